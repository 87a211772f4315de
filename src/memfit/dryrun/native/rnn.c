// cuDNN's recurrent networks (nn.RNN, nn.LSTM, nn.GRU). PyTorch keeps all weights of a network in one buffer, whose
// size and layout cuDNN tells; here they are the sum of all matrices and biases, matrices first, in order of the
// layers.
//
// ESTIMATES. cuDNN does not publish the sizes of its two scratch buffers. With T x B x H elements in one layer's
// hidden states in one direction, D directions, L layers and G gates (LSTM 4, GRU 3, else 1):
//   reserve (kept from forward to backward) = T B H L D (G + 1) + T B (output width) (L - 1)
//       the activations of the gates and the cell's own value per step, and the outputs between the layers;
//   workspace (during the call)             = T B H D G
//       the input product of one layer's gates;
//   dropout states                          = 64 KiB per SM.
#include "stub.h"
#include "workspaces.h"

#include <cudnn.h>
#include <stdlib.h>

typedef cudnnStatus_t Status;
#define DONE CUDNN_STATUS_SUCCESS

typedef struct {
  cudnnRNNMode_t cell;
  cudnnRNNBiasMode_t biases;
  cudnnDataType_t type;
  int directions, layers;
  size_t input, hidden, projected;  // projected: width of the output, hidden if there is no projection
} Network;

typedef struct {
  cudnnDataType_t type;
  size_t steps, batch, width;
} Sequence;

// ------------------------------------------------------------------ descriptors ----

API Status cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t *out) {
  *out = calloc(1, sizeof(Network));
  return *out ? DONE : CUDNN_STATUS_ALLOC_FAILED;
}
API Status cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t descriptor) {
  free(descriptor);
  return DONE;
}
API Status cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t descriptor, cudnnRNNAlgo_t algorithm, cudnnRNNMode_t cell,
                                    cudnnRNNBiasMode_t biases, cudnnDirectionMode_t direction,
                                    cudnnRNNInputMode_t input_mode, cudnnDataType_t type,
                                    cudnnDataType_t math_precision, cudnnMathType_t math, int32_t input, int32_t hidden,
                                    int32_t projected, int32_t layers, cudnnDropoutDescriptor_t dropout,
                                    uint32_t flags) {
  *(Network *)descriptor = (Network){
      .cell = cell,
      .biases = biases,
      .type = type,
      .directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1,
      .layers = layers,
      .input = (size_t)input,
      .hidden = (size_t)hidden,
      .projected = (size_t)(projected > 0 ? projected : hidden),
  };
  return DONE;
}

API Status cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t *out) {
  *out = calloc(1, sizeof(Sequence));
  return *out ? DONE : CUDNN_STATUS_ALLOC_FAILED;
}
API Status cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t descriptor) {
  free(descriptor);
  return DONE;
}
API Status cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t descriptor, cudnnDataType_t type,
                                     cudnnRNNDataLayout_t layout, int steps, int batch, int width, const int lengths[],
                                     void *padding) {
  *(Sequence *)descriptor = (Sequence){type, (size_t)steps, (size_t)batch, (size_t)width};
  return DONE;
}

API Status cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *bytes) {
  lock();
  *bytes = (size_t)settings.sm_count << 16;
  unlock();
  note_estimate("cuDNN dropout states", *bytes);
  return DONE;
}
EXPORT_CONSTANT(cudnnSetDropoutDescriptor, DONE)
EXPORT_CONSTANT(cudnnRestoreDropoutDescriptor, DONE)

// ------------------------------------------------------------- the weight buffer ----

static int gates(const Network *n) { return n->cell == CUDNN_LSTM ? 4 : n->cell == CUDNN_GRU ? 3 : 1; }
static bool projects(const Network *n) { return n->projected != n->hidden; }

static size_t input_width(const Network *n, int pseudo_layer) {
  return pseudo_layer < n->directions ? n->input : n->projected * (size_t)n->directions;
}

// The matrix of one linear layer: gates of the input first, then gates of the state, then the projection.
static size_t columns(const Network *n, int pseudo_layer, int linear) {
  if (linear == 2 * gates(n)) return n->hidden;
  return linear < gates(n) ? input_width(n, pseudo_layer) : n->projected;
}
static size_t rows(const Network *n, int linear) { return linear == 2 * gates(n) ? n->projected : n->hidden; }
static int matrices(const Network *n) { return 2 * gates(n) + (projects(n) ? 1 : 0); }

static bool has_bias(const Network *n, int linear) {
  if (linear >= 2 * gates(n)) return false;
  switch (n->biases) {
    case CUDNN_RNN_NO_BIAS:
      return false;
    case CUDNN_RNN_SINGLE_INP_BIAS:
      return linear < gates(n);
    case CUDNN_RNN_SINGLE_REC_BIAS:
      return linear >= gates(n);
    default:
      return true;
  }
}

