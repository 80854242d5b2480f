// See graphs.h. Pages of hicann/runtime docs/api_docs that are followed: aclmdlRICaptureBegin, aclmdlRICaptureEnd,
// aclmdlRICaptureGetInfo, aclmdlRICaptureMode, aclmdlRICaptureTaskGrpBegin, aclmdlRICaptureTaskUpdateBegin,
// aclmdlRIExecuteAsync, aclmdlRIDestroy, aclmdlRICaptureThreadExchangeMode.
#include "graphs.h"

#include <algorithm>
#include <atomic>
#include <cstdio>

namespace cann_simulator {
namespace {

std::atomic<uint32_t> last_model{0};
std::atomic<int> global_captures{0};  // captures that forbid unsafe calls on every thread
thread_local int own_captures = 0;
thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

void count_capture(aclmdlRICaptureMode mode, int by) {
  if (mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL) global_captures += by;
  if (mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED) own_captures += by;
}

// A snapshot, so that an update of the model may go on while an earlier replay runs.
std::vector<Task> tasks_of_node(Model &model, size_t index) {
  std::lock_guard<std::mutex> hold(model.guard);
  const Node &node = model.nodes[index];
  return node.group ? node.group->tasks : std::vector<Task>{node.task};
}

aclError replay(Model &model, Stream &stream, const Author &author) {
  aclError error = ACL_SUCCESS;
  for (size_t i = 0; i < model.nodes.size() && !error; i++)
    for (const Task &task : tasks_of_node(model, i))
      if (!error) error = run_task(task, stream, author);
  std::lock_guard<std::mutex> hold(model.guard);
  model.running--;
  return error;
}

bool same_kind_of_tasks(const std::vector<Task> &a, const std::vector<Task> &b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Task &x, const Task &y) { return x.name == y.name; });
}

// Every stream that joined must be waited for by another one of the capture before it ends.
bool all_joined(const Model &model) {
  for (Stream *stream : model.streams) {
    if (stream == model.origin || stream->captured == 0) continue;
    bool found = false;
    for (const auto &[joined, at] : model.joined) found |= joined == stream && at >= stream->captured;
    if (!found) return false;
  }
  return true;
}

}  // namespace

void capture(Stream &stream, Task task) {
  Model &model = *stream.capturing;
  std::lock_guard<std::mutex> hold(model.guard);
  stream.captured++;
  if (stream.group) {
    stream.group->tasks.push_back(std::move(task));
    if (stream.group->tasks.size() == 1) model.nodes.push_back(Node{{}, stream.group});
  } else {
    model.nodes.push_back(Node{std::move(task), nullptr});
  }
}

void invalidate(Model &model) { model.invalid = true; }

bool forbidden_by_capture() {
  switch (thread_mode) {
    case ACL_MODEL_RI_CAPTURE_MODE_GLOBAL: return global_captures > 0 || own_captures > 0;
    case ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL: return own_captures > 0;
    default: return false;
  }
}

void join_capture(Stream &stream, Model &model, Stream *recorded_on, uint64_t recorded_at) {
  std::lock_guard<std::mutex> hold(stream.guard);
  if (!stream.capturing) {
    stream.capturing = &model;
    stream.captured = 0;
    model.streams.push_back(&stream);
  }
  if (recorded_on != &stream) model.joined.emplace_back(recorded_on, recorded_at);
}

}  // namespace cann_simulator

using namespace cann_simulator;

#define FIND_STREAM(stream, handle)   \
  RETURN_IF_IT_CANNOT_CALL();         \
  Stream *stream = stream_of(handle); \
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no such stream", __func__)

