// Copies and fills. Pages of hicann/runtime docs/api_docs that are followed: aclrtMemcpy, aclrtMemcpyAsync,
// aclrtMemcpyBatch, aclrtMemcpyBatchAsync, aclrtMemset, aclrtMemsetAsync, aclrtIpcMemGetExportKey (memory imported
// from another card), aclmdlRICaptureBegin (what a capture forbids).
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "graphs.h"
#include "memory.h"
#include "streams.h"

namespace cann_simulator {
namespace {

struct Copy {
  void *to;
  const void *from;
  size_t size;
};

TaskKind kind_of(const Copy &copy) {
  if (!is_device(copy.to)) return TaskKind::kCopyToHost;
  return is_device(copy.from) ? TaskKind::kCopyOnDevice : TaskKind::kCopyToDevice;
}

bool on_host(const Copy &copy) { return !is_device(copy.to) && !is_device(copy.from); }

// With pageable host memory an asynchronous copy returns only when it is done (page aclrtMemcpyAsync).
bool is_pageable(const Copy &copy) {
  return (!is_device(copy.to) && !is_pinned(copy.to, copy.size)) ||
         (!is_device(copy.from) && !is_pinned(copy.from, copy.size));
}

bool kind_fits(const Copy &copy, aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST: return on_host(copy);
    case ACL_MEMCPY_HOST_TO_DEVICE: return is_device(copy.to) && !is_device(copy.from);
    case ACL_MEMCPY_DEVICE_TO_HOST: return !is_device(copy.to) && is_device(copy.from);
    case ACL_MEMCPY_DEFAULT: return true;
    default: return is_device(copy.to) && is_device(copy.from);
  }
}

aclError check_sizes(const char *function, const Copy &copy, size_t most) {
  if (!copy.to || !copy.from || copy.size > most)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes from %p to %p, where %zu fit", function, copy.size,
                copy.from, copy.to, most);
  if (is_device(copy.to) && !is_mapped(copy.to, copy.size))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is no device memory of %zu bytes", function, copy.to, copy.size);
  if (is_device(copy.from) && !is_mapped(copy.from, copy.size))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is no device memory of %zu bytes", function, copy.from, copy.size);
  return ACL_SUCCESS;
}

// Page aclrtIpcMemGetExportKey: memory of another card takes no host copies, no guessed direction and no
// synchronous copy; asynchronous copies between device addresses work.
aclError check_foreign(const char *function, const Copy &copy, bool guessed, bool synchronous) {
  if (!is_foreign(copy.to) && !is_foreign(copy.from)) return ACL_SUCCESS;
  if (kind_of(copy) == TaskKind::kCopyOnDevice && !guessed && !synchronous) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: memory imported from another card allows no such copy", function);
}

void throttle(TaskKind kind, size_t size, std::chrono::steady_clock::time_point since) {
  uint64_t limit = control().megabytes_per_s[static_cast<size_t>(kind)];
  if (!limit) return;
  auto end = since + std::chrono::nanoseconds(size * 1000 / limit);
  auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - std::chrono::steady_clock::now());
  if (left.count() > 0) usleep(static_cast<useconds_t>(left.count()));
}

void move_bytes(const Copy &copy) {
  auto since = std::chrono::steady_clock::now();
  memmove(shadow(copy.to), shadow(copy.from), copy.size);
  if (on_host(copy)) return;
  control().copied_bytes[static_cast<size_t>(kind_of(copy))] += copy.size;
  throttle(kind_of(copy), copy.size, since);
}

aclError run_copies(const std::string &name, const std::vector<Copy> &copies) {
  bool mapped = true;
  for (const Copy &copy : copies) mapped &= touch(copy.from, copy.size, false) && touch(copy.to, copy.size, true);
  flush_touches();
  if (!mapped) return fail_in_task(ACL_ERROR_RT_COPY_DATA, name + ": device memory was freed before the copy ran");
  for (const Copy &copy : copies) move_bytes(copy);
  return ACL_SUCCESS;
}

aclError submit_copies(const char *name, Stream &stream, const std::vector<Copy> &copies) {
  bool pageable = std::any_of(copies.begin(), copies.end(), is_pageable);
  if (pageable && stream.capturing) {
    invalidate(*stream.capturing);
    return fail(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC, "%s: pageable host memory in a capture", name);
  }
  aclError error = submit(stream, Task{name, kind_of(copies[0]), [=, text = std::string(name)] {
                                         return run_copies(text, copies);
                                       }});
  return !error && pageable ? synchronize(stream, -1) : error;
}

// Immediate, on the calling thread, and in no order with any stream (page aclrtMemcpy).
aclError copy_now(const char *name, const Copy &copy) {
  if (forbidden_by_capture()) return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s during a capture", name);
  std::vector<Range> ranges;
  add_ranges(ranges, copy.from, copy.size, false);
  add_ranges(ranges, copy.to, copy.size, true);
  record_host_access(name, ranges);
  std::shared_lock<std::shared_mutex> hold(memory_in_use());
  move_bytes(copy);
  return ACL_SUCCESS;
}

