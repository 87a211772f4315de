// cuDNN's graph API: descriptors remember no more than which convolution, or which other operation, a plan is for, so
// that the plan can say what workspace it wants (see workspaces.c). One engine is always found; nothing is computed.
//
// What is set into a descriptor is copied, as the real library does when it is finalized: a caller may destroy a tensor
// once the operation that reads it has been made.
#include "stub.h"
#include "workspaces.h"

#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

typedef cudnnStatus_t Status;
#define DONE CUDNN_STATUS_SUCCESS

typedef struct {
  cudnnBackendDescriptorType_t type;
  ConvolutionTensor tensor;  // of a tensor
  Planned planned;           // of everything that is made from operations
} Descriptor;

API Status cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out) {
  Descriptor *made = calloc(1, sizeof *made);
  if (!made) return CUDNN_STATUS_ALLOC_FAILED;
  made->type = type;
  *out = made;
  return DONE;
}
API Status cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  free(descriptor);
  return DONE;
}
EXPORT_CONSTANT(cudnnBackendFinalize, DONE)
EXPORT_CONSTANT(cudnnBackendExecute, DONE)

// ---------------------------------------------------------------- what is remembered ----

static void set_numbers(int64_t *into, int64_t count, const void *values) {
  for (int64_t i = 0; i < count && i < CONVOLUTION_MOST_DIMENSIONS; i++) into[i] = ((const int64_t *)values)[i];
}

static void describe_tensor(ConvolutionTensor *tensor, cudnnBackendAttributeName_t name, int64_t count,
                            const void *values) {
  switch (name) {
    case CUDNN_ATTR_TENSOR_DATA_TYPE:
      tensor->element_bytes = cudnn_element_bytes(*(const cudnnDataType_t *)values);
      break;
    case CUDNN_ATTR_TENSOR_DIMENSIONS:
      tensor->dimensions = count < CONVOLUTION_MOST_DIMENSIONS ? (int)count : CONVOLUTION_MOST_DIMENSIONS;
      set_numbers(tensor->shape, count, values);
      break;
    case CUDNN_ATTR_TENSOR_STRIDES:
      set_numbers(tensor->strides, count, values);
      break;
    default:
      break;
  }
}

// Where an operation of convolution keeps the tensor that an attribute sets; NULL: the attribute is none of the three.
static ConvolutionTensor *operand(Planned *planned, cudnnBackendAttributeName_t name) {
  switch (name) {
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X:
      return &planned->x;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW:
      return &planned->w;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY:
      return &planned->y;
    default:
      return NULL;
  }
}

static Family family_of(cudnnBackendDescriptorType_t type) {
  switch (type) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return FAMILY_FORWARD;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      return FAMILY_BACKWARD_DATA;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return FAMILY_BACKWARD_FILTER;
    default:
      return FAMILY_OTHER;
  }
}

static bool is_made_from_others(cudnnBackendAttributeName_t name) {
  switch (name) {
    case CUDNN_ATTR_OPERATIONGRAPH_OPS:
    case CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH:
    case CUDNN_ATTR_ENGINE_OPERATION_GRAPH:
    case CUDNN_ATTR_ENGINECFG_ENGINE:
    case CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
      return true;
    default:
      return false;
  }
}

API Status cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                    cudnnBackendAttributeType_t type, int64_t count, const void *values) {
  Descriptor *into = descriptor;
  if (!into || !values || count <= 0) return DONE;
  if (into->type == CUDNN_BACKEND_TENSOR_DESCRIPTOR) describe_tensor(&into->tensor, name, count, values);
  if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) return DONE;
  Descriptor *const *from = values;
  ConvolutionTensor *tensor = operand(&into->planned, name);
  if (tensor && from[0]) {
    into->planned.family = family_of(into->type);
    *tensor = from[0]->tensor;
  }
  if (is_made_from_others(name))
    for (int64_t i = 0; i < count; i++)
      if (from[i] && into->planned.family == FAMILY_OTHER) into->planned = from[i]->planned;
  return DONE;
}

// ------------------------------------------------------------------- what is answered ----

static size_t answer_bytes(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
      return 8;
    case CUDNN_TYPE_CHAR:
    case CUDNN_TYPE_BOOLEAN:
      return 1;
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 0;  // the caller made them: leave them be
    default:
      return 4;
  }
}

static bool has_one_value(cudnnBackendAttributeName_t name) {
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
    case CUDNN_ATTR_ENGINECFG_ENGINE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED:
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      return true;
    default:
      return false;
  }
}

API Status cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                    cudnnBackendAttributeType_t type, int64_t room, int64_t *count, void *out) {
  const Descriptor *from = descriptor;
  bool any = has_one_value(name);
  if (count) *count = any;
  if (!out || !any || room <= 0) return DONE;
  memset(out, 0, answer_bytes(type));
  switch (name) {
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
      *(int64_t *)out = (int64_t)planned_workspace(&from->planned);
      break;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      *(int64_t *)out = 1;
      break;
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:  // the caller's own configuration becomes the one for this graph
      if (*(Descriptor **)out) (*(Descriptor **)out)->planned = from->planned;
      break;
    default:
      break;
  }
  return DONE;
}
