// SPDX-License-Identifier: Apache-2.0
// Launches that do not end: proven by a state that repeats, or taken for granted after a time.
#include "endless.hpp"

#include <ctime>

#include "machine.hpp"
#include "signals.hpp"

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

namespace simulator {

namespace {

constexpr double kCheckedTimes = 4;           // about what checks cost a thread that runs alone
constexpr double kUnknownTimes = 4;           // for threads of whose memory nothing is known, or which is changed
constexpr double kSecondsAlone = 0.05;        // before those that spin have a turn too
constexpr double kSecondsBeforeLooks = 0.05;  // of a launch in which threads meet
constexpr double kPartOfLooks = 20;           // of the time, one part goes to looks
constexpr size_t kMostDigested = 16 << 20;    // bytes: some milliseconds

}  // namespace

bool Machine::digest_memory(Digest& digest) const {
  if (!launch_->knows_memory) return false;
  size_t bytes = static_cast<size_t>(arena_stride_) * resident_ctas_;
  for (const Extent& extent : launch_->memory) {
    if (extent.writable) bytes += extent.end - extent.begin;
  }
  if (bytes > kMostDigested) {
    digest.add(progress_);  // in checked mode, of each write
    return launch_->checked;
  }
  digest.add(arenas_, static_cast<size_t>(arena_stride_) * resident_ctas_);
  for (const Extent& extent : launch_->memory) {
    if (extent.writable) digest.add(reinterpret_cast<const void*>(extent.begin), extent.end - extent.begin);
  }
  return true;
}

void Machine::check_end(const void* place, const Digest& registers, uintptr_t stack_pointer) {
  const auto stack = reinterpret_cast<uintptr_t>(running_->stack);
  Digest digest = registers;
  if (stack_pointer >= stack && stack_pointer < stack + Stacks::kBytes) {
    digest.add(reinterpret_cast<const void*>(stack_pointer), stack + Stacks::kBytes - stack_pointer);
    Digest memory;
    const bool known = digest_memory(memory);
    digest.add(memory.low);
    digest.add(memory.high);
    if (states_.repeats(place, digest)) {
      // Another thread, or a store that is on its way, may change what it waits for.
      if (!ready_.empty() || !pollers_.empty() || !stores_.empty() || !spinners_.empty()) {
        spin(*running_, place, memory);
        return;
      }
      if (known) fail_here("endless", kEndless, place);
    }
  }
  const double seconds = cpu_seconds() - entered_at_;
  if (ready_.empty() && seconds > kSecondsAlone && wake_spinners()) {
    yield(*running_);
    return;
  }
  if (seconds >= launch_->endless_seconds * (launch_->checked ? kCheckedTimes : 1)) {
    fail_here("endless", "the thread runs on and on without meeting another", place);
  }
}

void Machine::spin(Thread& self, const void* place, const Digest& memory) {
  const double now = cpu_seconds();
  if (spinning_since_ == 0) {
    Signals::quicken();
    spinning_since_ = now;
  }
  // Those that are ready have as much time.
  spinners_rest_until_ = now + (spinners_woken_at_ != 0 ? now - spinners_woken_at_ : 0);
  self.state = State::polling;
  self.waits_for = "a value in memory";
  self.waits_at = place;
  self.stuck_with = memory;
  spinners_.push_back(&self);
  leave(self);
}

bool Machine::wake_spinners() {
  if (spinners_.empty()) return false;
  if (spinning_since_ != 0 && cpu_seconds() - spinning_since_ > kUnknownTimes * launch_->endless_seconds) return false;
  Digest memory;
  const bool known = digest_memory(memory);
  std::vector<Thread*> stuck;
  for (Thread* thread : spinners_) {
    if (known && thread->stuck_with == memory) {
      stuck.push_back(thread);
    } else {
      make_ready(*thread);
    }
  }
  spinners_.swap(stuck);
  spinners_woken_at_ = cpu_seconds();
  return spinners_.size() < stuck.size();
}

bool Machine::digest_threads(Digest& digest) const {
  // What is on its way would change memory later.
  if (!barriers_.empty() || !stores_.empty() || !pollers_.empty() || !spinners_.empty()) return false;
  digest.add(started_);
  digest.add(random_state_);
  for (size_t i = 0; i < ready_.size(); ++i) digest.add(ready_.at(i)->number);
  for (const Cluster& slot : slots_) {
    digest.add(uint64_t{slot.finished} << 32 | slot.arrived);
    for (const Cta& cta : slot.ctas) {
      digest.add(uint64_t{cta.arrived} << 32 | cta.predicates);
      for (const Warp& warp : cta.warps) {
        for (const auto& meeting : warp.meetings) {
          digest.add(uint64_t{meeting->mask} << 32 | meeting->arrived);
          digest.add(uint64_t{meeting->left} << 32 | static_cast<unsigned>(meeting->kind));
          digest.add(meeting->ballot);
          for (unsigned lane = 0; lane < 32; ++lane) {
            if ((meeting->arrived >> lane & 1) != 0) digest.add(meeting->values[lane]);
          }
        }
      }
      for (const Thread& thread : cta.threads) {
        digest.add(static_cast<uint64_t>(thread.state));
        if (!thread.copies.empty()) return false;
        if (thread.state == State::fresh || thread.state == State::finished) continue;
        const auto* from = static_cast<const char*>(thread.stack_pointer);
        digest.add(from, static_cast<size_t>(thread.stack + Stacks::kBytes - from));
      }
    }
  }
  return true;
}

const char* Machine::endless_meetings() {
  const double now = cpu_seconds();
  if (rests_since_ == 0) {
    rests_since_ = exits_since_ = now;
    exits_at_rest_ = exits_;
    look_at_rest_at_ = now + kSecondsBeforeLooks;
  }
  if (now < look_at_rest_at_) return nullptr;
  Digest digest;
  const bool known = digest_memory(digest);
  if (!(digest == rested_) || progress_ != progress_at_rest_ || !known) rests_since_ = now;
  rested_ = digest;
  progress_at_rest_ = progress_;
  if (exits_ != exits_at_rest_) exits_since_ = now;
  exits_at_rest_ = exits_;
  const char* found = nullptr;
  if (known && digest_threads(digest)) {
    // A loop of looks comes back to the one that is kept, as the distance to it doubles.
    if (looks_ > 0 && digest == kept_) found = "threads meet again and again, and do the same for ever";
    if ((looks_ & (looks_ - 1)) == 0) kept_ = digest;
    ++looks_;
  }
  if (now - rests_since_ > launch_->endless_seconds) found = "threads meet again and again, and none changes memory";
  if (!known && now - exits_since_ > kUnknownTimes * launch_->endless_seconds) {
    found = "threads meet again and again, and none leaves the kernel";
  }
  look_at_rest_at_ = now + kPartOfLooks * (cpu_seconds() - now);
  return found;
}

}  // namespace simulator
