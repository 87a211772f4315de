// Device memory (addresses and their account), pinned host memory, copies.
#include "ranges.h"
#include "stub.h"

#include <stdlib.h>
#include <string.h>

static Ranges device = {.base = DEVICE_BASE, .end = DEVICE_BASE + DEVICE_SPAN};
static Ranges pinned = {.base = 0, .end = UINTPTR_MAX};

bool is_device_address(const void *p) { return (uintptr_t)p - DEVICE_BASE < DEVICE_SPAN; }

uintptr_t take_addresses(size_t bytes, size_t charged_bytes) {
  size_t length = align_up(bytes ? bytes : 1, DEVICE_PAGE);
  uintptr_t at = settings.first_fit ? ranges_lowest_gap(&device, length) : ranges_above_all(&device, length);
  Range *range = at ? ranges_insert(&device, at, length) : NULL;
  if (!range) return 0;
  range->charged_bytes = charged_bytes;
  range->device = current_device;
  return at;
}

int device_of(uintptr_t p) {
  int mapped = mapped_device(p);
  if (mapped >= 0) return mapped;
  Range *range = ranges_find(&device, p);
  return range ? range->device : 0;
}

// Gives a range back by its first address; says whether there was one.
static bool drop_addresses(uintptr_t at) {
  Range *range = ranges_find(&device, at);
  if (!range || range->at != at) return false;
  discharge(range->device, range->charged_bytes);
  ranges_remove(&device, range);
  return true;
}

API cudaError_t cudaMalloc(void **out, size_t bytes) {
  *out = NULL;
  if (!bytes) return cudaSuccess;
  size_t cost = align_up(bytes, DEVICE_PAGE);
  lock();
  uintptr_t at = 0;
  Account *account = &accounts[current_device];
  if (cost >= bytes && charge(current_device, cost)) {
    at = take_addresses(bytes, cost);
    if (!at) discharge(current_device, cost);
  }
  account->mallocs += at != 0;
  say("cudaMalloc(%zu) on %d -> %#lx, used %zu\n", bytes, current_device, (unsigned long)at, account->used_bytes);
  unlock();
  *out = (void *)at;
  return at ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaFree(void *p) {
  lock();
  Account *account = &accounts[p ? device_of((uintptr_t)p) : current_device];
  account->context = true;
  bool had = p && drop_addresses((uintptr_t)p);
  account->frees += had;
  if (p) say("cudaFree(%p), used %zu\n", p, account->used_bytes);
  unlock();
  if (had || !p) return cudaSuccess;
  return cudaFreeHost(p) ? fail(cudaErrorInvalidValue) : cudaSuccess;  // managed memory is the host's
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  lock();
  accounts[current_device].context = true;
  size_t taken = settings.context_bytes + accounts[current_device].used_bytes;
  *free_bytes = taken < settings.total_bytes ? settings.total_bytes - taken : 0;
  *total_bytes = settings.total_bytes;
  unlock();
  return cudaSuccess;
}

// -------------------------------------------------- stream-ordered allocation ----
// One pool per device, which gives everything back at once.

static char pool_tokens[MOST_DEVICES];

static Account *account_of_pool(cudaMemPool_t pool) {
  size_t device = (size_t)((char *)pool - pool_tokens);
  return &accounts[device < MOST_DEVICES ? device : 0];
}

API cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }
API cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return cudaMalloc(out, bytes);
}
API cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { return cudaFree(p); }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int ordinal) {
  *pool = (cudaMemPool_t)&pool_tokens[ordinal >= 0 && ordinal < MOST_DEVICES ? ordinal : 0];
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int ordinal) {
  return cudaDeviceGetDefaultMemPool(pool, ordinal);
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  lock();
  const Account *account = account_of_pool(pool);
  switch (attribute) {
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent:
      *(uint64_t *)value = account->used_bytes;
      break;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
      *(uint64_t *)value = account->peak_bytes;
      break;
    case cudaMemPoolAttrReleaseThreshold:
      *(uint64_t *)value = 0;
      break;
    default:
      *(int *)value = 1;
  }
  unlock();
  return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  lock();
  Account *account = account_of_pool(pool);
  if (attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh)
    account->peak_bytes = account->used_bytes;
  unlock();
  return cudaSuccess;
}
SUCCEEDS(cudaMemPoolTrimTo, cudaMemPool_t pool, size_t keep_bytes)
SUCCEEDS(cudaMemPoolSetAccess, cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count)

