// See memory.h. Pages of hicann/runtime docs/api_docs that are followed: aclrtMalloc, aclrtFree, aclrtGetMemInfo,
// aclrtMallocHost, aclrtHostRegister, aclrtHostRegisterV2, aclrtHostUnregister, aclrtPointerGetAttributes,
// aclrtMemGetAddressRange.
#include "memory.h"

#include "teardown.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

namespace cann_simulator {
namespace {

constexpr size_t kArena = size_t{4} << 40;

struct HostRange {
  size_t size;
  uint64_t space;
  uint64_t offset;  // of the first byte in that space
  bool allocated;   // by aclrtMallocHost
};

struct Memory {
  std::mutex guard;
  char *arena = nullptr;   // where device pointers lie
  char *shadows = nullptr;  // where the bytes are
  size_t taken = kGranularity;
  std::map<const char *, Mapping> mappings;
  std::map<const char *, HostRange> host;
  std::shared_mutex in_use;
};

char *reserve_arena() {
  void *arena = mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return arena == MAP_FAILED ? nullptr : static_cast<char *>(arena);
}

Memory &memory() {
  static Memory *made = [] {
    auto *fresh = new Memory;  // never destroyed: workers may outlive static objects
    fresh->arena = reserve_arena();
    fresh->shadows = reserve_arena();
    return fresh;
  }();
  return *made;
}

size_t up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

template <typename Map>
auto containing(Map &map, const void *pointer) {
  auto found = map.upper_bound(static_cast<const char *>(pointer));
  if (found == map.begin()) return map.end();
  --found;
  return static_cast<const char *>(pointer) < found->first + found->second.size ? found : map.end();
}

uint64_t host_space(uint64_t a, uint64_t b) {
  return (uint64_t{1} << 63) | (std::hash<uint64_t>{}(a * 0x9e3779b97f4a7c15u ^ b) >> 1);
}

// Shared host memory is the same thing in every process: it is known by its file, private memory by its process.
HostRange describe_host(const void *pointer, size_t size, bool allocated) {
  auto address = reinterpret_cast<uint64_t>(pointer);
  HostRange range{size, host_space(getpid(), this_process().started), address, allocated};
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[512];
  while (maps && fgets(line, sizeof line, maps)) {
    unsigned long long begin, end, offset, inode;
    unsigned major, minor;
    char rights[8];
    if (sscanf(line, "%llx-%llx %7s %llx %x:%x %llu", &begin, &end, rights, &offset, &major, &minor, &inode) != 7)
      continue;
    if (address < begin || address >= end || rights[3] != 's' || inode == 0) continue;
    range.space = host_space((uint64_t{major} << 32) | minor, inode);
    range.offset = offset + (address - begin);
  }
  if (maps) fclose(maps);
  return range;
}

aclError add_host(void *pointer, size_t size, bool allocated) {
  Memory &all = memory();
  HostRange range = describe_host(pointer, size, allocated);
  std::lock_guard<std::mutex> hold(all.guard);
  const char *begin = static_cast<const char *>(pointer);
  auto next = all.host.lower_bound(begin);
  bool overlaps =
      (next != all.host.end() && next->first < begin + size) || containing(all.host, pointer) != all.host.end();
  if (overlaps) return fail(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "%p is registered already", pointer);
  all.host[begin] = range;
  return ACL_SUCCESS;
}

// Takes host memory out of the table; tasks that nothing orders before this still use it: that is a race.
bool remove_host(const void *pointer, bool allocated, const char *function, size_t &size) {
  std::vector<Range> ranges;
  {
    Memory &all = memory();
    std::lock_guard<std::mutex> hold(all.guard);
    auto found = all.host.find(static_cast<const char *>(pointer));
    if (found == all.host.end() || found->second.allocated != allocated) return false;
    const HostRange &range = found->second;
    size = range.size;
    ranges.push_back({range.space, range.offset, range.offset + range.size, true});
    all.host.erase(found);
  }
  record_host_access(function, ranges, true);
  return true;
}

aclError register_host(const char *function, void *pointer, size_t size) {
  if (!pointer || !size) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p, %zu bytes", function, pointer, size);
  if (reinterpret_cast<uintptr_t>(pointer) % kHostPage)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is not aligned to 4 KiB", function, pointer);
  return add_host(pointer, size, false);
}

}  // namespace

Physical::~Physical() {
  {
    StateLock hold;
    if (Allocation *shared = find_allocation(allocation)) drop_holder(*shared, getpid());
  }
  close(descriptor);
}

bool is_device(const void *pointer) {
  auto *address = static_cast<const char *>(pointer);
  return address >= memory().arena && address < memory().arena + kArena;
}

void *shadow(const void *pointer) {
  if (!is_device(pointer)) return const_cast<void *>(pointer);
  return memory().shadows + (static_cast<const char *>(pointer) - memory().arena);
}

bool is_mapped(const void *pointer, size_t size) {
  Memory &all = memory();
  std::lock_guard<std::mutex> hold(all.guard);
  auto *at = static_cast<const char *>(pointer), *end = at + size;
  while (at < end) {
    auto found = containing(all.mappings, at);
    if (found == all.mappings.end()) return false;
    at = found->first + found->second.size;
  }
  return true;
}

bool find_mapping(const void *pointer, Mapping &result) {
  Memory &all = memory();
  std::lock_guard<std::mutex> hold(all.guard);
  auto found = containing(all.mappings, pointer);
  if (found == all.mappings.end()) return false;
  result = found->second;
  return true;
}

bool is_foreign(const void *pointer) {
  Mapping found{};
  return find_mapping(pointer, found) && found.physical->owner_device != found.physical->device;
}

bool is_pinned(const void *pointer, size_t size) {
  Memory &all = memory();
  std::lock_guard<std::mutex> hold(all.guard);
  auto found = containing(all.host, pointer);
  return found != all.host.end() &&
         static_cast<const char *>(pointer) + size <= found->first + found->second.size;
}

void add_ranges(std::vector<Range> &ranges, const void *pointer, size_t size, bool writes) {
  Memory &all = memory();
  std::lock_guard<std::mutex> hold(all.guard);
  auto *at = static_cast<const char *>(pointer), *end = at + size;
  if (auto host = containing(all.host, at); host != all.host.end()) {
    uint64_t offset = host->second.offset + (at - host->first);
    ranges.push_back({host->second.space, offset, offset + size, writes});
    return;
  }
  while (at < end) {
    auto found = containing(all.mappings, at);
    if (found == all.mappings.end()) return;
    const Mapping &mapping = found->second;
    const char *part_end = std::min(end, static_cast<const char *>(mapping.address) + mapping.size);
    uint64_t offset = mapping.offset + (at - mapping.address);
    ranges.push_back({mapping.physical->allocation, offset, offset + (part_end - at), writes});
    at = part_end;
  }
}

std::shared_ptr<Physical> new_physical(size_t size, int device) {
  if (take_fault(control().failing_allocations)) return nullptr;
  int descriptor = memfd_create("cann_simulator", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(size)) != 0) {
    if (descriptor >= 0) close(descriptor);
    return nullptr;
  }
  StateLock hold;
  auto limit = control().memory_bytes[device].load();
  if (used_bytes(device) + size > limit) sweep_dead_processes();
  Allocation *shared = used_bytes(device) + size > limit ? nullptr : new_allocation(size, device, descriptor);
  if (!shared) {
    close(descriptor);
    return nullptr;
  }
  keep_descriptor(descriptor);
  return std::shared_ptr<Physical>(new Physical{descriptor, size, device, device, shared->id, false});
}

