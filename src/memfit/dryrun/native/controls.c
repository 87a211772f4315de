// What memfit itself asks of the made-up GPU, through ctypes. None of it brings the device to life.
#include "stub.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The account as JSON, in bytes and counts. "alive" says whether anything has touched the device yet; until then the
// totals are 0, because its environment has not been read.
API const char *memfit_stats(void) {
  static __thread char text[768];
  bool alive = lock_quietly();
  snprintf(text, sizeof text,
           "{\"alive\":%s,\"used_bytes\":%zu,\"peak_bytes\":%zu,\"context_bytes\":%zu,\"total_bytes\":%zu,\"nvml_total_"
           "bytes\":%zu,"
           "\"mallocs\":%lu,\"frees\":%lu,\"creates\":%lu,\"releases\":%lu,\"maps\":%lu,\"unmaps\":%lu,\"failed\":%lu,"
           "\"launches\":%lu}",
           alive ? "true" : "false", account.used_bytes, account.peak_bytes, settings.context_bytes,
           settings.total_bytes, settings.nvml_total_bytes, account.mallocs, account.frees, account.creates,
           account.releases, account.maps, account.unmaps, account.failed, account.launches);
  unlock();
  return text;
}

// Bytes that the process holds, its context included; 0 before the first call. For the NVML library beside this one.
API size_t memfit_process_bytes(void) {
  size_t bytes = lock_quietly() ? settings.context_bytes + account.used_bytes : 0;
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
  int count;
} Names;

static pthread_mutex_t names_mutex = PTHREAD_MUTEX_INITIALIZER;
static Names unknown_calls, estimates;

static void note(Names *list, const char *name) {
  pthread_mutex_lock(&names_mutex);
  int i = 0;
  while (i < list->count && strcmp(list->names[i], name)) i++;
  char *copy = i == list->count && i < NAMES_MOST ? strdup(name) : NULL;
  if (copy) list->names[list->count++] = copy;
  pthread_mutex_unlock(&names_mutex);
}

void note_unknown_call(const char *name) {
  note(&unknown_calls, name);
  if (settings.log) fprintf(stderr, "[memfit gpu] not modelled: %s\n", name);
}
void note_estimate(const char *what) { note(&estimates, what); }

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
