// See streams.h. Pages of hicann/runtime docs/api_docs that are followed: aclrtCreateStreamWithConfig,
// aclrtDestroyStream, aclrtSynchronizeStream, aclrtStreamQuery, aclrtSetStreamFailureMode, aclrtSynchronizeDevice,
// aclrtLaunchHostFunc.
#include "streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <set>
#include <shared_mutex>

#include "graphs.h"
#include "memory.h"
#include "teardown.h"

namespace cann_simulator {
namespace {

struct Registry {
  std::mutex guard;
  std::set<Stream *> streams;
  Stream *defaults[kMaxDevices] = {};
  int next_id = 0;
};

Registry &registry() {
  static Registry *made = new Registry;
  return *made;
}

thread_local Running *running = nullptr;

uint64_t handle_of(const Stream &stream) { return reinterpret_cast<uint64_t>(&stream); }

bool applies(const StreamRule &rule, const Stream &stream) {
  uint64_t process = rule.process, handle = rule.stream;
  return (process == 0 || process == static_cast<uint64_t>(getpid())) && (handle == 0 || handle == handle_of(stream));
}

bool held(const Stream &stream) {
  for (const auto &rule : control().rules)
    if (rule.held && applies(rule, stream)) return true;
  return false;
}

uint64_t stream_delay_us(const Stream &stream) {
  uint64_t sum = 0;
  for (const auto &rule : control().rules)
    if (rule.delay_us && applies(rule, stream)) sum += rule.delay_us;
  return sum;
}

uint64_t kind_delay_us(TaskKind kind) {
  if (kind == TaskKind::kKernel) return control().kernel_us;
  auto index = static_cast<size_t>(kind);
  return index < 3 ? control().copy_us[index].load() : 0;
}

void work(Stream *stream) {
  for (;;) {
    Task task;
    aclError failed;
    {
      std::unique_lock<std::mutex> hold(stream->guard);
      stream->work.wait(hold, [&] { return stream->stopping || !stream->queue.empty(); });
      if (stream->queue.empty()) return;
      task = std::move(stream->queue.front());
      stream->queue.pop_front();
      stream->current = &task;
      stream->current_began = false;
      failed = stream->stops_on_failure ? stream->error : ACL_SUCCESS;
    }
    while (held(*stream) && !lost(stream->device)) usleep(100);
    {
      std::lock_guard<std::mutex> hold(stream->guard);
      stream->current_began = true;
    }
    if (!failed) failed = lost(stream->device);
    aclError error = failed;
    if (!failed || task.runs_after_failure) error = run_task(task, *stream, task.author);
    {
      std::lock_guard<std::mutex> hold(stream->guard);
      stream->current = nullptr;
    }
    task.run = nullptr;  // what it keeps alive goes before the host may look
    {
      std::lock_guard<std::mutex> hold(stream->guard);
      if (!stream->error) stream->error = failed ? failed : error;
      stream->completed++;
      own_tasks().completed++;
    }
    stream->progress.notify_all();
  }
}

// Gives the task its place in the order: after all that this stream and the host know of.
void stamp(Stream &stream, Task &task) {
  task.author = Author{task.name, handle_of(stream), 0, 0, nullptr};
  if (!ordering_on()) return;
  State &all = *state();
  if (stream.agent == 0 || stream.host_version != all.host_version) {
    StateLock hold;
    if (stream.agent == 0) {
      stream.agent = new_agent(handle_of(stream));
      stream.count = all.agents[stream.agent].count;
    }
    stream.clock.join(all.host_clock, all.agents_used);
    stream.host_version = all.host_version;
  }
  stream.clock.set(stream.agent, ++stream.count);
  all.agents[stream.agent].count = stream.count;
  task.clock = std::make_shared<const Clock>(stream.clock);
  task.author.agent = stream.agent;
  task.author.count = stream.count;
  task.author.clock = task.clock.get();
}

bool is_copy(const Task &task) { return static_cast<size_t>(task.kind) < 3; }

bool finish_queue(Stream &stream) {
  bool moved = false;
  std::unique_lock<std::mutex> hold(stream.guard, std::try_to_lock);  // or a killed thread has it
  while (hold && (stream.current || !stream.queue.empty()) && !(stream.stops_on_failure && stream.error)) {
    const Task &task = stream.current ? *stream.current : stream.queue.front();
    if (!is_copy(task) && task.kind != TaskKind::kSync && task.kind != TaskKind::kOnce) break;
    bool done = stream.current && stream.current_began && task.kind == TaskKind::kOnce;
    hold.unlock();
    aclError error = done ? ACL_SUCCESS : run_task(task, stream, task.author);
    hold.lock();
    if (error) break;
    if (!stream.current) stream.queue.pop_front();
    stream.current = nullptr;
    moved = true;
  }
  return moved;
}

Stream *new_stream(int device) {
  auto *made = new Stream(device);
  std::lock_guard<std::mutex> hold(registry().guard);
  made->id = registry().next_id++;
  registry().streams.insert(made);
  return made;
}

}  // namespace

Stream *stream_of(aclrtStream handle) {
  int device = std::max(current_device(), 0);
  if (!handle) {
    static std::mutex guard;
    std::lock_guard<std::mutex> hold(guard);
    Stream *&found = registry().defaults[device];
    if (!found) found = new_stream(device);
    return found;
  }
  std::lock_guard<std::mutex> hold(registry().guard);
  auto *stream = static_cast<Stream *>(handle);
  return registry().streams.count(stream) ? stream : nullptr;
}

std::vector<Stream *> streams_of(int device) {
  std::lock_guard<std::mutex> hold(registry().guard);
  std::vector<Stream *> found;
  for (Stream *stream : registry().streams)
    if (stream->device == device) found.push_back(stream);
  return found;
}

aclError submit(Stream &stream, Task task, Clock *stamped) {
  if (aclError code = lost(stream.device)) return fail(code, "%s: device %d is lost", task.name.c_str(), stream.device);
  std::lock_guard<std::mutex> hold(stream.guard);
  if (stream.updating) {
    stream.updates.push_back(std::move(task));
    return ACL_SUCCESS;
  }
  if (stream.capturing) {
    capture(stream, std::move(task));
    return ACL_SUCCESS;
  }
  if (stream.stops_on_failure && stream.error && !task.runs_after_failure)
    return fail(stream.error, "%s: an earlier task of this stream failed", task.name.c_str());
  stamp(stream, task);
  if (stamped) *stamped = stream.clock;
  if (!stream.worker.joinable()) stream.worker = std::thread(work, &stream);
  stream.queue.push_back(std::move(task));
  stream.submitted++;
  own_tasks().submitted++;
  stream.work.notify_one();
  return ACL_SUCCESS;
}

aclError synchronize(Stream &stream, int32_t ms) {
  std::unique_lock<std::mutex> hold(stream.guard);
  if (stream.capturing) {
    invalidate(*stream.capturing);
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "synchronize: the stream is being captured");
  }
  uint64_t target = stream.submitted;
  Clock clock = stream.clock;
  auto reached = [&] { return stream.completed >= target; };
  if (ms < 0)
    stream.progress.wait(hold, reached);
  else if (!stream.progress.wait_for(hold, std::chrono::milliseconds(ms), reached))
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the stream is not done after %d ms", ms);
  clock.join(stream.found);
  aclError error = stream.error;
  if (!stream.stops_on_failure) stream.error = ACL_SUCCESS;
  hold.unlock();
  host_saw(clock);
  if (!error) error = lost(stream.device);
  return error ? fail(error, "a task of the stream failed with %d", error) : ACL_SUCCESS;
}

