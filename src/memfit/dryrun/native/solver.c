// cuSOLVER, the dense part: handles and buffer sizes. Calls that compute and are not here succeed too (see the
// generated file of traps); PyTorch reads their "info" from the device, which says 0: it worked.
//
// ESTIMATE. cuSOLVER tells its buffer sizes only on a device; here a factorisation of an m x n matrix wants
// m n + 64 max(m, n) elements, like LAPACK's blocked routines with a copy of the matrix.
#include "stub.h"

#include <cusolverDn.h>
#include <stdlib.h>

typedef cusolverStatus_t Status;
typedef cusolverDnHandle_t Handle;
#define DONE CUSOLVER_STATUS_SUCCESS

static size_t elements(int64_t m, int64_t n) {
  size_t count = (size_t)m * (size_t)n + 64 * (size_t)(m > n ? m : n);
  note_estimate("cuSOLVER workspace", count * sizeof(double));
  return count;
}

static Status blank(void **out) {
  *out = calloc(1, 64);
  return *out ? DONE : CUSOLVER_STATUS_ALLOC_FAILED;
}
static Status gone(void *object) {
  free(object);
  return DONE;
}
API Status cusolverDnCreate(Handle *out) { return blank((void **)out); }
API Status cusolverDnDestroy(Handle handle) { return gone(handle); }
API Status cusolverDnCreateParams(cusolverDnParams_t *out) { return blank((void **)out); }
API Status cusolverDnDestroyParams(cusolverDnParams_t params) { return gone(params); }
API Status cusolverDnCreateGesvdjInfo(gesvdjInfo_t *out) { return blank((void **)out); }
API Status cusolverDnDestroyGesvdjInfo(gesvdjInfo_t info) { return gone(info); }
API Status cusolverDnCreateSyevjInfo(syevjInfo_t *out) { return blank((void **)out); }
API Status cusolverDnDestroySyevjInfo(syevjInfo_t info) { return gone(info); }

// Sizes in elements, one function per type. R is the type of real results (singular values, eigenvalues).
#define SIZE(name, m, n, ...)                                                        \
  API Status cusolverDn##name##_bufferSize(Handle handle, __VA_ARGS__, int *lwork) { \
    *lwork = (int)elements(m, n);                                                    \
    return DONE;                                                                     \
  }
#define FOR_ALL(MACRO) \
  MACRO(S, float, float) MACRO(D, double, double) MACRO(C, cuComplex, float) MACRO(Z, cuDoubleComplex, double)
