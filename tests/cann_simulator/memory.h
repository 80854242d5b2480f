// Device memory and host memory as one process sees them.
//
// Device memory lies in memfds that are mapped at a shadow address only. The pointers that torch_npu gets lie in an
// arena without access rights, so that the CPU cannot touch device memory by mistake, and are never given out twice,
// so that a stale pointer is found. Streams' workers translate pointers with shadow().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "ordering.h"
#include "simulator.h"

namespace cann_simulator {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kHostPage = 4096;

// This process's hold on physical memory; the last reference drops it.
struct Physical {
  int descriptor;
  size_t size;
  int owner_device;  // the card that the memory is on
  int device;        // the card that this process uses it from: another one limits what copies may do
  uint64_t allocation;
  bool imported;
  ~Physical();
};

// What a device pointer belongs to.
struct Mapping {
  char *address;
  size_t size;
  std::shared_ptr<Physical> physical;
  size_t offset;  // of the mapping's first byte in the physical memory
  bool from_malloc;
};

void *shadow(const void *pointer);
bool is_device(const void *pointer);
bool is_mapped(const void *pointer, size_t size);  // all of it
bool is_foreign(const void *pointer);              // imported from another card than it is used on
bool is_pinned(const void *pointer, size_t size);  // all of it, in one pinned or registered piece of host memory

// The same bytes by what they are, for the ordering record. Nothing for pageable host memory: copies of it are over
// when the call returns.
void add_ranges(std::vector<Range> &ranges, const void *pointer, size_t size, bool writes);

std::shared_ptr<Physical> new_physical(size_t size, int device);  // null: out of memory
char *take_addresses(size_t size);
aclError map(char *address, size_t size, const std::shared_ptr<Physical> &physical, size_t offset, bool from_malloc);
bool unmap(char *address);
bool find_mapping(const void *pointer, Mapping &found);

// Tasks hold it shared while they touch memory, so that unmapping waits for their end and not for their order.
std::shared_mutex &memory_in_use();

}  // namespace cann_simulator
