// cuFFT: plans exist, transforms do nothing.
//
// ESTIMATE. cuFFT does not publish its work area; here it is one complex copy of the whole batch.
#include "stub.h"

#include <cufftXt.h>

API cufftResult cufftCreate(cufftHandle *plan) {
  static int last;
  *plan = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
  return CUFFT_SUCCESS;
}

static size_t complex_bytes(cudaDataType type) {
  switch (type) {
    case CUDA_C_64F:
    case CUDA_R_64F:
      return 16;
    case CUDA_C_16F:
    case CUDA_R_16F:
    case CUDA_C_16BF:
    case CUDA_R_16BF:
      return 4;
    default:
      return 8;
  }
}

API cufftResult cufftXtMakePlanMany(cufftHandle plan, int rank, long long *n, long long *inembed, long long istride,
                                    long long idist, cudaDataType input, long long *onembed, long long ostride,
                                    long long odist, cudaDataType output, long long batch, size_t *work_bytes,
                                    cudaDataType execution) {
  size_t elements = (size_t)batch;
  for (int i = 0; i < rank; i++) elements *= (size_t)n[i];
  *work_bytes = elements * complex_bytes(execution);
  note_estimate("cuFFT work area", *work_bytes);
  return CUFFT_SUCCESS;
}
EXPORT_CONSTANT(cufftDestroy, CUFFT_SUCCESS)
EXPORT_CONSTANT(cufftSetAutoAllocation, CUFFT_SUCCESS)
EXPORT_CONSTANT(cufftSetStream, CUFFT_SUCCESS)
EXPORT_CONSTANT(cufftSetWorkArea, CUFFT_SUCCESS)
EXPORT_CONSTANT(cufftXtExec, CUFFT_SUCCESS)