char *take_addresses(size_t size) {
  Memory &all = memory();
  std::lock_guard<std::mutex> hold(all.guard);
  char *address = all.arena + all.taken;
  all.taken += up(size, kGranularity) + kGranularity;  // a gap, so that running over the end is found
  return all.taken < kArena ? address : nullptr;
}

aclError map(char *address, size_t size, const std::shared_ptr<Physical> &physical, size_t offset,
             bool from_malloc) {
  Memory &all = memory();
  std::lock_guard<std::mutex> hold(all.guard);
  auto next = all.mappings.lower_bound(address);
  if ((next != all.mappings.end() && next->first < address + size) ||
      containing(all.mappings, address) != all.mappings.end())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%p is mapped already", static_cast<void *>(address));
  void *mapped = mmap(shadow(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->descriptor,
                      static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "mmap of simulated device memory failed");
  all.mappings[address] = Mapping{address, size, physical, offset, from_malloc};
  return ACL_SUCCESS;
}

bool unmap(char *address) {
  Memory &all = memory();
  std::shared_ptr<Physical> last;  // dropped after the locks
  std::unique_lock<std::shared_mutex> no_task(all.in_use);
  std::lock_guard<std::mutex> hold(all.guard);
  auto found = all.mappings.find(address);
  if (found == all.mappings.end()) return false;
  mmap(shadow(address), found->second.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  last = found->second.physical;
  all.mappings.erase(found);
  return true;
}

std::shared_mutex &memory_in_use() { return memory().in_use; }

}  // namespace cann_simulator

using namespace cann_simulator;

// Rounded up to 32 bytes and 32 more (page aclrtMalloc), and then to whole huge pages of 2 MiB.
SIMULATED aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy) {
  RETURN_IF_IT_CANNOT_CALL();
  if (!pointer || !size) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc of %zu bytes", size);
  size_t rounded = up(up(size, 32) + 32, kGranularity);
  auto physical = new_physical(rounded, current_device());
  if (!physical)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMalloc: device %d has no %zu bytes left", current_device(),
                rounded);
  char *address = take_addresses(rounded);
  if (!address) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the simulator is out of device addresses");
  *pointer = address;
  return map(address, rounded, physical, 0, true);
}

