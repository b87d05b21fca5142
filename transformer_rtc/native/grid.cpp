// SPDX-License-Identifier: Apache-2.0
// How large grids are.
#include "grid.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "errors.hpp"
#include "operator.hpp"

void Operator::check_margin(const Call& call, int64_t multiprocessors) const {
  for (const Argument& argument : arguments_) {
    if (argument.kind == Kind::sm_margin && call.sm_margin >= multiprocessors) {
      refuse(argument.called, "must leave at least one of " + std::to_string(multiprocessors) +
                                  " multiprocessors; it is " + std::to_string(call.sm_margin));
    }
  }
}

int64_t Operator::groups(const Call& call, const Layout& layout, const Plan& plan) const {
  const std::string& first_name = arguments_[0].called;
  const bool persistent = plan.max_groups < Plan::kAnyGroups;
  int64_t most = plan.max_groups;
  if (call.sm_margin > 0) {
    check_margin(call, plan.multiprocessors);
    most = std::max<int64_t>(1, most * (plan.multiprocessors - call.sm_margin) / plan.multiprocessors);
  }
  int64_t groups = (layout.geometry.rows + plan.rows_per_cta - 1) / plan.rows_per_cta;
  if (plan.elements_per_cta > 0) {
    const int64_t columns = (layout.launched_columns() + plan.vec_size - 1) / plan.vec_size * plan.vec_size;
    groups = (layout.launched_rows() * columns + plan.elements_per_cta - 1) / plan.elements_per_cta;
  }
  int64_t launched = persistent ? std::min(groups, most) : groups;
  if (persistent && plan.turn_bytes > 0) {
    // t rows in turn are the best where groups of one row each would leave t (t - 1) times `turn_bytes`, or more.
    const double ratio = static_cast<double>(groups) * static_cast<double>(plan.partial_bytes) / plan.turn_bytes;
    const double turns = std::floor(0.5 + std::sqrt(0.25 + ratio));
    const auto by = [&](double rows) { return static_cast<int64_t>(std::ceil(static_cast<double>(groups) / rows)); };
    // Of several, rather one more than a second group on some multiprocessors.
    const int64_t once = (plan.multiprocessors - call.sm_margin) / plan.ctas_per_row;
    const bool takes_more = turns >= 2 && by(turns) > once && by(turns + 1) <= once;
    launched = std::min(launched, by(takes_more ? turns + 1 : turns));
  }
  if (plan.whole >= 0 && layout.sizes[plan.whole] > 1) {
    const int64_t count = layout.sizes[plan.whole], unit = count / std::gcd(count, plan.rows_per_cta);
    launched = std::max(unit, launched / unit * unit);
  }
  if (launched > INT32_MAX / plan.ctas_per_row) refuse(first_name, "has more rows than a grid can hold");
  return launched;
}

int64_t sharers_of(const Stage& stage, int64_t rows, int64_t array_rows) {
  // So that each has 8 rows at least: what a CTA costs is little beside them. The shape alone decides, and with it the
  // order of the sums.
  // CTAs of a cluster share them once a launch only.
  const int64_t ctas = stage.shape.cluster.y, groups = stage.row_groups / (array_rows > kMostInY / ctas ? ctas : 1);
  const int64_t most = std::min(groups, rows / array_rows / 8);
  int64_t sharers = 1;
  while (2 * sharers <= most) sharers *= 2;
  return sharers;
}

LaunchShape later_shape(const Stage& stage, const Layout& layout, int64_t array_rows) {
  LaunchShape shape = stage.shape;
  const int64_t elements = stage.per >= 0 ? layout.sizes[stage.per] : 1;
  if (stage.columns_per_cta == 0) {
    shape.grid = {static_cast<unsigned>(elements), 1, 1};
    return shape;
  }
  const int64_t ctas = (layout.sizes[0] + stage.columns_per_cta - 1) / stage.columns_per_cta;
  int64_t in_y = elements;
  if (stage.rows_of >= 0) {
    const int64_t shared_by = sharers_of(stage, layout.geometry.rows, array_rows);
    const int64_t at_once = stage.row_groups / shared_by, in_cluster = shape.cluster.y;
    in_y = in_cluster * std::min(kMostInY / in_cluster, (array_rows + at_once - 1) / at_once);
    // CTAs that share nothing are launched one by one.
    if (shared_by * in_cluster <= stage.row_groups) shape.cluster = {1, 1, 1};
  }
  shape.grid = {static_cast<unsigned>(ctas), static_cast<unsigned>(in_y), 1};
  return shape;
}
