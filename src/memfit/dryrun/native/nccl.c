// NCCL for one process of a job whose others are absent. A collective moves nothing; what the results of the others
// would be is `collectives.py`'s to say. PyTorch's own ProcessGroupNCCL runs over this, so its buffers, streams and
// orders are the real ones. What NCCL itself takes for a communicator of several ranks is an estimate, and charged
// to the device. nccl.h needs nothing but these.
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DONE = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4 };

typedef struct {
  int rank, ranks, device;
  size_t charged_bytes;
} Communicator;
typedef struct {
  char bytes[128];
} UniqueId;

static __thread const char *last_error = "";

static int join(Communicator **out, int ranks, int rank) {
  *out = NULL;
  if (ranks < 1 || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
  Communicator *made = calloc(1, sizeof *made);
  if (!made) return UNHANDLED_CUDA_ERROR;
  lock();
  *made = (Communicator){rank, ranks, current_device, ranks > 1 ? settings.nccl_communicator_bytes : 0};
  bool fits = charge(made->device, made->charged_bytes);
  unlock();
  if (!fits) {
    free(made);
    last_error = "CUDA failure 2 'out of memory'";
    return UNHANDLED_CUDA_ERROR;
  }
  *out = made;
  note_estimate(ranks > 1 ? "NCCL communicator" : "NCCL buffers", made->charged_bytes);
  return DONE;
}

API int ncclGetUniqueId(UniqueId *id) {
  memset(id, 1, sizeof *id);
  return DONE;
}
API int ncclCommGetUniqueId(Communicator *communicator, UniqueId *id) { return ncclGetUniqueId(id); }
API int ncclCommInitRank(Communicator **out, int ranks, UniqueId id, int rank) { return join(out, ranks, rank); }
API int ncclCommInitRankConfig(Communicator **out, int ranks, UniqueId id, int rank, void *config) {
  return join(out, ranks, rank);
}
API int ncclCommInitRankScalable(Communicator **out, int ranks, int rank, int ids, UniqueId *id, void *config) {
  return join(out, ranks, rank);
}
API int ncclCommInitAll(Communicator **out, int devices, const int *list) {
  for (int i = 0; i < devices; i++) {
    int before = current_device;
    if (list) cudaSetDevice(list[i]);
    int error = join(&out[i], devices, i);
    cudaSetDevice(before);
    if (error) return error;
  }
  return DONE;
}
// PyTorch knows the new group's size itself; here the parent's is as good.
API int ncclCommSplit(Communicator *from, int color, int key, Communicator **out, void *config) {
  *out = NULL;
  return color < 0 ? DONE : join(out, from->ranks, from->rank);
}
API int ncclCommCount(const Communicator *communicator, int *ranks) {
  *ranks = communicator->ranks;
  return DONE;
}
API int ncclCommUserRank(const Communicator *communicator, int *rank) {
  *rank = communicator->rank;
  return DONE;
}
API int ncclCommCuDevice(const Communicator *communicator, int *ordinal) {
  *ordinal = communicator->device;
  return DONE;
}
API int ncclCommGetAsyncError(Communicator *communicator, int *error) {
  *error = DONE;
  return DONE;
}
API int ncclCommDestroy(Communicator *communicator) {
  if (!communicator) return DONE;
  lock();
  discharge(communicator->device, communicator->charged_bytes);
  unlock();
  free(communicator);
  return DONE;
}
API int ncclCommAbort(Communicator *communicator) { return ncclCommDestroy(communicator); }
API const char *ncclGetLastError(const Communicator *communicator) { return last_error; }
API int ncclMemAlloc(void **out, size_t bytes) {
  return cudaMalloc(out, bytes) ? UNHANDLED_CUDA_ERROR : DONE;
}
API int ncclMemFree(void *p) { return cudaFree(p) ? UNHANDLED_CUDA_ERROR : DONE; }
API int ncclCommRegister(const Communicator *communicator, void *buffer, size_t bytes, void **handle) {
  *handle = buffer;
  return DONE;
}
API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, Communicator *communicator) {
  *operation = 5;  // the first number past NCCL's own
  return DONE;
}

