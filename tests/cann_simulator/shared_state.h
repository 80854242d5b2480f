// What the processes of one simulated host share: the control file that tests write, and the state of the cards.
//
// Both are files in the folder $CANN_SIMULATOR_DIR, mapped by every process. Knows nothing of streams or of ACL.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace cann_simulator {

constexpr uint32_t kMaxDevices = 16;
constexpr uint32_t kMaxRules = 16;
constexpr uint32_t kMaxProcesses = 64;
constexpr uint32_t kMaxAgents = 256;  // streams of all processes that have run at least one task; 0 is "the host"
constexpr uint32_t kMaxHolders = 64;  // processes that hold one allocation
constexpr uint32_t kMaxAllocations = 4096;
constexpr uint32_t kMaxKeys = 1024;
constexpr uint32_t kMaxSharedEvents = 1024;
constexpr uint32_t kMaxWords = 512;  // of device memory that streams have written; the oldest are forgotten
constexpr uint32_t kMaxAccesses = 1 << 17;
constexpr uint32_t kAccessBuckets = 1 << 16;
constexpr uint32_t kMaxNamed = 65535;   // processes in the list of one handle or key
constexpr uint32_t kMaxNames = 1 << 17;  // in all lists together
constexpr uint32_t kNameBuckets = 1 << 14;

// One stream (or all streams of a process, or all) slowed down or held; see simulator.py, which writes it.
struct StreamRule {
  std::atomic<uint64_t> process;  // 0: every process
  std::atomic<uint64_t> stream;   // the value of torch.npu.Stream().npu_stream; 0: every stream
  std::atomic<uint64_t> delay_us;
  std::atomic<uint64_t> held;  // tasks stay queued while it is 1
};

// How many tasks a process has submitted and completed.
struct ProcessTasks {
  std::atomic<uint64_t> process;  // 0: free
  std::atomic<uint64_t> submitted;
  std::atomic<uint64_t> completed;
};

// The process that stands for one that has ended, until that is taken apart; see teardown.h.
struct Teardown {
  std::atomic<uint64_t> process;  // 0: free
  std::atomic<uint64_t> started;
  std::atomic<uint64_t> undertaker;
  std::atomic<uint64_t> undertaker_started;
};

// The file "control". tests/cann_simulator/simulator.py has the same layout: 8 bytes a field, in this order.
struct Control {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> devices;
  std::atomic<uint64_t> memory_bytes[kMaxDevices];
  std::atomic<uint64_t> lost_code[kMaxDevices];  // 0: the card is there; else what every call on it returns
  std::atomic<uint64_t> failing_allocations;     // so many of the next allocations find no memory
  std::atomic<uint64_t> failing_copies;          // so many of the next asynchronous copies fail
  std::atomic<uint64_t> failing_kernels;
  std::atomic<uint64_t> copy_us[3];  // added to each copy: host to device, device to host, device to device
  std::atomic<uint64_t> kernel_us;
  std::atomic<uint64_t> megabytes_per_s[3];  // 0: as fast as this machine copies
  std::atomic<uint64_t> wait_limit_ms;       // a task that waits longer for an event or a word fails
  std::atomic<uint64_t> allocations_offset;  // where simulator.py finds the allocations in the file "state"
  std::atomic<uint64_t> allocation_bytes;
  std::atomic<uint64_t> allocations;
  std::atomic<uint64_t> copied_bytes[3];  // by kind, as copy_us
  std::atomic<uint64_t> no_peers;      // 1: no card copies from another one
  std::atomic<uint64_t> synchronized;  // how often a process has waited for all of a stream or a device
  StreamRule rules[kMaxRules];
  ProcessTasks tasks[kMaxProcesses];
  std::atomic<uint64_t> teardown_ms;  // so long after its end a process is taken apart
  Teardown teardowns[kMaxProcesses];
};
constexpr uint64_t kControlMagic = 0x314d49534e4e4143;  // "CANNSIM1"

struct Holder {
  int32_t process;
  int32_t descriptor;  // of the memfd, in that process
  uint64_t started;    // clock ticks after boot: tells a process from a later one with the same id
};

// The processes that may import; their names are in State::names, found by list and process.
struct NameList {
  uint64_t id;  // never used twice; 0: nothing was exported
  uint32_t count;
};

struct Name {
  uint64_t list;  // 0: this slot is free
  uint64_t since;  // clock ticks after boot
  int32_t process;
  uint32_t next;  // in its bucket, or of the free ones; an index + 1
};

