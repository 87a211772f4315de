// The run-time compiler (PyTorch's jiterator: special functions, some complex arithmetic). Nothing that it compiles
// would run, so it compiles nothing: a program is a list of names, its binary a few zeros.
#include "stub.h"

#include <nvrtc.h>
#include <stdlib.h>
#include <string.h>

#define BINARY_BYTES 64

// PyTorch would keep such a "binary" on disk and use it on a real GPU one day. Runs before main().
__attribute__((constructor)) static void keep_kernels_off_the_disk(void) { setenv("USE_PYTORCH_KERNEL_CACHE", "0", 1); }

typedef struct Name { char *text; struct Name *next; } Name;
typedef struct { Name *names; } Program;

API nvrtcResult nvrtcVersion(int *major, int *minor) {
  *major = CUDART_VERSION / 1000;
  *minor = CUDART_VERSION % 1000 / 10;
  return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcCreateProgram(nvrtcProgram *out, const char *source, const char *name, int headers, const char *const *texts,
                                   const char *const *include_names) {
  *out = calloc(1, sizeof(Program));
  return *out ? NVRTC_SUCCESS : NVRTC_ERROR_OUT_OF_MEMORY;
}
API nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
  for (Name *name = ((Program *)*program)->names, *next; name; name = next) {
    next = name->next;
    free(name->text);
    free(name);
  }
  free(*program);
  *program = NULL;
  return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *expression) { return NVRTC_SUCCESS; }

// The lowered name stays valid as long as its program.
API nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *expression, const char **out) {
  Name *name = malloc(sizeof *name);
  char *text = strdup(expression);
  if (!name || !text) return NVRTC_ERROR_OUT_OF_MEMORY;
  *name = (Name){text, ((Program *)program)->names};
  ((Program *)program)->names = name;
  *out = text;
  return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options) {
  note_estimate("run-time compilation (nothing is compiled)");
  return NVRTC_SUCCESS;
}

static nvrtcResult size(size_t *bytes, size_t value) {
  *bytes = value;
  return NVRTC_SUCCESS;
}
static nvrtcResult zeros(char *out, size_t bytes) {
  memset(out, 0, bytes);
  return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes) { return size(bytes, BINARY_BYTES); }
API nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *out) { return zeros(out, BINARY_BYTES); }
API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes) { return size(bytes, BINARY_BYTES); }
API nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *out) { return zeros(out, BINARY_BYTES); }
API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes) { return size(bytes, 1); }
API nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *out) { return zeros(out, 1); }
