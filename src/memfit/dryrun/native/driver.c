// The driver: what expandable segments need, what libcaffe2_nvrtc.so links to, and who asks for entry points by name.
#include "ranges.h"
#include "stub.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER(name, ...) API CUresult name(__VA_ARGS__)
#define DRIVER_SUCCEEDS(name, ...) \
  DRIVER(name, __VA_ARGS__) { return CUDA_SUCCESS; }

static int module_token;
static char contexts[MOST_DEVICES];  // their addresses are the handles

// ------------------------------------------------------------------- device ----

DRIVER(cuInit, unsigned flags) {
  int count;
  return cudaGetDeviceCount(&count) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
DRIVER(cuDriverGetVersion, int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
DRIVER(cuDeviceGetCount, int *count) {
  cudaGetDeviceCount(count);
  return CUDA_SUCCESS;
}
DRIVER(cuDeviceGet, CUdevice *device, int ordinal) {
  int count;
  cudaGetDeviceCount(&count);
  *device = ordinal;
  return ordinal >= 0 && ordinal < count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER(cuDeviceGetName, char *out, int room, CUdevice device) {
  lock();
  snprintf(out, room, "%s", settings.name);
  unlock();
  return CUDA_SUCCESS;
}
DRIVER(cuDeviceGetUuid_v2, CUuuid *out, CUdevice device) {
  struct cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device)) return CUDA_ERROR_INVALID_DEVICE;
  memcpy(out->bytes, p.uuid.bytes, sizeof out->bytes);
  return CUDA_SUCCESS;
}
DRIVER(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device) {
  lock();
  *bytes = settings.total_bytes;
  unlock();
  return CUDA_SUCCESS;
}
DRIVER(cuMemGetInfo_v2, size_t *free_bytes, size_t *total_bytes) {
  cudaMemGetInfo(free_bytes, total_bytes);
  return CUDA_SUCCESS;
}
DRIVER(cuDeviceGetAttribute, int *value, CUdevice_attribute attribute, CUdevice device) {
  switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
  }
}

static const struct {
  CUresult code;
  const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS,               "CUDA_SUCCESS",               "no error"                          },
    {CUDA_ERROR_INVALID_VALUE,   "CUDA_ERROR_INVALID_VALUE",   "invalid argument"                  },
    {CUDA_ERROR_OUT_OF_MEMORY,   "CUDA_ERROR_OUT_OF_MEMORY",   "out of memory"                     },
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"              },
    {CUDA_ERROR_NO_DEVICE,       "CUDA_ERROR_NO_DEVICE",       "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE,  "CUDA_ERROR_INVALID_DEVICE",  "invalid device ordinal"            },
    {CUDA_ERROR_INVALID_IMAGE,   "CUDA_ERROR_INVALID_IMAGE",   "device kernel image is invalid"    },
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"            },
    {CUDA_ERROR_NOT_FOUND,       "CUDA_ERROR_NOT_FOUND",       "named symbol not found"            },
    {CUDA_ERROR_NOT_SUPPORTED,   "CUDA_ERROR_NOT_SUPPORTED",   "operation not supported"           },
};
DRIVER(cuGetErrorString, CUresult code, const char **text) {
  *text = "unknown error";
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) *text = errors[i].text;
  return CUDA_SUCCESS;
}
DRIVER(cuGetErrorName, CUresult code, const char **name) {
  *name = "CUDA_ERROR_UNKNOWN";
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) *name = errors[i].name;
  return CUDA_SUCCESS;
}

