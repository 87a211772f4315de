// cuSPARSE: handles, and products whose result has a known size. Descriptors are the real library's: they hold
// numbers and touch no device. What makes a sparse result (its size depends on values) is trapped.
//
// ESTIMATE. Buffers of products are taken as 0 bytes.
#include "stub.h"

#define DISABLE_CUSPARSE_DEPRECATED
#include <cusparse.h>
#include <stdlib.h>

typedef cusparseStatus_t Status;
#define DONE CUSPARSE_STATUS_SUCCESS

API Status cusparseCreate(cusparseHandle_t *out) {
  *out = calloc(1, 64);
  return *out ? DONE : CUSPARSE_STATUS_ALLOC_FAILED;
}
API Status cusparseDestroy(cusparseHandle_t handle) {
  free(handle);
  return DONE;
}
EXPORT_CONSTANT(cusparseSetStream, DONE)
EXPORT_CONSTANT(cusparseSetPointerMode, DONE)

static Status no_buffer(size_t *bytes) {
  *bytes = 0;
  note_estimate("cuSPARSE buffers", 0);
  return DONE;
}
API Status cusparseSpMM_bufferSize(cusparseHandle_t handle, cusparseOperation_t opa, cusparseOperation_t opb,
                                   const void *alpha, cusparseConstSpMatDescr_t a, cusparseConstDnMatDescr_t b,
                                   const void *beta, cusparseDnMatDescr_t c, cudaDataType compute,
                                   cusparseSpMMAlg_t algorithm, size_t *bytes) {
  return no_buffer(bytes);
}
API Status cusparseSpMV_bufferSize(cusparseHandle_t handle, cusparseOperation_t opa, const void *alpha,
                                   cusparseConstSpMatDescr_t a, cusparseConstDnVecDescr_t x, const void *beta,
                                   cusparseDnVecDescr_t y, cudaDataType compute, cusparseSpMVAlg_t algorithm,
                                   size_t *bytes) {
  return no_buffer(bytes);
}
API Status cusparseSDDMM_bufferSize(cusparseHandle_t handle, cusparseOperation_t opa, cusparseOperation_t opb,
                                    const void *alpha, cusparseConstDnMatDescr_t a, cusparseConstDnMatDescr_t b,
                                    const void *beta, cusparseSpMatDescr_t c, cudaDataType compute,
                                    cusparseSDDMMAlg_t algorithm, size_t *bytes) {
  return no_buffer(bytes);
}
API Status cusparseXcoosort_bufferSizeExt(cusparseHandle_t handle, int m, int n, int nonzeros, const int *row,
                                          const int *column, size_t *bytes) {
  return no_buffer(bytes);
}
API Status cusparseXcsrsort_bufferSizeExt(cusparseHandle_t handle, int m, int n, int nonzeros, const int *row,
                                          const int *column, size_t *bytes) {
  return no_buffer(bytes);
}
EXPORT_CONSTANT(cusparseSpMM, DONE)
EXPORT_CONSTANT(cusparseSpMV, DONE)
EXPORT_CONSTANT(cusparseSDDMM, DONE)
EXPORT_CONSTANT(cusparseSDDMM_preprocess, DONE)
EXPORT_CONSTANT(cusparseXcoo2csr, DONE)
EXPORT_CONSTANT(cusparseXcoosortByRow, DONE)
EXPORT_CONSTANT(cusparseXcsrsort, DONE)
EXPORT_CONSTANT(cusparseCreateIdentityPermutation, DONE)
