// Streams: queues of tasks with one worker thread each, so that what is asynchronous on a card really runs later.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ordering.h"
#include "simulator.h"

namespace cann_simulator {

// kSync and kOnce order streams; what is to be done once is not done again where a process was killed in the middle.
enum class TaskKind { kCopyToDevice, kCopyToHost, kCopyOnDevice, kKernel, kSync, kOnce, kOther };

struct Stream;

// The task that the calling thread runs now, for touch().
struct Running {
  Author author;
  std::vector<Range> ranges;
  Stream *stream;
};

struct Task {
  std::string name;
  TaskKind kind = TaskKind::kOther;
  std::function<aclError()> run;
  // Set at submission, when all that orders it is known.
  Author author{};
  std::shared_ptr<const Clock> clock{};
  bool runs_after_failure = false;  // records of events: what waits for them must learn of the failure
};

struct Model;      // graphs.h
struct TaskGroup;  // graphs.h

struct Stream {
  explicit Stream(int on_device) : device(on_device) {}

  const int device;
  int id = 0;
  std::mutex guard;
  std::condition_variable work, progress;
  std::deque<Task> queue;
  const Task *current = nullptr;  // that the worker has taken
  bool current_began = false;
  uint64_t submitted = 0, completed = 0;
  bool stopping = false;
  std::thread worker;  // started by the first task
  bool stops_on_failure = false;
  aclError error = ACL_SUCCESS;
  uint32_t overflow_switch = 0;
  // The clock of the last task submitted, and how far it has joined the host's.
  Clock clock;
  uint32_t agent = 0, count = 0;
  uint64_t host_version = 0;
  // What its waits have found, as known only when they run: orders what runs after them, whenever it was submitted.
  Clock found;
  // Graphs; see graphs.cpp.
  Model *capturing = nullptr;
  uint64_t captured = 0;
  TaskGroup *group = nullptr;
  TaskGroup *updating = nullptr;
  std::vector<Task> updates;
};

Stream *stream_of(aclrtStream handle);  // null handle: the device's default stream; an unknown one: null
std::vector<Stream *> streams_of(int device);

// Queues a task; or, where a capture or an update goes on, adds it to the graph. stamped: the task's clock, if queued.
aclError submit(Stream &stream, Task task, Clock *stamped = nullptr);

// Waits for what was submitted before the call, and tells the host's clock. ms < 0: no limit.
aclError synchronize(Stream &stream, int32_t ms);

// Runs one task now: delays, faults, its accesses. For workers and for the replay of graphs.
aclError run_task(const Task &task, Stream &stream, const Author &author);

// The place in the order of the task that runs on this thread.
Author running_author();

// From within a running task: what its stream runs from now on comes after these; what its waits have found so far.
void order_behind(const Clock &clock);
Clock found_so_far();

// From within a running task: it reads or writes these bytes. False: that is no mapped memory, the task fails.
// Call before touching; flush_touches() compares and records.
bool touch(const void *pointer, size_t size, bool writes);
void flush_touches();

// For libopapi.so: queues an operator on a stream.
aclError submit_kernel(aclrtStream stream, const std::string &name, std::function<aclError()> run);

// For the undertaker of a killed process: copies, and what orders them, that were queued and that nothing holds up,
// stream by stream up to a kernel or a callback of the host. What a copy was in the middle of is copied again.
void finish_queued_copies();

// How long a task waits for an event or a word before it fails; and whether a test holds tasks of a process that lives,
// so that a wait may be longer.
std::chrono::milliseconds wait_limit();
bool test_holds_tasks();

// The error of a task that has waited for longer than a test allows. On a device it would wait on, for ever.
aclError waited_too_long(const std::string &text);

// For libopapi.so: an error with a text for the log.
aclError fail_in_task(aclError code, const std::string &text);

}  // namespace cann_simulator