// A batch goes from host to device or from device to host, all of it (page aclrtMemcpyBatchAsync).
aclError check_batch(const char *name, const std::vector<Copy> &copies, const size_t *most, const size_t *indexes,
                     size_t attributes, size_t *failed) {
  *failed = SIZE_MAX;
  if (cann_older_than(8, 5)) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s needs CANN 8.5", name);
  bool fits = !copies.empty() && attributes > 0 && attributes <= copies.size() && indexes && indexes[0] == 0;
  for (size_t i = 1; fits && i < attributes; i++) fits = indexes[i] > indexes[i - 1] && indexes[i] < copies.size();
  if (!fits) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: sizes or attributes of the batch", name);
  for (size_t i = 0; i < copies.size(); i++) {
    bool one_way = kind_of(copies[i]) == kind_of(copies[0]) && kind_of(copies[i]) != TaskKind::kCopyOnDevice;
    if (!one_way || on_host(copies[i])) {
      *failed = i;
      return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: copy %zu has another direction than the batch", name, i);
    }
    if (aclError error = check_sizes(name, copies[i], most[i])) return error;
    if (aclError error = check_foreign(name, copies[i], false, false)) return error;
  }
  return ACL_SUCCESS;
}

std::vector<Copy> batch(void **to, void **from, const size_t *sizes, size_t count) {
  std::vector<Copy> copies;
  for (size_t i = 0; i < count; i++) copies.push_back({to[i], from[i], sizes[i]});
  return copies;
}

aclError set_bytes(void *to, int32_t value, size_t size) {
  bool mapped = touch(to, size, true);
  flush_touches();
  if (!mapped) return fail_in_task(ACL_ERROR_RT_COPY_DATA, "aclrtMemsetAsync: the memory was freed before it ran");
  memset(shadow(to), value, size);
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace cann_simulator

using namespace cann_simulator;

// The kind is ignored: the pointers tell (page aclrtMemcpy).
SIMULATED aclError aclrtMemcpy(void *to, size_t most, const void *from, size_t size, aclrtMemcpyKind) {
  RETURN_IF_IT_CANNOT_CALL();
  Copy copy{to, from, size};
  if (aclError error = check_sizes("aclrtMemcpy", copy, most)) return error;
  if (aclError error = check_foreign("aclrtMemcpy", copy, true, true)) return error;
  return copy_now("aclrtMemcpy", copy);
}

SIMULATED aclError aclrtMemcpyAsync(void *to, size_t most, const void *from, size_t size, aclrtMemcpyKind kind,
                                    aclrtStream handle) {
  RETURN_IF_IT_CANNOT_CALL();
  Copy copy{to, from, size};
  Stream *stream = stream_of(handle);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpyAsync: no such stream");
  if (aclError error = check_sizes("aclrtMemcpyAsync", copy, most)) return error;
  if (on_host(copy)) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtMemcpyAsync: from host to host");
  if (!kind_fits(copy, kind))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpyAsync: kind %d does not fit %p and %p", kind, to, from);
  if (aclError error = check_foreign("aclrtMemcpyAsync", copy, kind == ACL_MEMCPY_DEFAULT, false)) return error;
  return submit_copies("aclrtMemcpyAsync", *stream, {copy});
}

SIMULATED aclError aclrtMemcpyAsyncWithCondition(void *to, size_t most, const void *from, size_t size,
                                                 aclrtMemcpyKind kind, aclrtStream stream) {
  return aclrtMemcpyAsync(to, most, from, size, kind, stream);
}

SIMULATED aclError aclrtMemcpyBatchAsync(void **to, size_t *most, void **from, size_t *sizes, size_t count,
                                         aclrtMemcpyBatchAttr *, size_t *indexes, size_t attributes, size_t *failed,
                                         aclrtStream handle) {
  RETURN_IF_IT_CANNOT_CALL();
  Stream *stream = stream_of(handle);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpyBatchAsync: no such stream");
  auto copies = batch(to, from, sizes, count);
  if (aclError error = check_batch("aclrtMemcpyBatchAsync", copies, most, indexes, attributes, failed)) return error;
  return submit_copies("aclrtMemcpyBatchAsync", *stream, copies);
}

SIMULATED aclError aclrtMemcpyBatch(void **to, size_t *most, void **from, size_t *sizes, size_t count,
                                    aclrtMemcpyBatchAttr *, size_t *indexes, size_t attributes, size_t *failed) {
  RETURN_IF_IT_CANNOT_CALL();
  auto copies = batch(to, from, sizes, count);
  if (aclError error = check_batch("aclrtMemcpyBatch", copies, most, indexes, attributes, failed)) return error;
  for (const Copy &copy : copies)
    if (aclError error = copy_now("aclrtMemcpyBatch", copy)) return error;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtMemset(void *to, size_t most, int32_t value, size_t size) {
  RETURN_IF_IT_CANNOT_CALL();
  if (aclError error = check_sizes("aclrtMemset", {to, to, size}, most)) return error;
  if (forbidden_by_capture()) return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "aclrtMemset during a capture");
  std::vector<Range> ranges;
  add_ranges(ranges, to, size, true);
  record_host_access("aclrtMemset", ranges);
  memset(shadow(to), value, size);
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtMemsetAsync(void *to, size_t most, int32_t value, size_t size, aclrtStream handle) {
  RETURN_IF_IT_CANNOT_CALL();
  Stream *stream = stream_of(handle);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemsetAsync: no such stream");
  if (aclError error = check_sizes("aclrtMemsetAsync", {to, to, size}, most)) return error;
  return submit(*stream, Task{"aclrtMemsetAsync", TaskKind::kKernel, [=] { return set_bytes(to, value, size); }});
}
