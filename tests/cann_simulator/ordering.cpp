// See ordering.h.
//
// Accesses are kept in lists by memory and 2 MiB block. An access that is ordered before a new one, and covered by
// it, is dropped when the new one writes or both read: whatever is ordered after the new one is after it too.
#include "ordering.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace cann_simulator {
namespace {

constexpr uint64_t kBlock = uint64_t{2} << 20;
constexpr size_t kMaxReports = 1000;  // a process; one line for each pair of operations and streams

uint32_t bucket_of(uint64_t space, uint64_t block) {
  uint64_t mixed = (space * 0x9e3779b97f4a7c15u) ^ (block * 0xc2b2ae3d27d4eb4fu);
  return static_cast<uint32_t>(mixed >> 40) % kAccessBuckets;
}

void unlink_access(Access &access) {
  State &all = *state();
  if (access.previous)
    all.accesses[access.previous - 1].next = access.next;
  else
    all.buckets[access.bucket] = access.next;
  if (access.next) all.accesses[access.next - 1].previous = access.previous;
  access.used = 0;
}

// A free record, or the one that the clock hand finds: the store is bounded, old accesses are forgotten.
Access &new_access(uint32_t bucket) {
  State &all = *state();
  Access *taken = nullptr;
  for (uint32_t tries = 0; tries < 64 && !taken; tries++) {
    Access &candidate = all.accesses[all.access_clock_hand];
    all.access_clock_hand = (all.access_clock_hand + 1) % kMaxAccesses;
    if (!candidate.used || tries == 63) taken = &candidate;
  }
  if (taken->used) unlink_access(*taken);
  auto index = static_cast<uint32_t>(taken - all.accesses) + 1;
  taken->bucket = bucket;
  taken->previous = 0;
  taken->next = all.buckets[bucket];
  if (taken->next) all.accesses[taken->next - 1].previous = index;
  all.buckets[bucket] = index;
  taken->used = 1;
  return *taken;
}

void insert_access(const Author &author, const Range &range) {
  Access &access = new_access(bucket_of(range.space, range.begin / kBlock));
  access.space = range.space;
  access.begin = range.begin;
  access.end = range.end;
  access.stream = author.stream;
  access.agent = author.agent;
  access.count = author.count;
  access.process = acting_process();
  access.writes = range.writes;
  snprintf(access.operation, sizeof access.operation, "%s", author.operation.c_str());
}

// Cuts what `range` covers out of an access; what is left on both sides stays.
void cut_out(Access &access, const Range &range) {
  if (range.begin > access.begin && range.end < access.end) {
    Access &right = new_access(access.bucket);
    if (&right == &access) return;
    Access copy = access;
    copy.next = right.next;
    copy.previous = right.previous;
    copy.begin = range.end;
    right = copy;
    access.end = range.begin;
  } else if (range.begin > access.begin) {
    access.end = range.begin;
  } else if (range.end < access.end) {
    access.begin = range.end;
  } else {
    unlink_access(access);
  }
}

std::string describe(const char *operation, int32_t process, uint64_t stream, bool writes, uint64_t begin,
                     uint64_t end) {
  char text[256];
  snprintf(text, sizeof text,
           R"({"operation": "%s", "process": %d, "stream": %llu, "writes": %s, "begin": %llu, "end": %llu})",
           operation, process, static_cast<unsigned long long>(stream), writes ? "true" : "false",
           static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end));
  return text;
}

std::string race_line(const Access &earlier, const Author &author, const Range &range) {
  bool on_host = range.space >> 63;
  const Allocation *allocation = on_host ? nullptr : find_allocation(range.space);
  char head[160];
  snprintf(head, sizeof head, R"({"memory": "%s", "device": %d, "allocation": %llu, "first": )",
           on_host ? "host" : "device", allocation ? static_cast<int>(allocation->device) : -1,
           static_cast<unsigned long long>(range.space));
  return head +
         describe(earlier.operation, earlier.process, earlier.stream, earlier.writes, earlier.begin, earlier.end) +
         R"(, "second": )" +
         describe(author.operation.c_str(), acting_process(), author.stream, range.writes, range.begin, range.end) +
         "}\n";
}

// Once for each pair of operations on a pair of streams and one memory.
bool is_new_race(const Access &earlier, const Author &author, const Range &range) {
  static std::mutex guard;
  static std::set<std::string> seen;
  std::string key = std::string(earlier.operation) + "/" + author.operation + "/" + std::to_string(earlier.stream) +
                    "/" + std::to_string(author.stream) + "/" + std::to_string(range.space);
  std::lock_guard<std::mutex> hold(guard);
  return seen.size() < kMaxReports && seen.insert(key).second;
}

void append_lines(const std::string &lines) {
  if (lines.empty()) return;
  int descriptor = open((folder() + "/races.jsonl").c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0 || write(descriptor, lines.data(), lines.size()) < 0)
    fprintf(stderr, "CANN simulator: races.jsonl cannot be written: %s", lines.c_str());
  if (descriptor >= 0) close(descriptor);
}

Word *find_word(const Range &range) {
  for (auto &word : state()->words)
    if (word.space == range.space && word.offset == range.begin) return &word;
  return nullptr;
}

