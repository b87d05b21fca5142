// SPDX-License-Identifier: Apache-2.0
// What kernels ask of memory: accesses, atomics, fences, polling, other CTAs' addresses; and the table of all calls.
#include "calls.hpp"

namespace simulator {

namespace {

constexpr unsigned kMostAtomics = 64;  // in a row
constexpr uint64_t kMostTurns = 1 << 21;

}  // namespace

void Calls::access(const void* address, unsigned bytes, unsigned alignment, bool writes, const void* caller) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  machine.access(thread, address, bytes, alignment, writes ? Way::writes : Way::reads,
                 machine.event_of(thread, caller));
}

void Calls::access_after_tick(const void* address, unsigned bytes, unsigned alignment, bool writes,
                              const void* caller) {
  Machine& machine = *Machine::current;
  machine.interface_.access = &Calls::access;
  if (machine.running_ != nullptr && machine.switches_ == machine.ticked_switches_) {
    Digest registers;
    registers.add(trtc_looked_at, sizeof(trtc_looked_at));
    machine.check_end(caller, registers, trtc_looked_at[kLookedAt - 2]);
  }
  access(address, bytes, alignment, writes, caller);
}

void Calls::atomic(const void* address, unsigned bytes, Atomic kind, Order order, const void* caller) {
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
  Released& released = (machine.cta_of(address) != nullptr ? machine.released_in_shared_ : machine.released_)[address];
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

void Calls::changed() {
  ++Machine::current->progress_;
  // At once: an acquire that comes late sees what is released later too, and would hide that nothing orders it.
  Machine::current->wake_pollers();
}

void Calls::fence(bool device, const void*) {
  Machine& machine = *Machine::current;
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

void Calls::endless_poll(const void* caller) {
  Machine::current->fail_here("deadlock", "threads poll memory again and again, and no other can go on", caller);
}

void Calls::spin(const void* caller) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  if (++machine.turns_ > kMostTurns) endless_poll(caller);
  thread.state = State::polling;
  thread.waits_for = "a value in memory";
  thread.waits_at = caller;
  machine.pollers_.push_back(&thread);
  machine.leave(thread);
}

void Calls::fault(const char* kind, const char* message, const char* file, unsigned line, const void* caller) {
  Machine& machine = *Machine::current;
  if (file != nullptr) {
    machine.fault_.file = file;
    machine.fault_.line = line;
  }
  machine.fail_here(kind, message, caller);
}

void* Calls::cluster_address(const void* address, unsigned rank, const void* caller) {
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
