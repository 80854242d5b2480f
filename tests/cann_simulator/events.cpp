// Events, within a process and between processes. Pages of hicann/runtime docs/api_docs that are followed:
// aclrtCreateEventExWithFlag, aclrtCreateEventWithFlag, aclrtRecordEvent, aclrtStreamWaitEvent, aclrtResetEvent,
// aclrtQueryEventStatus, aclrtSynchronizeEvent, aclrtDestroyEvent, aclrtIpcGetEventHandle, aclrtIpcOpenEventHandle,
// aclrtEventElapsedTime.
//
// An event carries the clock of what it was recorded after; to wait for it, to synchronise with it and to find it
// complete are the edges of the ordering record. A failed stream's events carry its error, so that what waits for
// them fails and does not hang.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

#include "graphs.h"
#include "streams.h"

namespace cann_simulator {
namespace {

using Moment = std::chrono::steady_clock::time_point;

struct Event {
  uint32_t flags = 0;
  // Made for graphs, or with aclrtCreateEventWithFlag: a wait takes back what a record gave, see aclrtResetEvent.
  bool latches = false;
  SharedEvent *shared = nullptr;
  std::mutex guard;
  std::condition_variable changed;
  uint64_t recorded = 0, completed = 0;
  bool set = false;  // of an event that latches
  aclError error = ACL_SUCCESS;
  Clock clock;
  Clock found;  // what the recording stream's waits had found until then; see Stream
  Moment moment{};
  Model *captured_in = nullptr;
  Stream *captured_on = nullptr;
  uint64_t captured_at = 0;
};
using EventReference = std::shared_ptr<Event>;

std::mutex events_guard;
std::map<void *, EventReference> &events() {
  static auto *made = new std::map<void *, EventReference>;
  return *made;
}

EventReference event_of(aclrtEvent handle) {
  std::lock_guard<std::mutex> hold(events_guard);
  auto found = events().find(handle);
  return found == events().end() ? nullptr : found->second;
}

aclrtEvent keep(EventReference event) {
  std::lock_guard<std::mutex> hold(events_guard);
  aclrtEvent handle = event.get();
  events()[handle] = std::move(event);
  return handle;
}

aclError too_long(const char *what) {
  return waited_too_long(std::string(what) + ": nobody recorded the event in time (after a replay, a graph with "
                                             "updatable tasks waits for its next update)");
}

// --- events of one process

aclError complete(Event &event, uint64_t number, aclError error) {
  Clock found = found_so_far();
  std::lock_guard<std::mutex> hold(event.guard);
  event.completed = std::max(event.completed, number);
  event.found = std::move(found);
  event.set = true;
  event.error = error;
  event.moment = std::chrono::steady_clock::now();
  event.changed.notify_all();
  return ACL_SUCCESS;
}

aclError wait_for(Event &event, uint64_t number) {
  std::unique_lock<std::mutex> hold(event.guard);
  while (!event.changed.wait_for(hold, wait_limit(), [&] { return event.completed >= number; }))
    if (!test_holds_tasks()) return too_long("aclrtStreamWaitEvent");
  order_behind(event.found);
  return event.error;
}

aclError wait_until_set(Event &event) {
  std::unique_lock<std::mutex> hold(event.guard);
  while (!event.changed.wait_for(hold, wait_limit(), [&] { return event.set; }))
    if (!test_holds_tasks()) return too_long("aclrtStreamWaitEvent");
  order_behind(event.found);
  return event.error;
}

// --- events between processes

Clock found_by_recorder(const SharedEvent &shared) {
  Clock clock;
  clock.join(shared.found, state()->agents_used);
  return clock;
}

aclError complete_shared(SharedEvent &shared, uint64_t number, aclError error) {
  if (error) shared.error = error;
  {
    Clock found = found_so_far();
    StateLock hold;
    memset(shared.found, 0, sizeof shared.found);
    std::copy(found.counts().begin(), found.counts().end(), shared.found);
  }
  uint64_t before = shared.completed;
  while (before < number && !shared.completed.compare_exchange_weak(before, number)) {
  }
  return ACL_SUCCESS;
}

// The event is a word in device memory that the recorder's stream writes: a recorder that is killed before writes it
// never, and the wait has no limit of its own (page aclrtSetOpWaitTimeout). False: not within the limit.
bool reached_in_time(const SharedEvent &shared, uint64_t number, std::chrono::milliseconds limit) {
  auto end = std::chrono::steady_clock::now() + limit;
  while (shared.completed < number) {
    if (std::chrono::steady_clock::now() > end) return false;
    usleep(50);
  }
  return true;
}

aclError wait_for_shared(SharedEvent &shared, uint64_t number) {
  while (!reached_in_time(shared, number, wait_limit()))
    if (!test_holds_tasks()) return too_long("aclrtStreamWaitEvent");
  Clock found;
  {
    StateLock hold;
    found = found_by_recorder(shared);
  }
  order_behind(found);
  return shared.error;
}

SharedEvent *new_shared_event() {
  StateLock hold;
  for (auto &shared : state()->events) {
    bool used = false;
    for (const Holder &user : shared.users) used |= is_present(user);
    if (shared.generation && used) continue;
    memset(static_cast<void *>(&shared), 0, sizeof shared);
    shared.generation = state()->next_generation++;
    shared.users[0] = this_process();
    return &shared;
  }
  return nullptr;
}

bool add_user(SharedEvent &shared) {
  for (Holder &user : shared.users)
    if (!is_present(user)) {
      user = this_process();
      return true;
    }
  return false;
}

void remove_user(SharedEvent &shared) {
  StateLock hold;
  for (Holder &user : shared.users)
    if (user.process == getpid()) {
      user = Holder{};
      return;
    }
}

Clock clock_of(SharedEvent &shared) {
  Clock clock;
  clock.join(shared.clock, state()->agents_used);
  return clock;
}

// --- the calls

aclError create(aclrtEvent *handle, uint32_t flags, bool latches) {
  auto event = std::make_shared<Event>();
  event->flags = flags;
  event->latches = latches || (flags & ACL_EVENT_EXTERNAL);
  if (flags & ACL_EVENT_IPC) {
    if (flags != ACL_EVENT_IPC)
      return fail(ACL_ERROR_RT_PARAM_INVALID, "ACL_EVENT_IPC goes with no other flag, not %#x", flags);
    event->shared = new_shared_event();
    if (!event->shared) return fail(ACL_ERROR_RT_NO_EVENT_RESOURCE, "too many events between processes");
  }
  *handle = keep(std::move(event));
  return ACL_SUCCESS;
}

aclError stream_error(Stream &stream) {
  std::lock_guard<std::mutex> hold(stream.guard);
  if (aclError code = lost(stream.device)) return code;
  return stream.stops_on_failure ? stream.error : ACL_SUCCESS;
}

// Queues the record; what it is recorded after is the stream's clock then.
aclError record(const EventReference &event, Stream *stream, uint64_t number) {
  Task task{"aclrtRecordEvent", TaskKind::kSync, [event, stream, number] {
              aclError error = stream_error(*stream);
              return event->shared ? complete_shared(*event->shared, number, error) : complete(*event, number, error);
            }};
  task.runs_after_failure = true;
  Clock clock;
  if (aclError error = submit(*stream, std::move(task), &clock)) return error;
  if (event->shared) {
    StateLock lock;
    memset(event->shared->clock, 0, sizeof event->shared->clock);
    std::copy(clock.counts().begin(), clock.counts().end(), event->shared->clock);
  } else {
    std::lock_guard<std::mutex> lock(event->guard);
    event->clock = clock;
  }
  return ACL_SUCCESS;
}

// In a capture an ordinary event only ties streams together; the replay keeps the captured order.
bool record_in_capture(Event &event, Stream &stream) {
  std::lock_guard<std::mutex> hold(stream.guard);
  if (!stream.capturing || event.latches) {
    event.captured_in = nullptr;
    return false;
  }
  event.captured_in = stream.capturing;
  event.captured_on = &stream;
  event.captured_at = stream.captured;
  return true;
}

// What a stream submits after a wait is ordered after what the event was recorded after.
void join_clock(Stream &stream, const Clock &clock) {
  std::lock_guard<std::mutex> hold(stream.guard);
  stream.clock.join(clock);
}

aclError found_complete(const EventReference &event, aclError error) {
  if (event->shared) {
    Clock clock = clock_of(*event->shared);
    clock.join(found_by_recorder(*event->shared));
    host_saw(clock);
  } else {
    std::unique_lock<std::mutex> hold(event->guard);
    Clock clock = event->clock;
    clock.join(event->found);
    hold.unlock();
    host_saw(clock);
  }
  return error ? fail(error, "a task before the event failed with %d", error) : ACL_SUCCESS;
}

}  // namespace
}  // namespace cann_simulator

