// SPDX-License-Identifier: Apache-2.0
// The machine that runs a kernel: CTAs, warps and threads, what they wait for, and what the checker knows of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../interface.h"
#include "endless.hpp"
#include "fiber.hpp"
#include "knowledge.hpp"
#include "shadow.hpp"

namespace simulator {

using trtc_simulator::Atomic;
using trtc_simulator::Collective;
using trtc_simulator::Index;
using trtc_simulator::Order;
using trtc_simulator::Place;

// Which of the threads that can go on does.
enum class Schedule { first_in, last_in, random };

// Memory that a kernel may touch.
struct Extent {
  uintptr_t begin, end;
  bool writable;
  bool initialised;  // before the launch
  int name;          // in Launch::names
};

struct Launch {
  void (*entry)(const void*);
  const void* params;
  Index grid, block, cluster;
  unsigned dynamic_shared_memory;
  bool cooperative;  // all CTAs are resident together
  bool checked;
  Schedule schedule;
  uint64_t seed;
  double endless_seconds;  // of CPU time without a change that the machine could see
  bool knows_memory;       // whether `memory` is all that the kernel may write, but for stacks and shared memory
  std::vector<Extent> memory;
  std::vector<Extent> extents;
  std::vector<std::string> names;
  std::vector<trtc_simulator::SharedVariable*> shared_variables;
  uintptr_t code_begin, code_end;  // of the module
};

struct Party {
  const void* caller = nullptr;
  Index cta{}, thread{};
  bool known = false;  // whether cta and thread are
};

struct Fault {
  std::string kind;  // empty: none
  std::string message;
  Party at, other;
  std::string file;  // where the compiler told; else empty
  unsigned line = 0;
};

// Callers of one barrier that should be one line.
struct Suspect {
  const char* what;
  Party a, b;
};

inline uint64_t volume(const Index& size) { return static_cast<uint64_t>(size.x) * size.y * size.z; }

inline Index unravel(uint64_t number, const Index& size) {
  return {static_cast<unsigned>(number % size.x), static_cast<unsigned>(number / size.x % size.y),
          static_cast<unsigned>(number / size.x / size.y)};
}

inline std::string text(const Index& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

inline std::string bytes_text(unsigned bytes) { return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes"); }

struct Cta;
struct Warp;

// What an access does; a change is a read and a write at once.
enum class Way { reads, writes, changes };

enum class State { fresh, ready, waiting, polling, finished };

struct AsyncCopy {
  char* to;
  const char* from;
  unsigned bytes;
  unsigned group;  // of the thread's copies, in the order of its commits
  const void* caller;
};

struct Thread {
  Place place;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  State state = State::fresh;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  unsigned index = 0;   // in the CTA
  uint64_t number = 0;  // in the grid
  const void* waits_at = nullptr;
  const char* waits_for = nullptr;
  const void* waits_on = nullptr;   // a meeting, a barrier, a cluster
  bool at_cluster_barrier = false;  // has arrived and not waited
  uint64_t cluster_phase = 0;       // then
  Digest stuck_with{};              // the memory with which it does the same for ever; of one that spins
  // The checker's.
  Clock clock = 1;
  Knowledge own;                        // beyond its warp's and its CTA's
  Knowledge heard, heard_in_cta;        // by relaxed loads, for the next fence: of the device's, and of its CTA's
  Knowledge declared, declared_in_cta;  // by the last fence of the device, and of the CTA, for relaxed stores
  std::vector<AsyncCopy> copies;
  unsigned copy_groups = 0;  // closed ones
  std::vector<uint64_t> initialised_barriers;
};

struct Meeting {
  Collective kind;
  unsigned mask, arrived, left;
  unsigned long long values[32];
  unsigned long long ballot;
  const void* caller;
  unsigned first_lane;
};

struct Warp {
  std::vector<std::unique_ptr<Meeting>> meetings, spare;  // not everybody has left; to be used again
  unsigned lanes = 0;                                     // that exist
  unsigned finished = 0;
  Thread* threads = nullptr;
  Clock below = 0;
  uint64_t number = 0;
};

struct RemoteAccess {
  Event event;
  Party party;
};

// Threads that can go on, in the order in which they could: both ends are cheap.
class Queue {
 public:
  bool empty() const { return begin_ == end_; }
  size_t size() const { return end_ - begin_; }
  void clear() { begin_ = end_ = 0; }
  void push_back(Thread* thread) {
    if (size() == ring_.size()) grow();
    ring_[end_++ & (ring_.size() - 1)] = thread;
  }
  void push_front(Thread* thread) {
    if (size() == ring_.size()) grow();
    ring_[--begin_ & (ring_.size() - 1)] = thread;
  }
  const Thread* at(size_t i) const { return ring_[(begin_ + i) & (ring_.size() - 1)]; }
  Thread* pop_front() { return ring_[begin_++ & (ring_.size() - 1)]; }
  Thread* pop_back() { return ring_[--end_ & (ring_.size() - 1)]; }
  void swap_with_back(size_t i) {
    std::swap(ring_[(begin_ + i) & (ring_.size() - 1)], ring_[(end_ - 1) & (ring_.size() - 1)]);
  }

 private:
  void grow() {
    std::vector<Thread*> larger(ring_.empty() ? 1024 : 2 * ring_.size());
    const size_t count = size();
    for (size_t i = 0; i < count; ++i) larger[i] = ring_[(begin_ + i) & (ring_.size() - 1)];
    ring_.swap(larger);
    begin_ = 0;
    end_ = count;
  }

  std::vector<Thread*> ring_;  // a power of two
  size_t begin_ = 0, end_ = 0;
};

struct Cluster;

struct Cta {
  Index index{};
  uint64_t number = 0;
  Cluster* cluster = nullptr;
  char* arena = nullptr;
  Unit* units = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned arrived = 0, predicates = 0, result = 0, finished = 0;
  const void* barrier_caller = nullptr;
  Thread* barrier_first = nullptr;
  Clock below = 1;
  Knowledge common;
  std::unordered_map<Key, RemoteAccess> remote;  // to its shared memory, by CTAs of its cluster
};

struct Cluster {
  std::vector<Cta> ctas;
  unsigned threads = 0, finished = 0, arrived = 0;
  uint64_t phase = 0;
  std::vector<std::pair<Thread*, Clock>> releases;
  Knowledge pending, released;
};

// An mbarrier.
struct Barrier {
  uint64_t number;
  Cta* cta;
  unsigned arrivals, arrived = 0;
  long long bytes = 0;  // expected and not come
  uint64_t phase = 0;
  Event initialised;
  Knowledge pending, released;
};

// What atomic stores to an address have released: to all, and to the storing CTA only.
struct Released {
  Knowledge to_device;
  std::unordered_map<uint64_t, Knowledge> to_cta;
};

struct AsyncStore {
  char* to;
  const char* from;  // null: of `value`
  unsigned long long value;
  unsigned bytes;
  unsigned first, end;  // of them, those of which something is stored; the others are of no use then
  void* barrier;
  Cta* target;
  Party party;
  Knowledge before;  // what comes before it in its thread: whoever waits for the barrier knows that too
};

class Machine {
 public:
  Machine();

  // Runs a launch to its end or to a fault. `interrupted` is asked now and then.
  Fault run(const Launch& launch, bool (*interrupted)());

  trtc_simulator::Machine* interface() { return &interface_; }
  const std::vector<Suspect>& suspects() const { return suspects_; }

  // Gives a module's shared variables their offsets.
  static void lay_out(const std::vector<trtc_simulator::SharedVariable*>& variables);

 private:
  friend struct Calls;  // what kernels call
  friend class Signals;

  static constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point type

  static Machine* current;  // the one that runs

  struct SharedRegion {
    unsigned begin, end;
    std::string name;
  };

  // Scheduling.
  void start_cluster(Cluster& slot, uint64_t number);
  void make_ready(Thread& thread);
  void make_next(Thread& thread);  // before those that are ready
  Thread* pick();
  bool enter(Thread& thread);  // false: there is no memory for it
  void leave(Thread& self);    // to whoever is next; self is ready, waiting or polling
  void wait(Thread& self, const void* on, const char* what, const void* caller);
  void wake_pollers();
  void spin(Thread& self, const void* place, const Digest& memory);  // lets all others go until memory has changed
  bool wake_spinners();  // those for whom memory has changed; false: for none, or they have been at it for too long
  void came_to_something();
  void yield(Thread& self);  // lets all others go first
  void pass(Thread& self);   // lets others go first where the order is random
  void wake(std::vector<Thread>& threads, const void* on);
  [[noreturn]] void finish_thread();
  void finish_cta(Cta& cta);
  static void fiber_main();
  Party any_that_is_left() const;
  void loop(bool (*interrupted)());
  // Fails where the running thread never ends, or has run for too long. `place` is where its registers were read.
  void check_end(const void* place, const Digest& registers, uintptr_t stack_pointer);
  bool digest_memory(Digest& digest) const;   // false: it is unknown, or too large
  bool digest_threads(Digest& digest) const;  // false: they wait for what is not in it
  const char* endless_meetings();             // null: not known
  uint64_t random();

  // Faults. fail() does not return on a fiber.
  Party party(const Thread& thread, const void* caller) const;
  Party party_of(const Event& event) const;
  void fail(const char* kind, std::string message, const Party& at, const Party& other = {});
  void fail_here(const char* kind, std::string message, const void* caller);
  void suspect(const char* what, const Party& a, const Party& b);
  std::string blocked() const;  // who waits, and for what

  // The checker.
  bool knows(const Thread& thread, const Event& event) const;
  void publish(Thread& thread, Knowledge& to);  // and ticks
  void meet_cta(Cta& cta);
  void meet_warp(Warp& warp, unsigned mask);
  Event event_of(const Thread& thread, const void* caller) const {
    return {key_of(Owner::thread, thread.number), caller, thread.clock, false};
  }
  void access(Thread& thread, const void* address, unsigned bytes, unsigned alignment, Way way, const Event& event);
  // `place()` says where the unit's byte `offset` is.
  template <class Text>
  void check_cells(Thread& thread, Shadow& shadow, Unit& unit, unsigned offset, unsigned bytes, Way way,
                   const Event& event, bool initialised, Text place);
  void set_writer(const void* address, unsigned bytes, const Event& event);
  void forget_reader(const void* address, unsigned bytes, Key key);
  Cta* cta_of(const void* address) const;
  const SharedRegion* shared_region(unsigned offset, unsigned bytes) const;
  std::string shared_place(const Cta& cta, unsigned offset) const;
  const Extent* extent_of(uintptr_t address, unsigned bytes);
  std::string global_place(uintptr_t address) const;
  std::string hexadecimal(uintptr_t address) const;

  // Clusters and asynchronous work.
  void cluster_arrived(Cluster& cluster);
  Barrier& barrier_at(void* address, Thread& thread, const void* caller);
  void complete_phase(Barrier& barrier);
  bool deliver_one();
  // Of all groups but the last `pending` closed ones, and the open one.
  void land_copies(Thread& thread, unsigned pending);

  trtc_simulator::Machine interface_{};
  Place nowhere_{};
  const Launch* launch_ = nullptr;
  Stacks stacks_;
  Shadow shadow_, shared_shadow_;
  std::vector<Extent> extents_;
  std::vector<Extent> hulls_;  // of all extents of each name
  const Extent* last_extent_ = nullptr;
  std::vector<SharedRegion> regions_;
  unsigned arena_stride_ = 0, dynamic_offset_ = 0;
  std::vector<char> arena_memory_;
  char* arenas_ = nullptr;
  std::vector<Unit> units_;
  unsigned resident_ctas_ = 0;

  std::vector<Cluster> slots_;
  std::vector<uint64_t> order_;  // of clusters, where it is random
  uint64_t clusters_ = 0, started_ = 0, finished_ = 0;
  Queue ready_;
  std::vector<Thread*> pollers_;
  std::vector<Thread*> spinners_;  // that repeated their state
  double spinners_woken_at_ = 0, spinners_rest_until_ = 0;
  double spinning_since_ = 0;  // without a thread that came to something; 0: none spins
  Thread* running_ = nullptr;
  void* main_stack_pointer_ = nullptr;
  double entered_at_ = 0;  // when the running thread was, by the first tick that saw it
  uint64_t ticked_switches_ = 0;
  States states_;    // of the running thread since it was entered
  Digest rested_{};  // of memory, when it was last seen to change
  double rests_since_ = 0, look_at_rest_at_ = 0;
  Digest kept_{};  // of all threads and memory
  uint64_t looks_ = 0;
  uint64_t progress_at_rest_ = 0, exits_at_rest_ = 0;
  double exits_since_ = 0;          // the time of the last thread that left, or near it
  const void* touching_ = nullptr;  // the caller for whom the machine itself reads a kernel's memory
  uint64_t turns_ = 0;              // of polling threads, while no other thread came to anything
  unsigned atomics_ = 0;            // of the running thread since it was entered
  uint64_t progress_ = 0, switches_ = 0, random_state_ = 1;
  uint64_t exits_ = 0;  // threads that left
  Fault fault_;
  std::vector<Suspect> suspects_;
  std::unordered_set<uint64_t> suspected_;

  std::unordered_map<const void*, Released> released_, released_in_shared_;  // by address
  std::unordered_map<void*, Barrier> barriers_;
  uint64_t barrier_count_ = 0;
  std::vector<AsyncStore> stores_;
};

}  // namespace simulator
