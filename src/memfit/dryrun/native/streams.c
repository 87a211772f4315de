// Streams and events. A stream's last bits are its device. One clock serves all streams: synchronising any stream completes all events.
#include "stub.h"

#include <stdlib.h>

#define FIRST_STREAM ((uintptr_t)0x0F0000000000)  // looks like no host or device address

typedef struct {
  uint64_t stamp;
} Event;  // 0: never recorded

static uint64_t clock_now, completed;

static void complete_everything(void) {
  lock();
  completed = clock_now;
  unlock();
}

static cudaError_t new_stream(cudaStream_t *stream) {
  static uintptr_t last = FIRST_STREAM;
  lock();
  *stream = (cudaStream_t)((last += 0x100) + (uintptr_t)current_device);
  accounts[current_device].context = true;
  unlock();
  return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return new_stream(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return new_stream(stream);
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
  *flags = cudaStreamNonBlocking;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
  *id = ((uintptr_t)stream - FIRST_STREAM) / 0x100;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *ordinal) {
  uintptr_t at = (uintptr_t)stream;
  *ordinal = at > FIRST_STREAM && at < DEVICE_BASE ? (int)(at & 0xFF) : current_device;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
SUCCEEDS(cudaStreamDestroy, cudaStream_t stream)
SUCCEEDS(cudaStreamQuery, cudaStream_t stream)
SUCCEEDS(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
SUCCEEDS(cudaStreamSetAttribute, cudaStream_t stream, cudaStreamAttrID attribute, const cudaStreamAttrValue *value)
SUCCEEDS(cudaStreamAttachMemAsync, cudaStream_t stream, void *p, size_t bytes, unsigned flags)

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  complete_everything();
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize(void) {
  complete_everything();
  return cudaSuccess;
}

// What is queued behind work that does not run is done at once.
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *argument, unsigned flags) {
  call(stream, cudaSuccess, argument);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *argument) {
  call(argument);
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = (cudaEvent_t)calloc(1, sizeof(Event));
  return *event ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  lock();
  ((Event *)event)->stamp = ++clock_now;
  if (!settings.manual_events) completed = clock_now;
  unlock();
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  lock();
  bool done = ((Event *)event)->stamp <= completed;
  unlock();
  return done ? cudaSuccess : fail(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  lock();
  if (((Event *)event)->stamp > completed) completed = ((Event *)event)->stamp;
  unlock();
  return cudaSuccess;
}
// Work takes no time here; 0 would make users' rates infinite.
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = 1;
  return cudaSuccess;
}

// Lets the device "catch up": every event recorded so far has happened.
API void memfit_complete_events(void) { complete_everything(); }
