// Captured models: lists of tasks that run again as one task of a stream.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "streams.h"

namespace cann_simulator {

// Tasks that may be replaced after the capture.
struct TaskGroup {
  Model *model;
  std::vector<Task> tasks;
};

struct Node {
  Task task;
  TaskGroup *group = nullptr;  // set: the group's tasks run instead
};

struct Model {
  uint32_t id;
  aclmdlRICaptureMode mode;
  Stream *origin;
  std::mutex guard;
  std::vector<Node> nodes;
  std::vector<std::unique_ptr<TaskGroup>> groups;
  std::vector<Stream *> streams;  // that take part in the capture
  std::vector<std::pair<Stream *, uint64_t>> joined;  // forked streams, and how much of them others have waited for
  bool invalid = false;
  int running = 0;
};

// With the stream's lock held: keep a task for the replay.
void capture(Stream &stream, Task task);

// A call that no capture survives.
void invalidate(Model &model);

// May the calling thread not make a call that blocks, for a capture that goes on?
bool forbidden_by_capture();

// Makes a stream part of a capture, when it waits for an event of that capture.
void join_capture(Stream &stream, Model &model, Stream *recorded_on, uint64_t recorded_at);

}  // namespace cann_simulator
