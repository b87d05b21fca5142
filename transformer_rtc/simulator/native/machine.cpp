// SPDX-License-Identifier: Apache-2.0
// The machine's turns: which thread runs, until all have left or one fails.
#include "machine.hpp"

#include <new>

namespace simulator {

namespace {

constexpr uint64_t kIdleRounds = 64;               // of polling threads without any change of memory
constexpr uint64_t kIdleTurns = 1 << 18;           // of them all
constexpr uint64_t kIdleTurnsUnchecked = 1 << 20;  // where plain stores are not seen
constexpr uint64_t kSwitchesPerLook = 1 << 14;     // between looks whether the user interrupts

}  // namespace

Machine* Machine::current = nullptr;

uint64_t Machine::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

void Machine::make_ready(Thread& thread) {
  thread.state = State::ready;
  thread.waits_on = nullptr;
  ready_.push_back(&thread);
}

void Machine::make_next(Thread& thread) {
  thread.state = State::ready;
  thread.waits_on = nullptr;
  if (launch_->schedule == Schedule::first_in) {
    ready_.push_front(&thread);
  } else {
    ready_.push_back(&thread);
  }
}

Thread* Machine::pick() {
  if (ready_.empty()) return nullptr;
  if (launch_->schedule == Schedule::first_in) return ready_.pop_front();
  if (launch_->schedule == Schedule::random) ready_.swap_with_back(random() % ready_.size());
  return ready_.pop_back();
}

bool Machine::enter(Thread& thread) {
  if (thread.state == State::fresh) {
    try {
      thread.stack = stacks_.take();
    } catch (const std::bad_alloc&) {
      fail("out_of_memory", "there is no memory for another thread's stack", party(thread, nullptr));
      return false;
    }
    thread.stack_pointer = prepare_fiber(thread.stack, &Machine::fiber_main);
  }
  thread.state = State::ready;
  running_ = &thread;
  interface_.place = &thread.place;
  atomics_ = 0;
  ++switches_;
  return true;
}

void Machine::leave(Thread& self) {
  Thread* next = switches_ % kSwitchesPerLook == 0 ? nullptr : pick();
  if (next == nullptr) {
    running_ = nullptr;
    interface_.place = &nowhere_;
    ++switches_;
    trtc_switch(&self.stack_pointer, main_stack_pointer_);
    return;
  }
  enter(*next);
  if (next != &self) trtc_switch(&self.stack_pointer, next->stack_pointer);
}

void Machine::wait(Thread& self, const void* on, const char* what, const void* caller) {
  self.state = State::waiting;
  self.waits_on = on;
  self.waits_for = what;
  self.waits_at = caller;
  leave(self);
}

void Machine::wake_pollers() {
  for (Thread* thread : pollers_) make_ready(*thread);
  pollers_.clear();
}

void Machine::came_to_something() {
  turns_ = 0;
  spinning_since_ = 0;
}

void Machine::yield(Thread& self) {
  self.state = State::ready;
  if (launch_->schedule == Schedule::last_in) {
    ready_.push_front(&self);
  } else {
    ready_.push_back(&self);
  }
  leave(self);
}

void Machine::pass(Thread& self) {
  if (launch_->schedule == Schedule::random) yield(self);
}

void Machine::wake(std::vector<Thread>& threads, const void* on) {
  for (Thread& thread : threads) {
    if (thread.state == State::waiting && thread.waits_on == on) make_ready(thread);
  }
}

void Machine::fiber_main() {
  Machine& machine = *current;
  machine.launch_->entry(machine.launch_->params);
  machine.finish_thread();
}

void Machine::finish_thread() {
  Thread& self = *running_;
  Cta& cta = *self.cta;
  Cluster& cluster = *cta.cluster;
  const Party here = party(self, nullptr);
  if (!self.copies.empty()) {
    fail("unfinished_copy", "the thread leaves the kernel without a wait for its asynchronous copy",
         party(self, self.copies.front().caller));
  }
  if (self.at_cluster_barrier) {
    fail("divergent_barrier", "the thread leaves the kernel between its arrival at the cluster's barrier and its wait",
         here);
  }
  if (cta.arrived > 0) {
    fail("divergent_barrier", "a thread waits for its whole CTA, and another leaves the kernel without coming there",
         party(*cta.barrier_first, cta.barrier_caller), here);
  }
  for (const auto& meeting : self.warp->meetings) {
    if (meeting->arrived != meeting->mask && (meeting->mask >> self.index % 32 & 1) != 0) {
      fail("divergent_barrier", "a lane waits for lanes of its warp, and one of them leaves the kernel",
           party(self.warp->threads[meeting->first_lane], meeting->caller), here);
    }
  }
  self.state = State::finished;
  self.warp->finished |= 1u << self.index % 32;
  ++progress_;
  ++exits_;
  came_to_something();
  ++cluster.finished;
  if (++cta.finished == cta.threads.size()) finish_cta(cta);
  if (cluster.arrived > 0 && cluster.arrived + cluster.finished == cluster.threads) cluster_arrived(cluster);
  stacks_.give(self.stack);
  Thread* next = nullptr;
  if (cluster.finished == cluster.threads) {
    ++finished_;
  } else {
    next = pick();
  }
  void* gone;
  if (next != nullptr) {
    enter(*next);
    trtc_switch(&gone, next->stack_pointer);
  }
  running_ = nullptr;
  interface_.place = &nowhere_;
  trtc_switch(&gone, main_stack_pointer_);
  __builtin_unreachable();
}

void Machine::finish_cta(Cta& cta) {
  for (const AsyncStore& store : stores_) {
    if (store.target == &cta) {
      fail("exited_shared_memory", "a CTA leaves the kernel while a store to its shared memory is on its way",
           store.party, party(*running_, nullptr));
    }
  }
  for (const auto& [key, access] : cta.remote) {
    bool known = false;
    for (const Thread& thread : cta.threads) {
      known = knows(thread, access.event);
      if (known) break;
    }
    if (!known) {
      fail("exited_shared_memory",
           "another CTA of the cluster uses a CTA's shared memory, and nothing keeps that one from leaving first",
           access.party, party(*running_, nullptr));
    }
  }
}

Party Machine::any_that_is_left() const {
  for (const Cluster& slot : slots_) {
    for (const Cta& cta : slot.ctas) {
      for (const Thread& thread : cta.threads) {
        if (thread.state != State::finished) return party(thread, thread.waits_at);
      }
    }
  }
  return {};
}

void Machine::loop(bool (*interrupted)()) {
  uint64_t seen = ~uint64_t{0}, looked = 0;
  uint64_t idle = 0, rounds = 0;
  while (fault_.kind.empty()) {
    if (switches_ - looked >= kSwitchesPerLook) {
      looked = switches_;
      if (interrupted()) {
        fault_.kind = "interrupted";
        return;
      }
      if (const char* what = endless_meetings()) {
        fail("endless", what, any_that_is_left());
        return;
      }
      if (cpu_seconds() > spinners_rest_until_) wake_spinners();  // where others wait for one of them
    }
    for (Cluster& slot : slots_) {
      if (slot.finished == slot.threads && started_ < clusters_) {
        uint64_t number = started_++;
        if (launch_->schedule == Schedule::last_in) number = clusters_ - 1 - number;
        if (launch_->schedule == Schedule::random) number = order_[number];
        start_cluster(slot, number);
      }
    }
    if (Thread* next = pick()) {
      if (enter(*next)) trtc_switch(&main_stack_pointer_, next->stack_pointer);
      continue;
    }
    if (finished_ == clusters_) return;
    if (deliver_one()) continue;
    if (!pollers_.empty()) {
      if (progress_ != seen) idle = rounds = 0;
      seen = progress_;
      idle += pollers_.size();
      if (++rounds <= kIdleRounds || idle <= (launch_->checked ? kIdleTurns : kIdleTurnsUnchecked)) {
        wake_pollers();
        continue;
      }
    }
    if (!spinners_.empty()) {
      if (interrupted()) {  // the switches between them are slow
        fault_.kind = "interrupted";
        return;
      }
      if (wake_spinners()) {
        idle = rounds = 0;
        continue;
      }
      if (pollers_.empty()) {
        fail("endless", kEndless, party(*spinners_.front(), spinners_.front()->waits_at));
        return;
      }
    }
    fail("deadlock", "no thread can go on: " + blocked(), any_that_is_left());
  }
}

}  // namespace simulator
