// SPDX-License-Identifier: Apache-2.0
#include "core/cluster_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/plan.h"
#include "core/plan_memory.h"
#include "scsa/memory_budget.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;
using test::Vector;

Config SmallRegions(int rank = 2) {
  Config config;
  config.cluster_size = 16;
  config.rebuild_interval = 64;
  config.block_size = 256;
  config.rank = rank;
  config.selection = Selection::kHierarchical;
  return config;
}

void Extend(Plan& plan, const SyntheticCache& cache, std::int64_t n_prefix, int n_threads = 1) {
  int built = 0;
  ASSERT_TRUE(plan.Extend(cache.View(n_prefix), n_prefix, n_threads, &built).ok());
  ASSERT_GT(built, 0);
}

// Calls visit with every node and cluster, parents first.
template <class Visit>
void ForEachRange(std::span<const Region> regions, const ClusterRange& node, const Visit& visit) {
  visit(node);
  if (node.IsCluster()) return;
  const auto [lower, upper] = Children(regions, node);
  ForEachRange(regions, lower, visit);
  ForEachRange(regions, upper, visit);
}

// The cache rows below a node.
std::vector<std::int64_t> Rows(std::span<const Region> regions, const ClusterRange& node, int kv_head) {
  std::vector<std::int64_t> rows;
  std::int32_t cluster = 0;  // counted through the regions
  for (const Region& region : regions) {
    const Block& block = region.heads[kv_head];
    for (int c = 0; c < block.n_clusters; ++c, ++cluster) {
      if (cluster < node.first || cluster >= node.end) continue;
      for (int i = block.partition.offsets[c]; i < block.partition.offsets[c + 1]; ++i) {
        rows.push_back(block.begin + block.partition.members[i]);
      }
    }
  }
  return rows;
}

struct RowMoments {
  Vector mean, variance, value_mean;
};

RowMoments MomentsOfRows(const SyntheticCache& cache, const std::vector<std::int64_t>& rows, int kv_head,
                         int head_dim) {
  RowMoments out{Vector(head_dim), Vector(head_dim), Vector(head_dim)};
  const auto m = static_cast<double>(rows.size());
  for (const std::int64_t row : rows) {
    const Vector key = cache.DecodedKey(row, kv_head);
    const Vector value = cache.DecodedValue(row, kv_head);
    for (int d = 0; d < head_dim; ++d) {
      out.mean[d] += key[d] / m;
      out.value_mean[d] += value[d] / m;
    }
  }
  for (const std::int64_t row : rows) {
    const Vector key = cache.DecodedKey(row, kv_head);
    for (int d = 0; d < head_dim; ++d) out.variance[d] += (key[d] - out.mean[d]) * (key[d] - out.mean[d]) / m;
  }
  return out;
}

// The diagonal that a plan keeps of a cluster: that of its rows, and more where the residual was clamped.
Vector StoredDiagonal(const Block& block, int c, int rank, int head_dim) {
  Vector diagonal = test::ToDouble(block.residuals.data() + c * head_dim, head_dim);
  for (int j = 0; j < rank; ++j) {
    const float* direction = block.directions.data() + (c * rank + j) * head_dim;
    for (int d = 0; d < head_dim; ++d) diagonal[d] += static_cast<double>(direction[d]) * direction[d];
  }
  return diagonal;
}

// What the clamped residuals below a node add to the variance of its rows.
Vector Clamped(std::span<const Region> regions, const SyntheticCache& cache, const ClusterRange& node, int kv_head,
               int rank, int head_dim) {
  Vector added(head_dim);
  const auto m = static_cast<double>(Rows(regions, node, kv_head).size());
  std::int32_t cluster = 0;
  for (const Region& region : regions) {
    for (int c = 0; c < region.n_clusters(); ++c, ++cluster) {
      if (cluster < node.first || cluster >= node.end) continue;
      const std::vector<std::int64_t> rows = Rows(regions, {0, 0, cluster, cluster + 1}, kv_head);
      const Vector stored = StoredDiagonal(region.heads[kv_head], c, rank, head_dim);
      const Vector plain = MomentsOfRows(cache, rows, kv_head, head_dim).variance;
      for (int d = 0; d < head_dim; ++d) added[d] += static_cast<double>(rows.size()) / m * (stored[d] - plain[d]);
    }
  }
  return added;
}

