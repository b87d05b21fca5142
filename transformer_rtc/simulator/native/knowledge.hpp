// SPDX-License-Identifier: Apache-2.0
// Who knows of what: vector clocks, for thousands of threads that mostly learn of each other in groups.
//
// An event is an access of one thread at one tick of its clock. Another thread knows of it if a chain of barriers,
// releases and acquires leads there ("happens before"). When a CTA meets, all its clocks are set to one tick that none
// of them has had, so that "everything below it" is one number for the whole CTA; and likewise for a warp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

using Clock = uint32_t;

// Whose clock it is.
enum class Owner : uint64_t {
  thread,   // numbered through the grid
  warp,     // all threads of a warp
  cta,      // all threads of a CTA
  barrier,  // asynchronous stores that a barrier in shared memory has counted, by its phase
  pending,  // an asynchronous access that has not been waited for: nobody knows of it
};

using Key = uint64_t;
constexpr Key key_of(Owner owner, uint64_t number) { return static_cast<uint64_t>(owner) << 56 | number; }
constexpr Owner owner_of(Key key) { return static_cast<Owner>(key >> 56); }
constexpr uint64_t number_of(Key key) { return key & ((uint64_t{1} << 56) - 1); }

// For each owner, the tick below which all its events are known.
class Knowledge {
 public:
  bool empty() const { return entries_.empty(); }
  void clear() { entries_.clear(); }

  Clock below(Key key) const {
    const auto at = find(key);
    return at != entries_.end() && at->key == key ? at->below : 0;
  }

  void learn(Key key, Clock below) {
    if (below == 0) return;
    const auto at = entries_.begin() + (find(key) - entries_.begin());
    if (at != entries_.end() && at->key == key) {
      at->below = std::max(at->below, below);
    } else {
      entries_.insert(at, {key, below});
    }
  }

  // What `other` says of the owners for which `wanted` holds.
  template <class Wanted>
  void join_some(const Knowledge& other, Wanted wanted) {
    for (const Entry& entry : other.entries_) {
      if (wanted(entry.key)) learn(entry.key, entry.below);
    }
  }

  void join(const Knowledge& other) {
    if (other.empty() || &other == this) return;
    if (empty()) {
      entries_ = other.entries_;
      return;
    }
    std::vector<Entry> merged;
    merged.reserve(entries_.size() + other.entries_.size());
    auto a = entries_.begin();
    auto b = other.entries_.begin();
    while (a != entries_.end() || b != other.entries_.end()) {
      if (b == other.entries_.end() || (a != entries_.end() && a->key < b->key)) {
        merged.push_back(*a++);
      } else if (a == entries_.end() || b->key < a->key) {
        merged.push_back(*b++);
      } else {
        merged.push_back({a->key, std::max(a->below, b->below)});
        ++a, ++b;
      }
    }
    entries_.swap(merged);
  }

 private:
  struct Entry {
    Key key;
    Clock below;
  };

  std::vector<Entry>::const_iterator find(Key key) const {
    return std::lower_bound(entries_.begin(), entries_.end(), key,
                            [](const Entry& entry, Key wanted) { return entry.key < wanted; });
  }

  std::vector<Entry> entries_;  // sorted
};

// One access that may be half of a race.
struct Event {
  Key key = 0;
  const void* caller = nullptr;
  Clock clock = 0;  // 0: there was none
  bool atomic = false;
  bool wrote = false;
};