aclError run_task(const Task &task, Stream &stream, const Author &author) {
  if (uint64_t delay = stream_delay_us(stream) + kind_delay_us(task.kind)) usleep(delay);
  if (is_copy(task) && take_fault(control().failing_copies))
    return fail_in_task(ACL_ERROR_RT_COPY_DATA, task.name + ": failed on demand");
  if (task.kind == TaskKind::kKernel && take_fault(control().failing_kernels))
    return fail_in_task(ACL_ERROR_RT_AICORE_EXCEPTION, task.name + ": failed on demand");
  Running now{author, {}, &stream};
  now.author.operation = task.name;
  Clock order;
  if (author.clock) {
    order = *author.clock;
    std::lock_guard<std::mutex> hold(stream.guard);
    order.join(stream.found);
    now.author.clock = &order;
  }
  Running *outer = running;
  running = &now;
  aclError error;
  if (is_copy(task) || task.kind == TaskKind::kKernel) {
    std::shared_lock<std::shared_mutex> hold(memory_in_use());
    error = task.run();
  } else {
    error = task.run();
  }
  running = outer;
  return error;
}

Author running_author() { return running ? running->author : Author{}; }

void order_behind(const Clock &clock) {
  if (!running || clock.empty()) return;
  std::lock_guard<std::mutex> hold(running->stream->guard);
  running->stream->found.join(clock);
}

Clock found_so_far() {
  if (!running) return Clock{};
  std::lock_guard<std::mutex> hold(running->stream->guard);
  return running->stream->found;
}

bool touch(const void *pointer, size_t size, bool writes) {
  if (!running || size == 0) return true;
  if (is_device(pointer) && !is_mapped(pointer, size)) return false;
  if (ordering_on()) add_ranges(running->ranges, pointer, size, writes);
  return true;
}

void flush_touches() {
  if (!running) return;
  if (running->author.clock) record_accesses(running->author, running->ranges);
  running->ranges.clear();
}

aclError submit_kernel(aclrtStream handle, const std::string &name, std::function<aclError()> run) {
  Stream *stream = stream_of(handle);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no such stream", name.c_str());
  return submit(*stream, Task{name, TaskKind::kKernel, std::move(run)});
}

void finish_queued_copies() {
  std::unique_lock<std::mutex> hold(registry().guard, std::try_to_lock);
  for (bool moved = hold.owns_lock(); moved;) {
    moved = false;
    for (Stream *stream : registry().streams) moved |= finish_queue(*stream);
  }
}

