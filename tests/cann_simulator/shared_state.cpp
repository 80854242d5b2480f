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
#include <ctime>

#include "ordering.h"
#include "teardown.h"

namespace cann_simulator {
namespace {

constexpr uint64_t kReady = 6;  // the version of State's layout

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
    fresh->wait_limit_ms = 15000;
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

// Now, on the clock of processes' start times.
uint64_t ticks_since_boot() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  auto in_second = static_cast<uint64_t>(sysconf(_SC_CLK_TCK));
  return static_cast<uint64_t>(now.tv_sec) * in_second + static_cast<uint64_t>(now.tv_nsec) * in_second / 1000000000;
}

uint32_t *bucket_of(const NameList &list, int32_t process) {
  uint64_t mixed = (list.id * 0x9e3779b97f4a7c15u) ^ (static_cast<uint64_t>(process) * 0xc2b2ae3d27d4eb4fu);
  return &state()->name_buckets[(mixed >> 40) % kNameBuckets];
}

// The link to a name: 0 where there is none.
uint32_t *link_to(const NameList &list, int32_t process) {
  uint32_t *link = bucket_of(list, process);
  for (; *link; link = &state()->names[*link - 1].next) {
    const Name &name = state()->names[*link - 1];
    if (name.list == list.id && name.process == process) break;
  }
  return link;
}

// Lists of what a process had imported name it no longer.
void drop_dead_holder(Allocation &allocation, int32_t process) {
  for (auto &key : state()->keys)
    if (key.text[0] && key.allocation == allocation.id) remove_name(key.named, process);
  if (allocation.named.id) remove_name(allocation.named, process);
  drop_holder(allocation, process);
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

static std::atomic<bool> undertaker_has_lock{false};

StateLock::StateLock() {
  if (pthread_mutex_lock(&state()->mutex) == EOWNERDEAD) pthread_mutex_consistent(&state()->mutex);
  undertaker_has_lock = ended_process() != 0;
}

StateLock::~StateLock() {
  undertaker_has_lock = false;
  pthread_mutex_unlock(&state()->mutex);
}

void StateLock::abandon() {
  if (undertaker_has_lock) pthread_mutex_unlock(&state()->mutex);
}

// The 22nd field of /proc/PID/stat.
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

Holder this_process(int descriptor) {
  static const uint64_t started = start_time(getpid());
  return Holder{getpid(), descriptor, started};
}

int32_t acting_process() {
  int32_t ended = ended_process();
  return ended ? ended : getpid();
}

bool alive(const Holder &holder) {
  if (holder.process == getpid()) return true;
  if (holder.process == 0 || kill(holder.process, 0) != 0) return false;
  return start_time(holder.process) == holder.started;
}

int32_t process_of_descriptors(const Holder &holder) {
  if (alive(holder)) return holder.process;
  for (const auto &slot : control().teardowns) {
    if (slot.process != static_cast<uint64_t>(holder.process) || slot.started != holder.started) continue;
    Holder undertaker{static_cast<int32_t>(slot.undertaker), -1, slot.undertaker_started};
    return alive(undertaker) ? undertaker.process : 0;
  }
  return 0;
}

bool is_present(const Holder &holder) { return holder.process && process_of_descriptors(holder); }

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

bool add_name(NameList &list, int32_t process) {
  State &all = *state();
  uint32_t *link = link_to(list, process);
  if (!*link) {
    if (list.count == kMaxNamed) return false;
    if (!all.free_names && all.names_used == kMaxNames) return false;
    if (uint32_t reused = all.free_names) {
      all.free_names = all.names[reused - 1].next;
      *link = reused;
    } else {
      *link = ++all.names_used;
    }
    all.names[*link - 1] = Name{list.id, 0, process, 0};
    list.count++;
  }
  all.names[*link - 1].since = ticks_since_boot();
  return true;
}

const Name *find_name(const NameList &list, int32_t process) {
  uint32_t found = *link_to(list, process);
  return found ? &state()->names[found - 1] : nullptr;
}

void remove_name(NameList &list, int32_t process) {
  State &all = *state();
  uint32_t *link = link_to(list, process);
  uint32_t removed = *link;
  if (!removed) return;
  *link = all.names[removed - 1].next;
  all.names[removed - 1] = Name{0, 0, 0, all.free_names};
  all.free_names = removed;
  list.count--;
}

void forget_names(NameList &list) {
  for (uint32_t i = 0; i < state()->names_used && list.count; i++)
    if (state()->names[i].list == list.id) remove_name(list, state()->names[i].process);
}

void drop_holder(Allocation &allocation, int32_t process) {
  for (uint32_t i = 0; i < allocation.holder_count; i++)
    if (allocation.holders[i].process == process) {
      allocation.holders[i] = allocation.holders[--allocation.holder_count];
      break;
    }
  if (allocation.holder_count == 0) {
    forget_accesses(allocation.id, allocation.size);
    forget_names(allocation.named);
    memset(static_cast<void *>(&allocation), 0, sizeof allocation);
  }
}

void forget_key(MemoryKey &key) {
  forget_names(key.named);
  memset(static_cast<void *>(&key), 0, sizeof key);
}

void sweep_dead_processes() {
  State &all = *state();
  for (auto &key : all.keys)
    if (key.text[0] && !is_present(key.exporter)) forget_key(key);
  for (uint32_t slot = 0; slot < all.allocations_used; slot++)
    for (uint32_t i = 0; i < all.allocations[slot].holder_count;)
      if (!is_present(all.allocations[slot].holders[i]))
        drop_dead_holder(all.allocations[slot], all.allocations[slot].holders[i].process);
      else
        i++;
  for (uint32_t i = 1; i < all.agents_used; i++) {
    Agent &agent = all.agents[i];
    if (agent.process == 0 || is_present(Holder{agent.process, -1, agent.started})) continue;
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
