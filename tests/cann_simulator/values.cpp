// Words of device memory that a stream writes and waits for. Pages of hicann/runtime docs/api_docs that are followed:
// aclrtValueWrite, aclrtValueWait. To find the word's value is no edge of the ordering record: it would hide races.
#include <unistd.h>

#include <chrono>

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

aclError wait_for_value(const void *pointer, uint64_t value, uint32_t flag) {
  auto *word = static_cast<volatile uint64_t *>(shadow(pointer));
  auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(control().wait_limit_ms);
  while (!reached(*word, value, flag)) {
    if (std::chrono::steady_clock::now() > end)
      return fail_in_task(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "aclrtValueWait: the value did not come");
    usleep(20);
  }
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace cann_simulator

using namespace cann_simulator;

SIMULATED aclError aclrtValueWrite(void *pointer, uint64_t value, uint32_t, aclrtStream handle) {
  RETURN_IF_IT_CANNOT_CALL();
  Stream *stream = stream_of(handle);
  if (!stream || !is_mapped(pointer, 8)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWrite: %p", pointer);
  return submit(*stream, Task{"aclrtValueWrite", TaskKind::kSync, [=] {
                                *static_cast<volatile uint64_t *>(shadow(pointer)) = value;
                                return ACL_SUCCESS;
                              }});
}

SIMULATED aclError aclrtValueWait(void *pointer, uint64_t value, uint32_t flag, aclrtStream handle) {
  RETURN_IF_IT_CANNOT_CALL();
  Stream *stream = stream_of(handle);
  if (!stream || !is_mapped(pointer, 8)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait: %p", pointer);
  return submit(*stream, Task{"aclrtValueWait", TaskKind::kSync, [=] { return wait_for_value(pointer, value, flag); }});
}
