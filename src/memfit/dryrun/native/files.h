// What the write guard's two halves share: files.c (opening) and changes.c (removing, moving, making, asking).
#pragma once

#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>

#define API __attribute__((visibility("default")))
#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define HIDDEN __attribute__((visibility("hidden")))

extern HIDDEN __thread int real_files;  // more than 0: this thread's file operations are real

HIDDEN bool is_guarded(void);
HIDDEN bool is_exempt(const char *path);

// The absolute path, with the links of its folder resolved; false where there is no such folder.
HIDDEN bool canonical(const char *path, char out[PATH_MAX]);

// Where `full` lies in the scratch folder; false where the name is too long.
HIDDEN bool place_of(const char *full, char place[PATH_MAX]);

// Makes the folders above `place`.
HIDDEN bool make_folders(char *place);

HIDDEN void copy_file(const char *from, const char *to);

// `path` as seen from the folder that is open as `folder`; `out` is room for it.
HIDDEN const char *joined(int folder, const char *path, char out[PATH_MAX]);

// The path to open instead of `path`; `place` is room for it.
HIDDEN const char *settle(const char *path, int flags, char place[PATH_MAX]);
