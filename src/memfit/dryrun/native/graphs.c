// Stream capture and graphs: a capture is noted, so that PyTorch uses its private pools; the graph is empty.
#include "stub.h"

static int graph_token;
static unsigned long long capture_id;
static cudaStream_t capturing_stream;

static bool capturing(cudaStream_t stream) { return capturing_stream && capturing_stream == stream; }

static enum cudaStreamCaptureStatus status(cudaStream_t stream) {
  return capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  lock();
  capturing_stream = stream;
  capture_id++;
  unlock();
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  lock();
  capturing_stream = 0;
  unlock();
  *graph = (cudaGraph_t)&graph_token;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  *out = status(stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                         const cudaGraphEdgeData **edges, size_t *count) {
  *out = status(stream);
  if (id) *id = capture_id;
  if (graph) *graph = (cudaGraph_t)&graph_token;
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}
SUCCEEDS(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)
SUCCEEDS(cudaStreamUpdateCaptureDependencies, cudaStream_t stream, cudaGraphNode_t *dependencies,
         const cudaGraphEdgeData *edges, size_t count, unsigned flags)

static cudaError_t instantiate(cudaGraphExec_t *out) {
  *out = (cudaGraphExec_t)&graph_token;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  return instantiate(out);
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  return instantiate(out);
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = 1;  // PyTorch warns about an empty graph
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *dependencies,
                                             cudaGraphEdgeData *edges, size_t *count) {
  *count = 0;
  return cudaSuccess;
}
SUCCEEDS(cudaGraphLaunch, cudaGraphExec_t graph, cudaStream_t stream)
SUCCEEDS(cudaGraphUpload, cudaGraphExec_t graph, cudaStream_t stream)
SUCCEEDS(cudaGraphDestroy, cudaGraph_t graph)
SUCCEEDS(cudaGraphExecDestroy, cudaGraphExec_t graph)

API cudaError_t cudaUserObjectCreate(cudaUserObject_t *out, void *p, cudaHostFn_t destroy, unsigned count,
                                     unsigned flags) {
  *out = (cudaUserObject_t)&graph_token;
  return cudaSuccess;
}
SUCCEEDS(cudaGraphRetainUserObject, cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags)
SUCCEEDS(cudaUserObjectRelease, cudaUserObject_t object, unsigned count)
