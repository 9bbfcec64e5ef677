// SPDX-License-Identifier: Apache-2.0
#include "core/block_tree.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/block_plan.h"
#include "tests/core/plain_clusters.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::PlainCluster;
using test::SyntheticCache;
using test::Vector;

constexpr std::int64_t kBlockRows = 64;
constexpr int kBlocks = 75;  // levels of 75, 10, 2 and 1 nodes

Config SmallBlocks() {
  Config config = ConfigFor(Preset::kFast);
  config.block_size = kBlockRows;
  return config;
}

class BlockTreeTest : public ::testing::Test {
 protected:
  void Build(const std::vector<int>& blocks) { ASSERT_TRUE(plan_.Build(cache_.View(), blocks, 1).status.ok()); }

  // What the tree must hold, from the clusters of the blocks that are built.
  void ExpectMoments(const BlockTree& tree) {
    const std::vector<bool> visible(cache_.n_rows(), true);
    for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
      const std::vector<PlainCluster> clusters = test::UsableClusters(plan_, shape_, kv_head, visible);
      std::int64_t blocks_below = 1;
      for (int level = 0; level < tree.n_levels(); ++level, blocks_below *= BlockTree::kFanOut) {
        for (std::int64_t i = 0; i < tree.n_nodes(level); ++i) {
          SCOPED_TRACE("node " + std::to_string(i) + " of level " + std::to_string(level));
          std::vector<PlainCluster> below;
          for (const PlainCluster& cluster : clusters) {
            if (cluster.rows[0] / kBlockRows / blocks_below == i) below.push_back(cluster);
          }
          ExpectNode(tree, level, i, kv_head, below);
        }
      }
    }
  }

  void ExpectNode(const BlockTree& tree, int level, std::int64_t index, int kv_head,
                  const std::vector<PlainCluster>& below) {
    double rows = 0;
    for (const PlainCluster& cluster : below) rows += static_cast<double>(cluster.rows.size());
    ASSERT_EQ(static_cast<double>(tree.rows(level, index)), rows);
    if (rows == 0) return;
    const auto dims = static_cast<std::size_t>(shape_.head_dim);
    Vector mean(dims, 0.0), value_mean(dims, 0.0), variance(dims, 0.0);
    for (const PlainCluster& cluster : below) {
      const double share = static_cast<double>(cluster.rows.size()) / rows;
      for (std::size_t d = 0; d < dims; ++d) {
        mean[d] += share * cluster.centroid[d];
        value_mean[d] += share * cluster.value_mean[d];
      }
    }
    for (const PlainCluster& cluster : below) {
      const double share = static_cast<double>(cluster.rows.size()) / rows;
      for (std::size_t d = 0; d < dims; ++d) {
        variance[d] += share * (2 * cluster.half_trace * cluster.shape[d] + std::pow(cluster.centroid[d] - mean[d], 2));
      }
    }
    const NodeMoments moments = tree.moments(level, index, kv_head);
    for (std::size_t d = 0; d < dims; ++d) {
      ASSERT_NEAR(moments.mean[d], mean[d], 1e-6);
      ASSERT_NEAR(moments.value_mean[d], value_mean[d], 1e-6);
      ASSERT_NEAR(moments.variance[d], variance[d], 1e-5 * variance[d]);
    }
  }

  // The same bits as those of a tree that is made at once.
  void ExpectAsNew(const BlockTree& tree) {
    BlockTree fresh(shape_);
    fresh.Update(plan_, 1);
    ASSERT_EQ(tree.n_levels(), fresh.n_levels());
    for (int level = 0; level < fresh.n_levels(); ++level) {
      ASSERT_EQ(tree.n_nodes(level), fresh.n_nodes(level));
      for (std::int64_t i = 0; i < fresh.n_nodes(level); ++i) {
        ASSERT_EQ(tree.rows(level, i), fresh.rows(level, i));
        for (int h = 0; h < shape_.kv_heads && fresh.rows(level, i) > 0; ++h) {
          for (int d = 0; d < shape_.head_dim; ++d) {
            ASSERT_EQ(tree.moments(level, i, h).mean[d], fresh.moments(level, i, h).mean[d]);
            ASSERT_EQ(tree.moments(level, i, h).variance[d], fresh.moments(level, i, h).variance[d]);
            ASSERT_EQ(tree.moments(level, i, h).value_mean[d], fresh.moments(level, i, h).value_mean[d]);
          }
        }
      }
    }
  }

  void Drop(int block) {
    const std::int64_t rows[] = {block * kBlockRows + 5};
    ASSERT_EQ(plan_.DropWritten(rows), 1);
  }

  Shape shape_{4, 2, 24};
  Config config_ = SmallBlocks();
  SyntheticCache cache_{shape_, kBlocks* kBlockRows, DType::kF16};
  BlockPlan plan_{shape_, config_};
  BlockTree tree_{shape_};
};

