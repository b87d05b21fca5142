// SPDX-License-Identifier: Apache-2.0
#include "plan_table.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

PlanTable::Key PlanTable::key_of(const Call& call, int variant, int64_t columns, bool unaligned) {
  Key key{};
  key[0] = static_cast<uint64_t>(call.flags) << 48 | static_cast<uint64_t>(call.implementation) << 34 |
           static_cast<uint64_t>(call.sm_margin > 0) << 33 | static_cast<uint64_t>(variant) << 32 |
           static_cast<uint32_t>(call.views[0].device);
  key[1] = static_cast<uint64_t>(columns) << 1 | static_cast<uint64_t>(unaligned);
  std::memcpy(&key[2], call.dtypes, sizeof(call.dtypes));
  return key;
}

size_t PlanTable::Hash::operator()(const Key& key) const {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint64_t word : key) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

std::shared_ptr<const Plan> PlanTable::find(const Key& key) {
  if (last_ != nullptr && key == last_key_) return last_;
  const auto found = plans_.find(key);
  if (found == plans_.end()) return nullptr;
  found->second.looked_up = ++lookups_;
  last_key_ = key;
  std::shared_ptr<const Plan> plan = found->second.plan;
  // The one before may end with this: a kernel that is unloaded lets other threads run, and these may come here.
  std::shared_ptr<const Plan> before = std::exchange(last_, plan);
  return plan;
}

std::shared_ptr<const Plan> PlanTable::keep(const Key& key, const Plan& plan) {
  if (plans_.size() >= kMostPlans) forget();
  plans_.emplace(key, Kept{std::make_shared<const Plan>(plan), 0});
  return find(key);
}

void PlanTable::clear() {
  // They end last: a kernel that is unloaded lets other threads run, and these may come here.
  const auto plans = std::exchange(plans_, {});
  const auto last = std::exchange(last_, nullptr);
  last_key_ = {};
}

void PlanTable::forget() {
  std::vector<uint64_t> times;
  for (const auto& [key, kept] : plans_) times.push_back(kept.looked_up);
  const auto quarter = times.begin() + times.size() / 4;
  std::nth_element(times.begin(), quarter, times.end());
  // They end last: a kernel that is unloaded lets other threads run, and these may come here.
  std::vector<std::shared_ptr<const Plan>> forgotten;
  for (auto it = plans_.begin(); it != plans_.end();) {
    if (it->second.looked_up < *quarter) {
      forgotten.push_back(std::move(it->second.plan));
      it = plans_.erase(it);
    } else {
      ++it;
    }
  }
}
