// Which architecture a kernel runs as: that of the binary in its library that the driver would take.
//
// A kernel is compiled for a list of architectures. CUB asks which of them runs, and has no settings for any
// other: so a GPU of 8.9 must hear 8.6 where the list has that, as NVIDIA's driver answers.
#include "stub.h"

#include <pthread.h>
#include <stdlib.h>

#define WRAPPER_MAGIC 0x466243b1u
#define CONTAINER_MAGIC 0xba55ed50u
#define KIND_PTX 1
#define KIND_BINARY 2

typedef struct {
  uint32_t magic, version;
  const struct Container *container;
  void *unused;
} Wrapper;

typedef struct Container {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t size_bytes;  // of the entries that follow
} Container;

typedef struct {
  uint16_t kind, attributes;
  uint32_t header_bytes;
  uint64_t size_bytes;
  uint32_t compressed_bytes, unused;
  uint16_t minor, major;
  uint32_t architecture;  // 86 for 8.6
} Entry;

typedef struct {
  const void *kernel;
  void **library;
} Known;

// Filled while libraries are loaded, so it has a lock of its own: the other brings the device to life.
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static Known *known;
static size_t room, count;

static Known *place_of(Known *table, size_t slots, const void *kernel) {
  size_t at = ((uintptr_t)kernel >> 4) * 0x9e3779b97f4a7c15u & (slots - 1);
  while (table[at].kernel && table[at].kernel != kernel) at = (at + 1) & (slots - 1);
  return &table[at];
}

static bool grow(void) {
  size_t more = room ? 2 * room : 1 << 14;
  Known *larger = calloc(more, sizeof *larger);
  if (!larger) return false;
  for (size_t i = 0; i < room; i++) {
    if (known[i].kernel) *place_of(larger, more, known[i].kernel) = known[i];
  }
  free(known);
  known = larger;
  room = more;
  return true;
}

// The library, as later calls name it: the place that holds its wrapper.
API void **__cudaRegisterFatBinary(void *wrapper) {
  static void *none[1];
  void **library = malloc(sizeof *library);
  if (!library) return none;
  *library = wrapper;
  return library;
}
API void __cudaUnregisterFatBinary(void **library) { *library = NULL; }

API void __cudaRegisterFunction(void **library, const char *kernel) {
  pthread_mutex_lock(&reading);
  if (2 * count < room || grow()) {
    Known *place = place_of(known, room, kernel);
    count += !place->kernel;
    *place = (Known){kernel, library};
  }
  pthread_mutex_unlock(&reading);
}

static const Wrapper *wrapper_of(const void *kernel) {
  pthread_mutex_lock(&reading);
  void **library = room ? place_of(known, room, kernel)->library : NULL;
  const Wrapper *wrapper = library ? *library : NULL;
  pthread_mutex_unlock(&reading);
  return wrapper && wrapper->magic == WRAPPER_MAGIC && wrapper->container->magic == CONTAINER_MAGIC ? wrapper : NULL;
}

// A binary runs on its architecture and on later ones of the same generation; PTX on all that are later.
Compiled compiled_for(const void *kernel, int capability) {
  Compiled best = {0, 0};
  const Wrapper *wrapper = wrapper_of(kernel);
  if (!wrapper) return (Compiled){capability, capability};
  const Container *all = wrapper->container;
  const uint8_t *at = (const uint8_t *)all + all->header_bytes, *end = at + all->size_bytes;
  int virtual = 0;
  while (at + sizeof(Entry) <= end) {
    const Entry *entry = (const Entry *)at;
    int built = (int)entry->architecture;
    if (entry->kind == KIND_BINARY && built / 10 == capability / 10 && built <= capability && built > best.binary)
      best = (Compiled){built, built};
    if (entry->kind == KIND_PTX && built <= capability && built > virtual) virtual = built;
    at += entry->header_bytes + entry->size_bytes;
  }
  if (!best.binary && virtual) best = (Compiled){capability, virtual};
  return best.binary ? best : (Compiled){capability, capability};
}