std::vector<int> Blocks(int first, int end) {
  std::vector<int> blocks(static_cast<std::size_t>(end - first));
  std::iota(blocks.begin(), blocks.end(), first);
  return blocks;
}

TEST_F(BlockTreeTest, EachNodeHasTheMomentsOfTheClustersBelow) {
  Build(Blocks(0, kBlocks));
  tree_.Update(plan_, 2);
  EXPECT_EQ(tree_.n_levels(), 4);
  EXPECT_EQ(tree_.n_nodes(1), 10);
  EXPECT_EQ(tree_.rows(3, 0), kBlocks * kBlockRows - config_.sink);
  ExpectMoments(tree_);
}

TEST_F(BlockTreeTest, OneBlockIsTheRoot) {
  Build({0});
  tree_.Update(plan_, 1);
  EXPECT_EQ(tree_.n_levels(), 1);
  ExpectMoments(tree_);
}

TEST_F(BlockTreeTest, BlocksArriveOneByOne) {
  for (int b = 0; b < kBlocks; ++b) {
    Build({b});
    tree_.Update(plan_, 1);
    if (b % 7 == 0) ExpectAsNew(tree_);
  }
  ExpectMoments(tree_);
  ExpectAsNew(tree_);
}

TEST_F(BlockTreeTest, BlocksComeAndGo) {
  Build(Blocks(0, 20));
  tree_.Update(plan_, 1);
  // Some go, all of one node's among them; others change, and blocks come far behind.
  for (const int b : {0, 3, 8, 9, 10, 11, 12, 13, 14, 15, 17}) Drop(b);
  std::vector<float> key(static_cast<std::size_t>(shape_.head_dim), 2.5f);
  for (std::int64_t r = 3 * kBlockRows; r < 3 * kBlockRows + 20; ++r) cache_.SetKey(r, 1, key.data());
  Build({3, 70, 17});
  tree_.Update(plan_, 1);
  EXPECT_EQ(tree_.rows(1, 1), 0);
  EXPECT_EQ(tree_.rows(0, 0), 0);
  ExpectMoments(tree_);
  ExpectAsNew(tree_);
  // A block that went and came back between two updates is another one.
  Drop(3);
  cache_.SetKey(3 * kBlockRows + 40, 1, key.data());
  Build({3});
  tree_.Update(plan_, 1);
  ExpectMoments(tree_);
  for (const int b : {1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 70}) Drop(b);
  tree_.Update(plan_, 1);
  EXPECT_EQ(tree_.rows(tree_.n_levels() - 1, 0), 0);
}

TEST_F(BlockTreeTest, AReleasedNodeIsComputedAgain) {
  Build(Blocks(0, 10));
  tree_.Update(plan_, 1);
  tree_.Release(4);
  Drop(4);
  tree_.Update(plan_, 1);
  ExpectMoments(tree_);
  Build({4});
  tree_.Update(plan_, 1);
  ExpectMoments(tree_);
}

}  // namespace
}  // namespace scsa
