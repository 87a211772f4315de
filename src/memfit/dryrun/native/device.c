// The devices: all of one model, each with its number, and the one that each thread uses.
#include "stub.h"

#include <stdio.h>
#include <string.h>

typedef struct {
  int compute_capability;  // this row serves it and everything up to the next row
  int shared_per_sm_kib;
  int shared_per_block_optin_kib;
  int threads_per_sm;
  int blocks_per_sm;
  bool clusters;
} Architecture;

// CUDA C++ Programming Guide 13.0, section "Compute Capabilities", tables of technical specifications.
static const Architecture architectures[] = {
    {75,  64,  64,  1024, 16, false},
    {80,  164, 163, 2048, 32, false},
    {86,  100, 99,  1536, 16, false},
    {87,  164, 163, 1536, 16, false},
    {89,  100, 99,  1536, 24, false},
    {90,  228, 227, 2048, 32, true },
    {100, 228, 227, 2048, 32, true },
    {103, 228, 227, 2048, 32, true },
    {110, 228, 227, 1536, 24, true },
    {120, 100, 99,  1536, 24, true },
    {121, 100, 99,  1536, 24, true },
};

static const Architecture *architecture(void) {
  const Architecture *best = &architectures[0];
  for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
    if (architectures[i].compute_capability <= settings.compute_capability) best = &architectures[i];
  return best;
}

static struct cudaDeviceProp properties(int ordinal) {
  const Architecture *a = architecture();
  struct cudaDeviceProp p;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "%s", settings.name);
  int physical = settings.physical[ordinal];
  char uuid[20];
  snprintf(uuid, sizeof uuid, "memfit-gpu-%05d", physical);
  memcpy(p.uuid.bytes, uuid, 16);
  p.totalGlobalMem = settings.total_bytes;
  p.major = settings.compute_capability / 10;
  p.minor = settings.compute_capability % 10;
  p.multiProcessorCount = settings.sm_count;
  p.l2CacheSize = (int)settings.l2_bytes;
  p.persistingL2CacheMaxSize = settings.compute_capability >= 80 ? (int)(settings.l2_bytes / 4 * 3) : 0;
  p.accessPolicyMaxWindowSize = settings.compute_capability >= 80 ? 128 << 20 : 0;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = (size_t)a->shared_per_block_optin_kib << 10;
  p.sharedMemPerMultiprocessor = (size_t)a->shared_per_sm_kib << 10;
  p.reservedSharedMemPerBlock = settings.compute_capability >= 80 ? 1 << 10 : 0;
  p.maxThreadsPerMultiProcessor = a->threads_per_sm;
  p.maxBlocksPerMultiProcessor = a->blocks_per_sm;
  p.clusterLaunch = a->clusters;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.totalConstMem = 64 << 10;
  p.memPitch = 2147483647;
  p.textureAlignment = p.surfaceAlignment = 512;
  p.texturePitchAlignment = 32;
  p.memoryBusWidth = 5120;
  p.pciBusID = physical + 1;
  p.asyncEngineCount = 3;
  p.concurrentKernels = p.canMapHostMemory = p.unifiedAddressing = p.hostRegisterSupported = 1;
  p.managedMemory = p.concurrentManagedAccess = p.cooperativeLaunch = p.streamPrioritiesSupported = 1;
  p.globalL1CacheSupported = p.localL1CacheSupported = p.computePreemptionSupported = p.memoryPoolsSupported = 1;
  return p;
}

static bool visible(int ordinal) { return ordinal >= 0 && ordinal < settings.count; }