SIMULATED aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, size, policy);
}

// Frees at once and waits for no stream (page aclrtFree): tasks that may still use the memory are a race.
SIMULATED aclError aclrtFree(void *pointer) {
  Mapping found{};
  if (!find_mapping(pointer, found) || found.address != pointer || !found.from_malloc)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: %p is not of aclrtMalloc", pointer);
  record_host_access("aclrtFree", {{found.physical->allocation, 0, found.size, true}}, true);
  found.physical.reset();
  return unmap(static_cast<char *>(pointer)) ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

// What all processes together have allocated on the card is not free.
SIMULATED aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
  RETURN_IF_IT_CANNOT_CALL();
  StateLock hold;
  sweep_dead_processes();
  *total_bytes = control().memory_bytes[current_device()];
  *free_bytes = *total_bytes - std::min<size_t>(*total_bytes, used_bytes(current_device()));
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtMallocHost(void **pointer, size_t size) {
  RETURN_IF_IT_CANNOT_CALL();
  if (!pointer || !size) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocHost of %zu bytes", size);
  size_t rounded = up(size, kHostPage);
  void *made = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost of %zu bytes", size);
  *pointer = made;
  return add_host(made, rounded, true);
}

SIMULATED aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *) {
  return aclrtMallocHost(pointer, size);
}

SIMULATED aclError aclrtFreeHost(void *pointer) {
  size_t size = 0;
  if (!remove_host(pointer, true, "aclrtFreeHost", size))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: %p is not of aclrtMallocHost", pointer);
  std::unique_lock<std::shared_mutex> no_task(memory_in_use());
  munmap(pointer, size);
  return ACL_SUCCESS;
}

SIMULATED aclError aclrtHostRegister(void *pointer, uint64_t size, aclrtHostRegisterType, void **device_pointer) {
  RETURN_IF_IT_CANNOT_CALL();
  if (device_pointer) *device_pointer = pointer;
  return register_host("aclrtHostRegister", pointer, size);
}

SIMULATED aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t) {
  RETURN_IF_IT_CANNOT_CALL();
  return register_host("aclrtHostRegisterV2", pointer, size);
}

SIMULATED aclError aclrtHostGetDevicePointer(void *pointer, void **device_pointer, uint32_t) {
  RETURN_IF_IT_CANNOT_CALL();
  *device_pointer = pointer;
  return is_pinned(pointer, 1) ? ACL_SUCCESS : fail(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "%p", pointer);
}

SIMULATED aclError aclrtHostUnregister(void *pointer) {
  size_t size = 0;
  if (!remove_host(pointer, false, "aclrtHostUnregister", size))
    return fail(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "aclrtHostUnregister: %p", pointer);
  return ACL_SUCCESS;
}

// The card that the memory is on, also where another one uses it.
SIMULATED aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
  *attributes = aclrtPtrAttributes{};
  Mapping found{};
  if (find_mapping(pointer, found)) {
    attributes->location = {static_cast<uint32_t>(found.physical->owner_device), ACL_MEM_LOCATION_TYPE_DEVICE};
    attributes->pageSize = kGranularity;
  } else {
    bool pinned = is_pinned(pointer, 1);
    attributes->location.type = pinned ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    attributes->pageSize = kHostPage;
  }
  return ACL_SUCCESS;
}

// The block that was allocated, imported or mapped in one go (ACL's header, which older ones do not have).
SIMULATED aclError aclrtMemGetAddressRange(void *pointer, void **base, size_t *size) {
  RETURN_IF_IT_CANNOT_CALL();
  if (cann_older_than(9, 0)) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtMemGetAddressRange");
  Mapping found{};
  if (!find_mapping(pointer, found))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemGetAddressRange: %p is no device memory", pointer);
  *base = found.address;
  *size = found.size;
  return ACL_SUCCESS;
}
