// The machine's turns: which thread runs, how a launch starts and ends, and what is said of its faults.
#include "machine.hpp"

#include <cstdio>
#include <cstring>
#include <map>

#include "signals.hpp"

namespace simulator {

namespace {

constexpr unsigned kRedZone = 64;                  // bytes that belong to no variable
constexpr uint64_t kIdleRounds = 64;               // of polling threads without any change of memory
constexpr uint64_t kIdleTurns = 1 << 18;           // of them all
constexpr uint64_t kIdleTurnsUnchecked = 1 << 20;  // where plain stores are not seen
constexpr uint64_t kSwitchesPerLook = 1 << 14;     // between looks whether the user interrupts
constexpr uint64_t kKeptThreads = 4096;

uint64_t linear(const Index& index, const Index& size) {
  return index.x + static_cast<uint64_t>(size.x) * (index.y + static_cast<uint64_t>(size.y) * index.z);
}

Index unravel(uint64_t number, const Index& size) {
  return {static_cast<unsigned>(number % size.x), static_cast<unsigned>(number / size.x % size.y),
          static_cast<unsigned>(number / size.x / size.y)};
}

}  // namespace

Machine* Machine::current = nullptr;

// ---- Scheduling ----------------------------------------------------------------------------------------------------

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
  accesses_ = 0;
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

void Machine::met(Meetings& meetings, uint64_t most, const void* caller) {
  if (!launch_->checked) return;  // plain stores are not seen
  if (progress_ != meetings.progress) meetings.count = 0;
  meetings.progress = progress_;
  if (++meetings.count > most) {
    fail_here("endless", "threads meet again and again, and none writes anything", caller);
  }
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
  turns_ = 0;
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

void Machine::start_cluster(Cluster& slot, uint64_t number) {
  const Launch& launch = *launch_;
  const Index clusters = {launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                          launch.grid.z / launch.cluster.z};
  const Index place = unravel(number, clusters);
  const auto threads = static_cast<unsigned>(volume(launch.block));
  const unsigned warps = (threads + 31) / 32;
  const auto size = static_cast<unsigned>(volume(launch.cluster));
  if (!launch.cooperative) {
    shared_shadow_.clear();
    barriers_.clear();
    released_in_shared_.clear();
  }
  slot.threads = size * threads;
  slot.finished = slot.arrived = 0;
  slot.phase = 0;
  slot.releases.clear();
  slot.pending.clear();
  slot.released.clear();
  for (unsigned rank = 0; rank < size; ++rank) {
    Cta& cta = slot.ctas[rank];
    const Index in_cluster = unravel(rank, launch.cluster);
    cta.index = {place.x * launch.cluster.x + in_cluster.x, place.y * launch.cluster.y + in_cluster.y,
                 place.z * launch.cluster.z + in_cluster.z};
    cta.number = linear(cta.index, launch.grid);
    cta.cluster = &slot;
    cta.arrived = cta.predicates = cta.finished = 0;
    cta.below = 1;
    cta.idle = {};
    cta.common.clear();
    cta.remote.clear();
    std::memset(cta.arena, kPoison, arena_stride_);
    if (launch.checked) std::fill(cta.units, cta.units + arena_stride_ / kUnitBytes, Unit{});
    cta.warps.resize(warps);
    cta.threads.resize(threads);
    for (unsigned w = 0; w < warps; ++w) {
      Warp& warp = cta.warps[w];
      const unsigned lanes = std::min(32u, threads - 32 * w);
      warp.lanes = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
      warp.finished = 0;
      warp.below = 0;
      warp.meetings.clear();
      warp.idle = {};
      warp.threads = &cta.threads[32 * w];
      warp.number = cta.number * warps + w;
    }
    for (unsigned i = 0; i < threads; ++i) {
      Thread& thread = cta.threads[i];
      thread.place = {unravel(i, launch.block),   cta.index, launch.block, launch.grid, rank, size, cta.arena,
                      cta.arena + dynamic_offset_};
      thread.state = State::fresh;
      thread.at_cluster_barrier = false;
      thread.clock = 1;
      thread.copies.clear();
      thread.copy_groups = 0;
      if (launch.checked) {
        thread.own.clear();
        thread.heard.clear();
        thread.heard_in_cta.clear();
        thread.declared.clear();
        thread.declared_in_cta.clear();
        thread.initialised_barriers.clear();
      }
      thread.cta = &cta;
      thread.warp = &cta.warps[i / 32];
      thread.index = i;
      thread.number = cta.number * threads + i;
      ready_.push_back(&thread);
    }
  }
}

std::string Machine::blocked() const {
  // Where threads wait, and one that does for each place.
  std::map<std::pair<std::string, const void*>, std::pair<uint64_t, const Thread*>> places;
  for (const Cluster& slot : slots_) {
    for (const Cta& cta : slot.ctas) {
      for (const Thread& thread : cta.threads) {
        if (thread.state != State::waiting && thread.state != State::polling) continue;
        auto& found = places[{thread.waits_for, thread.waits_at}];
        if (found.first++ == 0) found.second = &thread;
      }
    }
  }
  std::string list;
  for (const auto& [place, found] : places) {
    list += (list.empty() ? "" : "; ") + std::to_string(found.first) + (found.first == 1 ? " waits" : " wait") +
            " for " + place.first + ", such as thread " + text(found.second->place.thread) + " of block " +
            text(found.second->place.cta);
  }
  return list;
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
    const Thread* stuck = nullptr;
    for (Cluster& slot : slots_) {
      for (Cta& cta : slot.ctas) {
        for (Thread& thread : cta.threads) {
          if (stuck == nullptr && thread.state != State::finished) stuck = &thread;
        }
      }
    }
    fail("deadlock", "no thread can go on: " + blocked(), party(*stuck, stuck->waits_at));
  }
}

void Machine::lay_out(const std::vector<trtc_simulator::SharedVariable*>& variables) {
  unsigned end = 0;
  for (trtc_simulator::SharedVariable* variable : variables) {
    // No better aligned than its type asks for.
    const unsigned alignment = variable->alignment;
    end = (end + kRedZone + alignment - 1) / alignment * alignment;
    if (end / alignment % 2 == 0) end += alignment;
    variable->offset = end;
    end += variable->bytes;
  }
}

Fault Machine::run(const Launch& launch, bool (*interrupted)()) {
  launch_ = &launch;
  current = this;
  fault_ = Fault{};
  suspects_.clear();
  suspected_.clear();
  random_state_ = launch.seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
  progress_ = accesses_ = 0;
  switches_ = 1;

  // Shared memory: variables with red zones between them, in as many arenas as CTAs are resident.
  regions_.clear();
  unsigned end = 0;
  for (const trtc_simulator::SharedVariable* variable : launch.shared_variables) {
    regions_.push_back({variable->offset, variable->offset + variable->bytes, variable->name});
    end = std::max(end, variable->offset + variable->bytes);
  }
  // Aligned to 16 and no better.
  dynamic_offset_ = (end + kRedZone + 31) / 32 * 32 + 16;
  if (launch.dynamic_shared_memory > 0) {
    regions_.push_back({dynamic_offset_, dynamic_offset_ + launch.dynamic_shared_memory, "dynamic shared memory"});
  }
  arena_stride_ = (dynamic_offset_ + launch.dynamic_shared_memory + kRedZone + 255) / 256 * 256;
  clusters_ = volume(launch.grid) / volume(launch.cluster);
  const uint64_t slots = launch.cooperative ? clusters_ : 1;
  resident_ctas_ = static_cast<unsigned>(slots * volume(launch.cluster));
  arena_memory_.resize(static_cast<size_t>(arena_stride_) * resident_ctas_ + 256);
  arenas_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(arena_memory_.data()) + 255) / 256 * 256);
  if (launch.checked) units_.resize(static_cast<size_t>(arena_stride_) / kUnitBytes * resident_ctas_);
  // Kept from launch to launch, as it is most of a small one's time, unless it is large.
  slots_.resize(slots);
  unsigned arena = 0;
  for (Cluster& slot : slots_) {
    slot.ctas.resize(volume(launch.cluster));
    for (Cta& cta : slot.ctas) {
      cta.arena = arenas_ + static_cast<size_t>(arena_stride_) * arena;
      cta.units = launch.checked ? units_.data() + static_cast<size_t>(arena_stride_) / kUnitBytes * arena : nullptr;
      ++arena;
    }
  }
  for (Cluster& slot : slots_) slot.threads = slot.finished = 0;
  started_ = finished_ = 0;
  order_.clear();
  if (launch.schedule == Schedule::random) {
    for (uint64_t i = 0; i < clusters_; ++i) order_.push_back(i);
    for (uint64_t i = clusters_; i > 1; --i) std::swap(order_[i - 1], order_[random() % i]);
  }

  // Extents that overlap are cut where they do: what one of them allows is allowed there.
  extents_.clear();
  last_extent_ = nullptr;
  hulls_.assign(launch.names.size(), Extent{~uintptr_t{0}, 0, false, false, 0});
  for (const Extent& extent : launch.extents) {
    Extent& hull = hulls_[static_cast<size_t>(extent.name)];
    hull.begin = std::min(hull.begin, extent.begin);
    hull.end = std::max(hull.end, extent.end);
  }
  std::map<uintptr_t, std::vector<std::pair<int, int>>> edges;  // (extent, +1 or -1)
  for (size_t i = 0; i < launch.extents.size(); ++i) {
    if (launch.extents[i].begin >= launch.extents[i].end) continue;
    edges[launch.extents[i].begin].push_back({static_cast<int>(i), 1});
    edges[launch.extents[i].end].push_back({static_cast<int>(i), -1});
  }
  std::vector<int> open;
  for (auto edge = edges.begin(); edge != edges.end(); ++edge) {
    for (const auto& [extent, way] : edge->second) {
      if (way > 0)
        open.push_back(extent);
      else
        open.erase(std::find(open.begin(), open.end(), extent));
    }
    if (open.empty()) continue;
    Extent piece{edge->first, std::next(edge)->first, false, false, launch.extents[open.front()].name};
    for (int i : open) {
      piece.writable |= launch.extents[i].writable;
      piece.initialised |= launch.extents[i].initialised;
    }
    Extent* last = extents_.empty() ? nullptr : &extents_.back();
    if (last != nullptr && last->end == piece.begin && last->name == piece.name && last->writable == piece.writable &&
        last->initialised == piece.initialised) {
      last->end = piece.end;
    } else {
      extents_.push_back(piece);
    }
  }

  ready_.clear();
  pollers_.clear();
  running_ = nullptr;
  interface_.place = &nowhere_;
  ticks_ = 0;
  touching_ = nullptr;
  turns_ = 0;
  {
    const Signals handled;
    loop(interrupted);
  }

  stacks_.give_all();
  shadow_.clear();
  shared_shadow_.clear();
  released_.clear();
  released_in_shared_.clear();
  barriers_.clear();
  stores_.clear();
  ready_.clear();
  if (resident_ctas_ * volume(launch.block) > kKeptThreads) slots_.clear();
  launch_ = nullptr;
  return fault_;
}

