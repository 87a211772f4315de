// The write guard for what changes and asks about files past Python: C, C++ and Rust libraries, and the programs that
// a script starts (cp, mv, rm, git …).
//
// What is made or moved lands in the scratch folder. What is removed is removed there; a file of the user's stays, and
// the caller is told that it is gone. A file of the user's that is moved is copied.
#undef _FORTIFY_SOURCE
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
#include <utime.h>

#define REAL(name) static typeof(&name) real; if (!real) real = NEXT(name)

// ------------------------------------------------------------------------ where a path leads ----

typedef struct {
  bool guarded;          // else the path is left alone
  char full[PATH_MAX];   // the user's
  char place[PATH_MAX];  // ours
} Path;

static bool is_there(const char *path) {
  struct stat found;
  real_files++;
  bool there = !lstat(path, &found);
  real_files--;
  return there;
}

static bool is_folder(const char *path) {
  struct stat found;
  real_files++;
  bool folder = !lstat(path, &found) && S_ISDIR(found.st_mode);
  real_files--;
  return folder;
}

static Path look_at(const char *path) {
  Path found = {0};
  char own[PATH_MAX];
  size_t length = path ? strlen(path) : 0;
  if (!is_guarded() || !length || length >= sizeof own) return found;
  memcpy(own, path, length + 1);
  while (length > 1 && own[length - 1] == '/') own[--length] = 0;
  int before = errno;
  real_files++;
  found.guarded = canonical(own, found.full) && !is_exempt(found.full) && place_of(found.full, found.place);
  real_files--;
  errno = before;
  return found;
}

// Whether a new name can be made at the path: the folder above it is there, the user's or ours.
static bool make_room(Path *path) {
  char above[PATH_MAX], ours[PATH_MAX];
  strcpy(above, path->full);
  *strrchr(above, '/') = 0;
  if (!place_of(above, ours)) return false;
  if (above[0] && !is_folder(above) && !is_there(ours)) {
    errno = ENOENT;
    return false;
  }
  real_files++;
  bool made = make_folders(path->place);
  real_files--;
  return made;
}

