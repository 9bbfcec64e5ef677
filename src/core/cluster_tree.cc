// SPDX-License-Identifier: Apache-2.0
#include "core/cluster_tree.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/kernels.h"

namespace scsa {
namespace {

// Where a node divides its clusters: a region and a cluster of it. Inside a region the cluster is not the first one.
struct Division {
  std::int32_t region;
  std::int32_t cluster;
};

Division DivisionOf(std::span<const Region> regions, const ClusterRange& node) {
  const std::int32_t n_regions = node.end_region - node.first_region;
  if (n_regions > 1) return {node.first_region + n_regions / 2, 0};
  const std::int32_t middle = node.first + (node.end - node.first) / 2;
  return {node.first_region, middle - regions[node.first_region].first_cluster};
}

float* NodeAt(std::span<const Region> regions, const Division& division, int kv_head, int head_dim) {
  const Region& region = regions[division.region];
  const std::size_t node = static_cast<std::size_t>(kv_head) * region.n_clusters() + division.cluster;
  return region.nodes.get() + 3 * node * static_cast<std::size_t>(head_dim);
}

// Moments of a node or a cluster. A cluster's diagonal is put together in `diagonal`.
TreeMoments AnyMoments(std::span<const Region> regions, const ClusterRange& node, int kv_head, int head_dim, int rank,
                       float* diagonal) {
  if (!node.IsCluster()) return MomentsOf(regions, node, kv_head, head_dim);
  const Region& region = regions[node.first_region];
  const Block& block = region.heads[kv_head];
  const std::int64_t at = std::int64_t{node.first - region.first_cluster} * head_dim;
  for (int d = 0; d < head_dim; ++d) {
    double variance = block.residuals[at + d];
    for (int j = 0; j < rank; ++j) {
      const double along = block.directions[at * rank + std::int64_t{j} * head_dim + d];
      variance += along * along;
    }
    diagonal[d] = static_cast<float>(variance);
  }
  return {block.centroids.data() + at, diagonal, block.value_means.data() + at};
}

// Fills one node, whose children are filled.
void FillNode(std::span<const Region> regions, const ClusterRange& node, int kv_head, int head_dim, int rank) {
  const auto [lower, upper] = Children(regions, node);
  std::array<float, kMaxHeadDim> lower_diagonal;
  std::array<float, kMaxHeadDim> upper_diagonal;
  const TreeMoments a = AnyMoments(regions, lower, kv_head, head_dim, rank, lower_diagonal.data());
  const TreeMoments b = AnyMoments(regions, upper, kv_head, head_dim, rank, upper_diagonal.data());
  const auto rows = static_cast<double>(RowsOf(regions, node));
  const double share_a = static_cast<double>(RowsOf(regions, lower)) / rows;
  const double share_b = static_cast<double>(RowsOf(regions, upper)) / rows;
  float* mean = NodeAt(regions, DivisionOf(regions, node), kv_head, head_dim);
  float* variance = mean + head_dim;
  float* value_mean = variance + head_dim;
  for (int d = 0; d < head_dim; ++d) {
    const double apart = static_cast<double>(a.mean[d]) - b.mean[d];
    mean[d] = static_cast<float>(share_a * a.mean[d] + share_b * b.mean[d]);
    variance[d] =
        static_cast<float>(share_a * a.variance[d] + share_b * b.variance[d] + share_a * share_b * apart * apart);
    value_mean[d] = static_cast<float>(share_a * a.value_mean[d] + share_b * b.value_mean[d]);
  }
}

// Fills a node and those below it, as far as `belongs` says.
template <class Belongs>
void FillTree(std::span<const Region> regions, const ClusterRange& node, int kv_head, int head_dim, int rank,
              const Belongs& belongs) {
  if (!belongs(node)) return;
  const auto [lower, upper] = Children(regions, node);
  FillTree(regions, lower, kv_head, head_dim, rank, belongs);
  FillTree(regions, upper, kv_head, head_dim, rank, belongs);
  FillNode(regions, node, kv_head, head_dim, rank);
}

}  // namespace

ClusterRange Root(std::span<const Region> regions) {
  const Region& last = regions.back();
  return {.first_region = 0,
          .end_region = static_cast<std::int32_t>(regions.size()),
          .first = regions.front().first_cluster,
          .end = last.first_cluster + last.n_clusters()};
}

std::pair<ClusterRange, ClusterRange> Children(std::span<const Region> regions, const ClusterRange& node) {
  const auto [region, cluster] = DivisionOf(regions, node);
  ClusterRange lower = node;
  ClusterRange upper = node;
  lower.end = upper.first = regions[region].first_cluster + cluster;
  if (cluster == 0) lower.end_region = upper.first_region = region;
  return {lower, upper};
}

std::int64_t RowsOf(std::span<const Region> regions, const ClusterRange& node) {
  const Region& region = regions[node.first_region];
  if (node.end_region - node.first_region > 1) return regions[node.end_region - 1].end - region.begin;
  const std::vector<std::int32_t>& offsets = region.heads.front().partition.offsets;
  return offsets[node.end - region.first_cluster] - offsets[node.first - region.first_cluster];
}

TreeMoments MomentsOf(std::span<const Region> regions, const ClusterRange& node, int kv_head, int head_dim) {
  const float* mean = NodeAt(regions, DivisionOf(regions, node), kv_head, head_dim);
  return {mean, mean + head_dim, mean + std::ptrdiff_t{2} * head_dim};
}

void FillNodes(const Region& region, int kv_head, int head_dim, int rank) {
  const std::span<const Region> regions(&region, 1);
  FillTree(regions, Root(regions), kv_head, head_dim, rank, [](const ClusterRange& node) { return !node.IsCluster(); });
}

void FillNodesAbove(std::span<const Region> regions, int head_dim, int rank) {
  if (regions.empty()) return;
  const auto kv_heads = static_cast<int>(regions.front().heads.size());
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    FillTree(regions, Root(regions), kv_head, head_dim, rank,
             [](const ClusterRange& node) { return node.end_region - node.first_region > 1; });
  }
}

}  // namespace scsa