// Nothing is estimated on the way up: every node has the moments of its rows, at odd numbers of regions, clusters and
// rows.
TEST(ClusterTree, NodesHoldTheMomentsOfTheirRows) {
  for (const int rank : {0, 2}) {
    const Shape shape{4, 2, 24};
    const SyntheticCache cache(shape, 2000, DType::kF16, 7);
    for (const std::int64_t n : {4 + 32 + 64, 4 + 32 + 256 + 129, 4 + 32 + 7 * 256 - 83}) {
      Plan plan(shape, SmallRegions(rank));
      Extend(plan, cache, n);
      const std::span<const Region> regions = plan.regions();
      int nodes = 0;
      for (int h = 0; h < shape.kv_heads; ++h) {
        ForEachRange(regions, Root(regions), [&](const ClusterRange& node) {
          const std::vector<std::int64_t> rows = Rows(regions, node, h);
          ASSERT_EQ(RowsOf(regions, node), std::ssize(rows));
          if (node.IsCluster()) return;
          ++nodes;
          const RowMoments expected = MomentsOfRows(cache, rows, h, 24);
          const Vector clamped = Clamped(regions, cache, node, h, rank, 24);
          const TreeMoments moments = MomentsOf(regions, node, h, 24);
          for (int d = 0; d < 24; ++d) {
            EXPECT_NEAR(moments.mean[d], expected.mean[d], 2e-6);
            EXPECT_NEAR(moments.value_mean[d], expected.value_mean[d], 2e-6);
            EXPECT_NEAR(moments.variance[d], expected.variance[d] + clamped[d], 5e-6);
            EXPECT_GT(clamped[d], -2e-6);
            EXPECT_LT(clamped[d], rank == 0 ? 2e-6 : expected.variance[d]);
          }
        });
      }
      // A binary tree over the clusters, whose last one is the last of the plan.
      EXPECT_EQ(nodes, shape.kv_heads * (Root(regions).end - 1));
    }
  }
}

TEST(ClusterTree, HalvesRegionsAndThenTheSplitsOfTheirRows) {
  const Shape shape{1, 1, 8};
  const SyntheticCache cache(shape, 3000, DType::kF16, 8);
  for (std::int64_t n = 100; n < 2000; n += 97) {
    Plan plan(shape, SmallRegions());
    Extend(plan, cache, n);
    const std::span<const Region> regions = plan.regions();
    std::vector<std::int32_t> clusters;
    ForEachRange(regions, Root(regions), [&](const ClusterRange& node) {
      if (node.IsCluster()) {
        clusters.push_back(node.first);
        return;
      }
      const auto [lower, upper] = Children(regions, node);
      ASSERT_EQ(lower.first, node.first);
      ASSERT_EQ(lower.end, upper.first);
      ASSERT_EQ(upper.end, node.end);
      const int n_regions = node.end_region - node.first_region;
      if (n_regions > 1) {
        ASSERT_EQ(lower.end_region - lower.first_region, n_regions / 2);
        ASSERT_EQ(upper.first_region, lower.end_region);
      } else {
        ASSERT_EQ(RowsOf(regions, lower), RowsOf(regions, node) / 2);  // floor(m / 2) members to the first child
      }
    });
    for (std::size_t i = 0; i < clusters.size(); ++i) ASSERT_EQ(clusters[i], static_cast<std::int32_t>(i));
    ASSERT_EQ(std::ssize(clusters), Root(regions).end);
  }
}

