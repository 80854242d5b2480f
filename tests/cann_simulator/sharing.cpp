// Device memory between processes. Pages of hicann/runtime docs/api_docs that are followed:
// aclrtMemExportToShareableHandle, aclrtMemSetPidToShareableHandle, aclrtMemImportFromShareableHandle,
// aclrtIpcMemGetExportKey, aclrtIpcMemSetImportPid, aclrtIpcMemImportByKey, aclrtIpcMemClose, aclrtDeviceGetBareTgid.
//
// Who imports opens the memory's memfd through any process that holds it, and is a holder then itself.
#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "physical_handles.h"
#include "teardown.h"

namespace cann_simulator {
namespace {

std::mutex guard;
std::map<std::string, void *> imported_keys;

int open_memory(const Allocation &allocation) {
  for (uint32_t i = 0; i < allocation.holder_count; i++) {
    int32_t process = process_of_descriptors(allocation.holders[i]);
    if (!process) continue;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, allocation.holders[i].descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor >= 0) return descriptor;
  }
  return -1;
}

// With the state's lock held: makes this process a holder.
std::shared_ptr<Physical> hold_memory(Allocation &allocation, int device) {
  for (uint32_t i = 0; i < allocation.holder_count; i++)
    if (allocation.holders[i].process == getpid()) return nullptr;  // once a process: see import_...
  int descriptor = open_memory(allocation);
  if (descriptor < 0 || allocation.holder_count == kMaxHolders) {
    if (descriptor >= 0) close(descriptor);
    return nullptr;
  }
  allocation.holders[allocation.holder_count++] = this_process(descriptor);
  keep_descriptor(descriptor);
  auto owner = static_cast<int>(allocation.device);
  return std::shared_ptr<Physical>(new Physical{descriptor, allocation.size, owner, device, allocation.id, true});
}

// An entry is of a process that ran when it was named: a number may be given out again (the driver's source).
template <typename Export>
aclError check_this_process(const Export &exported, const char *what) {
  if (!exported.checks_process) return ACL_SUCCESS;
  const Name *name = find_name(exported.named, getpid());
  if (!name) return fail(ACL_ERROR_RT_NO_PERMISSION, "process %d is not in the list of the %s", getpid(), what);
  if (this_process().started > name->since)
    return fail(ACL_ERROR_RT_NO_PERMISSION, "process %d has started after it was named for the %s", getpid(), what);
  return ACL_SUCCESS;
}

aclError allow(NameList &list, const int32_t *processes, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (!add_name(list, processes[i]))
      return fail(ACL_ERROR_RT_OVER_LIMIT, "more than %u processes in a list, or too many lists", kMaxNamed);
  return ACL_SUCCESS;
}

Allocation *exported_as(uint64_t shareable_handle) {
  for (uint32_t slot = 0; slot < state()->allocations_used; slot++) {
    Allocation &allocation = state()->allocations[slot];
    if (shareable_handle && allocation.id && allocation.shareable_handle == shareable_handle) return &allocation;
  }
  return nullptr;
}

MemoryKey *find_key(const char *text) {
  for (auto &key : state()->keys)
    if (key.text[0] && strcmp(key.text, text) == 0) return &key;
  return nullptr;
}

// 64 characters that nobody guesses: a key without a list of processes is all that its finder needs.
void make_text(char *text) {
  unsigned char random[32] = {};
  if (getrandom(random, sizeof random, 0) < 0) return;
  for (size_t i = 0; i < sizeof random; i++) snprintf(text + 2 * i, 3, "%02x", random[i]);
}

}  // namespace
}  // namespace cann_simulator

using namespace cann_simulator;

SIMULATED aclError aclrtDeviceGetBareTgid(int32_t *process) {
  *process = getpid();
  return ACL_SUCCESS;
}

