// Kernels: registered, described, launched, never run.
#include "stub.h"

#include <string.h>

static cudaError_t launched(void) {
  __atomic_add_fetch(&accounts[current_device].launches, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                 cudaStream_t stream) {
  return launched();
}
API cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                            cudaStream_t stream) {
  return launched();
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
  return launched();
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                   cudaStream_t stream) {
  return launched();
}
API CUresult cuLaunchKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
  return (CUresult)launched();
}
API CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                       unsigned by, unsigned bz, unsigned shared, CUstream stream, void **arguments) {
  return (CUresult)launched();
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction kernel, void **arguments, void **extra) {
  return (CUresult)launched();
}

API cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *kernel) {
  *out = (cudaKernel_t)kernel;
  return cudaSuccess;
}
API cudaError_t cudaGetKernel(cudaKernel_t *out, const void *kernel) { return __cudaGetKernel(out, kernel); }

// The <<<...>>> syntax pushes a configuration, and the kernel's host stub pops it.
static __thread struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared = shared;
  pushed.stream = stream;
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(cudaStream_t *)stream = pushed.stream;
  return cudaSuccess;
}

// Called for every kernel when a library is loaded: nothing here may bring the device to life.
API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaRegisterVar(void) {}
API void __cudaRegisterManagedVar(void) {}
API void __cudaRegisterHostVar(void) {}
API char __cudaInitModule(void **handle) { return 1; }

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel) {
  memset(out, 0, sizeof *out);
  lock();
  Compiled runs = compiled_for(kernel, settings.compute_capability);
  unlock();
  out->binaryVersion = runs.binary;
  out->ptxVersion = runs.ptx;
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
SUCCEEDS(cudaFuncSetAttribute, const void *kernel, enum cudaFuncAttribute attribute, int value)
SUCCEEDS(cudaFuncSetCacheConfig, const void *kernel, enum cudaFuncCache config)
SUCCEEDS(cudaKernelSetAttributeForDevice, cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int ordinal)

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *kernel, int block,
                                                                       size_t shared, unsigned flags) {
  *out = blocks_per_sm(block);
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *kernel, int block, size_t shared) {
  *out = blocks_per_sm(block);
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveClusters(int *out, const void *kernel, const cudaLaunchConfig_t *config) {
  lock();
  *out = settings.sm_count;
  unlock();
  return cudaSuccess;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction kernel, int block, size_t shared) {
  *out = blocks_per_sm(block);
  return CUDA_SUCCESS;
}
