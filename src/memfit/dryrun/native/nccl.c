// NCCL for a process that is alone (torchrun with one process): a collective over one rank has nothing to do. More
// ranks are refused: there is one made-up GPU. NCCL's own buffers are not modelled. nccl.h needs nothing but these.
#include "stub.h"

#include <stdlib.h>
#include <string.h>

enum { DONE = 0, INTERNAL_ERROR = 3, INVALID_USAGE = 5 };

typedef struct {
  int rank, ranks;
} Communicator;
typedef struct {
  char bytes[128];
} UniqueId;

static int join(Communicator **out, int ranks, int rank) {
  *out = NULL;
  if (ranks != 1) {
    note_unknown_call("ncclCommInitRank with more than one rank");
    return INVALID_USAGE;
  }
  *out = malloc(sizeof **out);
  if (!*out) return INTERNAL_ERROR;
  **out = (Communicator){rank, ranks};
  note_estimate("NCCL buffers");
  return DONE;
}

API int ncclGetUniqueId(UniqueId *id) {
  memset(id, 1, sizeof *id);
  return DONE;
}
API int ncclCommInitRank(Communicator **out, int ranks, UniqueId id, int rank) { return join(out, ranks, rank); }
API int ncclCommInitRankConfig(Communicator **out, int ranks, UniqueId id, int rank, void *config) {
  return join(out, ranks, rank);
}
API int ncclCommInitRankScalable(Communicator **out, int ranks, int rank, int ids, UniqueId *id, void *config) {
  return join(out, ranks, rank);
}
API int ncclCommInitAll(Communicator **out, int devices, const int *list) { return join(out, devices, 0); }
API int ncclCommSplit(Communicator *from, int color, int key, Communicator **out, void *config) {
  return join(out, from->ranks, from->rank);
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
  *ordinal = 0;
  return DONE;
}
API int ncclCommGetAsyncError(Communicator *communicator, int *error) {
  *error = DONE;
  return DONE;
}
API int ncclCommDestroy(Communicator *communicator) {
  free(communicator);
  return DONE;
}
API int ncclCommAbort(Communicator *communicator) { return ncclCommDestroy(communicator); }
EXPORT_CONSTANT(ncclCommFinalize, DONE)
EXPORT_CONSTANT(ncclGroupStart, DONE)
EXPORT_CONSTANT(ncclGroupEnd, DONE)
EXPORT_CONSTANT(ncclAllReduce, DONE)
EXPORT_CONSTANT(ncclAllGather, DONE)
EXPORT_CONSTANT(ncclReduceScatter, DONE)
EXPORT_CONSTANT(ncclBroadcast, DONE)
EXPORT_CONSTANT(ncclBcast, DONE)
EXPORT_CONSTANT(ncclReduce, DONE)
EXPORT_CONSTANT(ncclGather, DONE)
EXPORT_CONSTANT(ncclAlltoAll, DONE)
EXPORT_CONSTANT(ncclSend, DONE)
EXPORT_CONSTANT(ncclRecv, DONE)
EXPORT_CONSTANT(ncclRedOpDestroy, DONE)
EXPORT_CONSTANT(ncclCommDeregister, DONE)