// One shareable handle for one handle (page aclrtMemExportToShareableHandle).
SIMULATED aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType type, uint64_t flags,
                                                   uint64_t *shareable) {
  RETURN_IF_IT_CANNOT_CALL();
  std::shared_ptr<Physical> physical = physical_of(handle);
  if (!physical || physical->imported || type != ACL_MEM_HANDLE_TYPE_NONE)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemExportToShareableHandle: not a handle of aclrtMallocPhysical");
  StateLock hold;
  Allocation *allocation = find_allocation(physical->allocation);
  if (!allocation || allocation->shareable_handle)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemExportToShareableHandle: the handle is exported already");
  allocation->shareable_handle = (static_cast<uint64_t>(getpid()) << 32) | allocation->id;
  allocation->exporter = getpid();
  allocation->named = NameList{state()->next_generation++, 0};
  allocation->checks_process = !(flags & ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION);
  *shareable = allocation->shareable_handle;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtMemSetPidToShareableHandle(uint64_t shareable, int32_t *processes, size_t count) {
  RETURN_IF_IT_CANNOT_CALL();
  StateLock hold;
  Allocation *allocation = exported_as(shareable);
  if (!allocation || allocation->exporter != getpid())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemSetPidToShareableHandle: not exported by this process");
  sweep_dead_processes();
  return allow(allocation->named, processes, count);
}

// Not in the exporter's own process, and once in any other (page aclrtMemImportFromShareableHandle).
SIMULATED aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device, aclrtDrvMemHandle *handle) {
  RETURN_IF_IT_CANNOT_CALL();
  if (device < 0 || device >= static_cast<int>(device_count()))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtMemImportFromShareableHandle: device %d", device);
  std::shared_ptr<Physical> physical;
  {
    StateLock hold;
    sweep_dead_processes();
    Allocation *allocation = exported_as(shareable);
    if (!allocation) return fail(ACL_ERROR_RT_PARAM_INVALID, "the shareable handle is of no memory that still exists");
    if (aclError error = check_this_process(*allocation, "shareable handle")) return error;
    physical = hold_memory(*allocation, device);
  }
  if (!physical) return fail(ACL_ERROR_RT_PARAM_INVALID, "this process holds the memory already, or cannot reach it");
  *handle = keep_physical(std::move(physical));
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtIpcMemGetExportKey(void *pointer, size_t size, char *text, size_t length, uint64_t flags) {
  RETURN_IF_IT_CANNOT_CALL();
  Mapping found{};
  if (!find_mapping(pointer, found) || found.address != pointer || size > found.size || length < 65)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemGetExportKey: %p is no allocation of %zu bytes", pointer, size);
  StateLock hold;
  sweep_dead_processes();
  for (auto &key : state()->keys) {
    if (key.text[0]) continue;
    make_text(key.text);
    key.allocation = found.physical->allocation;
    key.offset = found.offset;
    key.size = found.size;
    key.exporter = this_process();
    key.named = NameList{state()->next_generation++, 0};
    key.checks_process = !(flags & ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION);
    snprintf(text, length, "%s", key.text);
    return ACL_SUCCESS;
  }
  return fail(ACL_ERROR_RT_OVER_LIMIT, "aclrtIpcMemGetExportKey: more than %u keys", kMaxKeys);
}

SIMULATED aclError aclrtIpcMemSetImportPid(const char *text, int32_t *processes, size_t count) {
  RETURN_IF_IT_CANNOT_CALL();
  StateLock hold;
  MemoryKey *key = find_key(text);
  if (!key || key->exporter.process != getpid())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemSetImportPid: not a key of this process");
  sweep_dead_processes();
  return allow(key->named, processes, count);
}

// From another card than the exporter's, is_foreign() is true of it and copies are limited.
SIMULATED aclError aclrtIpcMemImportByKey(void **pointer, const char *text, uint64_t) {
  RETURN_IF_IT_CANNOT_CALL();
  std::lock_guard<std::mutex> one_at_a_time(guard);
  if (auto found = imported_keys.find(text); found != imported_keys.end()) {
    *pointer = found->second;
    return ACL_SUCCESS;
  }
  std::shared_ptr<Physical> physical;
  size_t offset, size;
  {
    StateLock hold;
    sweep_dead_processes();
    MemoryKey *key = find_key(text);
    Allocation *allocation = key ? find_allocation(key->allocation) : nullptr;
    if (!allocation) return fail(ACL_ERROR_RT_PARAM_INVALID, "the key is of no memory that its exporter still has");
    if (aclError error = check_this_process(*key, "key")) return error;
    physical = hold_memory(*allocation, current_device());
    offset = key->offset;
    size = key->size;
  }
  if (!physical) return fail(ACL_ERROR_RT_PARAM_INVALID, "this process holds the memory already, or cannot reach it");
  char *address = take_addresses(size);
  if (!address) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the simulator is out of device addresses");
  if (aclError error = map(address, size, physical, offset, false)) return error;
  *pointer = imported_keys[text] = address;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtIpcMemClose(const char *text) {
  std::lock_guard<std::mutex> one_at_a_time(guard);
  if (auto found = imported_keys.find(text); found != imported_keys.end()) {
    unmap(static_cast<char *>(found->second));
    imported_keys.erase(found);
    return ACL_SUCCESS;
  }
  StateLock hold;
  MemoryKey *key = find_key(text);
  if (!key || key->exporter.process != getpid())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemClose: no such key");
  forget_key(*key);
  return ACL_SUCCESS;
}