// ---- Faults --------------------------------------------------------------------------------------------------------

Party Machine::party(const Thread& thread, const void* caller) const {
  return {caller, thread.place.cta, thread.place.thread, true};
}

Party Machine::party_of(const Event& event) const {
  if (owner_of(event.key) == Owner::barrier) return {event.caller, {}, {}, false};
  const uint64_t threads = volume(launch_->block), number = number_of(event.key);
  return {event.caller, unravel(number / threads, launch_->grid), unravel(number % threads, launch_->block), true};
}

void Machine::fail(const char* kind, std::string message, const Party& at, const Party& other) {
  if (fault_.kind.empty()) {
    fault_.kind = kind;
    fault_.message = std::move(message);
    fault_.at = at;
    fault_.other = other;
  }
  if (running_ == nullptr) return;
  void* gone;
  running_ = nullptr;
  interface_.place = &nowhere_;
  trtc_switch(&gone, main_stack_pointer_);
}

void Machine::fail_here(const char* kind, std::string message, const void* caller) {
  fail(kind, std::move(message), party(*running_, caller));
}

void Machine::suspect(const char* what, const Party& a, const Party& b) {
  const uint64_t pair =
      reinterpret_cast<uintptr_t>(a.caller) * 0x9e3779b97f4a7c15u ^ reinterpret_cast<uintptr_t>(b.caller);
  if (suspects_.size() < 256 && suspected_.insert(pair).second) suspects_.push_back({what, a, b});
}