// Physical memory of a card. It lives as long as one holder does; simulator.py reads the first five fields.
struct Allocation {
  uint64_t id;  // never used twice; 0: this slot is free
  uint64_t size;
  uint32_t device;
  uint32_t holder_count;
  Holder holders[kMaxHolders];
  uint64_t shareable_handle;  // 0: not exported
  int32_t exporter;
  uint32_t checks_process;
  NameList named;
};

// A key of aclrtIpcMemGetExportKey.
struct MemoryKey {
  char text[72];  // empty: this slot is free
  uint64_t allocation;
  uint64_t offset;
  uint64_t size;
  Holder exporter;
  uint32_t checks_process;
  NameList named;
};

struct SharedEvent {
  uint64_t generation;  // 0: this slot is free
  Holder users[kMaxHolders];
  std::atomic<uint64_t> recorded;
  std::atomic<uint64_t> completed;
  std::atomic<int32_t> error;
  uint32_t clock[kMaxAgents];
  uint32_t found[kMaxAgents];  // what the recording stream's waits had found until then; see Stream
};

// A word of device memory, with the last value that a stream wrote.
struct Word {
  uint64_t space;  // 0: this slot is free
  uint64_t offset;
  uint64_t value;
  uint32_t clock[kMaxAgents];
};

struct Agent {
  int32_t process;  // 0: free
  uint32_t count;   // of tasks submitted; never set back, so a slot may be used again
  uint64_t started;
  uint64_t stream;
};

// One access to memory, kept until a later one that is ordered after it covers it.
struct Access {
  uint64_t space;  // which memory: an allocation's id, or a number for host memory with the top bit set
  uint64_t begin;
  uint64_t end;
  uint64_t stream;
  uint32_t agent;
  uint32_t count;
  int32_t process;
  uint32_t next;  // in its bucket; an index + 1
  uint32_t previous;
  uint32_t bucket;
  uint8_t writes;
  uint8_t used;
  char operation[46];
};

// The file "state".
struct State {
  std::atomic<uint64_t> ready;
  pthread_mutex_t mutex;
  uint64_t next_allocation;
  uint64_t next_generation;
  uint32_t agents_used;
  uint32_t allocations_used;  // slots from the first on that were ever taken
  std::atomic<uint64_t> host_version;  // changes with host_clock
  uint32_t host_clock[kMaxAgents];
  Agent agents[kMaxAgents];
  Allocation allocations[kMaxAllocations];
  MemoryKey keys[kMaxKeys];
  SharedEvent events[kMaxSharedEvents];
  uint32_t names_used;  // slots from the first on that were ever taken
  uint32_t free_names;
  uint32_t name_buckets[kNameBuckets];
  Name names[kMaxNames];
  Word words[kMaxWords];
  uint32_t word_clock_hand;
  uint32_t access_clock_hand;
  uint32_t buckets[kAccessBuckets];
  Access accesses[kMaxAccesses];
};

// Null with a message on stderr when $CANN_SIMULATOR_DIR is not set or of no use.
State *state();
Control &control();
std::string folder();

// Holds the lock of the state; a process that died with it leaves it usable.
class StateLock {
 public:
  StateLock();
  ~StateLock();
  static void abandon();  // from a signal handler: this process ends, with the lock or without
  StateLock(const StateLock &) = delete;
  StateLock &operator=(const StateLock &) = delete;
};

Holder this_process(int descriptor = -1);
bool alive(const Holder &holder);
uint64_t start_time(int32_t process);  // 0 for a process that is gone or only waits to be reaped

// Alive, or ended and not taken apart yet; and whose descriptors its memory is found by: 0 for nobody's.
bool is_present(const Holder &holder);
int32_t process_of_descriptors(const Holder &holder);

// This one, or that whose tasks an undertaker finishes.
int32_t acting_process();

// With the lock held: forget what processes held that are taken apart, and take their streams' tasks for ended.
void sweep_dead_processes();

// This process's counts; a slot of its own while there are free ones.
ProcessTasks &own_tasks();

// With the lock held: bytes in use on a card.
uint64_t used_bytes(uint32_t device);

// With the lock held. A process has one name in a list; named again, it is named from then on. False: no room.
bool add_name(NameList &list, int32_t process);
const Name *find_name(const NameList &list, int32_t process);
void remove_name(NameList &list, int32_t process);
void forget_names(NameList &list);

Allocation *find_allocation(uint64_t id);
Allocation *new_allocation(uint64_t size, uint32_t device, int descriptor);  // null: too many
void drop_holder(Allocation &allocation, int32_t process);
void forget_key(MemoryKey &key);

}  // namespace cann_simulator
