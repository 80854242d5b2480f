// Addresses and physical memory apart. Pages of hicann/runtime docs/api_docs that are followed:
// aclrtReserveMemAddress, aclrtReleaseMemAddress, aclrtMallocPhysical, aclrtFreePhysical, aclrtMapMem, aclrtUnmapMem,
// aclrtMemGetAllocationGranularity.
#include <map>
#include <mutex>

#include "physical_handles.h"

namespace cann_simulator {
namespace {

std::mutex guard;
std::map<void *, size_t> reserved;

std::map<aclrtDrvMemHandle, std::shared_ptr<Physical>> &handles() {
  static auto *made = new std::map<aclrtDrvMemHandle, std::shared_ptr<Physical>>;
  return *made;
}

bool is_reserved(const void *address, size_t size) {
  std::lock_guard<std::mutex> hold(guard);
  for (const auto &[begin, length] : reserved)
    if (address >= begin && static_cast<const char *>(address) + size <= static_cast<const char *>(begin) + length)
      return true;
  return false;
}

}  // namespace

aclrtDrvMemHandle keep_physical(std::shared_ptr<Physical> physical) {
  std::lock_guard<std::mutex> hold(guard);
  aclrtDrvMemHandle handle = physical.get();
  handles()[handle] = std::move(physical);
  return handle;
}

std::shared_ptr<Physical> physical_of(aclrtDrvMemHandle handle) {
  std::lock_guard<std::mutex> hold(guard);
  auto found = handles().find(handle);
  return found == handles().end() ? nullptr : found->second;
}

}  // namespace cann_simulator

using namespace cann_simulator;

SIMULATED aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *, uint64_t) {
  RETURN_IF_IT_CANNOT_CALL();
  if (!size || alignment) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtReserveMemAddress: size %zu", size);
  size_t rounded = (size + kGranularity - 1) / kGranularity * kGranularity;
  *address = take_addresses(rounded);
  if (!*address) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the simulator is out of device addresses");
  std::lock_guard<std::mutex> hold(guard);
  reserved[*address] = rounded;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtReleaseMemAddress(void *address) {
  std::lock_guard<std::mutex> hold(guard);
  return reserved.erase(address) ? ACL_SUCCESS
                                 : fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress: %p", address);
}

SIMULATED aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *property,
                                       uint64_t flags) {
  RETURN_IF_IT_CANNOT_CALL();
  bool on_device = property && property->location.type == ACL_MEM_LOCATION_TYPE_DEVICE;
  if (!on_device || property->location.id >= device_count() || flags)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocPhysical: only memory of a device is simulated");
  if (!size || size % kGranularity)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocPhysical: %zu is no multiple of 2 MiB", size);
  auto device = static_cast<int>(property->location.id);
  if (aclError code = lost(device)) return fail(code, "aclrtMallocPhysical: device %d is lost", device);
  auto physical = new_physical(size, device);
  if (!physical)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocPhysical: device %d has no %zu bytes left", device, size);
  *handle = keep_physical(std::move(physical));
  return ACL_SUCCESS;
}

// Physical memory goes when its last holder of any process has freed it; a mapping is a holder too.
SIMULATED aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  std::shared_ptr<Physical> last = physical_of(handle);
  if (!last) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreePhysical: no such handle");
  std::lock_guard<std::mutex> hold(guard);
  handles().erase(handle);
  return ACL_SUCCESS;
}

// All of the physical memory, to addresses reserved before (page aclrtMapMem).
SIMULATED aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
  RETURN_IF_IT_CANNOT_CALL();
  std::shared_ptr<Physical> physical = physical_of(handle);
  if (!physical || size != physical->size || offset || flags)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: %zu bytes at offset %zu are not all of the handle's", size,
                offset);
  if (!is_reserved(address, size)) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: %p is not reserved", address);
  return map(static_cast<char *>(address), size, physical, 0, false);
}

SIMULATED aclError aclrtUnmapMem(void *address) {
  Mapping found{};
  if (!find_mapping(address, found) || found.address != address || found.from_malloc)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: %p is not of aclrtMapMem", address);
  found.physical.reset();
  unmap(static_cast<char *>(address));
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *, aclrtMemGranularityOptions, size_t *bytes) {
  *bytes = kGranularity;
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtMemSetAccess(void *, size_t, aclrtMemAccessDesc *, size_t) { return ACL_SUCCESS; }
