// cuBLAS and cuBLASLt entry points that PyTorch links to. Matrix products
// succeed and compute nothing; workspaces stay PyTorch's own business, so its
// allocator sees them as on a real device.
//
// Most entry points need no arguments looked at: by the x86-64 calling
// convention a function may ignore all of them.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cublasLt.h"

#define API __attribute__((visibility("default")))

static int math_mode, pointer_mode;

API int memfit_stub_cublasCreate(void **h) __asm__("cublasCreate_v2");
API int memfit_stub_cublasCreate(void **h) { *h = malloc(1); return *h ? 0 : 3; }  // each thread gets its own handle, hence its own workspace
API int memfit_stub_getmath(void *h, int *m) __asm__("cublasGetMathMode");
API int memfit_stub_getmath(void *h, int *m) { (void)h; *m = math_mode; return 0; }
API int memfit_stub_setmath(void *h, int m) __asm__("cublasSetMathMode");
API int memfit_stub_setmath(void *h, int m) { (void)h; math_mode = m; return 0; }
API int memfit_stub_getptr(void *h, int *m) __asm__("cublasGetPointerMode_v2");
API int memfit_stub_getptr(void *h, int *m) { (void)h; *m = pointer_mode; return 0; }
API int memfit_stub_setptr(void *h, int m) __asm__("cublasSetPointerMode_v2");
API int memfit_stub_setptr(void *h, int m) { (void)h; pointer_mode = m; return 0; }

API size_t cublasLtGetVersion(void) { return 130100; }

// Lt descriptors: opaque to PyTorch, so an empty object will do.
static cublasStatus_t blank(void **out) { *out = calloc(1, 256); return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t c, cudaDataType_t s) { (void)c; (void)s; return blank((void **)d); }
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *d, cudaDataType t, uint64_t r, uint64_t c, int64_t ld) { (void)t; (void)r; (void)c; (void)ld; return blank((void **)d); }
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *d) { return blank((void **)d); }
API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { free(d); return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t d) { free(d); return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t d) { free(d); return CUBLAS_STATUS_SUCCESS; }

// The heuristic offers one algorithm that needs no workspace.
static void one_result(cublasLtMatmulHeuristicResult_t *r) {
  memset(r, 0, sizeof *r);
  r->state = CUBLAS_STATUS_SUCCESS;
  r->wavesCount = 1.0f;
}
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                                  cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                  cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int want,
                                                  cublasLtMatmulHeuristicResult_t results[], int *got) {
  (void)h; (void)op; (void)a; (void)b; (void)c; (void)d; (void)p;
  *got = want > 0;
  if (want > 0) one_result(&results[0]);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t h, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                           cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                           const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *r) {
  (void)h; (void)op; (void)a; (void)b; (void)c; (void)d; (void)algo;
  one_result(r);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attr,
                                                        void *buf, size_t n, size_t *written) {
  (void)algo; (void)attr;
  if (buf) memset(buf, 0, n);
  if (written) *written = n;
  return CUBLAS_STATUS_SUCCESS;
}

#define NOP(name) API int nop_##name(void) __asm__(#name); int nop_##name(void) { return 0; }
#define NOP4(suffix) NOP(cublasS##suffix) NOP(cublasD##suffix) NOP(cublasC##suffix) NOP(cublasZ##suffix)
NOP(cublasDestroy_v2) NOP(cublasSetStream_v2) NOP(cublasSetWorkspace_v2) NOP(cublasSetSmCountTarget)
NOP(cublasGemmEx) NOP(cublasGemmStridedBatchedEx) NOP(cublasSgemmEx) NOP(cublasDotEx)
NOP(cublasSdot_v2) NOP(cublasDdot_v2) NOP(cublasCdotc_v2) NOP(cublasCdotu_v2) NOP(cublasZdotc_v2) NOP(cublasZdotu_v2)
NOP4(gemm_v2) NOP4(gemmStridedBatched) NOP4(gemmBatched) NOP4(gemv_v2) NOP4(trsm_v2) NOP4(trsmBatched)
NOP4(geqrfBatched) NOP4(getrfBatched) NOP4(getrsBatched) NOP4(gelsBatched)
NOP(cublasLtMatmul) NOP(cublasLtMatmulAlgoInit) NOP(cublasLtMatmulAlgoConfigSetAttribute)
NOP(cublasLtMatmulDescSetAttribute) NOP(cublasLtMatmulPreferenceSetAttribute) NOP(cublasLtMatrixLayoutSetAttribute)
