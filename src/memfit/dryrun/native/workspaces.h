// What a plan of cuDNN is for, as far as its workspace depends on it.
#pragma once
#include <cudnn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CONVOLUTION_MOST_DIMENSIONS 8

typedef enum { FAMILY_OTHER, FAMILY_FORWARD, FAMILY_BACKWARD_DATA, FAMILY_BACKWARD_FILTER } Family;

typedef struct {
  size_t element_bytes;
  int dimensions;  // with batch and channels, in that order, whatever the layout
  int64_t shape[CONVOLUTION_MOST_DIMENSIONS], strides[CONVOLUTION_MOST_DIMENSIONS];
} ConvolutionTensor;

typedef struct {
  Family family;
  ConvolutionTensor x, w, y;  // or their gradients
} Planned;

size_t cudnn_element_bytes(cudnnDataType_t type);

// The plan's workspace, in bytes, as PyTorch is told it; what the rule in workspaces.c says is noted beside.
size_t planned_workspace(const Planned *planned);