using namespace cann_simulator;

#define FIND_EVENT(event, handle)              \
  RETURN_IF_IT_CANNOT_CALL();                  \
  EventReference event = event_of(handle);     \
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no such event", __func__)

#define FIND_STREAM(stream, handle)   \
  Stream *stream = stream_of(handle); \
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no such stream", __func__)

SIMULATED aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) {
  RETURN_IF_IT_CANNOT_CALL();
  return create(event, flags, false);
}

SIMULATED aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) {
  RETURN_IF_IT_CANNOT_CALL();
  return create(event, flags, true);
}

// Does not wait; what is queued keeps the event until it has run (page aclrtDestroyEvent).
SIMULATED aclError aclrtDestroyEvent(aclrtEvent handle) {
  EventReference event = event_of(handle);
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyEvent: no such event");
  if (event->shared) remove_user(*event->shared);
  std::lock_guard<std::mutex> hold(events_guard);
  events().erase(handle);
  return ACL_SUCCESS;
}

// The latest record counts; waits that were queued before keep the one they saw (page aclrtRecordEvent).
SIMULATED aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  FIND_EVENT(event, handle);
  FIND_STREAM(stream, stream_handle);
  if (event->shared) {
    if (stream->capturing) return fail(ACL_ERROR_RT_EVENT_CAPTURED, "an event between processes in a capture");
    uint64_t number;
    {
      StateLock hold;
      event->shared->error = ACL_SUCCESS;
      number = ++event->shared->recorded;
    }
    return record(event, stream, number);
  }
  if (record_in_capture(*event, *stream)) return ACL_SUCCESS;
  uint64_t number;
  {
    std::lock_guard<std::mutex> hold(event->guard);
    number = ++event->recorded;
  }
  return record(event, stream, number);
}

