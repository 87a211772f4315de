// Managed memory, as paged optimizers use it: pages that move to whoever touches them, and leave the GPU when
// others need room. So they are the host's here, and none are counted on the GPU.
#include "stub.h"

API cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned flags) {
  note_estimate("managed memory (it leaves the GPU when others need room)", 0);
  return cudaHostAlloc(out, bytes, 0);
}

// Hints, whose arguments CUDA 13 changed.
EXPORT_CONSTANT(cudaMemPrefetchAsync, cudaSuccess)
EXPORT_CONSTANT(cudaMemAdvise, cudaSuccess)