// Compares one range, within one block, with the accesses before it. Returns what is to be reported.
std::string compare(const Author &author, const Range &range, bool only_own) {
  State &all = *state();
  std::string lines;
  for (uint32_t next, at = all.buckets[bucket_of(range.space, range.begin / kBlock)]; at; at = next) {
    Access &earlier = all.accesses[at - 1];
    next = earlier.next;
    if (earlier.space != range.space || earlier.end <= range.begin || earlier.begin >= range.end) continue;
    if (only_own && earlier.process != acting_process()) continue;
    bool ordered = (*author.clock)[earlier.agent] >= earlier.count;
    if (!ordered && (range.writes || earlier.writes) && is_new_race(earlier, author, range))
      lines += race_line(earlier, author, range);
    bool replaced = range.writes || (ordered && !earlier.writes);
    if (replaced && !only_own) cut_out(earlier, range);
  }
  return lines;
}

void compare_and_record(const Author &author, const std::vector<Range> &ranges, bool only_own) {
  std::string lines;
  for (const Range &range : ranges)
    for (uint64_t begin = range.begin; begin < range.end;) {
      Range part{range.space, begin, std::min(range.end, (begin / kBlock + 1) * kBlock), range.writes};
      lines += compare(author, part, only_own);
      if (!only_own) insert_access(author, part);
      begin = part.end;
    }
  append_lines(lines);
}

}  // namespace

bool ordering_on() {
  static const bool on = [] {
    const char *set = getenv("CANN_SIMULATOR_ORDERING");
    return !set || strcmp(set, "0") != 0;
  }();
  return on;
}

void Clock::set(uint32_t agent, uint32_t count) {
  if (agent >= counts_.size()) counts_.resize(agent + 1);
  counts_[agent] = count;
}

void Clock::join(const uint32_t *counts, uint32_t size) {
  if (size > counts_.size()) counts_.resize(size);
  for (uint32_t i = 0; i < size; i++) counts_[i] = std::max(counts_[i], counts[i]);
}

uint32_t new_agent(uint64_t stream) {
  State &all = *state();
  uint32_t found = 0;
  for (uint32_t i = 1; i < all.agents_used && !found; i++)
    if (all.agents[i].process == 0) found = i;
  if (!found && all.agents_used < kMaxAgents) found = all.agents_used++;
  if (!found) {
    fprintf(stderr, "CANN simulator: more than %u streams at once; the rest go unchecked\n", kMaxAgents);
    return 0;
  }
  Agent &agent = all.agents[found];
  agent.process = getpid();
  agent.started = this_process().started;
  agent.stream = stream;
  return found;
}

void end_agent(uint32_t agent) {
  if (agent == 0) return;
  State &all = *state();
  all.agents[agent].process = 0;
  all.host_clock[agent] = all.agents[agent].count;
  all.host_version++;
}

void host_saw(const Clock &clock) {
  if (!ordering_on() || clock.empty()) return;
  StateLock hold;
  State &all = *state();
  for (uint32_t i = 0; i < clock.counts().size(); i++)
    if (clock.counts()[i] > all.host_clock[i]) {
      all.host_clock[i] = clock.counts()[i];
      all.host_version++;
    }
}

void record_accesses(const Author &author, const std::vector<Range> &ranges) {
  if (!ordering_on() || ranges.empty()) return;
  StateLock hold;
  compare_and_record(author, ranges, false);
}

void record_host_access(const std::string &operation, const std::vector<Range> &ranges, bool only_own) {
  if (!ordering_on() || ranges.empty()) return;
  StateLock hold;
  State &all = *state();
  all.host_version++;
  Author author{operation, 0, 0, ++all.host_clock[0], nullptr};
  Clock now;
  now.join(all.host_clock, all.agents_used);
  author.clock = &now;
  compare_and_record(author, ranges, only_own);
}

void word_written(const Range &range, uint64_t value, const Clock &clock) {
  if (!ordering_on()) return;
  State &all = *state();
  Word *word = find_word(range);
  for (uint32_t i = 0; i < kMaxWords && !word; i++)
    if (all.words[i].space == 0) word = &all.words[i];
  if (!word) word = &all.words[all.word_clock_hand++ % kMaxWords];
  memset(static_cast<void *>(word), 0, sizeof *word);
  word->space = range.space;
  word->offset = range.begin;
  word->value = value;
  std::copy(clock.counts().begin(), clock.counts().end(), word->clock);
}

Clock clock_of_word(const Range &range, uint64_t value) {
  Clock clock;
  const Word *word = find_word(range);
  if (word && word->value == value) clock.join(word->clock, state()->agents_used);
  return clock;
}

void forget_accesses(uint64_t space, uint64_t size) {
  State &all = *state();
  for (auto &word : all.words)
    if (word.space == space) memset(static_cast<void *>(&word), 0, sizeof word);
  for (uint64_t block = 0; block * kBlock < size; block++)
    for (uint32_t next, at = all.buckets[bucket_of(space, block)]; at; at = next) {
      next = all.accesses[at - 1].next;
      if (all.accesses[at - 1].space == space) unlink_access(all.accesses[at - 1]);
    }
}

}  // namespace cann_simulator
