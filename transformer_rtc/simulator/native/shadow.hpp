// SPDX-License-Identifier: Apache-2.0
// What the checker remembers of memory: for each byte the last write and the reads since, at the coarsest grain that
// the accesses allow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "knowledge.hpp"

struct Events {
  uint32_t size, capacity;
  Event* events;
};

// Bytes that have always been accessed together.
struct Cell {
  Event write;
  Event read;                   // the first reader since, or an atomic writer before that the last one did not know of
  Events* more = nullptr;       // and further ones
  uint32_t atomic_writers = 0;  // among them
};

// 16 bytes: 1, 2, 4, 8 or 16 cells.
struct Unit {
  Cell* cells = nullptr;
  uint8_t shift = 0;  // of a cell's bytes
};

constexpr unsigned kUnitBytes = 16;

// Memory that is given back all at once.
class Arena {
 public:
  void* allocate(size_t bytes);
  void clear();

 private:
  static constexpr size_t kBlock = 1 << 18;
  std::vector<std::unique_ptr<char[]>> blocks_;
  std::vector<std::unique_ptr<char[]>> large_;
  size_t block_ = 0, used_ = 0;
};

class Shadow {
 public:
  // The unit of a global address.
  Unit& unit(uintptr_t address) {
    const uintptr_t number = address / kPageBytes;
    if (number != last_number_) {
      Unit*& page = pages_[number];
      if (page == nullptr) {
        page = static_cast<Unit*>(arena_.allocate(sizeof(Unit) * kPageBytes / kUnitBytes));
        for (size_t i = 0; i < kPageBytes / kUnitBytes; ++i) page[i] = Unit{};
      }
      last_number_ = number;
      last_page_ = page;
    }
    return last_page_[address % kPageBytes / kUnitBytes];
  }

  // Makes a unit's cells as fine as an access of 2^shift bytes needs, and returns them.
  Cell* refine(Unit& unit, uint8_t shift) {
    if (unit.cells == nullptr || unit.shift > shift) split(unit, shift);
    return unit.cells;
  }

  void add_event(Cell& cell, const Event& event);
  // Keeps the events for which `keep` holds.
  template <class Keep>
  static void filter_events(Cell& cell, Keep keep) {
    if (cell.more != nullptr) {
      uint32_t kept = 0;
      for (uint32_t i = 0; i < cell.more->size; ++i) {
        if (keep(cell.more->events[i])) cell.more->events[kept++] = cell.more->events[i];
      }
      cell.more->size = kept;
    }
    if (cell.read.clock != 0 && !keep(cell.read)) {
      cell.read = Event{};
      if (cell.more != nullptr && cell.more->size > 0) cell.read = cell.more->events[--cell.more->size];
    }
  }

  void clear();

 private:
  static constexpr uintptr_t kPageBytes = 4096;
  static constexpr uint32_t kCompact = 256;

  void split(Unit& unit, uint8_t shift);

  Arena arena_;
  std::unordered_map<uintptr_t, Unit*> pages_;
  uintptr_t last_number_ = ~uintptr_t{0};
  Unit* last_page_ = nullptr;
};
