// cuDNN entry points that PyTorch calls for convolution, batch norm and
// attention. Graphs build, one engine is always found, nothing is computed.
//
// What only the real cuDNN knows is how much workspace its engines want:
// here every plan wants MEMFIT_CUDNN_WORKSPACE_BYTES bytes (default 0), so peaks
// of convolutions and of cuDNN attention are lower bounds.
#include <cudnn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define S cudnnStatus_t
#define DONE { return CUDNN_STATUS_SUCCESS; }

static int token;
static __thread cudaStream_t stream_now;

static int64_t workspace(void) {
  const char *s = getenv("MEMFIT_CUDNN_WORKSPACE_BYTES");
  return s ? strtoll(s, NULL, 0) : 0;
}

API S cudnnCreate(cudnnHandle_t *h) { *h = (cudnnHandle_t)&token; return CUDNN_STATUS_SUCCESS; }
API S cudnnDestroy(cudnnHandle_t h) DONE
API S cudnnSetStream(cudnnHandle_t h, cudaStream_t s) { stream_now = s; return CUDNN_STATUS_SUCCESS; }
API S cudnnGetStream(cudnnHandle_t h, cudaStream_t *s) { *s = stream_now; return CUDNN_STATUS_SUCCESS; }

// Graph API: a descriptor remembers nothing.
API S cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t t, cudnnBackendDescriptor_t *d) { *d = calloc(1, 64); return CUDNN_STATUS_SUCCESS; }
API S cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) { free(d); return CUDNN_STATUS_SUCCESS; }
API S cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t n, cudnnBackendAttributeType_t t, int64_t c, const void *v) DONE
API S cudnnBackendFinalize(cudnnBackendDescriptor_t d) DONE
API S cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) DONE

static size_t elem_size(cudnnBackendAttributeType_t t) {
  switch (t) {
    case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_VOID_PTR: return 8;
    case CUDNN_TYPE_CHAR: case CUDNN_TYPE_BOOLEAN: return 1;
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 0;  // the caller made them: leave them be
    default: return 4;
  }
}
API S cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                               int64_t room, int64_t *count, void *out) {
  int64_t n = 0;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
    case CUDNN_ATTR_ENGINECFG_ENGINE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED:
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: n = 1; break;
    default: break;
  }
  if (count) *count = n;
  if (out && n && room > 0) {
    memset(out, 0, elem_size(type));
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || name == CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE) *(int64_t *)out = workspace();
    if (name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT) *(int64_t *)out = 1;
  }
  return CUDNN_STATUS_SUCCESS;
}

// Batch norm.
#define T const cudnnTensorDescriptor_t
#define A const cudnnActivationDescriptor_t
API S cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, T x, T z, T y, T b, A a, size_t *n) { *n = workspace(); return CUDNN_STATUS_SUCCESS; }
API S cudnnGetBatchNormalizationBackwardExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, T x, T y, T dy, T dz, T dx, T b, A a, size_t *n) { *n = workspace(); return CUDNN_STATUS_SUCCESS; }
API S cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, A a, T x, size_t *n) { *n = 0; return CUDNN_STATUS_SUCCESS; }

#define NOP(name) API S nop_##name(void) __asm__(#name); S nop_##name(void) DONE
NOP(cudnnBatchNormalizationForwardTrainingEx) NOP(cudnnBatchNormalizationBackwardEx) NOP(cudnnBatchNormalizationForwardInference)
NOP(cudnnPoolingForward)

// Everything else that would take the fake handle into the real library.
#define NO(name) API S no_##name(void) __asm__(#name); S no_##name(void) { return CUDNN_STATUS_NOT_SUPPORTED; }
NO(cudnnConvolutionForward) NO(cudnnConvolutionBackwardData) NO(cudnnConvolutionBackwardFilter) NO(cudnnConvolutionBiasActivationForward)
NO(cudnnFindConvolutionForwardAlgorithmEx) NO(cudnnFindConvolutionBackwardDataAlgorithmEx) NO(cudnnFindConvolutionBackwardFilterAlgorithmEx)
NO(cudnnGetConvolutionForwardAlgorithm_v7) NO(cudnnGetConvolutionBackwardDataAlgorithm_v7) NO(cudnnGetConvolutionBackwardFilterAlgorithm_v7)
NO(cudnnGetConvolutionForwardWorkspaceSize) NO(cudnnGetConvolutionBackwardDataWorkspaceSize) NO(cudnnGetConvolutionBackwardFilterWorkspaceSize)
NO(cudnnCTCLoss) NO(cudnnCTCLoss_v8) NO(cudnnGetCTCLossWorkspaceSize) NO(cudnnGetCTCLossWorkspaceSize_v8)
NO(cudnnDropoutGetStatesSize) NO(cudnnSetDropoutDescriptor) NO(cudnnRestoreDropoutDescriptor)
NO(cudnnRNNForward) NO(cudnnRNNBackwardData_v8) NO(cudnnRNNBackwardWeights_v8) NO(cudnnGetRNNTempSpaceSizes) NO(cudnnGetRNNWeightSpaceSize) NO(cudnnGetRNNWeightParams)
NO(cudnnSpatialTfGridGeneratorForward) NO(cudnnSpatialTfGridGeneratorBackward) NO(cudnnSpatialTfSamplerForward) NO(cudnnSpatialTfSamplerBackward)