SIMULATED aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  FIND_EVENT(event, handle);
  FIND_STREAM(stream, stream_handle);
  if (event->captured_in) {
    join_capture(*stream, *event->captured_in, event->captured_on, event->captured_at);
    return ACL_SUCCESS;
  }
  if (event->shared) {
    if (stream->capturing) return fail(ACL_ERROR_RT_EVENT_CAPTURED, "an event between processes in a capture");
    uint64_t number = event->shared->recorded;
    {
      StateLock hold;
      Clock clock = clock_of(*event->shared);
      join_clock(*stream, clock);
    }
    return submit(*stream, Task{"aclrtStreamWaitEvent", TaskKind::kSync,
                                [event, number] { return wait_for_shared(*event->shared, number); }});
  }
  std::unique_lock<std::mutex> hold(event->guard);
  uint64_t number = event->recorded;
  Clock clock = event->clock;
  hold.unlock();
  join_clock(*stream, clock);
  bool latches = event->latches;
  return submit(*stream, Task{"aclrtStreamWaitEvent", TaskKind::kSync, [event, number, latches] {
                                return latches ? wait_until_set(*event) : wait_for(*event, number);
                              }});
}

// Sets the event back, in the order of the stream: the next wait needs the next record (page aclrtResetEvent).
SIMULATED aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream_handle) {
  FIND_EVENT(event, handle);
  FIND_STREAM(stream, stream_handle);
  if (event->shared) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtResetEvent: an event between processes");
  return submit(*stream, Task{"aclrtResetEvent", TaskKind::kSync, [event] {
                                std::lock_guard<std::mutex> hold(event->guard);
                                event->set = false;
                                return ACL_SUCCESS;
                              }});
}