#define FACTORISATIONS(P, T, R)                                     \
  SIZE(P##geqrf, m, n, int m, int n, T *a, int lda)                 \
  SIZE(P##getrf, m, n, int m, int n, T *a, int lda)                 \
  SIZE(P##potrf, n, n, cublasFillMode_t uplo, int n, T *a, int lda) \
  SIZE(P##sytrf, n, n, int n, T *a, int lda)                        \
  SIZE(P##gesvd, m, n, int m, int n)
FOR_ALL(FACTORISATIONS)

#define Q_FACTORS(P, ORG, ORM, T)                                                                              \
  SIZE(P##ORG, m, n, int m, int n, int k, const T *a, int lda, const T *tau)                                   \
  SIZE(P##ORM, m, n, cublasSideMode_t side, cublasOperation_t trans, int m, int n, int k, const T *a, int lda, \
       const T *tau, const T *c, int ldc)
Q_FACTORS(S, orgqr, ormqr, float)
Q_FACTORS(D, orgqr, ormqr, double)
Q_FACTORS(C, ungqr, unmqr, cuComplex)
Q_FACTORS(Z, ungqr, unmqr, cuDoubleComplex)

#define SINGULAR_VALUES(P, T, R)                                                                                     \
  API Status cusolverDn##P##gesvdj_bufferSize(Handle handle, cusolverEigMode_t job, int economy, int m, int n,       \
                                              const T *a, int lda, const R *s, const T *u, int ldu, const T *v,      \
                                              int ldv, int *lwork, gesvdjInfo_t info) {                              \
    *lwork = (int)elements(m, n);                                                                                    \
    return DONE;                                                                                                     \
  }                                                                                                                  \
  API Status cusolverDn##P##gesvdjBatched_bufferSize(Handle handle, cusolverEigMode_t job, int m, int n, const T *a, \
                                                     int lda, const R *s, const T *u, int ldu, const T *v, int ldv,  \
                                                     int *lwork, gesvdjInfo_t info, int batch) {                     \
    *lwork = (int)elements(m, n) * batch;                                                                            \
    return DONE;                                                                                                     \
  }                                                                                                                  \
  API Status cusolverDn##P##gesvdaStridedBatched_bufferSize(                                                         \
      Handle handle, cusolverEigMode_t job, int rank, int m, int n, const T *a, int lda, long long sa, const R *s,   \
      long long ss, const T *u, int ldu, long long su, const T *v, int ldv, long long sv, int *lwork, int batch) {   \
    *lwork = (int)elements(m, n) * batch;                                                                            \
    return DONE;                                                                                                     \
  }
FOR_ALL(SINGULAR_VALUES)

#define EIGENVALUES(P, KIND, T, R)                                                                                   \
  SIZE(P##KIND##evd, n, n, cusolverEigMode_t job, cublasFillMode_t uplo, int n, const T *a, int lda, const R *w)     \
  API Status cusolverDn##P##KIND##evjBatched_bufferSize(Handle handle, cusolverEigMode_t job, cublasFillMode_t uplo, \
                                                        int n, const T *a, int lda, const R *w, int *lwork,          \
                                                        syevjInfo_t info, int batch) {                               \
    *lwork = (int)elements(n, n) * batch;                                                                            \
    return DONE;                                                                                                     \
  }
EIGENVALUES(S, sy, float, float)
EIGENVALUES(D, sy, double, double)
EIGENVALUES(C, he, cuComplex, float)
EIGENVALUES(Z, he, cuDoubleComplex, double)

// ------------------------------------------- the 64-bit interface: sizes in bytes ----

static size_t type_bytes(cudaDataType type) {
  switch (type) {
    case CUDA_R_64F:
    case CUDA_C_32F:
      return 8;
    case CUDA_C_64F:
      return 16;
    default:
      return 4;
  }
}
static Status bytes(cudaDataType type, int64_t m, int64_t n, int64_t batch, size_t *on_device, size_t *on_host) {
  *on_device = elements(m, n) * type_bytes(type) * (size_t)batch;
  *on_host = 0;
  return DONE;
}
API Status cusolverDnXgeqrf_bufferSize(Handle handle, cusolverDnParams_t params, int64_t m, int64_t n,
                                       cudaDataType type, const void *a, int64_t lda, cudaDataType tau_type,
                                       const void *tau, cudaDataType compute, size_t *on_device, size_t *on_host) {
  return bytes(type, m, n, 1, on_device, on_host);
}
API Status cusolverDnXpotrf_bufferSize(Handle handle, cusolverDnParams_t params, cublasFillMode_t uplo, int64_t n,
                                       cudaDataType type, const void *a, int64_t lda, cudaDataType compute,
                                       size_t *on_device, size_t *on_host) {
  return bytes(type, n, n, 1, on_device, on_host);
}
API Status cusolverDnXsyevd_bufferSize(Handle handle, cusolverDnParams_t params, cusolverEigMode_t job,
                                       cublasFillMode_t uplo, int64_t n, cudaDataType type, const void *a, int64_t lda,
                                       cudaDataType w_type, const void *w, cudaDataType compute, size_t *on_device,
                                       size_t *on_host) {
  return bytes(type, n, n, 1, on_device, on_host);
}
API Status cusolverDnXsyevBatched_bufferSize(Handle handle, cusolverDnParams_t params, cusolverEigMode_t job,
                                             cublasFillMode_t uplo, int64_t n, cudaDataType type, const void *a,
                                             int64_t lda, cudaDataType w_type, const void *w, cudaDataType compute,
                                             size_t *on_device, size_t *on_host, int64_t batch) {
  return bytes(type, n, n, batch, on_device, on_host);
}
API Status cusolverDnXgeev_bufferSize(Handle handle, cusolverDnParams_t params, cusolverEigMode_t left,
                                      cusolverEigMode_t right, int64_t n, cudaDataType type, const void *a, int64_t lda,
                                      cudaDataType w_type, const void *w, cudaDataType vl_type, const void *vl,
                                      int64_t ldvl, cudaDataType vr_type, const void *vr, int64_t ldvr,
                                      cudaDataType compute, size_t *on_device, size_t *on_host) {
  return bytes(type, n, n, 1, on_device, on_host);
}
API Status cusolverDnXsytrs_bufferSize(Handle handle, cublasFillMode_t uplo, int64_t n, int64_t right_sides,
                                       cudaDataType type, const void *a, int64_t lda, const int64_t *pivots,
                                       cudaDataType b_type, void *b, int64_t ldb, size_t *on_device, size_t *on_host) {
  return bytes(type, n, right_sides, 1, on_device, on_host);
}