SIMULATED aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  FIND_STREAM(stream, handle);
  std::lock_guard<std::mutex> hold(stream->guard);
  if (stream->capturing) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is being captured already");
  auto *model = new Model{++last_model, mode, stream, {}, {}, {}, {stream}, {}};
  stream->capturing = model;
  stream->captured = 0;
  count_capture(mode, 1);
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model) {
  FIND_STREAM(stream, handle);
  std::lock_guard<std::mutex> hold(stream->guard);
  *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (stream->capturing)
    *status = stream->capturing->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  if (model) *model = stream->capturing;
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *result) {
  FIND_STREAM(stream, handle);
  Model *model = stream->capturing;
  if (!model) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not being captured");
  if (model->origin != stream)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
  bool joined = all_joined(*model);
  for (Stream *member : model->streams) {
    std::lock_guard<std::mutex> hold(member->guard);
    member->capturing = nullptr;
    member->group = nullptr;
  }
  count_capture(model->mode, -1);
  *result = nullptr;
  if (model->invalid) return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "a call during the capture made it invalid");
  if (!joined) return fail(ACL_ERROR_RT_STREAM_UNJOINED, "a stream of the capture was not waited for at its end");
  *result = model;
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) {
  *id = static_cast<Model *>(model)->id;
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
  FIND_STREAM(stream, stream_handle);
  auto *model = static_cast<Model *>(handle);
  {
    std::lock_guard<std::mutex> hold(model->guard);
    model->running++;
  }
  // The replay's tasks are ordered as one task of its stream, so they take over its place in the order.
  auto replaying = [model, stream] { return replay(*model, *stream, running_author()); };
  return submit(*stream, Task{"aclmdlRIExecuteAsync", TaskKind::kOther, replaying});
}

SIMULATED aclError aclmdlRIDestroy(aclmdlRI handle) {
  auto *model = static_cast<Model *>(handle);
  std::unique_lock<std::mutex> hold(model->guard);
  if (model->running > 0) return fail(ACL_ERROR_RT_MODEL_RUNNING, "the model still runs");
  model->nodes.clear();
  model->groups.clear();
  return ACL_SUCCESS;  // the small rest is kept: a handle used too late then fails and does not crash
}

SIMULATED aclError aclmdlRIDebugPrint(aclmdlRI model) {
  fprintf(stderr, "CANN simulator: model of %zu nodes\n", static_cast<Model *>(model)->nodes.size());
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char *path, uint32_t) {
  FILE *file = fopen(path, "w");
  if (!file) return fail(ACL_ERROR_RT_FILE_OPEN, "%s", path);
  auto *model = static_cast<Model *>(handle);
  fprintf(file, "[");
  for (size_t i = 0; i < model->nodes.size(); i++)
    for (const Task &task : tasks_of_node(*model, i))
      fprintf(file, "%s\n{\"name\": \"%s\"}", i ? "," : "", task.name.c_str());
  fprintf(file, "\n]\n");
  fclose(file);
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  std::swap(*mode, thread_mode);
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  FIND_STREAM(stream, handle);
  std::lock_guard<std::mutex> hold(stream->guard);
  if (!stream->capturing) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group outside of a capture");
  if (stream->group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the stream has an open task group");
  stream->capturing->groups.push_back(std::make_unique<TaskGroup>(TaskGroup{stream->capturing, {}}));
  stream->group = stream->capturing->groups.back().get();
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group) {
  FIND_STREAM(stream, handle);
  std::lock_guard<std::mutex> hold(stream->guard);
  if (!stream->group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the stream has no open task group");
  *group = stream->group;
  stream->group = nullptr;
  return ACL_SUCCESS;
}

SIMULATED aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  FIND_STREAM(stream, handle);
  std::lock_guard<std::mutex> hold(stream->guard);
  if (stream->capturing) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "an update on a stream that is being captured");
  stream->updating = static_cast<TaskGroup *>(group);
  stream->updates.clear();
  return ACL_SUCCESS;
}

// The new tasks take the place of the old ones when the stream gets there, not at this call: a replay that does not
// wait for the update may still run the old ones.
SIMULATED aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  FIND_STREAM(stream, handle);
  TaskGroup *group;
  std::vector<Task> updates;
  {
    std::lock_guard<std::mutex> hold(stream->guard);
    group = stream->updating;
    stream->updating = nullptr;
    updates.swap(stream->updates);
  }
  if (!group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no update of this stream has begun");
  if (!same_kind_of_tasks(group->tasks, updates))
    return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "the update has other tasks than the group");
  return submit(*stream, Task{"task update", TaskKind::kOther, [group, updates] {
                                std::lock_guard<std::mutex> hold(group->model->guard);
                                group->tasks = updates;
                                return ACL_SUCCESS;
                              }});
}