// Elements before the given matrix; for a linear layer past the last pseudo layer, the elements of all matrices.
static size_t matrix_offset(const Network *n, int pseudo_layer, int linear) {
  size_t at = 0;
  for (int layer = 0; layer <= pseudo_layer && layer < n->layers * n->directions; layer++)
    for (int i = 0; i < (layer == pseudo_layer ? linear : matrices(n)); i++) at += rows(n, i) * columns(n, layer, i);
  return at;
}
static size_t bias_offset(const Network *n, int pseudo_layer, int linear) {
  size_t at = 0;
  for (int layer = 0; layer <= pseudo_layer && layer < n->layers * n->directions; layer++)
    for (int i = 0; i < (layer == pseudo_layer ? linear : 2 * gates(n)); i++) at += has_bias(n, i) ? n->hidden : 0;
  return at;
}
static size_t all_matrices(const Network *n) { return matrix_offset(n, n->layers * n->directions, 0); }
static size_t all_biases(const Network *n) { return bias_offset(n, n->layers * n->directions, 0); }

API Status cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t descriptor, size_t *bytes) {
  const Network *n = (const Network *)descriptor;
  *bytes = (all_matrices(n) + all_biases(n)) * cudnn_element_bytes(n->type);
  return DONE;
}

// Tensor descriptors belong to the real library, which is loaded by now: PyTorch made them with it.
static Status describe(cudnnTensorDescriptor_t tensor, cudnnDataType_t type, size_t rows, size_t columns) {
  typedef Status (*Setter)(cudnnTensorDescriptor_t, cudnnDataType_t, int, const int *, const int *);
  Setter set = (Setter)real_function("libcudnn.so.9", "cudnnSetTensorNdDescriptor");
  int shape[3] = {1, (int)rows, (int)columns}, strides[3] = {(int)(rows * columns), (int)columns, 1};
  return set ? set(tensor, type, 3, shape, strides) : CUDNN_STATUS_NOT_SUPPORTED;
}

API Status cudnnGetRNNWeightParams(cudnnHandle_t handle, cudnnRNNDescriptor_t descriptor, int32_t pseudo_layer,
                                   size_t bytes, const void *weights, int32_t linear, cudnnTensorDescriptor_t matrix,
                                   void **matrix_at, cudnnTensorDescriptor_t bias, void **bias_at) {
  const Network *n = (const Network *)descriptor;
  if (pseudo_layer < 0 || pseudo_layer >= n->layers * n->directions || linear < 0) return CUDNN_STATUS_INVALID_VALUE;
  size_t element = cudnn_element_bytes(n->type);
  const char *matrices_at = weights, *biases_at = matrices_at + element * all_matrices(n);
  Status status = DONE;
  if (matrix_at) {  // NULL as the answer: there is no such matrix
    *matrix_at = linear < matrices(n) ? (void *)(matrices_at + element * matrix_offset(n, pseudo_layer, linear)) : NULL;
    if (*matrix_at) status = describe(matrix, n->type, rows(n, linear), columns(n, pseudo_layer, linear));
  }
  if (bias_at && status == DONE) {
    *bias_at = has_bias(n, linear) ? (void *)(biases_at + element * bias_offset(n, pseudo_layer, linear)) : NULL;
    if (*bias_at) status = describe(bias, n->type, n->hidden, 1);
  }
  return status;
}

// ------------------------------------------------------------------------ running ----

API Status cudnnGetRNNTempSpaceSizes(cudnnHandle_t handle, cudnnRNNDescriptor_t descriptor, cudnnForwardMode_t mode,
                                     cudnnRNNDataDescriptor_t data, size_t *workspace_bytes, size_t *reserve_bytes) {
  const Network *n = (const Network *)descriptor;
  const Sequence *s = (const Sequence *)data;
  size_t tokens = s->steps * s->batch, element = cudnn_element_bytes(n->type), directions = (size_t)n->directions,
         layers = (size_t)n->layers;
  size_t kept = tokens * n->hidden * layers * directions * (size_t)(gates(n) + 1);
  size_t between = tokens * n->projected * directions * (layers - 1);
  if (workspace_bytes) *workspace_bytes = tokens * n->hidden * directions * (size_t)gates(n) * element;
  if (reserve_bytes) *reserve_bytes = mode == CUDNN_FWD_MODE_TRAINING ? (kept + between) * element : 0;
  note_estimate("cuDNN RNN workspace and reserve space",
                (workspace_bytes ? *workspace_bytes : 0) + (reserve_bytes ? *reserve_bytes : 0));
  return DONE;
}
EXPORT_CONSTANT(cudnnRNNForward, DONE)
EXPORT_CONSTANT(cudnnRNNBackwardData_v8, DONE)
EXPORT_CONSTANT(cudnnRNNBackwardWeights_v8, DONE)