// Tells memfit what was not done, in the file that its environment names.
static void tell(const char *what, const char *path) {
  const char *notes = getenv("MEMFIT_WRITES_NOTES");
  int before = errno;
  real_files++;
  int file = notes ? open(notes, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  if (file >= 0) {
    dprintf(file, "%s %s\n", what, path);
    close(file);
  }
  real_files--;
  errno = before;
}

// ------------------------------------------------------------------------------ removing ----

// 0 or -1, as the caller is told; 1: to be done for real.
static int take_away(const char *given, bool folder) {
  Path path = look_at(given);
  if (!path.guarded) return 1;
  bool ours = is_there(path.place), users = is_there(path.full);
  if (!ours && !users) {
    errno = ENOENT;
    return -1;
  }
  if (users && is_folder(path.full) != folder) {
    errno = folder ? ENOTDIR : EISDIR;
    return -1;
  }
  int result = 0;
  if (ours) {
    real_files++;
    result = folder ? rmdir(path.place) : unlink(path.place);
    real_files--;
  }
  if (users) tell("kept", path.full);
  return users && folder ? 0 : result;
}

API int unlink(const char *path) {
  REAL(unlink);
  int done = take_away(path, false);
  return done > 0 ? real(path) : done;
}
API int rmdir(const char *path) {
  REAL(rmdir);
  int done = take_away(path, true);
  return done > 0 ? real(path) : done;
}
API int unlinkat(int folder, const char *path, int flags) {
  REAL(unlinkat);
  char room[PATH_MAX];
  int done = take_away(joined(folder, path, room), flags & AT_REMOVEDIR);
  return done > 0 ? real(folder, path, flags) : done;
}
API int remove(const char *path) {
  REAL(remove);
  Path found = look_at(path);
  if (!found.guarded) return real(path);
  return take_away(path, is_folder(is_there(found.place) ? found.place : found.full));
}

// -------------------------------------------------------------------------------- moving ----

#define NO_REPLACE 1u

// As take_away.
static int move(const char *old, const char *new, unsigned flags) {
  Path from = look_at(old), to = look_at(new);
  if (!from.guarded && !to.guarded) return 1;
  if ((flags & NO_REPLACE) && to.guarded && (is_there(to.place) || is_there(to.full))) {
    errno = EEXIST;
    return -1;
  }
  bool users = from.guarded && !is_there(from.place);
  if (users && !is_there(from.full)) {
    errno = ENOENT;
    return -1;
  }
  if (users && is_folder(from.full)) {
    errno = EXDEV;  // callers then copy, and remove what they have copied
    return -1;
  }
  if (to.guarded && !make_room(&to)) return -1;
  const char *source = from.guarded ? (users ? from.full : from.place) : old, *target = to.guarded ? to.place : new;
  real_files++;
  int result = 0;
  if (users) copy_file(source, target);
  else result = rename(source, target);
  real_files--;
  if (users) tell("kept", from.full);
  return result;
}

API int rename(const char *old, const char *new) {
  REAL(rename);
  int done = move(old, new, 0);
  return done > 0 ? real(old, new) : done;
}
API int renameat(int above, const char *old, int below, const char *new) {
  REAL(renameat);
  char first[PATH_MAX], second[PATH_MAX];
  int done = move(joined(above, old, first), joined(below, new, second), 0);
  return done > 0 ? real(above, old, below, new) : done;
}
API int renameat2(int above, const char *old, int below, const char *new, unsigned flags) {
  REAL(renameat2);
  char first[PATH_MAX], second[PATH_MAX];
  int done = move(joined(above, old, first), joined(below, new, second), flags);
  return done > 0 ? real(above, old, below, new, flags) : done;
}

// A second name would lead a later write to the user's file, so it is a copy.
static int copy_under(const char *old, const char *new) {
  Path to = look_at(new);
  char room[PATH_MAX];
  if (!to.guarded) return 1;
  if (is_there(to.place) || is_there(to.full)) {
    errno = EEXIST;
    return -1;
  }
  const char *from = settle(old, O_RDONLY, room);
  if (!is_there(from)) errno = ENOENT;
  if (!is_there(from) || !make_room(&to)) return -1;
  real_files++;
  copy_file(from, to.place);
  real_files--;
  return 0;
}
API int link(const char *old, const char *new) {
  REAL(link);
  int done = copy_under(old, new);
  return done > 0 ? real(old, new) : done;
}
API int linkat(int above, const char *old, int below, const char *new, int flags) {
  REAL(linkat);
  char first[PATH_MAX], second[PATH_MAX];
  int done = copy_under(joined(above, old, first), joined(below, new, second));
  return done > 0 ? real(above, old, below, new, flags) : done;
}

// -------------------------------------------------------------------------------- making ----

// The place to make something new at, or NULL with errno set; the path itself where it is not guarded.
static const char *new_name(const char *given, Path *path) {
  *path = look_at(given);
  if (!path->guarded) return given;
  if (is_there(path->place) || is_there(path->full)) {
    errno = EEXIST;
    return NULL;
  }
  return make_room(path) ? path->place : NULL;
}

API int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  Path room;
  const char *name = new_name(path, &room);
  return name ? real(name, mode) : -1;
}
API int mkdirat(int folder, const char *path, mode_t mode) {
  REAL(mkdirat);
  Path room;
  char full[PATH_MAX];
  const char *name = new_name(joined(folder, path, full), &room);
  return !name ? -1 : room.guarded ? real(AT_FDCWD, name, mode) : real(folder, path, mode);
}
API int symlink(const char *text, const char *path) {
  REAL(symlink);
  Path room;
  const char *name = new_name(path, &room);
  return name ? real(text, name) : -1;
}
API int symlinkat(const char *text, int folder, const char *path) {
  REAL(symlinkat);
  Path room;
  char full[PATH_MAX];
  const char *name = new_name(joined(folder, path, full), &room);
  return !name ? -1 : room.guarded ? real(text, AT_FDCWD, name) : real(text, folder, path);
}

// A template of a temporary name: its last letters are given back in the caller's own.
#define TEMPLATE(result, name, arguments, call, failed)         \
  API result name arguments {                                   \
    REAL(name);                                                 \
    Path room = look_at(template);                              \
    if (!room.guarded) {                                        \
      char *chosen = template;                                  \
      return call;                                              \
    }                                                           \
    if (!make_room(&room)) return failed;                       \
    char *chosen = room.place;                                  \
    result made = call;                                         \
    size_t length = strlen(template), ours = strlen(chosen);    \
    memcpy(template + length - 6, chosen + ours - 6, 6);        \
    return made;                                                \
  }
TEMPLATE(int, mkstemp, (char *template), real(chosen), -1)
TEMPLATE(int, mkostemp, (char *template, int flags), real(chosen, flags), -1)
API char *mkdtemp(char *template) {
  REAL(mkdtemp);
  Path room = look_at(template);
  if (!room.guarded) return real(template);
  if (!make_room(&room) || !real(room.place)) return NULL;
  memcpy(template + strlen(template) - 6, room.place + strlen(room.place) - 6, 6);
  return template;
}

// ----------------------------------------------------------------------------- adjusting ----

