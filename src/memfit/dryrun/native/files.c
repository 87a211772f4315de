// The write guard for code that opens files past Python: C++ and Rust libraries (tokenizers, torch's writers).
//
// `writes.py` stands under Python's own file functions and hands down paths that are settled. What still
// arrives here with a path of the user's, to be written, comes from a library; it gets the same place in the
// scratch folder, and reads of a path that has such a place go there too. Off until memfit_guard_files.
#undef _FORTIFY_SOURCE  // its inline definitions of the functions below would be in the way
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | O_APPEND)

static char scratch[PATH_MAX];
static char exempt[8 * PATH_MAX];  // folders, each between colons: ":/dev:/proc:"
static __thread int real_files;

// Guards this process and its forks: `folder` takes the writes, `folders` (separated by colons) are exempt.
API void memfit_guard_files(const char *folder, const char *folders) {
  snprintf(exempt, sizeof exempt, ":%s:%s:", folders, folder);
  snprintf(scratch, sizeof scratch, "%s", folder);
}

// Lifts the guard for this thread, or puts it back.
API void memfit_real_files(int on) { real_files = on; }

static bool is_exempt(const char *path) {
  for (const char *at = exempt; *at && at[1]; ) {
    const char *end = strchr(at + 1, ':');
    size_t length = (size_t)(end - at - 1);
    if (length && !strncmp(path, at + 1, length) && (path[length] == '/' || !path[length])) return true;
    at = end;
  }
  return strstr(path, "/__pycache__/") != NULL;  // Python's own, and no more than it would write anyway
}

// The absolute path, with the links of its folder resolved; false where there is no such folder.
static bool canonical(const char *path, char out[PATH_MAX]) {
  char folder[PATH_MAX];
  const char *slash = strrchr(path, '/');
  size_t length = slash ? (size_t)(slash - path) : 0;
  if (length >= sizeof folder) return false;
  snprintf(folder, sizeof folder, "%.*s", slash ? (int)(length ? length : 1) : 1, slash ? path : ".");
  char resolved[PATH_MAX];
  const char *name = slash ? slash + 1 : path;
  if (realpath(folder, resolved))
    return snprintf(out, PATH_MAX, "%s/%s", strcmp(resolved, "/") ? resolved : "", name) < PATH_MAX;
  // A folder that is in the scratch folder only; relative paths are taken from where the process is.
  if (path[0] == '/') return snprintf(out, PATH_MAX, "%s", path) < PATH_MAX;
  if (!getcwd(resolved, sizeof resolved)) return false;
  return snprintf(out, PATH_MAX, "%s/%s", resolved, path[0] == '.' && path[1] == '/' ? path + 2 : path) < PATH_MAX;
}

static bool make_folders(char *path) {
  for (char *slash = path + strlen(scratch) + 1; (slash = strchr(slash, '/')); slash++) {
    *slash = 0;
    int failed = mkdir(path, 0777);
    *slash = '/';
    if (failed && errno != EEXIST) return false;
  }
  return true;
}

static void copy_file(const char *from, const char *to) {
  char block[1 << 16];
  ssize_t count;
  int source = open(from, O_RDONLY | O_CLOEXEC);
  int target = source < 0 ? -1 : open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  while (target >= 0 && (count = read(source, block, sizeof block)) > 0)
    if (write(target, block, (size_t)count) != count) break;
  if (source >= 0) close(source);
  if (target >= 0) close(target);
}

// The path to open instead of `path`; `place` is room for it.
static const char *settle(const char *path, int flags, char place[PATH_MAX]) {
  char full[PATH_MAX], folder[PATH_MAX];
  if (!scratch[0] || real_files || !path || !*path) return path;
  int before = errno;
  if (!canonical(path, full) || is_exempt(full) || strlen(scratch) + strlen(full) >= PATH_MAX) return path;
  strcpy(stpcpy(place, scratch), full);
  bool there = !access(place, F_OK);
  if (!there && (flags & WRITES)) {
    bool old = !access(full, F_OK);
    snprintf(folder, sizeof folder, "%s", full);
    *strrchr(folder, '/') = 0;
    bool wanted = (old || (flags & O_CREAT)) && (access(folder[0] ? folder : "/", F_OK) == 0);
    if (wanted && make_folders(place)) {
      there = true;
      if (old && !(flags & O_TRUNC)) copy_file(full, place);
    } else {
      char above[PATH_MAX];  // a folder that the script made is in the scratch folder only
      snprintf(above, sizeof above, "%s", place);
      *strrchr(above, '/') = 0;
      there = (flags & O_CREAT) && !access(above, F_OK);
    }
  }
  errno = before;
  return there ? place : path;
}

#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static mode_t mode_of(int flags, va_list arguments) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

#define OPEN(name)                                            \
  API int name(const char *path, int flags, ...) {            \
    char place[PATH_MAX];                                     \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    mode_t mode = mode_of(flags, rest);                       \
    va_end(rest);                                             \
    static typeof(&name) real;                                \
    if (!real) real = NEXT(name);                             \
    return real(settle(path, flags, place), flags, mode);     \
  }

#define OPENAT(name)                                                             \
  API int name(int folder, const char *path, int flags, ...) {                   \
    char place[PATH_MAX];                                                        \
    va_list rest;                                                                \
    va_start(rest, flags);                                                       \
    mode_t mode = mode_of(flags, rest);                                          \
    va_end(rest);                                                                \
    static typeof(&name) real;                                                   \
    if (!real) real = NEXT(name);                                                \
    bool here = folder == AT_FDCWD || path[0] == '/';                            \
    return real(folder, here ? settle(path, flags, place) : path, flags, mode);  \
  }

#define FOPEN(name)                                                                                       \
  API FILE *name(const char *path, const char *mode) {                                                    \
    char place[PATH_MAX];                                                                                 \
    static typeof(&name) real;                                                                            \
    if (!real) real = NEXT(name);                                                                         \
    int update = strchr(mode, '+') ? O_RDWR : 0;                                                          \
    int flags = mode[0] == 'w' ? O_WRONLY | O_CREAT | O_TRUNC : mode[0] == 'a' ? O_WRONLY | O_CREAT : update; \
    return real(settle(path, flags, place), mode);                                                        \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

API int creat(const char *path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
API int creat64(const char *path, mode_t mode) { return open64(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
