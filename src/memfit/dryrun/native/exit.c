// How a process ends: with its result kept, and cleanly.
//
// exit() and its relatives, called past Python by a library or through ctypes, end the process there and then. The part
// in Python that has the result asks to be told before. A fork is another process, and has nothing to tell.
//
// And a clean end for processes that end right after backward():
//
// PyTorch's autograd thread for the device lets go of Python objects after backward() has returned, and needs the
// interpreter's lock for it. If the script ends within those milliseconds, CPython (before 3.14) answers a thread that
// asks for the lock of a finalizing interpreter with pthread_exit(), which unwinds the stack through C++ destructors
// that may not throw: std::terminate(), "terminate called without an active exception". A real GPU is slow enough to
// hide it; here kernels take no time. So such a thread is left waiting instead, as CPython 3.14 does; the process's end
// takes it along.
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef int (*Question)(void);
typedef void (*End)(void *);
typedef void (*Exit)(int);

static Exit farewell;
static pid_t farewell_of;

// From now on tell(code) is called once before this process ends by one of the calls below.
API void memfit_before_exit(Exit tell) {
  farewell = tell;
  farewell_of = getpid();
}

static __attribute__((noreturn)) void leave(const char *by, int code) {
  Exit tell = farewell;
  if (tell && getpid() == farewell_of) {
    farewell = NULL;
    tell(code);
  }
  ((Exit)dlsym(RTLD_NEXT, by))(code);
  abort();
}

API __attribute__((noreturn)) void exit(int code) { leave("exit", code); }
API __attribute__((noreturn)) void quick_exit(int code) { leave("quick_exit", code); }
API __attribute__((noreturn)) void _exit(int code) { leave("_exit", code); }
API __attribute__((noreturn)) void _Exit(int code) { leave("_Exit", code); }

static int interpreter_is_finalizing(void) {
  Question ask = (Question)dlsym(RTLD_DEFAULT, "Py_IsFinalizing");  // public since 3.13
  if (!ask) ask = (Question)dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
  return ask && ask();
}

API __attribute__((noreturn)) void pthread_exit(void *value) {
  while (interpreter_is_finalizing()) pause();
  End end = (End)dlsym(RTLD_NEXT, "pthread_exit");
  if (end) end(value);
  abort();
}

// PyTorch's engine would wait ten seconds for a thread that is left waiting; it reads this when it ends.
__attribute__((constructor)) static void do_not_wait_for_autograd_threads(void) {
  setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0", 0);
}
