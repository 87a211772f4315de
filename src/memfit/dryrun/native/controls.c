// What memfit itself asks of the made-up GPU, through ctypes, and the names of calls that it does not model.
#include "stub.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

// The account as JSON, in bytes and counts; "alive" says whether anything has touched the device yet.
API const char *memfit_stats(void) {
  static char text[768];
  bool alive = device_is_alive();
  lock();
  snprintf(text, sizeof text,
           "{\"alive\":%s,\"used_bytes\":%zu,\"peak_bytes\":%zu,\"context_bytes\":%zu,\"total_bytes\":%zu,\"nvml_total_bytes\":%zu,"
           "\"mallocs\":%lu,\"frees\":%lu,\"creates\":%lu,\"releases\":%lu,\"maps\":%lu,\"unmaps\":%lu,\"failed\":%lu,\"launches\":%lu}",
           alive ? "true" : "false", account.used_bytes, account.peak_bytes, settings.context_bytes, settings.total_bytes,
           settings.nvml_total_bytes, account.mallocs, account.frees, account.creates, account.releases, account.maps,
           account.unmaps, account.failed, account.launches);
  unlock();
  return text;
}

// For the NVML library beside this one. Bytes that the process holds, its context included; 0 before the first call.
API size_t memfit_process_bytes(void) {
  if (!device_is_alive()) return 0;
  lock();
  size_t bytes = settings.context_bytes + account.used_bytes;
  unlock();
  return bytes;
}

#define NAMES_MOST 256

static pthread_mutex_t names_mutex = PTHREAD_MUTEX_INITIALIZER;
static const char *names[NAMES_MOST];
static int names_count;

// Notes each name once.
void note_unknown_call(const char *name) {
  pthread_mutex_lock(&names_mutex);
  int i = 0;
  while (i < names_count && strcmp(names[i], name)) i++;
  if (i == names_count && names_count < NAMES_MOST) {
    char *copy = strdup(name);
    if (copy) names[names_count++] = copy;
  }
  pthread_mutex_unlock(&names_mutex);
  if (settings.log) fprintf(stderr, "[memfit gpu] not modelled: %s\n", name);
}

// The trapped calls so far, as a JSON list of names.
API const char *memfit_unknown_calls(void) {
  static char text[NAMES_MOST * 80];
  size_t at = 0;
  pthread_mutex_lock(&names_mutex);
  text[at++] = '[';
  for (int i = 0; i < names_count && at + strlen(names[i]) + 8 < sizeof text; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, "%s\"%s\"", i ? "," : "", names[i]);
  text[at++] = ']';
  text[at] = 0;
  pthread_mutex_unlock(&names_mutex);
  return text;
}
