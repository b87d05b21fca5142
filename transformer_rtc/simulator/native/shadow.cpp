// SPDX-License-Identifier: Apache-2.0
#include "shadow.hpp"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace {

bool same_owner(const Event& a, const Event& b) { return a.key == b.key && a.atomic == b.atomic && a.wrote == b.wrote; }

}  // namespace

void* Arena::allocate(size_t bytes) {
  bytes = (bytes + 15) / 16 * 16;
  if (bytes > kBlock / 4) {
    large_.emplace_back(new char[bytes]);
    return large_.back().get();
  }
  if (block_ == blocks_.size() || used_ + bytes > kBlock) {
    if (block_ < blocks_.size()) ++block_;
    if (block_ == blocks_.size()) blocks_.emplace_back(new char[kBlock]);
    used_ = 0;
  }
  char* found = blocks_[block_].get() + used_;
  used_ += bytes;
  return found;
}

void Arena::clear() {
  constexpr size_t keep = 64;  // 16 MiB
  if (blocks_.size() > keep) blocks_.resize(keep);
  large_.clear();
  block_ = used_ = 0;
}

void Shadow::split(Unit& unit, uint8_t shift) {
  const unsigned count = kUnitBytes >> shift;
  auto* cells = static_cast<Cell*>(arena_.allocate(sizeof(Cell) * count));
  for (unsigned i = 0; i < count; ++i) {
    cells[i] = Cell{};
    if (unit.cells == nullptr) continue;
    const Cell& old = unit.cells[(i << shift) >> unit.shift];
    cells[i].write = old.write;
    cells[i].read = old.read;
    cells[i].atomic_writers = old.atomic_writers;
    if (old.more != nullptr && old.more->size > 0) {
      auto* events = static_cast<Event*>(arena_.allocate(sizeof(Event) * old.more->size));
      std::memcpy(static_cast<void*>(events), old.more->events, sizeof(Event) * old.more->size);
      cells[i].more = static_cast<Events*>(arena_.allocate(sizeof(Events)));
      *cells[i].more = {old.more->size, old.more->size, events};
    }
  }
  unit.cells = cells;
  unit.shift = shift;
}

void Shadow::add_event(Cell& cell, const Event& event) {
  if (cell.read.clock == 0) {
    cell.read = event;
    return;
  }
  if (cell.more == nullptr) {
    cell.more = static_cast<Events*>(arena_.allocate(sizeof(Events)));
    *cell.more = {0, 0, nullptr};
  }
  Events& more = *cell.more;
  for (uint32_t i = more.size; i-- > 0 && i + 8 >= more.size;) {
    if (same_owner(more.events[i], event)) {
      more.events[i] = event;
      return;
    }
  }
  if (more.size == more.capacity && more.capacity >= kCompact) {
    // Only an owner's last tick counts.
    std::sort(more.events, more.events + more.size, [](const Event& a, const Event& b) {
      return std::tie(a.key, a.atomic, a.wrote, b.clock) < std::tie(b.key, b.atomic, b.wrote, a.clock);
    });
    const Event* end = std::unique(more.events, more.events + more.size, same_owner);
    more.size = static_cast<uint32_t>(end - more.events);
  }
  if (more.size == more.capacity) {
    const uint32_t capacity = more.capacity == 0 ? 4 : 2 * more.capacity;
    auto* events = static_cast<Event*>(arena_.allocate(sizeof(Event) * capacity));
    if (more.size > 0) std::memcpy(static_cast<void*>(events), more.events, sizeof(Event) * more.size);
    more.events = events;
    more.capacity = capacity;
  }
  more.events[more.size++] = event;
}

void Shadow::clear() {
  pages_.clear();
  last_number_ = ~uintptr_t{0};
  last_page_ = nullptr;
  arena_.clear();
}
