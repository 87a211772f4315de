// The write guard for code that opens files past Python: C++ and Rust libraries (tokenizers, torch's writers).
//
// `writes.py` stands under Python's own file functions and hands down paths that are settled. What still
// arrives here with a path of the user's, to be written, comes from a library; it gets the same place in the
// scratch folder, and reads of a path that has such a place go there too. Off until memfit_guard_files.
//
// Programs that the script starts inherit the guard by their environment.
#undef _FORTIFY_SOURCE  // its inline definitions of the functions below would be in the way
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | O_APPEND)

static char scratch[PATH_MAX];
static char exempt[8 * PATH_MAX];  // folders, each between colons: ":/dev:/proc:"
__thread int real_files;

// Guards this process and its forks: `folder` takes the writes, `folders` (separated by colons) are exempt.
API void memfit_guard_files(const char *folder, const char *folders) {
  snprintf(exempt, sizeof exempt, ":%s:%s:", folders, folder);
  snprintf(scratch, sizeof scratch, "%s", folder);
}

__attribute__((constructor)) static void guard_as_inherited(void) {
  const char *folder = getenv("MEMFIT_WRITES_SCRATCH"), *folders = getenv("MEMFIT_WRITES_EXEMPT");
  if (folder && *folder) memfit_guard_files(folder, folders ? folders : "");
}

bool is_guarded(void) { return scratch[0] && !real_files; }

// Lifts the guard for this thread, or puts it back.
API void memfit_real_files(int on) { real_files = on; }

bool is_exempt(const char *path) {
  for (const char *at = exempt; *at && at[1]; ) {
    const char *end = strchr(at + 1, ':');
    size_t length = (size_t)(end - at - 1);
    if (length && !strncmp(path, at + 1, length) && (path[length] == '/' || !path[length])) return true;
    at = end;
  }
  return strstr(path, "/__pycache__/") != NULL;  // Python's own, and no more than it would write anyway
}

bool canonical(const char *path, char out[PATH_MAX]) {
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

bool place_of(const char *full, char place[PATH_MAX]) {
  if (strlen(scratch) + strlen(full) >= PATH_MAX) return false;
  strcpy(stpcpy(place, scratch), full);
  return true;
}

bool make_folders(char *path) {
  for (char *slash = path + strlen(scratch) + 1; (slash = strchr(slash, '/')); slash++) {
    *slash = 0;
    int failed = mkdir(path, 0777);
    *slash = '/';
    if (failed && errno != EEXIST) return false;
  }
  return true;
}

void copy_file(const char *from, const char *to) {
  char block[1 << 16];
  ssize_t count;
  int source = open(from, O_RDONLY | O_CLOEXEC);
  int target = source < 0 ? -1 : open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  while (target >= 0 && (count = read(source, block, sizeof block)) > 0)
    if (write(target, block, (size_t)count) != count) break;
  if (source >= 0) close(source);
  if (target >= 0) close(target);
}

static bool is_folder(const char *path) {
  struct stat found;
  return !stat(path, &found) && S_ISDIR(found.st_mode);
}

static const char *settled(const char *path, int flags, char place[PATH_MAX]) {
  char full[PATH_MAX], folder[PATH_MAX];
  int before = errno;
  if (!canonical(path, full) || is_exempt(full) || !place_of(full, place)) return path;
  bool there = !access(place, F_OK);
  // A folder of the user's that also holds redirected files is still the user's folder.
  if (there && !(flags & WRITES) && is_folder(place) && is_folder(full)) there = false;
  if (!there && (flags & WRITES)) {
    bool old = !access(full, F_OK);
    if (old && (flags & O_CREAT) && (flags & O_EXCL)) return path;  // fails, as it should
    snprintf(folder, sizeof folder, "%s", full);
    *strrchr(folder, '/') = 0;
    bool wanted = (old || (flags & O_CREAT)) && (access(folder[0] ? folder : "/", F_OK) == 0);
    if (wanted && make_folders(place)) {
      there = true;
      if (old) copy_file(flags & O_TRUNC ? "/dev/null" : full, place);
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

const char *settle(const char *path, int flags, char place[PATH_MAX]) {
  if (!is_guarded() || !path || !*path) return path;
  real_files++;
  const char *found = settled(path, flags, place);
  real_files--;
  return found;
}

const char *joined(int folder, const char *path, char out[PATH_MAX]) {
  if (!is_guarded() || folder == AT_FDCWD || !path || !*path || path[0] == '/') return path;
  char link[64], above[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  real_files++;
  ssize_t length = readlink(link, above, sizeof above - 1);
  real_files--;
  if (length < 0) return path;
  above[length] = 0;
  return snprintf(out, PATH_MAX, "%s/%s", above, path) < PATH_MAX ? out : path;
}

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
    char full[PATH_MAX];                                                         \
    const char *given = joined(folder, path, full);                              \
    const char *chosen = settle(given, flags, place);                            \
    if (chosen == given) return real(folder, path, flags, mode);                 \
    return real(AT_FDCWD, chosen, flags, mode);                                  \
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

// What programs that are compiled with _FORTIFY_SOURCE call where no mode is given.
API int __open_2(const char *path, int flags) { return open(path, flags); }
API int __open64_2(const char *path, int flags) { return open64(path, flags); }
API int __openat_2(int folder, const char *path, int flags) { return openat(folder, path, flags); }
API int __openat64_2(int folder, const char *path, int flags) { return openat64(folder, path, flags); }
