// SPDX-License-Identifier: Apache-2.0
//
// Moments of ever more clusters of a Plan together: what hierarchical selection of preset `seed` looks at before it
// looks at clusters.
//
// The tree is a balanced binary one over the clusters of a KV head, counted through the regions. A node above several
// regions has half of them (the smaller half where the number is odd) below its first child, and a node of one region
// has half of its clusters there: these are the sets of rows that the recursive splitting has made (cluster.h), whose
// halves differ by one cluster at most. With M the rows of a node, M_0 and M_1 those of its children,
//   mean       = (M_0 mean_0 + M_1 mean_1) / M              value mean likewise
//   variance_d = (M_0 v_0d + M_1 v_1d) / M + M_0 M_1 / M^2 (mean_0d - mean_1d)^2          the full diagonal
// and a cluster has its centroid, its value mean and v_d = residual_d + sum_j lambda_j e_jd^2. So the moments of a node
// are those of its rows (the variance with what clamping has added to the residuals of its clusters): nothing is
// estimated.
//
// A node is kept where it divides its clusters, with the region of the first cluster below its second child. So nodes
// inside a region are immutable like the region, and those above it come and go with the regions that they divide.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "core/plan.h"

namespace scsa {

// A node, or a cluster where it holds but one: clusters [first, end), which are those of the regions [first_region,
// end_region) or, with one region, some of its clusters.
struct ClusterRange {
  std::int32_t first_region = 0;
  std::int32_t end_region = 0;
  std::int32_t first = 0;
  std::int32_t end = 0;

  bool IsCluster() const { return end - first == 1; }
};

// All clusters. regions is not empty.
ClusterRange Root(std::span<const Region> regions);
std::pair<ClusterRange, ClusterRange> Children(std::span<const Region> regions, const ClusterRange& node);
// The same for all KV heads.
std::int64_t RowsOf(std::span<const Region> regions, const ClusterRange& node);

// Each [head_dim].
struct TreeMoments {
  const float* mean = nullptr;
  const float* variance = nullptr;
  const float* value_mean = nullptr;
};

// Of a node that is no cluster.
TreeMoments MomentsOf(std::span<const Region> regions, const ClusterRange& node, int kv_head, int head_dim);

// Floats of Region::nodes.
constexpr std::size_t NodeFloats(int kv_heads, int n_clusters, int head_dim) {
  return std::size_t{3} * static_cast<std::size_t>(kv_heads) * static_cast<std::size_t>(n_clusters) *
         static_cast<std::size_t>(head_dim);
}

// Fills the nodes of one KV head inside a region, whose blocks are built and whose `nodes` have their memory.
void FillNodes(const Region& region, int kv_head, int head_dim, int rank);
// Fills the nodes above the regions, for all KV heads.
void FillNodesAbove(std::span<const Region> regions, int head_dim, int rank);

}  // namespace scsa