SIMULATED aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t ms) {
  FIND_EVENT(event, handle);
  auto limit = std::chrono::milliseconds(ms < 0 ? INT32_MAX : ms);
  if (event->captured_in) return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event belongs to a capture");
  if (event->shared) {
    uint64_t wanted = event->shared->recorded;
    if (!reached_in_time(*event->shared, wanted, ms < 0 ? wait_limit() : limit))
      return ms < 0 ? too_long(__func__) : fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "the event is not complete");
    return found_complete(event, event->shared->error);
  }
  std::unique_lock<std::mutex> hold(event->guard);
  uint64_t number = event->recorded;
  if (!event->changed.wait_for(hold, limit, [&] { return event->completed >= number; }))
    return fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "the event is not complete after %d ms", ms);
  aclError error = event->error;
  hold.unlock();
  return found_complete(event, error);
}

SIMULATED aclError aclrtSynchronizeEvent(aclrtEvent event) { return aclrtSynchronizeEventWithTimeout(event, -1); }

// Complete, too, when it was never recorded (page aclrtRecordEvent).
SIMULATED aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
  FIND_EVENT(event, handle);
  bool done;
  aclError error;
  if (event->shared) {
    done = event->shared->completed >= event->shared->recorded;
    error = event->shared->error;
  } else {
    std::lock_guard<std::mutex> hold(event->guard);
    done = event->completed >= event->recorded;
    error = event->error;
  }
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return done ? found_complete(event, error) : ACL_SUCCESS;
}

SIMULATED aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
  FIND_EVENT(event, handle);
  if (event->shared) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtQueryEventWaitStatus: an event between processes");
  std::lock_guard<std::mutex> hold(event->guard);
  *status = event->completed >= event->recorded ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end) {
  EventReference first = event_of(start), last = event_of(end);
  if (!first || !last || first->shared || last->shared || !first->completed || !last->completed)
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: events that were not recorded");
  *ms = std::chrono::duration<float, std::milli>(last->moment - first->moment).count();
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t *microseconds) {
  FIND_EVENT(event, handle);
  if (event->shared) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventGetTimestamp: an event between processes");
  auto since = event->moment.time_since_epoch();
  *microseconds = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(since).count());
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtIpcGetEventHandle(aclrtEvent handle, aclrtIpcEventHandle *result) {
  FIND_EVENT(event, handle);
  if (!event->shared) return fail(ACL_ERROR_RT_PARAM_INVALID, "the event was not made with ACL_EVENT_IPC");
  memset(result, 0, sizeof *result);
  snprintf(result->reserved, sizeof result->reserved, "event-%td-%llu", event->shared - state()->events,
           static_cast<unsigned long long>(event->shared->generation));
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent *result) {
  RETURN_IF_IT_CANNOT_CALL();
  long index = -1;
  unsigned long long generation = 0;
  handle.reserved[sizeof handle.reserved - 1] = 0;
  bool read = sscanf(handle.reserved, "event-%ld-%llu", &index, &generation) == 2;
  if (!read || index < 0 || index >= static_cast<long>(kMaxSharedEvents))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "this is no handle of an event");
  SharedEvent &shared = state()->events[index];
  StateLock hold;
  if (shared.generation != generation || !add_user(shared))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "the event is gone, or has too many users");
  auto event = std::make_shared<Event>();
  event->flags = ACL_EVENT_IPC;
  event->shared = &shared;
  *result = keep(std::move(event));
  return ACL_SUCCESS;
}