// The place of a file that is ours; NULL where it is the user's, whose times and rights stay as they are.
static const char *adjustable(const char *given, char room[PATH_MAX]) {
  Path path = look_at(given);
  if (!path.guarded) return given;
  if (is_there(path.place)) return strcpy(room, path.place);
  return is_there(path.full) ? NULL : given;
}

#define ADJUST(name, arguments, call)                                 \
  API int name arguments {                                            \
    REAL(name);                                                       \
    char room[PATH_MAX];                                              \
    const char *chosen = adjustable(path, room);                      \
    return chosen ? call : 0;                                         \
  }
ADJUST(chmod, (const char *path, mode_t mode), real(chosen, mode))
ADJUST(chown, (const char *path, uid_t user, gid_t group), real(chosen, user, group))
ADJUST(lchown, (const char *path, uid_t user, gid_t group), real(chosen, user, group))
ADJUST(utime, (const char *path, const struct utimbuf *times), real(chosen, times))
ADJUST(utimes, (const char *path, const struct timeval times[2]), real(chosen, times))

#define ADJUST_AT(name, arguments, elsewhere, here)                   \
  API int name arguments {                                            \
    REAL(name);                                                       \
    char full[PATH_MAX], room[PATH_MAX];                              \
    const char *given = joined(folder, path, full);                   \
    const char *chosen = given ? adjustable(given, room) : given;     \
    if (given && !chosen) return 0;                                   \
    return chosen == given ? here : elsewhere;                        \
  }
ADJUST_AT(fchmodat, (int folder, const char *path, mode_t mode, int flags), real(AT_FDCWD, chosen, mode, flags),
          real(folder, path, mode, flags))
ADJUST_AT(fchownat, (int folder, const char *path, uid_t user, gid_t group, int flags),
          real(AT_FDCWD, chosen, user, group, flags), real(folder, path, user, group, flags))
ADJUST_AT(utimensat, (int folder, const char *path, const struct timespec times[2], int flags),
          real(AT_FDCWD, chosen, times, flags), real(folder, path, times, flags))

API int truncate(const char *path, off_t length) {
  REAL(truncate);
  char room[PATH_MAX];
  return real(settle(path, O_RDWR, room), length);
}

// -------------------------------------------------------------------------------- asking ----

#define ASK(result, name, arguments, call)              \
  API result name arguments {                           \
    REAL(name);                                         \
    char room[PATH_MAX];                                \
    const char *chosen = settle(path, O_RDONLY, room);  \
    return call;                                        \
  }
ASK(int, stat, (const char *path, struct stat *out), real(chosen, out))
ASK(int, lstat, (const char *path, struct stat *out), real(chosen, out))
ASK(int, stat64, (const char *path, struct stat64 *out), real(chosen, out))
ASK(int, lstat64, (const char *path, struct stat64 *out), real(chosen, out))
ASK(int, access, (const char *path, int mode), real(chosen, mode))
ASK(int, chdir, (const char *path), real(chosen))
ASK(DIR *, opendir, (const char *path), real(chosen))
ASK(ssize_t, readlink, (const char *path, char *out, size_t size), real(chosen, out, size))

#define ASK_AT(result, name, arguments, elsewhere, here)            \
  API result name arguments {                                       \
    REAL(name);                                                     \
    char full[PATH_MAX], room[PATH_MAX];                            \
    const char *given = joined(folder, path, full);                 \
    const char *chosen = settle(given, O_RDONLY, room);             \
    return chosen == given ? here : elsewhere;                      \
  }
ASK_AT(int, fstatat, (int folder, const char *path, struct stat *out, int flags), real(AT_FDCWD, chosen, out, flags),
       real(folder, path, out, flags))
ASK_AT(int, fstatat64, (int folder, const char *path, struct stat64 *out, int flags),
       real(AT_FDCWD, chosen, out, flags), real(folder, path, out, flags))
ASK_AT(int, statx, (int folder, const char *path, int flags, unsigned mask, struct statx *out),
       real(AT_FDCWD, chosen, flags, mask, out), real(folder, path, flags, mask, out))
ASK_AT(int, faccessat, (int folder, const char *path, int mode, int flags), real(AT_FDCWD, chosen, mode, flags),
       real(folder, path, mode, flags))
ASK_AT(ssize_t, readlinkat, (int folder, const char *path, char *out, size_t size), real(AT_FDCWD, chosen, out, size),
       real(folder, path, out, size))

// As above, of programs that are compiled with _FORTIFY_SOURCE.
API ssize_t __readlink_chk(const char *path, char *out, size_t size, size_t room) {
  return size > room ? (abort(), -1) : readlink(path, out, size);
}
API ssize_t __readlinkat_chk(int folder, const char *path, char *out, size_t size, size_t room) {
  return size > room ? (abort(), -1) : readlinkat(folder, path, out, size);
}
