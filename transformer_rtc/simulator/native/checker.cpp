// SPDX-License-Identifier: Apache-2.0
// What orders accesses, and what is wrong with one.
#include "machine.hpp"

namespace simulator {

namespace {

constexpr uint32_t kMostAtomicWriters = 64;  // of a cell that are remembered, beside the last one

}  // namespace

bool Machine::knows(const Thread& thread, const Event& event) const {
  const Owner owner = owner_of(event.key);
  if (owner == Owner::pending) return false;
  const Cta& cta = *thread.cta;
  if (owner == Owner::thread) {
    const uint64_t number = number_of(event.key);
    if (number == thread.number) return true;
    const uint64_t threads = cta.threads.size(), whose = number / threads;
    const uint64_t warp = whose * cta.warps.size() + number % threads / 32;
    if (whose == cta.number && event.clock < cta.below) return true;
    if (warp == thread.warp->number && event.clock < thread.warp->below) return true;
    if (thread.own.empty() && cta.common.empty()) return false;
    for (const Key key : {event.key, key_of(Owner::warp, warp), key_of(Owner::cta, whose)}) {
      if (event.clock < thread.own.below(key) || event.clock < cta.common.below(key)) return true;
    }
    return false;
  }
  return event.clock < thread.own.below(event.key) || event.clock < cta.common.below(event.key);
}

void Machine::publish(Thread& thread, Knowledge& to) {
  to.join(thread.cta->common);
  to.join(thread.own);
  to.learn(key_of(Owner::cta, thread.cta->number), thread.cta->below);
  to.learn(key_of(Owner::warp, thread.warp->number), thread.warp->below);
  to.learn(key_of(Owner::thread, thread.number), thread.clock + 1);
  ++thread.clock;
}

void Machine::meet_cta(Cta& cta) {
  Clock latest = 0;
  Knowledge declared, heard;
  for (Thread& thread : cta.threads) {
    latest = std::max(latest, thread.clock);
    if (!thread.own.empty()) {
      cta.common.join(thread.own);
      thread.own.clear();
    }
    declared.join(thread.declared);
    heard.join(thread.heard);
  }
  // A fence of one thread, a barrier, and another's flag: more than the memory model promises, but every GPU keeps it.
  for (Thread& thread : cta.threads) {
    if (!declared.empty()) thread.declared = declared;
    if (!heard.empty()) thread.heard = heard;
  }
  cta.below = latest + 1;
  for (Thread& thread : cta.threads) thread.clock = latest + 1;
}

void Machine::meet_warp(Warp& warp, unsigned mask) {
  Clock latest = 0;
  Knowledge joined;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    latest = std::max(latest, warp.threads[lane].clock);
    joined.join(warp.threads[lane].own);
  }
  if (mask == warp.lanes) {
    warp.below = latest + 1;
  } else {
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1) != 0) joined.learn(key_of(Owner::thread, warp.threads[lane].number), latest + 1);
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    warp.threads[lane].clock = latest + 1;
    if (!joined.empty()) warp.threads[lane].own = joined;
  }
}

Cta* Machine::cta_of(const void* address) const {
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(arenas_);
  const uintptr_t number = offset / arena_stride_;
  if (number >= resident_ctas_) return nullptr;
  const size_t size = slots_.front().ctas.size();
  return const_cast<Cta*>(&slots_[number / size].ctas[number % size]);
}

const Machine::SharedRegion* Machine::shared_region(unsigned offset, unsigned bytes) const {
  for (const SharedRegion& region : regions_) {
    if (offset >= region.begin && offset + bytes <= region.end) return &region;
  }
  return nullptr;
}

const Extent* Machine::extent_of(uintptr_t address, unsigned bytes) {
  if (last_extent_ == nullptr || address < last_extent_->begin || address >= last_extent_->end) {
    const auto after = std::upper_bound(extents_.begin(), extents_.end(), address,
                                        [](uintptr_t wanted, const Extent& extent) { return wanted < extent.begin; });
    if (after == extents_.begin() || address >= std::prev(after)->end) return nullptr;
    last_extent_ = &*std::prev(after);
  }
  return address + bytes <= last_extent_->end ? last_extent_ : nullptr;
}

