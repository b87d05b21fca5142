// SPDX-License-Identifier: Apache-2.0
// What comes later: asynchronous copies and stores, and the barriers in shared memory that count them.
#include <algorithm>
#include <cstring>

#include "calls.hpp"

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

void Calls::copy_async(void* shared, const void* global, unsigned bytes, const void* caller) {
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

void Calls::commit_copies() { ++Machine::current->running_->copy_groups; }

void Calls::wait_copies(unsigned pending, const void*) {
  Machine::current->land_copies(*Machine::current->running_, pending);
}

void Calls::barrier_init(void* address, unsigned arrivals, const void* caller) {
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

void Calls::barrier_publish(const void*) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  for (const auto& [address, barrier] : machine.barriers_) {
    if (barrier.initialised.key == key_of(Owner::thread, thread.number)) {
      thread.initialised_barriers.push_back(barrier.number);
    }
  }
}

void Calls::barrier_arrive(void* address, unsigned expected_bytes, const void* caller) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  Barrier& barrier = machine.barrier_at(address, thread, caller);
  barrier.bytes += expected_bytes;
  if (machine.launch_->checked) machine.publish(thread, barrier.pending);
  ++barrier.arrived;
  machine.complete_phase(barrier);
}

void Calls::barrier_wait(void* address, unsigned parity, const void* caller) {
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

void Calls::copy_bulk(void* shared, const void* global, unsigned bytes, void* address, unsigned first, unsigned end,
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

void Calls::store_async(void* to, unsigned long long value, unsigned bytes, void* address, const void* caller) {
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

}  // namespace simulator
