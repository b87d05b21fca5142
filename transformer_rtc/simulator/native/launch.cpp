// SPDX-License-Identifier: Apache-2.0
// How a launch starts and ends: where shared memory and arrays lie, and what its clusters start with.
#include <algorithm>
#include <cstring>
#include <map>

#include "calls.hpp"
#include "signals.hpp"

namespace simulator {

namespace {

constexpr unsigned kRedZone = 64;  // bytes that belong to no variable
constexpr uint64_t kKeptThreads = 4096;

uint64_t linear(const Index& index, const Index& size) {
  return index.x + static_cast<uint64_t>(size.x) * (index.y + static_cast<uint64_t>(size.y) * index.z);
}

}  // namespace

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
  progress_ = 0;
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
  std::vector<int> open, before;
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
    // Where an array goes on, an access may go over the end of another one that it shares memory with.
    const bool goes_on = std::any_of(open.begin(), open.end(), [&](int extent) {
      return std::find(before.begin(), before.end(), extent) != before.end();
    });
    if (last != nullptr && last->end == piece.begin && (goes_on || last->name == piece.name) &&
        last->writable == piece.writable && last->initialised == piece.initialised) {
      last->end = piece.end;
    } else {
      extents_.push_back(piece);
    }
    before = open;
  }

  ready_.clear();
  pollers_.clear();
  running_ = nullptr;
  interface_.place = &nowhere_;
  entered_at_ = cpu_seconds();
  spinners_.clear();
  spinning_since_ = spinners_woken_at_ = spinners_rest_until_ = 0;
  states_.clear();
  rests_since_ = look_at_rest_at_ = exits_since_ = 0;
  exits_ = 0;
  looks_ = 0;
  rested_ = Digest{};
  interface_.access = &Calls::access;
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

}  // namespace simulator