template <class Text>
void Machine::check_cells(Thread& thread, Shadow& shadow, Unit& unit, unsigned offset, unsigned bytes, Way way,
                          const Event& event, bool initialised, Text place) {
  const bool writes = way != Way::reads;
  uint8_t shift = 0;
  while (shift < 4 && ((offset | bytes) >> shift & 1) == 0) ++shift;
  Cell* cells = shadow.refine(unit, shift);
  const auto harmless = [&](const Event& other) { return (event.atomic && other.atomic) || knows(thread, other); };
  const auto race = [&](const char* other_way, const Event& other) {
    const bool waits = owner_of(other.key) == Owner::pending;
    fail("race",
         std::string(writes ? "writes " : "reads ") + bytes_text(bytes) + " at " + place() + ", which " +
             (waits ? "an asynchronous copy or store that has not been waited for " : "another thread ") + other_way +
             (waits ? "" : ", and nothing orders the two"),
         party(thread, event.caller), party_of(other));
  };
  for (unsigned c = offset >> unit.shift; c <= (offset + bytes - 1) >> unit.shift; ++c) {
    Cell& cell = cells[c];
    if (cell.write.clock != 0 && !harmless(cell.write)) race("writes", cell.write);
    if (way != Way::writes && cell.write.clock == 0 && !initialised) {
      fail("uninitialised", "reads " + bytes_text(bytes) + " at " + place() + ", where nothing has been written",
           party(thread, event.caller));
    }
    // What came since the last write; and before it, atomic writers of whom the last one did not know.
    if (writes || cell.atomic_writers > 0) {
      const auto check = [&](const Event& other) {
        if (other.clock != 0 && (writes || other.wrote) && !harmless(other))
          race(other.wrote ? "writes" : "reads", other);
      };
      check(cell.read);
      for (uint32_t i = 0; cell.more != nullptr && i < cell.more->size; ++i) check(cell.more->events[i]);
    }
    if (!writes) {
      // A reader of whom this one knows is behind whatever will know of this one.
      if (cell.read.clock != 0 && cell.read.atomic == event.atomic && !cell.read.wrote && knows(thread, cell.read)) {
        cell.read = Event{};
      }
      shadow.add_event(cell, event);
      continue;
    }
    // What an atomic write does not know of still counts for a plain access to come.
    Shadow::filter_events(cell, [&](const Event& other) { return event.atomic && !knows(thread, other); });
    if (!event.atomic) cell.atomic_writers = 0;
    if (event.atomic && cell.write.clock != 0 && cell.atomic_writers < kMostAtomicWriters &&
        !knows(thread, cell.write)) {
      cell.write.wrote = true;
      shadow.add_event(cell, cell.write);
      ++cell.atomic_writers;
    }
    cell.write = event;
  }
}

