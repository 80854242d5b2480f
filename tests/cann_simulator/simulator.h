// What all parts of the simulated libascendcl.so use: ACL's own headers, errors, the calling thread's device.
#pragma once

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <atomic>
#include <cstdint>
#include <string>

// The functions that torch_npu calls; ACL's headers declare them, so a wrong signature does not compile.
#define SIMULATED extern "C" __attribute__((visibility("default")))

namespace cann_simulator {

// Keeps the text for aclGetRecentErrMsg and returns the code.
aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The device of the calling thread; -1 before aclrtSetDevice.
int current_device();
uint32_t device_count();

// What a call on the current device returns at once: no device set, or the card is lost. 0: go on.
aclError cannot_call(const char *function);
aclError lost(int device);

bool cann_older_than(int major, int minor);

// Takes one from a count of faults in the control file.
bool take_fault(std::atomic<uint64_t> &count);

}  // namespace cann_simulator

#define RETURN_IF_IT_CANNOT_CALL()                                                        \
  do {                                                                                    \
    if (aclError reason = cann_simulator::cannot_call(__func__)) return reason;           \
  } while (0)
