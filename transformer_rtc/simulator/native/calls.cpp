// What kernels ask of the machine: barriers, warps' operations, clusters, asynchronous copies and stores, atomics.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace simulator {

void Machine::land_copies(Thread& thread, unsigned pending) {
  size_t landed = 0;
  for (; landed < thread.copies.size(); ++landed) {
    const AsyncCopy& copy = thread.copies[landed];
    if (copy.group + pending >= thread.copy_groups) break;
    if (launch_->checked) {
      // Read as late as it may be; and written by the thread itself, now that it has waited.
      forget_reader(copy.from, copy.bytes, key_of(Owner::pending, thread.number));
      access(thread, copy.from, copy.bytes, copy.bytes, Way::reads, event_of(thread, copy.caller));
      set_writer(copy.to, copy.bytes, event_of(thread, copy.caller));
    }
    touching_ = copy.caller;
    std::memcpy(copy.to, copy.from, copy.bytes);
    touching_ = nullptr;
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

void Machine::cluster_arrived(Cluster& cluster) {
  // What a whole CTA releases at one tick is one entry.
  for (size_t begin = 0; begin < cluster.releases.size();) {
    const auto& [first, clock] = cluster.releases[begin];
    size_t end = begin;
    while (end < cluster.releases.size() && cluster.releases[end].first->cta == first->cta &&
           cluster.releases[end].second == clock) {
      ++end;
    }
    if (end - begin == first->cta->threads.size()) {
      cluster.pending.learn(key_of(Owner::cta, first->cta->number), clock + 1);
    } else {
      for (size_t i = begin; i < end; ++i) {
        const auto& [thread, tick] = cluster.releases[i];
        cluster.pending.learn(key_of(Owner::thread, thread->number), tick + 1);
      }
    }
    begin = end;
  }
  cluster.releases.clear();
  cluster.released = std::move(cluster.pending);
  cluster.pending.clear();
  cluster.arrived = 0;
  ++cluster.phase;
  ++progress_;
  for (Cta& cta : cluster.ctas) wake(cta.threads, &cluster);
}

Barrier& Machine::barrier_at(void* address, Thread& thread, const void* caller) {
  const auto found = barriers_.find(address);
  if (found == barriers_.end()) {
    const Cta* cta = cta_of(address);
    fail_here(
        "uninitialised",
        "no barrier has been initialised at " +
            (cta == nullptr ? "address " + hexadecimal(reinterpret_cast<uintptr_t>(address))
                            : shared_place(*cta, static_cast<unsigned>(static_cast<char*>(address) - cta->arena))),
        caller);
  }
  Barrier& barrier = found->second;
  if (launch_->checked && !knows(thread, barrier.initialised) &&
      !knows(thread, {key_of(Owner::barrier, barrier.number), nullptr, 0, false})) {
    fail("race", "uses a barrier in shared memory, and nothing orders that behind its initialisation",
         party(thread, caller), party_of(barrier.initialised));
  }
  return barrier;
}

void Machine::complete_phase(Barrier& barrier) {
  if (barrier.arrived != barrier.arrivals || barrier.bytes != 0) return;
  barrier.released = std::move(barrier.pending);
  barrier.pending.clear();
  barrier.arrived = 0;
  ++barrier.phase;
  ++progress_;
  wake(barrier.cta->threads, &barrier);
}

bool Machine::deliver_one() {
  if (stores_.empty()) return false;
  size_t chosen = 0;
  if (launch_->schedule == Schedule::last_in) chosen = stores_.size() - 1;
  if (launch_->schedule == Schedule::random) chosen = random() % stores_.size();
  const AsyncStore store = std::move(stores_[chosen]);
  stores_.erase(stores_.begin() + static_cast<std::ptrdiff_t>(chosen));
  Barrier& barrier = barriers_.at(store.barrier);
  touching_ = store.party.caller;
  const char* from = store.from != nullptr ? store.from : reinterpret_cast<const char*>(&store.value);
  std::memcpy(store.to + store.first, from + store.first, store.end - store.first);
  touching_ = nullptr;
  if (launch_->checked) {
    const Event event{key_of(Owner::barrier, barrier.number), store.party.caller, static_cast<Clock>(barrier.phase + 1),
                      false};
    set_writer(store.to, store.bytes, event);
    store.target->remote[event.key] = {event, store.party};
    barrier.pending.join(store.before);
  }
  ++progress_;
  barrier.bytes -= store.bytes;
  complete_phase(barrier);
  return true;
}

namespace {

constexpr unsigned kMostAtomics = 64;  // in a row
constexpr uint64_t kMostTurns = 1 << 21;
constexpr uint64_t kMostMeetings = 1 << 20;  // of a warp without any change of memory; of a CTA, a 64th

}  // namespace

struct Calls {
  static void access(const void* address, unsigned bytes, unsigned alignment, bool writes, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    machine.access(thread, address, bytes, alignment, writes ? Way::writes : Way::reads,
                   machine.event_of(thread, caller));
  }

  static void atomic(const void* address, unsigned bytes, Atomic kind, Order order, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    // It may be a polling loop that does not say so: others get their turn.
    if (++machine.atomics_ > kMostAtomics && !machine.ready_.empty()) {
      machine.turns_ += 8;
      if (machine.turns_ > kMostTurns) endless_poll(caller);
      machine.yield(thread);
    }
    if (!machine.launch_->checked) return;
    const auto whole = reinterpret_cast<uintptr_t>(address);
    if (whole - reinterpret_cast<uintptr_t>(thread.stack) < Stacks::kBytes) return;
    Event event = machine.event_of(thread, caller);
    event.atomic = true;
    const uint64_t progress = machine.progress_;
    const Way way = kind == Atomic::load ? Way::reads : kind == Atomic::change ? Way::changes : Way::writes;
    machine.access(thread, address, bytes, bytes, way, event);
    if (kind != Atomic::store) machine.progress_ = progress;  // changed() tells
    if (kind == Atomic::store) machine.wake_pollers();
    const bool acquires = order == Order::acquire || order == Order::acquire_release;
    const bool releases = order == Order::release || order == Order::acquire_release;
    Released& released =
        (machine.cta_of(address) != nullptr ? machine.released_in_shared_ : machine.released_)[address];
    const uint64_t cta = thread.cta->number;
    if (kind != Atomic::store) {
      (acquires ? thread.own : thread.heard).join(released.to_device);
      const auto within = released.to_cta.find(cta);
      if (within != released.to_cta.end()) (acquires ? thread.own : thread.heard_in_cta).join(within->second);
    }
    if (kind == Atomic::load) return;
    if (kind == Atomic::store) released = Released{};
    if (releases) {
      machine.publish(thread, released.to_device);
    } else {
      released.to_device.join(thread.declared);
      if (!thread.declared_in_cta.empty()) released.to_cta[cta].join(thread.declared_in_cta);
    }
  }

  static void endless_poll(const void* caller) {
    Machine::current->fail_here("deadlock", "threads poll memory again and again, and no other can go on", caller);
  }

  static void changed() {
    ++Machine::current->progress_;
    // At once: an acquire that comes late sees what is released later too, and would hide that nothing orders it.
    Machine::current->wake_pollers();
  }

  static void fence(bool device, const void*) {
    Machine& machine = *Machine::current;
    if (!machine.launch_->checked) return;
    Thread& thread = *machine.running_;
    thread.own.join(thread.heard_in_cta);
    thread.heard_in_cta.clear();
    if (device) {
      thread.own.join(thread.heard);
      thread.heard.clear();
      machine.publish(thread, thread.declared);
    } else {
      // A fence of the CTA hears only what its own threads did.
      const Cta& cta = *thread.cta;
      thread.own.join_some(thread.heard, [&](Key key) {
        const uint64_t number = number_of(key);
        switch (owner_of(key)) {
          case Owner::thread:
            return number / cta.threads.size() == cta.number;
          case Owner::warp:
            return number / cta.warps.size() == cta.number;
          case Owner::cta:
            return number == cta.number;
          default:
            return false;
        }
      });
      machine.publish(thread, thread.declared_in_cta);
    }
  }

  static unsigned cta_barrier(bool predicate, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    Cta& cta = *thread.cta;
    if (cta.finished > 0) {
      machine.fail_here("divergent_barrier",
                        "the thread waits for its whole CTA, of which " + std::to_string(cta.finished) +
                            " threads have left the kernel",
                        caller);
    }
    if (cta.arrived == 0) {
      cta.barrier_caller = caller;
      cta.barrier_first = &thread;
      cta.predicates = 0;
    } else if (machine.launch_->checked && caller != cta.barrier_caller) {
      machine.suspect("threads of a CTA meet at different barriers",
                      machine.party(*cta.barrier_first, cta.barrier_caller), machine.party(thread, caller));
    }
    cta.predicates += predicate;
    if (++cta.arrived < cta.threads.size()) {
      machine.wait(thread, &cta, "a barrier of its CTA", caller);
    } else {
      cta.result = cta.predicates;
      cta.arrived = 0;
      machine.met(cta.idle, kMostMeetings / 64, caller);
      machine.turns_ = 0;
      if (machine.launch_->checked) machine.meet_cta(cta);
      machine.wake(cta.threads, &cta);
      machine.pass(thread);
    }
    return cta.result;
  }

  static unsigned long long collective(Collective kind, unsigned mask, unsigned long long value, unsigned source,
                                       const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    Warp& warp = *thread.warp;
    const unsigned lane = thread.index % 32, bit = 1u << lane;
    mask &= warp.lanes;
    if ((mask & bit) == 0) {
      machine.fail_here("divergent_barrier", "the mask of a warp's operation does not name the lane that calls it",
                        caller);
    }
    if ((mask & warp.finished) != 0) {
      machine.fail_here("divergent_barrier", "the lane waits for lanes of its warp that have left the kernel", caller);
    }
    Meeting* meeting = nullptr;
    for (const auto& candidate : warp.meetings) {
      if (candidate->mask == mask && candidate->kind == kind && candidate->arrived != mask &&
          (candidate->arrived & bit) == 0) {
        meeting = candidate.get();
      }
    }
    if (meeting == nullptr) {
      if (warp.spare.empty()) warp.spare.push_back(std::make_unique<Meeting>());
      warp.meetings.push_back(std::move(warp.spare.back()));
      warp.spare.pop_back();
      meeting = warp.meetings.back().get();
      meeting->kind = kind;
      meeting->mask = mask;
      meeting->arrived = 0;
      meeting->left = mask;
      meeting->ballot = 0;
      meeting->caller = caller;
      meeting->first_lane = lane;
    } else if (machine.launch_->checked && caller != meeting->caller) {
      machine.suspect("lanes of a warp meet at different operations",
                      machine.party(warp.threads[meeting->first_lane], meeting->caller), machine.party(thread, caller));
    }
    meeting->arrived |= bit;
    meeting->values[lane] = value;
    if (value != 0) meeting->ballot |= bit;
    if (meeting->arrived != mask) {
      machine.wait(thread, meeting, "lanes of its warp", caller);
    } else {
      machine.met(warp.idle, kMostMeetings, caller);
      if (machine.launch_->checked && kind == Collective::synchronise) machine.meet_warp(warp, mask);
      for (unsigned other = 32; other-- > 0;) {
        if ((mask & ~bit) >> other & 1) machine.make_next(warp.threads[other]);
      }
      machine.pass(thread);
    }
    unsigned long long result = meeting->ballot;
    if (kind == Collective::shuffle) {
      if (source >= 32 || (mask >> source & 1) == 0) {
        if (machine.launch_->checked) {
          machine.fail_here("divergent_barrier",
                            "a shuffle reads lane " + std::to_string(source) + ", which does not take part", caller);
        }
        source = lane;
      }
      result = meeting->values[source];
    }
    meeting->left &= ~bit;
    if (meeting->left == 0) {
      for (auto& candidate : warp.meetings) {
        if (candidate.get() != meeting) continue;
        warp.spare.push_back(std::move(candidate));
        candidate = std::move(warp.meetings.back());
        warp.meetings.pop_back();
        break;
      }
    }
    return result;
  }

  static void cluster_arrive(bool releases, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    Cluster& cluster = *thread.cta->cluster;
    if (thread.at_cluster_barrier) {
      machine.fail_here("divergent_barrier", "the thread arrives twice at the cluster's barrier without a wait",
                        caller);
    }
    thread.at_cluster_barrier = true;
    thread.cluster_phase = cluster.phase;
    if (machine.launch_->checked) {
      // What a relaxed arrival tells of: barriers whose initialisation was fenced.
      for (uint64_t number : thread.initialised_barriers) cluster.pending.learn(key_of(Owner::barrier, number), 1);
      if (releases) {
        cluster.releases.push_back({&thread, thread.clock});
        cluster.pending.join(thread.own);
        cluster.pending.join(thread.cta->common);
        cluster.pending.learn(key_of(Owner::warp, thread.warp->number), thread.warp->below);
        cluster.pending.learn(key_of(Owner::cta, thread.cta->number), thread.cta->below);
        ++thread.clock;
      }
    }
    if (++cluster.arrived + cluster.finished == cluster.threads) machine.cluster_arrived(cluster);
  }

  static void cluster_wait(const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    Cluster& cluster = *thread.cta->cluster;
    if (!thread.at_cluster_barrier) {
      machine.fail_here("divergent_barrier", "the thread waits at the cluster's barrier, where it has not arrived",
                        caller);
    }
    while (cluster.phase == thread.cluster_phase) machine.wait(thread, &cluster, "a barrier of its cluster", caller);
    thread.at_cluster_barrier = false;
    if (machine.launch_->checked) thread.own.join(cluster.released);
  }

  static void* cluster_address(const void* address, unsigned rank, const void* caller) {
    Machine& machine = *Machine::current;
    const Cta& cta = *machine.running_->cta;
    const Cta* owner = machine.cta_of(address);
    if (owner == nullptr || owner->cluster != cta.cluster) {
      machine.fail_here("out_of_bounds", "an address that is mapped to another CTA is not in shared memory", caller);
    }
    if (rank >= cta.cluster->ctas.size()) {
      machine.fail_here("out_of_bounds",
                        "CTA " + std::to_string(rank) + " of a cluster of " + std::to_string(cta.cluster->ctas.size()),
                        caller);
    }
    return cta.cluster->ctas[rank].arena + (static_cast<const char*>(address) - owner->arena);
  }

  static void copy_async(void* shared, const void* global, unsigned bytes, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    const Cta* to = machine.cta_of(shared);
    if (to != thread.cta || machine.cta_of(global) != nullptr) {
      machine.fail_here("out_of_bounds", "an asynchronous copy goes from global memory to the CTA's own shared memory",
                        caller);
    }
    if (machine.launch_->checked) {
      Event event = machine.event_of(thread, caller);
      event.key = key_of(Owner::pending, thread.number);
      machine.access(thread, global, bytes, bytes, Way::reads, event);
      machine.access(thread, shared, bytes, bytes, Way::writes, event);
    }
    thread.copies.push_back(
        {static_cast<char*>(shared), static_cast<const char*>(global), bytes, thread.copy_groups, caller});
    std::memset(shared, Machine::kPoison, bytes);
  }

  static void commit_copies() { ++Machine::current->running_->copy_groups; }

  static void wait_copies(unsigned pending, const void*) {
    Machine::current->land_copies(*Machine::current->running_, pending);
  }

  static void barrier_init(void* address, unsigned arrivals, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    Cta* cta = machine.cta_of(address);
    if (cta != thread.cta) {
      machine.fail_here("out_of_bounds", "a barrier is initialised outside of the CTA's own shared memory", caller);
    }
    const Event event = machine.event_of(thread, caller);
    if (machine.launch_->checked) machine.access(thread, address, 8, 8, Way::writes, event);
    Barrier barrier{};
    barrier.number = machine.barrier_count_++;
    barrier.cta = cta;
    barrier.arrivals = arrivals;
    barrier.initialised = event;
    machine.barriers_[address] = std::move(barrier);
  }

  static void barrier_publish(const void*) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    for (const auto& [address, barrier] : machine.barriers_) {
      if (barrier.initialised.key == key_of(Owner::thread, thread.number)) {
        thread.initialised_barriers.push_back(barrier.number);
      }
    }
  }

  static void barrier_arrive(void* address, unsigned expected_bytes, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    Barrier& barrier = machine.barrier_at(address, thread, caller);
    barrier.bytes += expected_bytes;
    if (machine.launch_->checked) machine.publish(thread, barrier.pending);
    ++barrier.arrived;
    machine.complete_phase(barrier);
  }

  static void barrier_wait(void* address, unsigned parity, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    Barrier& barrier = machine.barrier_at(address, thread, caller);
    if (barrier.cta != thread.cta) {
      machine.fail_here("out_of_bounds", "a thread waits at a barrier in another CTA's shared memory", caller);
    }
    while ((barrier.phase & 1) == parity) machine.wait(thread, &barrier, "a barrier in shared memory", caller);
    if (machine.launch_->checked) {
      thread.own.join(barrier.released);
      thread.own.learn(key_of(Owner::barrier, barrier.number), static_cast<Clock>(barrier.phase + 1));
    }
  }

  static void copy_bulk(void* shared, const void* global, unsigned bytes, void* address, unsigned first, unsigned end,
                        const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    const Barrier& barrier = machine.barrier_at(address, thread, caller);
    if (machine.cta_of(shared) != thread.cta || barrier.cta != thread.cta || machine.cta_of(global) != nullptr) {
      machine.fail_here("out_of_bounds", "a bulk copy goes from global memory to the CTA's own shared memory", caller);
    }
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16 != 0) {
      machine.fail_here("misaligned", "a bulk copy's addresses and size are multiples of 16 bytes", caller);
    }
    char* const to = static_cast<char*>(shared);
    const char* const from = static_cast<const char*>(global);
    if (machine.launch_->checked) {
      const auto begin = reinterpret_cast<uintptr_t>(global);
      const Extent* used = machine.extent_of(begin + first, 1);
      // Rows of an array may be extents of their own, with memory between them.
      const Extent array = used != nullptr ? machine.hulls_[static_cast<size_t>(used->name)] : Extent{};
      if (begin < array.begin || begin + bytes > array.end || end > bytes) {
        machine.fail_here("out_of_bounds", "a bulk copy reads what is in no array", caller);
      }
      // Piece by piece: extents are cut where others overlap them.
      for (unsigned at = first, piece = 0; at < end; at += piece) {
        piece = std::min(end - at, 16 - at % 16);
        machine.access(thread, from + at, piece, 1, Way::reads, machine.event_of(thread, caller));
      }
      Event event = machine.event_of(thread, caller);
      event.key = key_of(Owner::pending, thread.number);
      machine.access(thread, to, bytes, 16, Way::writes, event);
    }
    std::memset(to, Machine::kPoison, bytes);
    machine.stores_.push_back({to, from, 0, bytes, first, end, address, thread.cta, machine.party(thread, caller), {}});
    if (machine.launch_->checked) machine.publish(thread, machine.stores_.back().before);
  }

  static void store_async(void* to, unsigned long long value, unsigned bytes, void* address, const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    const Barrier& barrier = machine.barrier_at(address, thread, caller);
    Cta* target = machine.cta_of(to);
    if (target != barrier.cta) {
      machine.fail_here("out_of_bounds", "an asynchronous store and its barrier are in different CTAs", caller);
    }
    if (target->finished == target->threads.size()) {
      machine.fail_here("exited_shared_memory",
                        "stores to the shared memory of block " + text(target->index) + ", which has left the kernel",
                        caller);
    }
    if (machine.launch_->checked) {
      Event event = machine.event_of(thread, caller);
      event.key = key_of(Owner::pending, thread.number);
      machine.access(thread, to, bytes, bytes, Way::writes, event);
    }
    std::memset(to, Machine::kPoison, bytes);
    machine.stores_.push_back(
        {static_cast<char*>(to), nullptr, value, bytes, 0, bytes, address, target, machine.party(thread, caller), {}});
    if (machine.launch_->checked) machine.publish(thread, machine.stores_.back().before);
  }

  static void spin(const void* caller) {
    Machine& machine = *Machine::current;
    Thread& thread = *machine.running_;
    if (++machine.turns_ > kMostTurns) endless_poll(caller);
    thread.state = State::polling;
    thread.waits_for = "a value in memory";
    thread.waits_at = caller;
    machine.pollers_.push_back(&thread);
    machine.leave(thread);
  }

  static void fault(const char* kind, const char* message, const char* file, unsigned line, const void* caller) {
    Machine& machine = *Machine::current;
    if (file != nullptr) {
      machine.fault_.file = file;
      machine.fault_.line = line;
    }
    machine.fail_here(kind, message, caller);
  }
};

Machine::Machine() {
  interface_.place = &nowhere_;
  interface_.access = &Calls::access;
  interface_.atomic = &Calls::atomic;
  interface_.changed = &Calls::changed;
  interface_.fence = &Calls::fence;
  interface_.cta_barrier = &Calls::cta_barrier;
  interface_.collective = &Calls::collective;
  interface_.cluster_arrive = &Calls::cluster_arrive;
  interface_.cluster_wait = &Calls::cluster_wait;
  interface_.cluster_address = &Calls::cluster_address;
  interface_.copy_async = &Calls::copy_async;
  interface_.commit_copies = &Calls::commit_copies;
  interface_.wait_copies = &Calls::wait_copies;
  interface_.barrier_init = &Calls::barrier_init;
  interface_.barrier_publish = &Calls::barrier_publish;
  interface_.barrier_arrive = &Calls::barrier_arrive;
  interface_.barrier_wait = &Calls::barrier_wait;
  interface_.copy_bulk = &Calls::copy_bulk;
  interface_.store_async = &Calls::store_async;
  interface_.spin = &Calls::spin;
  interface_.fault = &Calls::fault;
}

}  // namespace simulator
