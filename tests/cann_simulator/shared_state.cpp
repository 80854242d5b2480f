// See shared_state.h.
#include "shared_state.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ordering.h"

namespace cann_simulator {
namespace {

constexpr uint64_t kReady = 3;  // the version of State's layout

template <typename T>
T *map_file(const std::string &path, void (*initialise)(T *)) {
  int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0) return nullptr;
  flock(descriptor, LOCK_EX);
  struct stat found {};
  fstat(descriptor, &found);
  bool fresh = static_cast<size_t>(found.st_size) < sizeof(T);
  void *mapped = MAP_FAILED;
  if (!fresh || ftruncate(descriptor, sizeof(T)) == 0)
    mapped = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped != MAP_FAILED) initialise(static_cast<T *>(mapped));
  flock(descriptor, LOCK_UN);
  close(descriptor);
  return mapped == MAP_FAILED ? nullptr : static_cast<T *>(mapped);
}

void initialise_state(State *fresh) {
  if (fresh->ready == kReady) return;
  pthread_mutexattr_t shared;
  pthread_mutexattr_init(&shared);
  pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&fresh->mutex, &shared);
  fresh->next_allocation = 1;
  fresh->next_generation = 1;
  fresh->agents_used = 1;
  fresh->host_version = 1;
  fresh->ready = kReady;
}

void initialise_control(Control *fresh) {
  if (fresh->magic != kControlMagic) {
    fresh->devices = 2;
    for (auto &bytes : fresh->memory_bytes) bytes = uint64_t{4} << 30;
    fresh->wait_limit_ms = 30000;
    fresh->magic = kControlMagic;
  }
  fresh->allocations_offset = offsetof(State, allocations);
  fresh->allocation_bytes = sizeof(Allocation);
  fresh->allocations = kMaxAllocations;
}

struct Files {
  State *state = nullptr;
  Control *control = nullptr;
};

Files open_files() {
  Files files;
  if (folder().empty()) {
    fprintf(stderr, "CANN simulator: set CANN_SIMULATOR_DIR to a fresh folder\n");
    return files;
  }
  mkdir(folder().c_str(), 0700);
  files.control = map_file<Control>(folder() + "/control", initialise_control);
  files.state = map_file<State>(folder() + "/state", initialise_state);
  if (!files.control || !files.state) {
    fprintf(stderr, "CANN simulator: cannot use %s: %s\n", folder().c_str(), strerror(errno));
    return Files{};
  }
  return files;
}

const Files &files() {
  static const Files opened = open_files();
  return opened;
}

// The 22nd field of /proc/PID/stat; 0 for a process that is gone or only waits to be reaped.
uint64_t start_time(int32_t process) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  const char *after_name = strrchr(text, ')');
  if (!after_name || after_name[2] == 'Z' || after_name[2] == 'X') return 0;
  unsigned long long started = 0;
  sscanf(after_name + 2,
         "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &started);
  return started;
}

}  // namespace

std::string folder() {
  const char *set = getenv("CANN_SIMULATOR_DIR");
  return set ? set : "";
}

State *state() { return files().state; }

Control &control() {
  static Control *nothing = new Control{};  // before state() was found to be null
  return files().control ? *files().control : *nothing;
}

StateLock::StateLock() {
  if (pthread_mutex_lock(&state()->mutex) == EOWNERDEAD) pthread_mutex_consistent(&state()->mutex);
}

StateLock::~StateLock() { pthread_mutex_unlock(&state()->mutex); }

Holder this_process(int descriptor) {
  static const uint64_t started = start_time(getpid());
  return Holder{getpid(), descriptor, started};
}

bool alive(const Holder &holder) {
  if (holder.process == getpid()) return true;
  if (holder.process == 0 || kill(holder.process, 0) != 0) return false;
  return start_time(holder.process) == holder.started;
}

ProcessTasks &own_tasks() {
  static ProcessTasks &own = []() -> ProcessTasks & {
    StateLock hold;
    for (auto &slot : control().tasks) {
      auto process = static_cast<pid_t>(slot.process.load());
      if (process && start_time(process)) continue;
      slot.submitted = slot.completed = 0;
      slot.process = getpid();
      return slot;
    }
    static ProcessTasks uncounted;
    return uncounted;
  }();
  return own;
}

void drop_holder(Allocation &allocation, int32_t process) {
  for (uint32_t i = 0; i < allocation.holder_count; i++)
    if (allocation.holders[i].process == process) {
      allocation.holders[i] = allocation.holders[--allocation.holder_count];
      break;
    }
  if (allocation.holder_count == 0) {
    forget_accesses(allocation.id, allocation.size);
    memset(static_cast<void *>(&allocation), 0, sizeof allocation);
  }
}

void sweep_dead_processes() {
  State &all = *state();
  for (uint32_t slot = 0; slot < all.allocations_used; slot++)
    for (uint32_t i = 0; i < all.allocations[slot].holder_count;)
      if (!alive(all.allocations[slot].holders[i]))
        drop_holder(all.allocations[slot], all.allocations[slot].holders[i].process);
      else
        i++;
  for (auto &key : all.keys)
    if (key.text[0] && !alive(key.exporter)) memset(static_cast<void *>(&key), 0, sizeof key);
  for (uint32_t i = 1; i < all.agents_used; i++) {
    Agent &agent = all.agents[i];
    if (agent.process == 0 || alive(Holder{agent.process, -1, agent.started})) continue;
    agent.process = 0;
    all.host_clock[i] = agent.count;  // nothing of a dead process still runs
    all.host_version++;
  }
}

uint64_t used_bytes(uint32_t device) {
  uint64_t sum = 0;
  for (uint32_t slot = 0; slot < state()->allocations_used; slot++) {
    const Allocation &allocation = state()->allocations[slot];
    if (allocation.id && allocation.device == device) sum += allocation.size;
  }
  return sum;
}

Allocation *find_allocation(uint64_t id) {
  for (uint32_t slot = 0; slot < state()->allocations_used; slot++)
    if (id && state()->allocations[slot].id == id) return &state()->allocations[slot];
  return nullptr;
}

Allocation *new_allocation(uint64_t size, uint32_t device, int descriptor) {
  State &all = *state();
  for (uint32_t slot = 0; slot < kMaxAllocations; slot++) {
    Allocation &allocation = all.allocations[slot];
    if (allocation.id) continue;
    allocation.id = all.next_allocation++;
    allocation.size = size;
    allocation.device = device;
    allocation.holders[0] = this_process(descriptor);
    allocation.holder_count = 1;
    if (slot >= all.allocations_used) all.allocations_used = slot + 1;
    return &allocation;
  }
  return nullptr;
}

}  // namespace cann_simulator