// ------------------------------------------------------------------ host memory ----
// Plain memory, remembered so that "is it pinned?" has an answer.

API cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
  lock();
  bool made = ranges_insert(&pinned, (uintptr_t)p, bytes ? bytes : 1);
  unlock();
  return made ? cudaSuccess : fail(cudaErrorHostMemoryAlreadyRegistered);
}

API cudaError_t cudaHostUnregister(void *p) {
  lock();
  Range *range = ranges_find(&pinned, (uintptr_t)p);
  bool had = range && range->at == (uintptr_t)p;
  if (had) ranges_remove(&pinned, range);
  unlock();
  return had ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

API cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  if (posix_memalign(out, 4096, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
  return cudaHostRegister(*out, bytes, flags);
}
API cudaError_t cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

API cudaError_t cudaFreeHost(void *p) {
  if (!p) return cudaSuccess;
  cudaError_t error = cudaHostUnregister(p);
  if (!error) free(p);
  return error;
}

API cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned flags) {
  *out = p;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
  memset(out, 0, sizeof *out);
  out->type = cudaMemoryTypeUnregistered;
  out->device = -1;
  lock();
  if (is_device_address(p)) {
    out->type = cudaMemoryTypeDevice;
    out->device = device_of((uintptr_t)p);
    out->devicePointer = (void *)p;
  } else if (ranges_find(&pinned, (uintptr_t)p)) {
    out->type = cudaMemoryTypeHost;
    out->device = current_device;
    out->hostPointer = out->devicePointer = (void *)p;
  }
  unlock();
  return cudaSuccess;
}

// -------------------------------------------------------------- copies and sets ----

// The last small copy of this thread from the host to a device: PyTorch makes some tensors (`torch.tensor(…, device=)`)
// where the operations cannot be seen, and this is then the only trace of their values.
#define UPLOAD_MOST 4096
static __thread struct {
  const void *to;
  size_t bytes;
  char content[UPLOAD_MOST];
} upload;

API const char *memfit_last_upload(const void *to, size_t bytes) {
  return upload.to == to && upload.bytes == bytes ? upload.content : NULL;
}

static cudaError_t copy(void *to, const void *from, size_t bytes) {
  if (!bytes) return cudaSuccess;
  if (is_device_address(to)) {
    upload.to = bytes <= UPLOAD_MOST && !is_device_address(from) ? to : NULL;
    upload.bytes = bytes;
    if (upload.to) memcpy(upload.content, from, bytes);
    return cudaSuccess;
  }
  if (is_device_address(from)) memset(to, 0, bytes);
  else memmove(to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  return copy(to, from, bytes);
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
  return copy(to, from, bytes);
}
API cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
  return copy(to, from, bytes);
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                    cudaStream_t stream) {
  return copy(to, from, bytes);
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, enum cudaMemcpyKind kind) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, 0);
}

static cudaError_t set(void *p, int value, size_t bytes) {
  if (!is_device_address(p)) memset(p, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void *p, int value, size_t bytes) { return set(p, value, bytes); }
API cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) { return set(p, value, bytes); }

// Symbols of device code all live at one address, which costs nothing.
API cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static uintptr_t place;
  lock();
  if (!place) place = take_addresses(DEVICE_PAGE, 0);
  unlock();
  *out = (void *)place;
  return cudaSuccess;
}
SUCCEEDS(cudaMemcpyToSymbol, const void *symbol, const void *from, size_t bytes, size_t offset,
         enum cudaMemcpyKind kind)
SUCCEEDS(cudaMemcpyToSymbolAsync, const void *symbol, const void *from, size_t bytes, size_t offset,
         enum cudaMemcpyKind kind, cudaStream_t stream)

// ------------------------------------------------------- the driver's address ranges ----

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr hint,
                                 unsigned long long flags) {
  lock();
  *out = take_addresses(bytes, 0);
  say("cuMemAddressReserve(%zu) -> %#llx\n", bytes, *out);
  unlock();
  return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  lock();
  bool had = drop_addresses(at);
  unlock();
  return had ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr p) {
  lock();
  Range *range = ranges_find(&device, p);
  if (range && base) *base = range->at;
  if (range && bytes) *bytes = range->length;
  unlock();
  return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Which device range holds p: its base address, and how many ranges were taken before it (-1: none).
API long memfit_range(uintptr_t p, uintptr_t *base) {
  lock_quietly();
  Range *range = ranges_find(&device, p);
  long ordinal = range ? (long)range->ordinal : -1;
  if (range) *base = range->at;
  unlock();
  return ordinal;
}