std::chrono::milliseconds wait_limit() {
  return std::chrono::milliseconds(ended_process() ? 0 : control().wait_limit_ms.load());
}

bool test_holds_tasks() {
  if (ended_process()) return false;
  for (const auto &rule : control().rules)
    if (rule.held && (rule.process == 0 || start_time(static_cast<int32_t>(rule.process)))) return true;
  return false;
}

aclError waited_too_long(const std::string &text) {
  if (ended_process()) return ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;  // the next round looks again
  int descriptor = open((folder() + "/overdue").c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  std::string line = "process " + std::to_string(getpid()) + ": " + text + "\n";
  if (descriptor < 0 || write(descriptor, line.data(), line.size()) < 0)
    fprintf(stderr, "CANN simulator: the file overdue cannot be written\n");
  if (descriptor >= 0) close(descriptor);
  return fail_in_task(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, text);
}

aclError fail_in_task(aclError code, const std::string &text) {
  fprintf(stderr, "CANN simulator: %s\n", text.c_str());
  return code;
}

}  // namespace cann_simulator

using namespace cann_simulator;

#define FIND_STREAM(stream, handle)   \
  RETURN_IF_IT_CANNOT_CALL();         \
  Stream *stream = stream_of(handle); \
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no such stream", __func__)

SIMULATED aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
  RETURN_IF_IT_CANNOT_CALL();
  *stream = new_stream(current_device());
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtCreateStream(aclrtStream *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

// Waits for what is queued (page aclrtDestroyStream).
SIMULATED aclError aclrtDestroyStream(aclrtStream handle) {
  Stream *stream = handle ? stream_of(handle) : nullptr;
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyStream: no such stream");
  {
    std::lock_guard<std::mutex> hold(registry().guard);
    registry().streams.erase(stream);
  }
  {
    std::lock_guard<std::mutex> hold(stream->guard);
    stream->stopping = true;
  }
  stream->work.notify_all();
  if (stream->worker.joinable()) stream->worker.join();
  if (stream->agent) {
    StateLock hold;
    end_agent(stream->agent);
  }
  delete stream;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

SIMULATED aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t ms) {
  FIND_STREAM(stream, handle);
  control().synchronized++;
  return synchronize(*stream, ms);
}

SIMULATED aclError aclrtSynchronizeStream(aclrtStream handle) { return aclrtSynchronizeStreamWithTimeout(handle, -1); }

SIMULATED aclError aclrtSynchronizeDeviceWithTimeout(int32_t ms) {
  RETURN_IF_IT_CANNOT_CALL();
  control().synchronized++;
  aclError first = ACL_SUCCESS;
  for (Stream *stream : streams_of(current_device()))
    if (aclError error = synchronize(*stream, ms); error && !first) first = error;
  return first;
}

SIMULATED aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

SIMULATED aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  FIND_STREAM(stream, handle);
  std::unique_lock<std::mutex> hold(stream->guard);
  bool done = stream->completed == stream->submitted;
  *status = done ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  Clock clock = stream->clock;
  clock.join(stream->found);
  aclError error = stream->error;
  hold.unlock();
  if (done) host_saw(clock);
  return error ? fail(error, "a task of the stream failed with %d", error) : ACL_SUCCESS;
}

SIMULATED aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
  FIND_STREAM(stream, handle);
  *id = stream->id;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
  FIND_STREAM(stream, handle);
  std::lock_guard<std::mutex> hold(stream->guard);
  stream->stops_on_failure = mode == ACL_STOP_ON_FAILURE;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t value) {
  FIND_STREAM(stream, handle);
  stream->overflow_switch = value;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtGetStreamOverflowSwitch(aclrtStream handle, uint32_t *value) {
  FIND_STREAM(stream, handle);
  *value = stream->overflow_switch;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) { return ACL_SUCCESS; }

SIMULATED aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void *argument) {
  FIND_STREAM(stream, handle);
  return submit(*stream, Task{"aclrtLaunchHostFunc", TaskKind::kOther, [=] {
                                function(argument);
                                return ACL_SUCCESS;
                              }});
}

// On a card the thread of aclrtProcessReport calls it; here the stream's worker does.
SIMULATED aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType,
                                       aclrtStream handle) {
  FIND_STREAM(stream, handle);
  return submit(*stream, Task{"aclrtLaunchCallback", TaskKind::kOther, [=] {
                                function(argument);
                                return ACL_SUCCESS;
                              }});
}

SIMULATED aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
SIMULATED aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

SIMULATED aclError aclrtProcessReport(int32_t ms) {
  usleep(static_cast<useconds_t>(ms < 0 ? 100 : ms) * 1000);
  return ACL_SUCCESS;
}

// For tests: the CPU reads or writes pinned memory now. The simulator cannot see that by itself.
SIMULATED void cann_simulator_host_access(const void *pointer, size_t size, int writes) {
  std::vector<Range> ranges;
  add_ranges(ranges, pointer, size, writes != 0);
  record_host_access(writes ? "host write" : "host read", ranges);
}
