// See teardown.h. Each process that sets a device gets an undertaker: a process of its own that shares its address
// space (CLONE_VM), so that all that the process had queued, and the bytes that it was to copy, are still there when
// the process has been killed. It has no descriptors but those of device memory: sockets and pipes close at once.
//
// It runs on a stack of its own and with the thread-local memory of a thread that sleeps for ever. Locks that threads
// held when they were killed stay locked, so it has a limit of time.
#include "teardown.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <thread>

#include "shared_state.h"
#include "streams.h"

namespace cann_simulator {
namespace {

constexpr size_t kStack = size_t{1} << 20;
constexpr uint64_t kFinishingMs = 2000;
constexpr int kNothing = -1;
constexpr useconds_t kOpeningUs = 2000000;

std::atomic<int32_t> process{0};  // that has an undertaker
std::atomic<int> wanted{kNothing};  // a descriptor that it is to open
std::atomic<int> undertaker{0};
std::atomic<bool> ended{false};
Teardown *entry = nullptr;  // of this process

void open_wanted(int &process_descriptor) {
  int descriptor = wanted;
  if (descriptor == process_descriptor) process_descriptor = dup(process_descriptor);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process.load(), descriptor);
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened >= 0 && opened != descriptor) {
    dup3(opened, descriptor, O_CLOEXEC);
    close(opened);
  }
  wanted = kNothing;
}

// From here on the process is taken apart, at one moment for all.
[[noreturn]] void leave() {
  if (entry) entry->process = 0;
  _exit(0);
}

void limit_time(uint64_t ms) {
  signal(SIGALRM, [](int) {
    StateLock::abandon();
    leave();
  });
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  sigprocmask(SIG_UNBLOCK, &alarms, nullptr);
  itimerval limit{};
  limit.it_value.tv_sec = static_cast<time_t>(ms / 1000);
  limit.it_value.tv_usec = static_cast<suseconds_t>(ms % 1000 * 1000);
  setitimer(ITIMER_REAL, &limit, nullptr);
}

int undertake(void *) {
  syscall(SYS_close_range, 0U, ~0U, 0U);
  prctl(PR_SET_NAME, "cann-undertaker");
  auto process_descriptor = static_cast<int>(syscall(SYS_pidfd_open, process.load(), 0));
  if (process_descriptor < 0) _exit(1);
  for (;;) {
    if (wanted != kNothing) open_wanted(process_descriptor);
    pollfd end{process_descriptor, POLLIN, 0};
    if (poll(&end, 1, 1) > 0) break;
  }
  uint64_t late_ms = control().teardown_ms;
  if (!late_ms) leave();
  limit_time(late_ms + kFinishingMs);
  usleep(static_cast<useconds_t>(late_ms * 1000));
  ended = true;
  finish_queued_copies();
  leave();
}

void enter_undertaker() {
  StateLock hold;
  Holder own = this_process();
  for (auto &slot : control().teardowns) {
    Holder other{static_cast<int32_t>(slot.undertaker), kNothing, slot.undertaker_started};
    if (slot.process && alive(other)) continue;
    slot.process = 0;
    slot.started = own.started;
    slot.undertaker = static_cast<uint64_t>(undertaker.load());
    slot.undertaker_started = start_time(undertaker);
    slot.process = static_cast<uint64_t>(own.process);
    entry = &slot;
    return;
  }
}

// Its thread-local memory is the undertaker's: it does nothing with it any more.
void lend_thread() {
  static int cleared_at_the_end;  // and not the thread's number: locks compare it with their owner's
  syscall(SYS_set_tid_address, &cleared_at_the_end);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  void *stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  undertaker = stack == MAP_FAILED ? -1 : clone(undertake, static_cast<char *>(stack) + kStack, CLONE_VM, nullptr);
  for (;;) pause();
}

}  // namespace

void start_undertaker() {
  if (!control().teardown_ms) return;
  static std::once_flag once;
  std::call_once(once, [] {
    process = getpid();
    std::thread(lend_thread).detach();
    while (!undertaker) usleep(100);
    if (undertaker < 0) {
      fprintf(stderr, "CANN simulator: no undertaker: this process is taken apart at once\n");
      process = 0;
    } else {
      enter_undertaker();
    }
  });
}

void keep_descriptor(int descriptor) {
  static std::mutex one_at_a_time;
  if (process != getpid()) return;
  std::lock_guard<std::mutex> hold(one_at_a_time);
  wanted = descriptor;
  for (useconds_t waited = 0; wanted != kNothing && waited < kOpeningUs; waited += 50) usleep(50);
}

int32_t ended_process() { return ended ? process.load() : 0; }

}  // namespace cann_simulator
