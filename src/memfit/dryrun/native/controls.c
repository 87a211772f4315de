// What memfit itself asks of the made-up GPU, through ctypes. None of it brings the device to life.
#include "stub.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A device's account as JSON, in bytes and counts. "alive" says whether anything has touched a device yet; until then the
// totals are 0, because the environment has not been read. "context": whether this process has used this device.
API const char *memfit_device_stats(int device) {
  static __thread char text[768];
  bool alive = lock_quietly();
  Account account = accounts[device >= 0 && device < MOST_DEVICES ? device : 0];
  snprintf(text, sizeof text,
           "{\"alive\":%s,\"devices\":%d,\"context\":%s,\"used_bytes\":%zu,\"peak_bytes\":%zu,\"context_bytes\":%zu,\"total_bytes\":%zu,\"nvml_total_"
           "bytes\":%zu,"
           "\"mallocs\":%lu,\"frees\":%lu,\"creates\":%lu,\"releases\":%lu,\"maps\":%lu,\"unmaps\":%lu,\"failed\":%lu,"
           "\"launches\":%lu}",
           alive ? "true" : "false", settings.count, account.context ? "true" : "false", account.used_bytes, account.peak_bytes, settings.context_bytes,
           settings.total_bytes, settings.nvml_total_bytes, account.mallocs, account.frees, account.creates,
           account.releases, account.maps, account.unmaps, account.failed, account.launches);
  unlock();
  return text;
}

// The same of the first device.
API const char *memfit_stats(void) { return memfit_device_stats(0); }

// Devices that this process has used, as bits.
API uint64_t memfit_used_devices(void) {
  uint64_t bits = 0;
  lock_quietly();
  for (int i = 0; i < MOST_DEVICES; i++) bits |= (uint64_t)accounts[i].context << i;
  unlock();
  return bits;
}

// Bytes that the process holds on one of the machine's devices, its context included; 0 if it has not used it. For the
// NVML library beside this one.
API size_t memfit_process_bytes(int physical) {
  size_t bytes = 0;
  if (lock_quietly())
    for (int i = 0; i < settings.count; i++)
      if (settings.physical[i] == physical && accounts[i].context)
        bytes = settings.context_bytes + accounts[i].used_bytes;
  unlock();
  return bytes;
}

void *real_function(const char *library, const char *name) {
  void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void *function = handle ? dlsym(handle, name) : NULL;
  if (handle) dlclose(handle);  // gives back this call's hold on it, no more
  return function;
}

// ----------------------------------------------------------------- lists of names ----

#define NAMES_MOST 256

typedef struct {
  const char *names[NAMES_MOST];
  size_t bytes[NAMES_MOST];  // the largest, of names that are sizes
  int count;
} Names;

static pthread_mutex_t names_mutex = PTHREAD_MUTEX_INITIALIZER;
static Names unknown_calls, estimates;

static void note(Names *list, const char *name, size_t bytes) {
  pthread_mutex_lock(&names_mutex);
  int i = 0;
  while (i < list->count && strcmp(list->names[i], name)) i++;
  char *copy = i == list->count && i < NAMES_MOST ? strdup(name) : NULL;
  if (copy) list->names[list->count++] = copy;
  if (i < list->count && bytes > list->bytes[i]) list->bytes[i] = bytes;
  pthread_mutex_unlock(&names_mutex);
}

void note_unknown_call(const char *name) {
  note(&unknown_calls, name, 0);
  if (settings.log) fprintf(stderr, "[memfit gpu] not modelled: %s\n", name);
}
void note_estimate(const char *what, size_t bytes) { note(&estimates, what, bytes); }

static const char *as_json(const Names *list) {
  static __thread char text[NAMES_MOST * 80];
  size_t at = 0;
  pthread_mutex_lock(&names_mutex);
  text[at++] = '[';
  for (int i = 0; i < list->count && at + strlen(list->names[i]) + 8 < sizeof text; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, "%s\"%s\"", i ? "," : "", list->names[i]);
  pthread_mutex_unlock(&names_mutex);
  memcpy(text + at, "]", 2);
  return text;
}

// Calls that were refused so far, as a JSON list of names.
API const char *memfit_unknown_calls(void) { return as_json(&unknown_calls); }

// Sizes so far that came from a rule and not from the real library, as a JSON list of names.
API const char *memfit_estimates(void) { return as_json(&estimates); }

// The largest size that a name of memfit_estimates stands for.
API size_t memfit_estimate_bytes(const char *name) {
  size_t bytes = 0;
  pthread_mutex_lock(&names_mutex);
  for (int i = 0; i < estimates.count; i++)
    if (!strcmp(estimates.names[i], name)) bytes = estimates.bytes[i];
  pthread_mutex_unlock(&names_mutex);
  return bytes;
}
