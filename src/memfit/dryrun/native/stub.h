// What the files of the made-up GPU share: its settings, its memory account, one lock.
//
// The library is preloaded under a CUDA build of PyTorch. PyTorch's own dispatcher picks its real kernels
// and its own caching allocator serves them; here kernels are accepted and not run, device memory is
// address space that nobody may touch, and copies to the host give zeros.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

// A runtime call that succeeds and does nothing.
#define SUCCEEDS(name, ...) \
  API cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

// By the x86-64 calling convention a function may ignore all of its arguments, so a call whose arguments do
// not matter needs no prototype: it is defined under another C name and exported under its own.
#define EXPORT_CONSTANT(name, value)               \
  API int memfit_stub_##name(void) __asm__(#name); \
  int memfit_stub_##name(void) { return (value); }

#define DEVICE_BASE ((uintptr_t)0x100000000000)  // 16 TiB: the first device address
#define DEVICE_SPAN ((size_t)32 << 40)           // 32 TiB of device addresses
#define DEVICE_PAGE ((size_t)2 << 20)            // physical memory is handed out in 2 MiB pages
#define MOST_DEVICES 64

typedef struct {
  char name[256];
  int compute_capability;  // 86 for 8.6
  int sm_count;
  int count;                   // devices that this process may see, all of one model
  int physical[MOST_DEVICES];  // their numbers in the machine, which CUDA_VISIBLE_DEVICES picks and orders
  bool peers;                  // whether they reach each other's memory
  size_t l2_bytes;
  size_t total_bytes;       // what cudaMemGetInfo calls total
  size_t nvml_total_bytes;  // what nvidia-smi calls total
  size_t context_bytes;     // taken before the first allocation
  size_t cudnn_workspace_bytes;
  size_t nccl_communicator_bytes;  // an estimate of what NCCL takes for one
  bool first_fit;      // reuse freed addresses
  bool manual_events;  // an event has happened once something was synchronised
  bool log;
} Settings;

typedef struct {
  bool context;       // whether this process has one on the device, as it has once it used it
  size_t used_bytes;  // without the context
  size_t peak_bytes;  // of used_bytes
  unsigned long mallocs, frees, creates, releases, maps, unmaps, failed, launches;
} Account;

// What a kernel was compiled to, and the architecture that it was compiled for: 86 for 8.6.
typedef struct {
  int binary, ptx;
} Compiled;

// Filled in at the first call that needs them; valid after lock().
extern Settings settings;
extern Account accounts[MOST_DEVICES];
extern __thread int current_device;  // of this thread, as cudaSetDevice left it

// The one lock. Taking it first brings the device to life: the environment is read then, not when the
// library is loaded, so that a forked child may still choose its GPU.
void lock(void);
void unlock(void);
bool lock_quietly(void);  // without bringing it to life; says whether it is alive

cudaError_t fail(cudaError_t error);  // notes it for cudaGetLastError and returns it
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));  // on stderr, if logging is on

// Two lists of names, each name once: calls that were refused, and sizes that were made up by a documented rule.
void note_unknown_call(const char *name);
void note_estimate(const char *what, size_t bytes);

bool charge(int device, size_t bytes);  // takes physical memory, or says that there is not enough; lock is held
void discharge(int device, size_t bytes);

uintptr_t take_addresses(size_t bytes, size_t charged_bytes);  // on this thread's device; 0: none left; lock is held
bool is_device_address(const void *p);
int device_of(uintptr_t p);      // whose memory is there; lock is held
int mapped_device(uintptr_t p);  // the same for memory that was mapped there; -1: none; lock is held

int blocks_per_sm(int threads_per_block);
Compiled compiled_for(const void *kernel, int capability);  // on a GPU of that capability

// A function of one of NVIDIA's libraries that PyTorch has loaded; NULL: it is not loaded.
void *real_function(const char *library, const char *name);

static inline size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
