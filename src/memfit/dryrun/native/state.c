// The device's settings (from the environment), its account and its lock.
#include "stub.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

Settings settings;
Account accounts[MOST_DEVICES];
__thread int current_device;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool alive;
static __thread cudaError_t last_error;

static size_t number(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static bool equals(const char *name, const char *value) {
  const char *text = getenv(name);
  return text && !strcmp(text, value);
}

// CUDA_VISIBLE_DEVICES as the driver reads it: the list ends at the first entry that names no device, and a device that
// is named twice leaves none.
static int visible_devices(int count, int *physical) {
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  bool all = !text || !strncmp(text, "GPU-", 4);
  int found = 0;
  for (; all && found < count; found++) physical[found] = found;
  while (!all && found < count) {
    char *end;
    long one = strtol(text, &end, 10);
    if (end == text || one < 0 || one >= count) break;
    for (int i = 0; i < found; i++)
      if (physical[i] == one) return 0;
    physical[found++] = (int)one;
    while (*end == ' ') end++;
    if (*end != ',') break;
    text = end + 1;
  }
  return found;
}

static void read_settings(void) {
  const char *name = getenv("MEMFIT_GPU_NAME");
  snprintf(settings.name, sizeof settings.name, "%s", name && *name ? name : "NVIDIA H100 80GB HBM3");
  settings.compute_capability = (int)number("MEMFIT_GPU_CC", 90);
  settings.sm_count = (int)number("MEMFIT_GPU_SM_COUNT", settings.compute_capability >= 90 ? 132 : 108);
  settings.l2_bytes = number("MEMFIT_GPU_L2_BYTES", (size_t)(settings.compute_capability >= 90 ? 50 : 40) << 20);
  settings.total_bytes = number("MEMFIT_GPU_TOTAL_BYTES", (size_t)80 << 30);
  settings.nvml_total_bytes = number("MEMFIT_GPU_NVML_TOTAL_BYTES", settings.total_bytes);
  if (settings.nvml_total_bytes < settings.total_bytes) settings.nvml_total_bytes = settings.total_bytes;
  settings.context_bytes = number("MEMFIT_GPU_CONTEXT_BYTES", 0);
  size_t count = number("MEMFIT_GPU_COUNT", 1);
  settings.count = visible_devices(count < MOST_DEVICES ? (int)count : MOST_DEVICES, settings.physical);
  settings.peers = number("MEMFIT_GPU_PEERS", 1) != 0;
  settings.cudnn_workspace_bytes = number("MEMFIT_CUDNN_WORKSPACE_BYTES", 0);
  settings.nccl_communicator_bytes = number("MEMFIT_NCCL_COMMUNICATOR_BYTES", 0);
  settings.first_fit = equals("MEMFIT_ADDRESSES", "firstfit");
  settings.manual_events = equals("MEMFIT_EVENTS", "manual");
  settings.log = equals("MEMFIT_STUB_LOG", "1");
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork(void) { pthread_mutex_unlock(&mutex); }

// Device addresses are reserved, without memory behind them: a host access faults, as it would for a real GPU's.
static void reserve_addresses(void) {
  void *want = (void *)DEVICE_BASE;
  void *got =
      mmap(want, DEVICE_SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (got == want) return;
  perror(
      "memfit: cannot reserve the address range of the made-up GPU (32 TiB, nothing is stored in it; "
      "is the virtual memory of this process limited by ulimit -v?)");
  abort();
}

void lock(void) {
  pthread_mutex_lock(&mutex);
  if (alive) return;
  read_settings();
  reserve_addresses();
  pthread_atfork(before_fork, after_fork, after_fork);
  alive = true;
}

void unlock(void) { pthread_mutex_unlock(&mutex); }

bool lock_quietly(void) {
  pthread_mutex_lock(&mutex);
  return alive;
}

bool charge(int device, size_t bytes) {
  Account *account = &accounts[device];
  account->context = true;
  if (settings.context_bytes + account->used_bytes + bytes > settings.total_bytes) {
    account->failed++;
    return false;
  }
  account->used_bytes += bytes;
  if (account->used_bytes > account->peak_bytes) account->peak_bytes = account->used_bytes;
  return true;
}

void discharge(int device, size_t bytes) { accounts[device].used_bytes -= bytes; }

void say(const char *format, ...) {
  if (!settings.log) return;
  va_list arguments;
  va_start(arguments, format);
  fputs("[memfit gpu] ", stderr);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
