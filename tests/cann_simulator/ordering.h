// The record of who touched which memory when, and the search for accesses that nothing orders.
//
// A happens-before checker with vector clocks. Each stream is an agent that counts its tasks; "the host" is one
// agent for all threads of all processes. An access is known by (agent, count); it happened before a task whose
// clock holds at least that count for that agent. What the edges are is decided where they arise: streams.cpp
// (submission, stream order, synchronising, queries), events.cpp (record to wait, across processes too) and values.cpp
// (a word's write to the wait that finds its value).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shared_state.h"

namespace cann_simulator {

// Counts by agent; agents beyond its size count as 0.
class Clock {
 public:
  uint32_t operator[](uint32_t agent) const { return agent < counts_.size() ? counts_[agent] : 0; }
  void set(uint32_t agent, uint32_t count);
  void join(const uint32_t *counts, uint32_t size);
  void join(const Clock &other) { join(other.counts_.data(), static_cast<uint32_t>(other.counts_.size())); }
  const std::vector<uint32_t> &counts() const { return counts_; }
  bool empty() const { return counts_.empty(); }

 private:
  std::vector<uint32_t> counts_;
};

// Who makes an access: a task of a stream, or the host (agent 0).
struct Author {
  std::string operation;
  uint64_t stream = 0;
  uint32_t agent = 0;
  uint32_t count = 0;
  const Clock *clock = nullptr;
};

struct Range {
  uint64_t space;
  uint64_t begin;
  uint64_t end;
  bool writes;
};

bool ordering_on();  // CANN_SIMULATOR_ORDERING=0 turns it off

// A slot for a stream's clock. With the state's lock held.
uint32_t new_agent(uint64_t stream);
void end_agent(uint32_t agent);

// What the host has seen complete becomes an edge to all that any process submits from now on.
void host_saw(const Clock &clock);

// Compares with what is recorded, reports races, then records. Takes the state's lock.
void record_accesses(const Author &author, const std::vector<Range> &ranges);

// The same for an access by the host itself, now. only_own: compare with this process's tasks alone and record
// nothing; for memory that is given back.
void record_host_access(const std::string &operation, const std::vector<Range> &ranges, bool only_own = false);

// A value that a stream wrote to a word of device memory, and what that came after. With the state's lock held.
void word_written(const Range &word, uint64_t value, const Clock &clock);
Clock clock_of_word(const Range &word, uint64_t value);  // empty: no stream wrote this value there last

// With the state's lock held.
void forget_accesses(uint64_t space, uint64_t size);

}  // namespace cann_simulator
