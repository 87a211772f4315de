// What cuDNN's convolutions would like as workspace. Only the real cuDNN knows, so PyTorch is told
// MEMFIT_CUDNN_WORKSPACE_BYTES (0), and the peaks stay what PyTorch alone decides. Beside them the largest workspace by
// this rule is noted, for `memfit.dryrun.device_memory` (the sources are in `memfit.dryrun.libraries`):
//
//   tensor cores want NHWC, so a convolution in NCHW that they carry out transposes its operands:   x + w + y
//     (fp32 by TF32 since compute capability 8.0, half precision since 7.0);
//   without them (fp32 on Turing), as a public trace of ResNet-50 on a V100 has it:
//     3x3 with stride 1 and 128 channels or more, by Winograd's tiles of 4x4:  36 (tiles N (C + K) + C K) elements
//     larger than 1x1 with another stride:                                      x + 2 w + y
//     else                                                                      nothing to speak of;
//   in NHWC, nothing to speak of.
#include "workspaces.h"
#include "stub.h"

enum { BATCH, CHANNELS, FIRST_SPACE };

size_t cudnn_element_bytes(cudnnDataType_t type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE:
      return 8;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16:
      return 2;
    case CUDNN_DATA_INT8:
    case CUDNN_DATA_UINT8:
      return 1;
    default:
      return 4;
  }
}

static size_t elements(const ConvolutionTensor *tensor, int from) {
  size_t count = 1;
  for (int i = from; i < tensor->dimensions; i++) count *= (size_t)tensor->shape[i];
  return count;
}
static size_t bytes_of(const ConvolutionTensor *tensor) { return elements(tensor, 0) * tensor->element_bytes; }

static bool channels_come_last(const ConvolutionTensor *tensor) {
  return tensor->dimensions > FIRST_SPACE && tensor->shape[CHANNELS] > 1 && tensor->strides[CHANNELS] == 1 &&
         elements(tensor, FIRST_SPACE) > 1;
}

static bool by_tensor_cores(const Planned *p) {
  if (p->x.element_bytes == 2) return settings.compute_capability >= 70;
  return p->x.element_bytes == 4 && settings.compute_capability >= 80;
}

// Tiles of 4 in each direction of the output, of one image.
static size_t tiles(const ConvolutionTensor *y) {
  size_t count = 1;
  for (int i = FIRST_SPACE; i < y->dimensions; i++) count *= align_up((size_t)y->shape[i], 4) / 4;
  return count;
}

static size_t without_tensor_cores(const Planned *p) {
  size_t channels = (size_t)p->x.shape[CHANNELS], kernels = (size_t)p->y.shape[CHANNELS];
  bool same_space = elements(&p->x, FIRST_SPACE) == elements(&p->y, FIRST_SPACE);
  size_t window = elements(&p->w, FIRST_SPACE);
  if (window == 1) return 0;
  if (!same_space) return bytes_of(&p->x) + 2 * bytes_of(&p->w) + bytes_of(&p->y);
  if (window != 9 || channels < 128 || p->w.shape[CHANNELS] != p->x.shape[CHANNELS]) return 0;
  size_t batch = (size_t)p->x.shape[BATCH];
  return 36 * p->x.element_bytes * (tiles(&p->y) * batch * (channels + kernels) + channels * kernels);
}

static size_t by_rule(const Planned *p) {
  if (p->family == FAMILY_OTHER || channels_come_last(&p->x)) return 0;
  if (by_tensor_cores(p)) return bytes_of(&p->x) + bytes_of(&p->w) + bytes_of(&p->y);
  return p->x.element_bytes == 4 ? without_tensor_cores(p) : 0;
}

size_t planned_workspace(const Planned *planned) {
  lock();
  size_t told = settings.cudnn_workspace_bytes, rule = by_rule(planned);
  unlock();
  note_estimate("cuDNN workspace", told);
  if (rule) note_estimate("convolution workspace beside the peaks", rule);
  return told;
}
