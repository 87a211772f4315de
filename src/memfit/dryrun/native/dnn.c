// cuDNN for batch norm, CTC and the convolutions of before the graph API (which is in dnn_graph.c): nothing is computed.
//
// What only the real cuDNN knows is how much workspace it wants. Here that is MEMFIT_CUDNN_WORKSPACE_BYTES (0), and the
// reserve space of batch norm is 0 (as in a public trace of ResNet-50), so the peaks are what PyTorch alone decides; the
// first such call is noted as an estimate. What convolutions would like is kept beside them (workspaces.c).
//
// Descriptors are the real library's (they hold numbers and touch no device), except where a file here says otherwise.
#include "stub.h"

#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

typedef cudnnStatus_t Status;
#define DONE CUDNN_STATUS_SUCCESS

static size_t workspace(void) {
  lock();
  size_t bytes = settings.cudnn_workspace_bytes;
  unlock();
  note_estimate("cuDNN workspace", bytes);
  return bytes;
}

// ---------------------------------------------------------------------- handles ----

typedef struct {
  cudaStream_t stream;
} Handle;

API Status cudnnCreate(cudnnHandle_t *out) {
  *out = calloc(1, sizeof(Handle));
  return *out ? DONE : CUDNN_STATUS_ALLOC_FAILED;
}
API Status cudnnDestroy(cudnnHandle_t handle) {
  free(handle);
  return DONE;
}
API Status cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  ((Handle *)handle)->stream = stream;
  return DONE;
}
API Status cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
  *stream = ((Handle *)handle)->stream;
  return DONE;
}

// ------------------------------------------------------------------- batch norm ----

typedef const cudnnTensorDescriptor_t Tensor;
typedef const cudnnActivationDescriptor_t Activation;

API Status cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(cudnnHandle_t handle, cudnnBatchNormMode_t mode,
                                                                    cudnnBatchNormOps_t ops, Tensor x, Tensor z,
                                                                    Tensor y, Tensor statistics, Activation activation,
                                                                    size_t *bytes) {
  *bytes = workspace();
  return DONE;
}
API Status cudnnGetBatchNormalizationBackwardExWorkspaceSize(cudnnHandle_t handle, cudnnBatchNormMode_t mode,
                                                             cudnnBatchNormOps_t ops, Tensor x, Tensor y, Tensor dy,
                                                             Tensor dz, Tensor dx, Tensor statistics,
                                                             Activation activation, size_t *bytes) {
  *bytes = workspace();
  return DONE;
}
API Status cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t handle, cudnnBatchNormMode_t mode,
                                                                cudnnBatchNormOps_t ops, Activation activation,
                                                                Tensor x, size_t *bytes) {
  *bytes = 0;
  return DONE;
}
EXPORT_CONSTANT(cudnnBatchNormalizationForwardTrainingEx, DONE)
EXPORT_CONSTANT(cudnnBatchNormalizationBackwardEx, DONE)
EXPORT_CONSTANT(cudnnBatchNormalizationForwardInference, DONE)

// ------------------------------------------------ convolution, as before the graph API ----

#define FIND(name, Performance)                                                  \
  static Status name(int wanted, int *got, Performance *out) {                   \
    *got = wanted > 0;                                                           \
    if (wanted <= 0) return DONE;                                                \
    memset(out, 0, sizeof *out);                                                 \
    out->algo = 1; /* implicit precomputed GEMM forward, algorithm 1 backward */ \
    out->time = 1.0f;                                                            \
    out->memory = workspace();                                                   \
    return DONE;                                                                 \
  }
FIND(forward_choice, cudnnConvolutionFwdAlgoPerf_t)
FIND(data_choice, cudnnConvolutionBwdDataAlgoPerf_t)
FIND(filter_choice, cudnnConvolutionBwdFilterAlgoPerf_t)

typedef const cudnnFilterDescriptor_t Filter;
typedef const cudnnConvolutionDescriptor_t Convolution;

