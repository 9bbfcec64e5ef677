// SPDX-License-Identifier: Apache-2.0
//
// The clusters of a BlockPlan, decoded plainly.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/block_plan.h"
#include "tests/core/synthetic.h"

namespace scsa::test {

// A cluster as the plan describes it.
struct PlainCluster {
  std::vector<std::int64_t> rows;
  Vector centroid, value_mean, shape;
  Vector key_step, value_step;
  double half_trace = 0;
};

// Those with members, of the blocks whose rows are all visible.
inline std::vector<PlainCluster> UsableClusters(const BlockPlan& plan, const Shape& shape, int kv_head,
                                                const std::vector<bool>& visible) {
  std::vector<PlainCluster> clusters;
  const SummaryLayout& layout = plan.layout();
  for (int b = 0; b < plan.n_blocks(); ++b) {
    bool usable = plan.built(b);
    for (std::int64_t r = plan.FirstRow(b); r < plan.EndRow(b); ++r) usable = usable && visible[r];
    if (!usable) continue;
    const ConstKeyRecord keys = layout.Keys(plan.key_record(kv_head, b));
    const ConstValueRecord values = layout.Values(plan.value_record(kv_head, b));
    for (int slot = 0; slot < plan.slots(); ++slot) {
      PlainCluster cluster;
      const std::uint16_t* offsets = plan.offsets(kv_head, b) + slot;
      for (int i = offsets[0]; i < offsets[1]; ++i) {
        cluster.rows.push_back(std::int64_t{b} * plan.block_rows() + plan.members(kv_head, b)[i]);
      }
      if (cluster.rows.empty()) continue;
      for (int d = 0; d < shape.head_dim; ++d) {
        cluster.centroid.push_back(keys.mean[d] +
                                   static_cast<double>(keys.step[d]) * keys.centroids[layout.CentroidAt(slot, d)]);
        cluster.value_mean.push_back(values.mean[d] +
                                     static_cast<double>(values.step[d]) * values.means[layout.ValueAt(slot, d)]);
      }
      cluster.shape = test::ToDouble(keys.shape, shape.head_dim);
      cluster.key_step = test::ToDouble(keys.step, shape.head_dim);
      cluster.value_step = test::ToDouble(values.step, shape.head_dim);
      cluster.half_trace = keys.half_traces[slot];
      EXPECT_EQ(keys.counts[slot], static_cast<float>(cluster.rows.size()));
      EXPECT_FLOAT_EQ(keys.log_counts[slot], std::log(static_cast<float>(cluster.rows.size())));
      clusters.push_back(cluster);
    }
  }
  return clusters;
}

}  // namespace scsa::test
