// Words of device memory that a stream writes and waits for. Pages of hicann/runtime docs/api_docs that are followed:
// aclrtValueWrite, aclrtValueWait. A wait that finds a value is an edge of the ordering record, from the write of that
// value by a stream of any process. A host that reads the word has seen nothing.
#include <unistd.h>

#include <chrono>
#include <shared_mutex>
#include <string>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace cann_simulator {
namespace {

bool reached(uint64_t found, uint64_t value, uint32_t flag) {
  switch (flag) {
    case 0: return found >= value;
    case 1: return found == value;
    case 2: return (found & value) != 0;
    default: return ~(found | value) != 0;
  }
}

// Where the word is, whatever the process calls it. Nothing: its memory was freed.
std::vector<Range> place_of(const void *pointer) {
  std::vector<Range> found;
  if (is_mapped(pointer, sizeof(uint64_t))) add_ranges(found, pointer, sizeof(uint64_t), true);
  return found;
}

aclError freed(const char *function) {
  return fail_in_task(ACL_ERROR_RT_COPY_DATA, std::string(function) + ": the word's memory was freed before it ran");
}

aclError write_value(void *pointer, uint64_t value) {
  std::shared_lock<std::shared_mutex> in_use(memory_in_use());
  auto place = place_of(pointer);
  if (place.empty()) return freed("aclrtValueWrite");
  const Clock *clock = running_author().clock;
  StateLock hold;
  *static_cast<volatile uint64_t *>(shadow(pointer)) = value;
  if (clock) word_written(place[0], value, *clock);
  return ACL_SUCCESS;
}

// Waits for ever on a device: whoever was to write may be dead. What follows comes after the write that was found.
aclError wait_for_value(const void *pointer, uint64_t value, uint32_t flag) {
  auto end = std::chrono::steady_clock::now() + wait_limit();
  for (;; usleep(20)) {
    std::shared_lock<std::shared_mutex> in_use(memory_in_use());
    auto place = place_of(pointer);
    if (place.empty()) return freed("aclrtValueWait");
    auto *word = static_cast<volatile uint64_t *>(shadow(pointer));
    if (reached(*word, value, flag)) {
      Clock written;
      {
        StateLock hold;
        uint64_t found = *word;
        if (!reached(found, value, flag)) continue;  // written again meanwhile
        written = clock_of_word(place[0], found);
      }
      order_behind(written);
      return ACL_SUCCESS;
    }
    if (std::chrono::steady_clock::now() < end) continue;
    if (!test_holds_tasks())
      return waited_too_long("aclrtValueWait: the value " + std::to_string(value) + " did not come");
    end = std::chrono::steady_clock::now() + wait_limit();
  }
}

}  // namespace
}  // namespace cann_simulator

using namespace cann_simulator;

SIMULATED aclError aclrtValueWrite(void *pointer, uint64_t value, uint32_t, aclrtStream handle) {
  RETURN_IF_IT_CANNOT_CALL();
  Stream *stream = stream_of(handle);
  if (!stream || !is_mapped(pointer, 8)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWrite: %p", pointer);
  return submit(*stream, Task{"aclrtValueWrite", TaskKind::kOnce, [=] { return write_value(pointer, value); }});
}

SIMULATED aclError aclrtValueWait(void *pointer, uint64_t value, uint32_t flag, aclrtStream handle) {
  RETURN_IF_IT_CANNOT_CALL();
  Stream *stream = stream_of(handle);
  if (!stream || !is_mapped(pointer, 8)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait: %p", pointer);
  return submit(*stream, Task{"aclrtValueWait", TaskKind::kSync, [=] { return wait_for_value(pointer, value, flag); }});
}