std::string Machine::hexadecimal(uintptr_t address) const {
  char digits[24];
  std::snprintf(digits, sizeof(digits), "0x%llx", static_cast<unsigned long long>(address));
  return digits;
}

std::string Machine::shared_place(const Cta& cta, unsigned offset) const {
  const SharedRegion* nearest = nullptr;
  unsigned distance = ~0u;
  for (const SharedRegion& region : regions_) {
    const unsigned away = offset < region.begin ? region.begin - offset : offset < region.end ? 0 : offset - region.end;
    if (away < distance || nearest == nullptr) nearest = &region, distance = away;
  }
  const std::string whose = running_ == nullptr || &cta == running_->cta ? "" : " of block " + text(cta.index);
  if (nearest == nullptr) return "shared memory" + whose + ", of which the kernel has none";
  const std::string name = nearest->name == "dynamic shared memory" ? nearest->name : "shared " + nearest->name;
  if (offset >= nearest->begin && offset < nearest->end) {
    return "byte " + std::to_string(offset - nearest->begin) + " of " + name + whose;
  }
  if (offset >= nearest->end) {
    if (offset == nearest->end) return "right behind the end of " + name + whose;
    return bytes_text(offset - nearest->end) + " past the end of " + name + whose + ", which has " +
           bytes_text(nearest->end - nearest->begin);
  }
  return bytes_text(nearest->begin - offset) + " before " + name + whose;
}

std::string Machine::global_place(uintptr_t address) const {
  const Extent* nearest = nullptr;
  uintptr_t distance = ~uintptr_t{0};
  for (const Extent& extent : extents_) {
    const uintptr_t away = address < extent.begin ? extent.begin - address
                           : address < extent.end ? 0
                                                  : address - extent.end;
    if (away < distance) nearest = &extent, distance = away;
  }
  if (nearest == nullptr || distance > 1 << 30)
    return "address " + hexadecimal(address) + ", in no array of the launch";
  const std::string& name = launch_->names[nearest->name];
  if (distance == 0 && address < nearest->end) {
    return "byte " + std::to_string(address - nearest->begin) + " of " + name;
  }
  if (address == nearest->end) return "right behind the end of " + name;
  if (address > nearest->end) return std::to_string(distance) + " bytes past the end of " + name;
  return std::to_string(distance) + " bytes before " + name;
}

}  // namespace simulator