DRIVER(cuDevicePrimaryCtxGetState, CUdevice device, unsigned *flags, int *active) {
  lock();
  bool known = device >= 0 && device < settings.count;
  *active = known && accounts[device].context;
  unlock();
  *flags = 0;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER(cuDevicePrimaryCtxRetain, CUcontext *out, CUdevice device) {
  lock();
  bool known = device >= 0 && device < settings.count;
  if (known) accounts[device].context = true;
  unlock();
  *out = known ? (CUcontext)&contexts[device] : NULL;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER_SUCCEEDS(cuDevicePrimaryCtxRelease_v2, CUdevice device)

static __thread int pushed[16], depth;

static void use_context(CUcontext context) {
  size_t device = (size_t)((char *)context - contexts);
  if (device < MOST_DEVICES) current_device = (int)device;
}
DRIVER(cuCtxGetCurrent, CUcontext *out) {
  *out = (CUcontext)&contexts[current_device];
  return CUDA_SUCCESS;
}
DRIVER(cuCtxPushCurrent_v2, CUcontext context) {
  if (depth < (int)(sizeof pushed / sizeof *pushed)) pushed[depth++] = current_device;
  use_context(context);
  return CUDA_SUCCESS;
}
DRIVER(cuCtxPopCurrent_v2, CUcontext *out) {
  if (out) *out = (CUcontext)&contexts[current_device];
  if (depth) current_device = pushed[--depth];
  return CUDA_SUCCESS;
}
DRIVER(cuCtxSetCurrent, CUcontext context) {
  use_context(context);
  return CUDA_SUCCESS;
}
DRIVER(cuCtxGetLimit, size_t *value, CUlimit limit) {
  return (CUresult)cudaDeviceGetLimit(value, (enum cudaLimit)limit);
}
DRIVER_SUCCEEDS(cuCtxSetLimit, CUlimit limit, size_t value)
DRIVER_SUCCEEDS(cuCtxSynchronize, void)
DRIVER_SUCCEEDS(cuStreamSynchronize, CUstream stream)
DRIVER(cuCtxGetDevice, CUdevice *device) {
  *device = current_device;
  return CUDA_SUCCESS;
}

// ------------------------------------------------------------ physical memory ----
// It is charged from its creation until it is both released and unmapped.

typedef struct {
  size_t bytes;
  int device, holders;
} Physical;

static Ranges mappings = {.base = DEVICE_BASE, .end = DEVICE_BASE + DEVICE_SPAN};

int mapped_device(uintptr_t p) {
  Range *mapping = ranges_find(&mappings, p);
  return mapping ? ((Physical *)mapping->owner)->device : -1;
}

static void let_go(Physical *memory) {
  if (--memory->holders) return;
  discharge(memory->device, memory->bytes);
  free(memory);
}

DRIVER(cuMemGetAllocationGranularity, size_t *bytes, const CUmemAllocationProp *properties,
       CUmemAllocationGranularity_flags flags) {
  *bytes = DEVICE_PAGE;
  return CUDA_SUCCESS;
}

DRIVER(cuMemCreate, CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
       unsigned long long flags) {
  if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
  lock();
  int device = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? properties->location.id : current_device;
  if (device < 0 || device >= settings.count) {
    unlock();
    return CUDA_ERROR_INVALID_DEVICE;
  }
  Physical *memory = charge(device, bytes) ? malloc(sizeof *memory) : NULL;
  if (memory) {
    *memory = (Physical){bytes, device, 1};
    *out = (uintptr_t)memory;
    accounts[device].creates++;
  }
  say("cuMemCreate(%zu) on %d %s, used %zu\n", bytes, device, memory ? "done" : "out of memory",
      accounts[device].used_bytes);
  unlock();
  return memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

DRIVER(cuMemRelease, CUmemGenericAllocationHandle handle) {
  lock();
  accounts[((Physical *)handle)->device].releases++;
  let_go((Physical *)handle);
  unlock();
  return CUDA_SUCCESS;
}

DRIVER(cuMemMap, CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
       unsigned long long flags) {
  lock();
  Range *mapping = ranges_insert(&mappings, at, bytes);
  if (mapping) {
    mapping->owner = (Physical *)handle;
    ((Physical *)handle)->holders++;
    accounts[((Physical *)handle)->device].maps++;
  }
  say("cuMemMap(%#llx, %zu)\n", at, bytes);
  unlock();
  return mapping ? CUDA_SUCCESS : CUDA_ERROR_ALREADY_MAPPED;
}

DRIVER(cuMemUnmap, CUdeviceptr at, size_t bytes) {
  lock();
  Account *account = &accounts[device_of(at)];
  for (Range *mapping; (mapping = ranges_from(&mappings, at)) && mapping->at + mapping->length <= at + bytes;) {
    let_go(mapping->owner);
    ranges_remove(&mappings, mapping);
  }
  account->unmaps++;
  say("cuMemUnmap(%#llx, %zu), used %zu\n", at, bytes, account->used_bytes);
  unlock();
  return CUDA_SUCCESS;
}

DRIVER_SUCCEEDS(cuMemSetAccess, CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
DRIVER_SUCCEEDS(cuMemsetD32Async, CUdeviceptr at, unsigned value, size_t count, CUstream stream)
DRIVER_SUCCEEDS(cuStreamWriteValue32, CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags)
EXPORT_CONSTANT(cuMemExportToShareableHandle, CUDA_ERROR_NOT_SUPPORTED)
EXPORT_CONSTANT(cuMemImportFromShareableHandle, CUDA_ERROR_NOT_SUPPORTED)
EXPORT_CONSTANT(cuMemRetainAllocationHandle, CUDA_ERROR_NOT_SUPPORTED)
EXPORT_CONSTANT(cuMemGetAllocationPropertiesFromHandle, CUDA_ERROR_NOT_SUPPORTED)
DRIVER(cuPointerGetAttribute, void *value, CUpointer_attribute attribute, CUdeviceptr p) {
  struct cudaPointerAttributes known;
  cudaPointerGetAttributes(&known, (void *)p);
  if (known.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *(CUdeviceptr *)value = p;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int *)value = known.device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned *)value = known.type == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// -------------------------------------------------------------------- modules ----

static CUresult loaded(CUmodule *out) {
  *out = (CUmodule)&module_token;
  return CUDA_SUCCESS;
}
DRIVER(cuModuleLoad, CUmodule *out, const char *file) { return loaded(out); }
DRIVER(cuModuleLoadData, CUmodule *out, const void *image) { return loaded(out); }
DRIVER(cuModuleLoadDataEx, CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
  return loaded(out);
}
DRIVER_SUCCEEDS(cuModuleUnload, CUmodule module)
DRIVER(cuModuleGetFunction, CUfunction *out, CUmodule module, const char *name) {
  *out = (CUfunction)&module_token;
  return CUDA_SUCCESS;
}
DRIVER(cuFuncGetAttribute, int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
DRIVER(cuFuncGetModule, CUmodule *out, CUfunction function) { return loaded(out); }
DRIVER(cuModuleGetGlobal_v2, CUdeviceptr *at, size_t *bytes, CUmodule module, const char *name) {
  *bytes = sizeof(void *);
  return (CUresult)cudaGetSymbolAddress((void **)at, name);
}
DRIVER_SUCCEEDS(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
DRIVER_SUCCEEDS(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
DRIVER(cuLinkCreate_v2, unsigned count, CUjit_option *options, void **values, CUlinkState *state) {
  *state = (CUlinkState)&module_token;
  return CUDA_SUCCESS;
}
DRIVER_SUCCEEDS(cuLinkAddData_v2, CUlinkState state, CUjitInputType type, void *data, size_t bytes, const char *name,
                unsigned count, CUjit_option *options, void **values)
DRIVER(cuLinkComplete, CUlinkState state, void **image, size_t *bytes) {
  static char nothing[64];
  *image = nothing;
  *bytes = sizeof nothing;
  return CUDA_SUCCESS;
}
EXPORT_CONSTANT(cuLinkDestroy, CUDA_SUCCESS)
EXPORT_CONSTANT(cuTensorMapEncodeTiled, CUDA_SUCCESS)

// ------------------------------------------------------- entry points by name ----

// Tables of functions that NVIDIA's own libraries share with the driver: there are none. The run-time compiler asks for
// one, and crashes if this very function is missing.
DRIVER(cuGetExportTable, const void **table, const CUuuid *id) {
  *table = NULL;
  return CUDA_ERROR_NOT_FOUND;
}

// cuda.h renames some functions to NAME_v2, and callers ask for either.
static void *entry_point(const char *name) {
  static void *self;
  Dl_info info;
  if (!self && dladdr((void *)contexts, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!self) return NULL;
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  void *found = dlsym(self, second);
  return found ? found : dlsym(self, name);
}

DRIVER(cuGetProcAddress_v2, const char *name, void **function, int version, cuuint64_t flags,
       CUdriverProcAddressQueryResult *result) {
  *function = entry_point(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
  *function = entry_point(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