void ExpectSameTree(const Plan& a, const Plan& b, const Shape& shape) {
  ASSERT_EQ(a.regions().size(), b.regions().size());
  for (int h = 0; h < shape.kv_heads; ++h) {
    ForEachRange(a.regions(), Root(a.regions()), [&](const ClusterRange& node) {
      if (node.IsCluster()) return;
      const TreeMoments x = MomentsOf(a.regions(), node, h, shape.head_dim);
      const TreeMoments y = MomentsOf(b.regions(), node, h, shape.head_dim);
      const int n = 3 * shape.head_dim;  // one after the other
      ASSERT_TRUE(std::equal(x.mean, x.mean + n, y.mean)) << node.first << " " << node.end;
    });
  }
}

// Whatever came and went, the tree is that of a plan that was built at once.
TEST(ClusterTree, FollowsTheRegions) {
  const Shape shape{4, 2, 16};
  const SyntheticCache cache(shape, 2500, DType::kF16, 9);
  const auto expect_fresh = [&](const Plan& plan) {
    Plan fresh(shape, SmallRegions());
    Extend(fresh, cache, plan.sealed_end() + 32, 3);
    ASSERT_EQ(fresh.sealed_end(), plan.sealed_end());
    ExpectSameTree(plan, fresh, shape);
  };
  Plan plan(shape, SmallRegions());
  for (std::int64_t n = 100; n < 2400; n += 64) {
    Extend(plan, cache, n);
    expect_fresh(plan);
  }
  const std::int64_t written[] = {1700};
  EXPECT_EQ(plan.DropWritten(written), 3);
  expect_fresh(plan);
  EXPECT_EQ(plan.DropBeyond(1300), 1);
  expect_fresh(plan);
  plan.EvictLast();
  expect_fresh(plan);
  EXPECT_EQ(plan.sealed_end(), 4 + 4 * 256);
  Extend(plan, cache, 2000);
  expect_fresh(plan);
}

TEST(ClusterTree, MayComeLaterAndGoAgain) {
  const Shape shape{4, 2, 16};
  const SyntheticCache cache(shape, 2000, DType::kF16, 10);
  std::shared_ptr<MemoryBudget> budget;
  ASSERT_TRUE(MemoryBudget::Create(std::uint64_t{1} << 30, &budget).ok());
  PlanMemory memory;
  // Nothing else is in the budget that could give way.
  class Nothing final : public EvictablePlan {
    Candidate LeastUseful() const override { return {}; }
    std::uint64_t Evict(int, std::uint64_t) override { return 0; }
  } nothing;
  memory.Join(budget, &nothing);
  Config config = SmallRegions();
  Plan built_with_it(shape, config);
  Extend(built_with_it, cache, 1500);
  {
    config.selection = Selection::kAutomatic;
    Plan plan(shape, config, &memory);
    Extend(plan, cache, 1500);
    EXPECT_FALSE(plan.has_tree());
    const std::size_t without = plan.Bytes();
    EXPECT_EQ(budget->used(), without);
    // A node of three vectors per cluster and KV head.
    const std::size_t nodes =
        std::size_t{3} * sizeof(float) * 16 * 2 * static_cast<std::size_t>(Root(plan.regions()).end);
    budget->SetLimit(without + nodes - 1);
    EXPECT_FALSE(plan.SetTree(true));
    EXPECT_FALSE(plan.has_tree());
    EXPECT_EQ(plan.Bytes(), without);
    EXPECT_EQ(budget->used(), without);
    budget->SetLimit(without + nodes);
    EXPECT_TRUE(plan.SetTree(true));
    EXPECT_EQ(plan.Bytes(), without + nodes);
    EXPECT_EQ(plan.Bytes(), built_with_it.Bytes());
    EXPECT_EQ(budget->used(), without + nodes);
    ExpectSameTree(plan, built_with_it, shape);
    EXPECT_TRUE(plan.SetTree(false));
    EXPECT_EQ(budget->used(), without);
    EXPECT_TRUE(plan.SetTree(true));
    EXPECT_EQ(plan.DropBeyond(1000), 3);
    EXPECT_EQ(budget->used(), plan.Bytes());
  }
  EXPECT_EQ(budget->used(), 0u);
}

}  // namespace
}  // namespace scsa