API Status cudnnGetConvolutionForwardAlgorithm_v7(cudnnHandle_t handle, Tensor x, Filter w, Convolution convolution,
                                                  Tensor y, const int wanted, int *got,
                                                  cudnnConvolutionFwdAlgoPerf_t *out) {
  return forward_choice(wanted, got, out);
}
API Status cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnnHandle_t handle, Filter w, Tensor dy,
                                                       Convolution convolution, Tensor dx, const int wanted, int *got,
                                                       cudnnConvolutionBwdDataAlgoPerf_t *out) {
  return data_choice(wanted, got, out);
}
API Status cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnnHandle_t handle, Tensor x, Tensor dy,
                                                         Convolution convolution, Filter dw, const int wanted, int *got,
                                                         cudnnConvolutionBwdFilterAlgoPerf_t *out) {
  return filter_choice(wanted, got, out);
}
API Status cudnnFindConvolutionForwardAlgorithmEx(cudnnHandle_t handle, Tensor xd, const void *x, Filter wd,
                                                  const void *w, Convolution convolution, Tensor yd, void *y,
                                                  const int wanted, int *got, cudnnConvolutionFwdAlgoPerf_t *out,
                                                  void *space, size_t space_bytes) {
  return forward_choice(wanted, got, out);
}
API Status cudnnFindConvolutionBackwardDataAlgorithmEx(cudnnHandle_t handle, Filter wd, const void *w, Tensor dyd,
                                                       const void *dy, Convolution convolution, Tensor dxd, void *dx,
                                                       const int wanted, int *got,
                                                       cudnnConvolutionBwdDataAlgoPerf_t *out, void *space,
                                                       size_t space_bytes) {
  return data_choice(wanted, got, out);
}
API Status cudnnFindConvolutionBackwardFilterAlgorithmEx(cudnnHandle_t handle, Tensor xd, const void *x, Tensor dyd,
                                                         const void *y, Convolution convolution, Filter dwd, void *dw,
                                                         const int wanted, int *got,
                                                         cudnnConvolutionBwdFilterAlgoPerf_t *out, void *space,
                                                         size_t space_bytes) {
  return filter_choice(wanted, got, out);
}
API Status cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t handle, Tensor x, Filter w, Convolution convolution,
                                                   Tensor y, cudnnConvolutionFwdAlgo_t algorithm, size_t *bytes) {
  *bytes = workspace();
  return DONE;
}
API Status cudnnGetConvolutionBackwardDataWorkspaceSize(cudnnHandle_t handle, Filter w, Tensor dy,
                                                        Convolution convolution, Tensor dx,
                                                        cudnnConvolutionBwdDataAlgo_t algorithm, size_t *bytes) {
  *bytes = workspace();
  return DONE;
}
API Status cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnnHandle_t handle, Tensor x, Tensor dy,
                                                          Convolution convolution, Filter dw,
                                                          cudnnConvolutionBwdFilterAlgo_t algorithm, size_t *bytes) {
  *bytes = workspace();
  return DONE;
}
EXPORT_CONSTANT(cudnnConvolutionForward, DONE)
EXPORT_CONSTANT(cudnnConvolutionBackwardData, DONE)
EXPORT_CONSTANT(cudnnConvolutionBackwardFilter, DONE)
EXPORT_CONSTANT(cudnnConvolutionBiasActivationForward, DONE)

// --------------------------------------------------------------------- CTC loss ----
// ESTIMATE. The workspace is taken as two copies of the probabilities (steps x batch x labels, fp32).

static Status ctc_workspace(Tensor probabilities, size_t *bytes) {
  cudnnDataType_t type;
  int dimensions = 0, shape[8] = {0}, strides[8];
  typedef Status (*Getter)(Tensor, int, cudnnDataType_t *, int *, int[], int[]);
  Getter get = (Getter)real_function("libcudnn.so.9", "cudnnGetTensorNdDescriptor");
  if (!get) return CUDNN_STATUS_NOT_SUPPORTED;
  Status status = get(probabilities, 3, &type, &dimensions, shape, strides);
  *bytes = 2 * sizeof(float) * (size_t)shape[0] * (size_t)shape[1] * (size_t)shape[2];
  note_estimate("cuDNN CTC workspace", *bytes);
  return status;
}
API Status cudnnGetCTCLossWorkspaceSize(cudnnHandle_t handle, Tensor probabilities, Tensor gradients, const int *labels,
                                        const int *label_lengths, const int *input_lengths,
                                        cudnnCTCLossAlgo_t algorithm, cudnnCTCLossDescriptor_t descriptor,
                                        size_t *bytes) {
  return ctc_workspace(probabilities, bytes);
}
API Status cudnnGetCTCLossWorkspaceSize_v8(cudnnHandle_t handle, cudnnCTCLossAlgo_t algorithm,
                                           cudnnCTCLossDescriptor_t descriptor, Tensor probabilities, Tensor gradients,
                                           size_t *bytes) {
  return ctc_workspace(probabilities, bytes);
}
EXPORT_CONSTANT(cudnnCTCLoss, DONE)
EXPORT_CONSTANT(cudnnCTCLoss_v8, DONE)

// ------------------------------------------------------- calls that want no workspace ----

EXPORT_CONSTANT(cudnnPoolingForward, DONE)
EXPORT_CONSTANT(cudnnSpatialTfGridGeneratorForward, DONE)
EXPORT_CONSTANT(cudnnSpatialTfGridGeneratorBackward, DONE)
EXPORT_CONSTANT(cudnnSpatialTfSamplerForward, DONE)
EXPORT_CONSTANT(cudnnSpatialTfSamplerBackward, DONE)