API cudaError_t cudaGetDeviceCount(int *count) {
  lock();
  *count = settings.count;
  unlock();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int *ordinal) {
  lock();
  bool any = settings.count > 0;
  unlock();
  *ordinal = current_device;
  return any ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaSetDevice(int ordinal) {
  lock();
  bool any = settings.count > 0, known = visible(ordinal);
  if (known) {  // since CUDA 12 this makes the context
    current_device = ordinal;
    accounts[ordinal].context = true;
  }
  unlock();
  return known ? cudaSuccess : fail(any ? cudaErrorInvalidDevice : cudaErrorNoDevice);
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int ordinal) {
  lock();
  bool known = visible(ordinal);
  if (known) *out = properties(ordinal);
  unlock();
  return known ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

static int attribute(const struct cudaDeviceProp *p, enum cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      return p->maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX:
      return p->maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY:
      return p->maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ:
      return p->maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX:
      return p->maxGridSize[0];
    case cudaDevAttrMaxGridDimY:
      return p->maxGridSize[1];
    case cudaDevAttrMaxGridDimZ:
      return p->maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return (int)p->sharedMemPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return (int)p->sharedMemPerBlockOptin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return (int)p->sharedMemPerMultiprocessor;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return (int)p->reservedSharedMemPerBlock;
    case cudaDevAttrTotalConstantMemory:
      return (int)p->totalConstMem;
    case cudaDevAttrWarpSize:
      return p->warpSize;
    case cudaDevAttrMaxPitch:
      return (int)p->memPitch;
    case cudaDevAttrTextureAlignment:
      return (int)p->textureAlignment;
    case cudaDevAttrMultiProcessorCount:
      return p->multiProcessorCount;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return p->maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return p->maxBlocksPerMultiProcessor;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return p->regsPerBlock;
    case cudaDevAttrComputeCapabilityMajor:
      return p->major;
    case cudaDevAttrComputeCapabilityMinor:
      return p->minor;
    case cudaDevAttrL2CacheSize:
      return p->l2CacheSize;
    case cudaDevAttrMaxPersistingL2CacheSize:
      return p->persistingL2CacheMaxSize;
    case cudaDevAttrMaxAccessPolicyWindowSize:
      return p->accessPolicyMaxWindowSize;
    case cudaDevAttrClockRate:
      return 1755000;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return p->memoryBusWidth;
    case cudaDevAttrAsyncEngineCount:
      return p->asyncEngineCount;
    case cudaDevAttrPciBusId:
      return p->pciBusID;
    case cudaDevAttrClusterLaunch:
      return p->clusterLaunch;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrConcurrentKernels:
      return 1;
    default:
      return 0;
  }
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr wanted, int ordinal) {
  lock();
  bool known = visible(ordinal);
  struct cudaDeviceProp p = properties(known ? ordinal : 0);
  unlock();
  if (!known) return fail(cudaErrorInvalidDevice);
  *value = attribute(&p, wanted);
  return cudaSuccess;
}

// How many blocks an SM holds by threads alone; registers and shared memory are not modelled.
int blocks_per_sm(int threads_per_block) {
  lock();
  const Architecture *a = architecture();
  int threads = a->threads_per_sm, limit = a->blocks_per_sm;
  unlock();
  int fit = threads_per_block > 0 ? threads / threads_per_block : 0;
  return fit < 1 ? 1 : fit < limit ? fit : limit;
}

API cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int ordinal) {
  struct cudaDeviceProp p;
  cudaError_t error = cudaGetDeviceProperties(&p, ordinal);
  if (!error) snprintf(out, room, "0000:%02X:00.0", p.pciBusID);
  return error;
}
API cudaError_t cudaDeviceGetByPCIBusId(int *ordinal, const char *bus) {
  unsigned domain, number;
  if (sscanf(bus, "%x:%x", &domain, &number) != 2) return fail(cudaErrorInvalidValue);
  lock();
  int found = 0;
  while (found < settings.count && settings.physical[found] + 1 != (int)number) found++;
  bool any = found < settings.count;
  unlock();
  *ordinal = found;
  return any ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
API cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaDeviceGetLimit(size_t *value, enum cudaLimit limit) {
  *value = limit == cudaLimitStackSize ? 1024 : 8 << 20;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceFlags(unsigned *flags) {
  *flags = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
  lock();
  bool known = visible(a) && visible(b);
  *can = known && a != b && settings.peers;
  unlock();
  return known ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
API cudaError_t cudaDeviceEnablePeerAccess(int ordinal, unsigned flags) {
  int can;
  cudaError_t error = cudaDeviceCanAccessPeer(&can, current_device, ordinal);
  if (error) return error;
  return can ? cudaSuccess : fail(cudaErrorPeerAccessUnsupported);
}
SUCCEEDS(cudaDeviceDisablePeerAccess, int ordinal)
API cudaError_t cudaDeviceGetP2PAttribute(int *value, enum cudaDeviceP2PAttr attribute, int a, int b) {
  *value = 0;
  return attribute == cudaDevP2PAttrAccessSupported ? cudaDeviceCanAccessPeer(value, a, b) : cudaSuccess;
}
SUCCEEDS(cudaDeviceSetLimit, enum cudaLimit limit, size_t value)
SUCCEEDS(cudaSetDeviceFlags, unsigned flags)
SUCCEEDS(cudaInitDevice, int ordinal, unsigned device_flags, unsigned flags)
SUCCEEDS(cudaDeviceSetCacheConfig, enum cudaFuncCache config)
SUCCEEDS(cudaProfilerStart, void)
SUCCEEDS(cudaProfilerStop, void)
