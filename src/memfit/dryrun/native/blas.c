// cuBLAS and cuBLASLt: products succeed and compute nothing. Workspaces stay PyTorch's own business (it allocates
// them itself, one per handle and stream), so its allocator sees them as on a real device.
//
// Entry points that are not here and that compute something succeed too (see the generated file of traps): a BLAS
// call takes no memory of its own.
#include "stub.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 130100

// PyTorch makes a handle for each thread, and a workspace for each handle.
typedef struct {
  cublasMath_t math;
  cublasPointerMode_t pointers;
  cublasAtomicsMode_t atomics;
  cudaStream_t stream;
} Handle;

API cublasStatus_t cublasCreate_v2(cublasHandle_t *out) {
  *out = calloc(1, sizeof(Handle));
  return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}
API cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  free(handle);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) {
  *version = VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

#define PROPERTY(setter, getter, type, field)                     \
  API cublasStatus_t setter(cublasHandle_t handle, type value) {  \
    ((Handle *)handle)->field = value;                            \
    return CUBLAS_STATUS_SUCCESS;                                 \
  }                                                               \
  API cublasStatus_t getter(cublasHandle_t handle, type *value) { \
    *value = ((Handle *)handle)->field;                           \
    return CUBLAS_STATUS_SUCCESS;                                 \
  }
PROPERTY(cublasSetMathMode, cublasGetMathMode, cublasMath_t, math)
PROPERTY(cublasSetPointerMode_v2, cublasGetPointerMode_v2, cublasPointerMode_t, pointers)
PROPERTY(cublasSetAtomicsMode, cublasGetAtomicsMode, cublasAtomicsMode_t, atomics)
PROPERTY(cublasSetStream_v2, cublasGetStream_v2, cudaStream_t, stream)

EXPORT_CONSTANT(cublasSetWorkspace_v2, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasSetSmCountTarget, CUBLAS_STATUS_SUCCESS)

// Batched solvers report through a number on the host whether their arguments were valid.
#define SOLVERS(T, type)                                                                                             \
  API cublasStatus_t cublas##T##getrsBatched(cublasHandle_t handle, cublasOperation_t trans, int n, int right_sides, \
                                             const type *const a[], int lda, const int *pivots, type *const b[],     \
                                             int ldb, int *info, int batch) {                                        \
    *info = 0;                                                                                                       \
    return CUBLAS_STATUS_SUCCESS;                                                                                    \
  }                                                                                                                  \
  API cublasStatus_t cublas##T##geqrfBatched(cublasHandle_t handle, int m, int n, type *const a[], int lda,          \
                                             type *const tau[], int *info, int batch) {                              \
    *info = 0;                                                                                                       \
    return CUBLAS_STATUS_SUCCESS;                                                                                    \
  }                                                                                                                  \
  API cublasStatus_t cublas##T##gelsBatched(cublasHandle_t handle, cublasOperation_t trans, int m, int n,            \
                                            int right_sides, type *const a[], int lda, type *const c[], int ldc,     \
                                            int *info, int *device_info, int batch) {                                \
    *info = 0;                                                                                                       \
    return CUBLAS_STATUS_SUCCESS;                                                                                    \
  }
SOLVERS(S, float)
SOLVERS(D, double)
SOLVERS(C, cuComplex)
SOLVERS(Z, cuDoubleComplex)

// -------------------------------------------------------------------- cuBLASLt ----

API cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) { return cublasCreate_v2((cublasHandle_t *)out); }
API cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return cublasDestroy_v2((cublasHandle_t)handle); }
API size_t cublasLtGetVersion(void) { return VERSION; }

// Descriptors are opaque to PyTorch, so an empty object will do.
static cublasStatus_t blank(void **out) {
  *out = calloc(1, 256);
  return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}
static cublasStatus_t gone(void *object) {
  free(object);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                            cudaDataType_t scale) {
  return blank((void **)out);
}
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type, uint64_t rows,
                                              uint64_t columns, int64_t ld) {
  return blank((void **)out);
}
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) { return blank((void **)out); }
API cublasStatus_t cublasLtMatrixTransformDescCreate(cublasLtMatrixTransformDesc_t *out, cudaDataType scale) {
  return blank((void **)out);
}
API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t object) { return gone(object); }
API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t object) { return gone(object); }
API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t object) { return gone(object); }
API cublasStatus_t cublasLtMatrixTransformDescDestroy(cublasLtMatrixTransformDesc_t object) { return gone(object); }

// The heuristic always offers one algorithm that needs no workspace, so PyTorch never falls back to plain cuBLAS.
static cublasStatus_t one_result(cublasLtMatmulHeuristicResult_t *out) {
  memset(out, 0, sizeof *out);
  out->state = CUBLAS_STATUS_SUCCESS;
  out->wavesCount = 1.0f;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                                  cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                  cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                  cublasLtMatmulPreference_t preference, int wanted,
                                                  cublasLtMatmulHeuristicResult_t results[], int *got) {
  *got = wanted > 0;
  return wanted > 0 ? one_result(&results[0]) : CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                           cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                           const cublasLtMatmulAlgo_t *algorithm,
                                           cublasLtMatmulHeuristicResult_t *out) {
  return one_result(out);
}
API cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algorithm,
                                                        cublasLtMatmulAlgoConfigAttributes_t attribute, void *out,
                                                        size_t bytes, size_t *written) {
  if (out) memset(out, 0, bytes);
  if (written) *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT_CONSTANT(cublasLtMatmul, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasLtMatrixTransform, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasLtMatmulAlgoInit, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasLtMatmulAlgoConfigSetAttribute, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasLtMatmulDescSetAttribute, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasLtMatmulPreferenceSetAttribute, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasLtMatrixLayoutSetAttribute, CUBLAS_STATUS_SUCCESS)
EXPORT_CONSTANT(cublasLtMatrixTransformDescSetAttribute, CUBLAS_STATUS_SUCCESS)