// How the last reduction of this thread combines: NCCL's number (0 sum, 1 product, 2 most, 3 least, 4 mean).
static __thread int reduction;
API int memfit_last_reduction(void) { return reduction; }

static int reduce(int operation) {
  reduction = operation;
  return DONE;
}

// What this process gives to collectives, by kind: how often, how many bytes of its own, and how many it sends to other
// ranks where they stand in a ring, which is how bandwidth is used best (Patarasuk and Yuan 2009).
typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, SEND, KINDS } Kind;
static const char *const kind_names[KINDS] = {"all_reduce", "all_gather", "reduce_scatter",
                                              "broadcast",  "reduce",     "send"};
static struct {
  unsigned long long calls, own_bytes, sent_bytes;
} traffic[KINDS];

// Sizes of NCCL's types by number: int8, uint8, int32, uint32, int64, uint64, fp16, fp32, fp64, bf16, two of fp8.
static size_t bytes_of(size_t count, int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < (int)(sizeof sizes / sizeof *sizes) ? count * sizes[type] : 0;
}

static void note_traffic(Kind kind, const Communicator *communicator, size_t own_bytes) {
  size_t others = communicator->ranks - 1, ranks = communicator->ranks, sent = own_bytes;
  if (kind == ALL_REDUCE) sent = 2 * own_bytes / ranks * others;
  if (kind == ALL_GATHER) sent = own_bytes * others;
  if (kind == REDUCE_SCATTER) sent = own_bytes / ranks * others;
  lock();
  traffic[kind].calls++;
  traffic[kind].own_bytes += own_bytes;
  traffic[kind].sent_bytes += others ? sent : 0;
  unlock();
}

API const char *memfit_traffic(void) {
  static char text[1024];
  size_t used = 0;
  lock();
  for (int kind = 0; kind < KINDS; kind++)
    used += snprintf(text + used, sizeof text - used, "%s\"%s\": [%llu, %llu, %llu]", kind ? ", " : "{",
                     kind_names[kind], traffic[kind].calls, traffic[kind].own_bytes, traffic[kind].sent_bytes);
  snprintf(text + used, sizeof text - used, "}");
  unlock();
  return text;
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *communicator,
                      cudaStream_t stream) {
  note_traffic(ALL_REDUCE, communicator, bytes_of(count, type));
  return reduce(operation);
}
API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                          Communicator *communicator, cudaStream_t stream) {
  note_traffic(REDUCE_SCATTER, communicator, bytes_of(count, type) * communicator->ranks);
  return reduce(operation);
}
API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                   Communicator *communicator, cudaStream_t stream) {
  note_traffic(REDUCE, communicator, bytes_of(count, type));
  return reduce(operation);
}
API int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *communicator,
                      cudaStream_t stream) {
  note_traffic(ALL_GATHER, communicator, bytes_of(count, type));
  return DONE;
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                      cudaStream_t stream) {
  note_traffic(BROADCAST, communicator, bytes_of(count, type));
  return DONE;
}
API int ncclBcast(void *buffer, size_t count, int type, int root, Communicator *communicator, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
API int ncclSend(const void *from, size_t count, int type, int peer, Communicator *communicator, cudaStream_t stream) {
  if (peer != communicator->rank) note_traffic(SEND, communicator, bytes_of(count, type));
  return DONE;
}
EXPORT_CONSTANT(ncclCommFinalize, DONE)
EXPORT_CONSTANT(ncclGroupStart, DONE)
EXPORT_CONSTANT(ncclGroupEnd, DONE)
EXPORT_CONSTANT(ncclGather, DONE)
EXPORT_CONSTANT(ncclAlltoAll, DONE)
EXPORT_CONSTANT(ncclRecv, DONE)
EXPORT_CONSTANT(ncclRedOpDestroy, DONE)
EXPORT_CONSTANT(ncclCommDeregister, DONE)
