/* Preloaded into a process: tells it a time of day that is as many seconds from the true one as the
 * eight bytes of the file FORGE_TEST_CLOCK say, from the moment when they change. Time that only
 * grows is left as it is, and so is what waits in the kernel. tests/nightly/runs/test_clock.py
 * compiles it. libfaketime 0.9.10 would do more, and a calm run fails under it (EINVAL). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *moved;

__attribute__((constructor)) static void find_clock(void) {
  const char *path = getenv("FORGE_TEST_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *at = mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (at != MAP_FAILED) moved = at;
}

int clock_gettime(clockid_t id, struct timespec *at) {
  int failed = (int)syscall(SYS_clock_gettime, id, at);
  if (!failed && moved && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI))
    at->tv_sec += *moved;
  return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
