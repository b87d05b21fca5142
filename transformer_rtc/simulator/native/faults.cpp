// SPDX-License-Identifier: Apache-2.0
// What is said of a fault: who had it, where in memory, and for what the others wait.
#include <cstdio>
#include <map>

#include "machine.hpp"

namespace simulator {

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

}  // namespace simulator
