// SPDX-License-Identifier: Apache-2.0
// The plans of an operator by what they depend on. The last one that was used is found without hashing.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "call.hpp"
#include "plan.hpp"

class PlanTable {
 public:
  // Then the quarter that was not looked up for longest is forgotten: hidden sizes may vary without end.
  static constexpr size_t kMostPlans = 512;

  // Implementation, flags and device; columns; the arrays' dtypes; and whether some row is no whole aligned vectors.
  using Key = std::array<uint64_t, 2 + kMaxArrays * sizeof(DtypeId) / sizeof(uint64_t)>;
  static Key key_of(const Call& call, int variant, int64_t columns, bool unaligned);

  // Null where there is none.
  std::shared_ptr<const Plan> find(const Key& key);
  std::shared_ptr<const Plan> keep(const Key& key, const Plan& plan);
  void clear();

 private:
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  struct Kept {
    std::shared_ptr<const Plan> plan;  // a call goes on with what is forgotten meanwhile
    uint64_t looked_up;
  };

  void forget();

  Key last_key_{};
  std::shared_ptr<const Plan> last_;
  std::unordered_map<Key, Kept, Hash> plans_;
  uint64_t lookups_ = 0;
};