void Machine::access(Thread& thread, const void* pointer, unsigned bytes, unsigned alignment, Way way,
                     const Event& event) {
  const bool writes = way != Way::reads;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address - reinterpret_cast<uintptr_t>(thread.stack) < Stacks::kBytes) return;
  const char* verb = writes ? "writes " : "reads ";
  const auto refuse = [&](const char* kind, const std::string& message) {
    fail(kind, message, party(thread, event.caller));
  };
  if (writes) ++progress_;
  if (Cta* cta = cta_of(pointer)) {
    const auto offset = static_cast<unsigned>(static_cast<const char*>(pointer) - cta->arena);
    if (shared_region(offset, bytes) == nullptr) {
      const bool begins = shared_region(offset, 1) != nullptr;
      refuse("out_of_bounds",
             verb + bytes_text(bytes) + ": " + shared_place(*cta, offset) + (begins ? ", and beyond its end" : ""));
    }
    if (address % alignment != 0) {
      refuse("misaligned", verb + bytes_text(bytes) + " at " + shared_place(*cta, offset) +
                               ", which is not aligned to " + bytes_text(alignment));
    }
    if (cta->cluster != thread.cta->cluster) {
      refuse("out_of_bounds",
             std::string(verb) + "the shared memory of block " + text(cta->index) + ", which is of another cluster");
    }
    if (cta != thread.cta) {
      if (cta->cluster->phase == 0) {
        refuse("race", std::string(verb) + "the shared memory of block " + text(cta->index) +
                           ", which may not have started: no barrier of the cluster has been passed");
      }
      if (cta->finished == cta->threads.size()) {
        refuse("exited_shared_memory",
               std::string(verb) + "the shared memory of block " + text(cta->index) + ", which has left the kernel");
      }
      if (owner_of(event.key) != Owner::pending) cta->remote[event.key] = {event, party(thread, event.caller)};
    }
    for (unsigned done = 0; done < bytes;) {
      const unsigned in_unit = (offset + done) % kUnitBytes, part = std::min(bytes - done, kUnitBytes - in_unit);
      check_cells(thread, shared_shadow_, cta->units[(offset + done) / kUnitBytes], in_unit, part, way, event, false,
                  [&] { return shared_place(*cta, offset + done); });
      done += part;
    }
    return;
  }
  const Extent* extent = extent_of(address, bytes);
  if (extent == nullptr) {
    const bool begins = extent_of(address, 1) != nullptr;
    refuse("out_of_bounds",
           verb + bytes_text(bytes) + ": " + global_place(address) + (begins ? ", and beyond its end" : ""));
  }
  if (address % alignment != 0) {
    refuse("misaligned", verb + bytes_text(bytes) + " at " + global_place(address) + ", address " +
                             hexadecimal(address) + ", which is not aligned to " + bytes_text(alignment));
  }
  if (writes && !extent->writable) {
    refuse("read_only", verb + bytes_text(bytes) + " at " + global_place(address) + ", which is only to be read");
  }
  if (!extent->writable) return;  // nobody writes it, so nothing is to be remembered
  const bool initialised = extent->initialised;
  for (unsigned done = 0; done < bytes;) {
    const unsigned in_unit = (address + done) % kUnitBytes, part = std::min(bytes - done, kUnitBytes - in_unit);
    check_cells(thread, shadow_, shadow_.unit(address + done), in_unit, part, way, event, initialised,
                [&] { return global_place(address + done); });
    done += part;
  }
}

void Machine::set_writer(const void* address, unsigned bytes, const Event& event) {
  const Cta* cta = cta_of(address);
  const auto offset = static_cast<unsigned>(static_cast<const char*>(address) - cta->arena);
  for (unsigned done = 0; done < bytes;) {
    Unit& unit = cta->units[(offset + done) / kUnitBytes];
    const unsigned in_unit = (offset + done) % kUnitBytes, part = std::min(bytes - done, kUnitBytes - in_unit);
    for (unsigned c = in_unit >> unit.shift; c <= (in_unit + part - 1) >> unit.shift; ++c) unit.cells[c].write = event;
    done += part;
  }
}

void Machine::forget_reader(const void* pointer, unsigned bytes, Key key) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (unsigned done = 0; done < bytes;) {
    Unit& unit = shadow_.unit(address + done);
    const unsigned in_unit = (address + done) % kUnitBytes, part = std::min(bytes - done, kUnitBytes - in_unit);
    // What nobody can write is not remembered.
    for (unsigned c = in_unit >> unit.shift; unit.cells && c <= (in_unit + part - 1) >> unit.shift; ++c) {
      Shadow::filter_events(unit.cells[c], [&](const Event& reader) { return reader.key != key; });
    }
    done += part;
  }
}

}  // namespace simulator
