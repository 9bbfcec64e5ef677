// SPDX-License-Identifier: Apache-2.0
#include "core/frontier_walk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/core/joint_operator_fixture.h"
#include "tests/core/plain_clusters.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::PlainCluster;
using test::RestatedQuery;
using test::SmallBlocks;
using test::Vector;

// A query's products with the steps of the summaries are rounded to 15 bits of the largest: logits of this size to some
// 1e-4.
constexpr double kTolerance = 1e-4;

// A member of a frontier. A node is stated as a cluster of all its rows whose variance shape is its whole variance.
struct Entry {
  PlainCluster summary;
  int level;  // -1: a cluster
  std::int64_t index;
  Vector estimates;  // [queries]
};

// frontier_walk.h in double, without a tree, a heap, running sums or gauges.
class RestatedWalk {
 public:
  RestatedWalk(const BlockPlan& plan, const Config& config, std::vector<PlainCluster> clusters,
               const std::vector<bool>& visible, std::vector<Vector> queries, Vector exact_masses)
      : plan_(plan), config_(config), queries_(std::move(queries)), exact_(std::move(exact_masses)) {
    for (PlainCluster& cluster : clusters) {
      clusters_[static_cast<int>(cluster.rows[0] / plan.block_rows())].push_back(std::move(cluster));
    }
    for (int b = 0; b < plan.n_blocks(); ++b) {
      if (!plan.built(b)) continue;
      bool usable = true;
      for (std::int64_t r = plan.FirstRow(b); r < plan.EndRow(b); ++r) usable = usable && visible[r];
      usable_[b] = usable;
    }
    int levels = 1;
    for (std::int64_t blocks = 1; blocks < plan.n_blocks(); blocks *= BlockTree::kFanOut) ++levels;
    AddNode(levels - 1, 0);
    settled_ = Totals();
  }

  void Run(double tau) {
    while (!frontier_.empty() && !(ClosedShare() < tau)) {
      std::size_t next = 0;
      for (std::size_t e = 1; e < frontier_.size(); ++e) {
        if (Importance(frontier_[e]) > Importance(frontier_[next])) next = e;
      }
      const Entry entry = frontier_[next];
      frontier_.erase(frontier_.begin() + static_cast<std::ptrdiff_t>(next));
      if (entry.level < 0) {
        opened_.push_back(entry);
        continue;
      }
      if (entry.level == 0) {
        for (const PlainCluster& cluster : clusters_[static_cast<int>(entry.index)]) Add(cluster, -1, 0);
      } else {
        for (int child = 0; child < BlockTree::kFanOut; ++child) {
          AddNode(entry.level - 1, entry.index * BlockTree::kFanOut + child);
        }
      }
      const Vector totals = Totals();
      for (std::size_t i = 0; i < totals.size(); ++i) {
        if (totals[i] < settled_[i] / 2 || totals[i] > 2 * settled_[i]) {
          settled_ = totals;
          break;
        }
      }
    }
  }

  std::vector<PlainCluster> opened() const { return SummariesOf(opened_); }
  std::vector<PlainCluster> closed() const { return SummariesOf(frontier_); }
  bool has_nodes() const {
    return std::ranges::any_of(frontier_, [](const Entry& entry) { return entry.level >= 0; });
  }

 private:
  static std::vector<PlainCluster> SummariesOf(const std::vector<Entry>& entries) {
    std::vector<PlainCluster> summaries;
    for (const Entry& entry : entries) summaries.push_back(entry.summary);
    return summaries;
  }

  void Add(const PlainCluster& summary, int level, std::int64_t index) {
    Entry entry{summary, level, index, {}};
    for (const Vector& qs : queries_) {
      double estimate = test::WeightsOf(summary, qs, config_).estimate;
      if (level >= 0) {
        double variance = 0;
        for (std::size_t d = 0; d < qs.size(); ++d) variance += summary.shape[d] * qs[d] * qs[d];
        estimate *= std::exp(4 * std::sqrt(variance));
      }
      entry.estimates.push_back(estimate);
    }
    frontier_.push_back(entry);
  }

  void AddNode(int level, std::int64_t index) {
    std::int64_t width = 1;
    for (int l = 0; l < level; ++l) width *= BlockTree::kFanOut;
    int built = 0;
    int usable = 0;
    std::vector<PlainCluster> below;
    for (std::int64_t b = index * width; b < (index + 1) * width; ++b) {
      const auto found = usable_.find(static_cast<int>(b));
      if (found == usable_.end()) continue;
      ++built;
      if (!found->second) continue;
      ++usable;
      const std::vector<PlainCluster>& clusters = clusters_[static_cast<int>(b)];
      below.insert(below.end(), clusters.begin(), clusters.end());
    }
    if (usable == 0) return;
    if (usable < built) {
      for (int child = 0; child < BlockTree::kFanOut; ++child) AddNode(level - 1, index * BlockTree::kFanOut + child);
      return;
    }
    Add(Together(below), level, index);
  }

  static PlainCluster Together(const std::vector<PlainCluster>& clusters) {
    PlainCluster node;
    for (const PlainCluster& c : clusters) node.rows.insert(node.rows.end(), c.rows.begin(), c.rows.end());
    const std::size_t dims = clusters[0].centroid.size();
    node.centroid.assign(dims, 0.0);
    node.value_mean.assign(dims, 0.0);
    node.shape.assign(dims, 0.0);
    node.half_trace = 0.5;
    const auto rows = static_cast<double>(node.rows.size());
    for (const PlainCluster& c : clusters) {
      for (std::size_t d = 0; d < dims; ++d) {
        node.centroid[d] += static_cast<double>(c.rows.size()) / rows * c.centroid[d];
        node.value_mean[d] += static_cast<double>(c.rows.size()) / rows * c.value_mean[d];
      }
    }
    for (const PlainCluster& c : clusters) {
      for (std::size_t d = 0; d < dims; ++d) {
        const double variance = 2 * c.half_trace * c.shape[d] + std::pow(c.centroid[d] - node.centroid[d], 2);
        node.shape[d] += static_cast<double>(c.rows.size()) / rows * variance;
      }
    }
    return node;
  }

  Vector Sums(const std::vector<Entry>& entries) const {
    Vector sums(queries_.size(), 0.0);
    for (const Entry& entry : entries) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += entry.estimates[i];
    }
    return sums;
  }
  Vector Totals() const {
    Vector totals = exact_;
    const Vector closed = Sums(frontier_);
    const Vector opened = Sums(opened_);
    for (std::size_t i = 0; i < totals.size(); ++i) totals[i] += closed[i] + opened[i];
    return totals;
  }
  double ClosedShare() const {
    const Vector closed = Sums(frontier_);
    const Vector totals = Totals();
    double share = 0;
    for (std::size_t i = 0; i < totals.size(); ++i) share += closed[i] / totals[i] / static_cast<double>(totals.size());
    return share;
  }
  double Importance(const Entry& entry) const {
    double importance = 0;
    for (std::size_t i = 0; i < settled_.size(); ++i) importance += entry.estimates[i] / settled_[i];
    if (entry.level < 0) importance *= config_.cluster_size / static_cast<double>(entry.summary.rows.size());
    return importance;
  }

  const BlockPlan& plan_;
  Config config_;
  std::vector<Vector> queries_;  // scaled
  Vector exact_;
  std::map<int, std::vector<PlainCluster>> clusters_;  // of usable blocks
  std::map<int, bool> usable_;                         // of built blocks
  std::vector<Entry> frontier_;
  std::vector<Entry> opened_;
  Vector settled_;
};

class FrontierWalkTest : public test::JointOperatorTest {
 protected:
  // Most rows have short keys and matter little to queries of this size; those of every fourth run of five blocks may.
  void BuildAndWalk(const Shape& shape, std::int64_t n_rows, int n_blocks, const Config& config,
                    DType type = DType::kF16) {
    Build(shape, n_rows, n_blocks, config, type);
    std::vector<float> key(static_cast<std::size_t>(shape.head_dim));
    for (std::int64_t r = 0; r < n_rows; ++r) {
      if (r / (5 * config.block_size) % 4 == 0) continue;
      for (int h = 0; h < shape.kv_heads; ++h) {
        const Vector long_key = cache_->DecodedKey(r, h);
        std::ranges::transform(long_key, key.begin(), [](double x) { return static_cast<float>(0.02 * x); });
        cache_->SetKey(r, h, key.data());
      }
    }
    std::vector<int> blocks(static_cast<std::size_t>(n_blocks));
    std::iota(blocks.begin(), blocks.end(), 0);
    ASSERT_TRUE(plan_->Build(kv_, blocks, 1).status.ok());
    q_ = test::RandomQueries(shape, 23, 1.5f);
    Walk();
  }

  std::vector<Vector> Restated(int kv_head, double tau, std::int64_t* rows_read) const override {
    const std::vector<RestatedQuery> queries = QueriesOf(kv_head);
    const std::vector<PlainCluster> clusters = ClustersOf(kv_head);
    const std::vector<bool> covered = test::CoveredRows(*cache_, clusters);
    std::vector<Vector> scaled;
    Vector exact;
    for (const RestatedQuery& query : queries) {
      scaled.push_back(test::ScaledQuery(query, shape_, params_));
      exact.push_back(test::ExactMass(*cache_, params_, kv_head, query, scaled.back(), covered));
    }
    RestatedWalk walk(*plan_, config_, clusters, visible_, scaled, exact);
    walk.Run(tau);
    stops_with_nodes_ += walk.has_nodes() ? 1 : 0;
    return test::RestateOutputs(*cache_, shape_, config_, params_, kv_head, walk.opened(), walk.closed(), queries,
                                rows_read);
  }

  mutable int stops_with_nodes_ = 0;  // restated walks that left blocks unopened
};

TEST_F(FrontierWalkTest, FollowsTheFormulasOnEveryTarget) {
  test::OnEveryTarget([&] {
    BuildAndWalk({4, 2, 24}, 4300, 66, SmallBlocks());
    for (const float tau : {0.5f, 0.1f, 0.01f}) ExpectRestated(tau, kTolerance);
  });
  EXPECT_GT(stops_with_nodes_, 0);
}

TEST_F(FrontierWalkTest, HolesAndAttentionSinksCount) {
  BuildAndWalk({4, 2, 16}, 3000, 46, SmallBlocks());
  // Blocks 2 and 17 to 20 are not usable, nor is any of 8 to 15.
  for (std::int64_t r = 130; r < 140; ++r) visible_[r] = false;
  for (std::int64_t r = 8 * 64; r < 16 * 64; r += 9) visible_[r] = false;
  for (std::int64_t r = 17 * 64; r < 21 * 64; ++r) visible_[r] = false;
  visible_[2] = false;  // block 0 does not cover the first rows
  visible_[2999] = false;
  const std::vector<float> sinks = {0.5f, 2.0f, -1.0f, 3.0f};
  params_.sinks = sinks.data();
  for (const float tau : {0.5f, 0.2f, 0.01f}) ExpectRestated(tau, kTolerance);
  EXPECT_GT(stops_with_nodes_, 0);
}

TEST_F(FrontierWalkTest, BlocksThatAreNotBuiltAreExact) {
  BuildAndWalk({4, 2, 16}, 3000, 46, SmallBlocks());
  const std::int64_t written[] = {10, 64 * 20, 64 * 21, 64 * 45};
  ASSERT_EQ(plan_->DropWritten(written), 4);
  for (const std::int64_t row : written) {
    for (std::int64_t r = row / 64 * 64; r < row / 64 * 64 + 64; ++r) visible_[r] = r % 3 != 0;
  }
  tree_->Update(*plan_, 1);
  for (const float tau : {0.5f, 0.05f}) ExpectRestated(tau, kTolerance);
}

TEST_F(FrontierWalkTest, OtherClusterSizesAndRowFormatsWork) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kQ8_0}) {
    Config config = SmallBlocks();
    config.block_size = 128;
    config.cluster_size = 16;
    config.tail_shrink = 0.25f;
    BuildAndWalk({6, 2, 40}, 1500, 11, config, type);
    for (const float tau : {0.3f, 0.03f}) ExpectRestated(tau, kTolerance);
  }
}

TEST_F(FrontierWalkTest, ZeroTauIsExact) {
  BuildAndWalk({6, 2, 40}, 1000, 15, SmallBlocks());
  LayerStats stats;
  const std::vector<float> out = Attend(0.0f, 1, &stats);
  for (int h = 0; h < shape_.q_heads; ++h) EXPECT_LT(test::RelativeL2(HeadOf(out, h), Exact(h)), 1e-5);
  EXPECT_EQ(stats.union_rows, 2u * 1000);
}

TEST_F(FrontierWalkTest, OneTauLooksAtTheRootAlone) {
  BuildAndWalk({6, 2, 40}, 5000, 75, SmallBlocks());
  LayerStats stats;
  Attend(1.0f, 1, &stats);
  EXPECT_EQ(stats.stat_scored, 6u);
  EXPECT_EQ(stats.stat_opened_rows, 0u);
  const std::uint64_t exact_rows = 5000 - 75 * 64 + 4;
  EXPECT_EQ(stats.union_rows, 2 * exact_rows);
  EXPECT_EQ(stats.visible_rows, 2u * 5000);
  // Per KV head: keys and values of the exact rows, and three vectors of the root.
  EXPECT_EQ(stats.bytes_read, 2 * (exact_rows * 2 * 2 * 40 + 3 * 4 * 40));
}

// With a query of zeros every row weighs the same, so the output is the plain mean of all values: each row must be
// counted exactly once, as an opened row, in a cluster or in a node. Each block marks a dimension of its own, and one
// more marks every other row of it.
TEST_F(FrontierWalkTest, TheFrontierCoversEachRowOnce) {
  constexpr int kMarked = 19;
  Build({2, 1, 40}, 20 * 64 + 30, 20, SmallBlocks());
  for (std::int64_t r = 0; r < cache_->n_rows(); ++r) {
    std::vector<float> value(40, 0.0f);
    if (r / 64 < kMarked) value[r / 64] = 1.0f;
    if (r / 64 < kMarked && r % 2 == 0) value[kMarked + r / 64] = 1.0f;
    cache_->SetValue(r, 0, value.data());
  }
  std::vector<int> blocks(20);
  std::iota(blocks.begin(), blocks.end(), 0);
  ASSERT_TRUE(plan_->Build(kv_, blocks, 1).status.ok());
  Walk();
  std::ranges::fill(q_, 0.0f);
  visible_[64 * 7 + 3] = false;
  const auto n = static_cast<double>(cache_->n_rows() - 1);
  for (const float tau : {1.0f, 0.9f, 0.8f, 0.6f, 0.4f, 0.2f, 0.05f, 0.0f}) {
    const std::vector<float> out = Attend(tau);
    for (int block = 0; block < kMarked; ++block) {
      const double rows = block == 7 ? 63 : 64;
      EXPECT_NEAR(out[block], rows / n, 1e-5 * rows / n) << "block " << block << ", tau " << tau;
      // Value means are rounded to 8 bits here.
      EXPECT_NEAR(out[kMarked + block], 32 / n, 0.01 * 32 / n) << "block " << block << ", tau " << tau;
    }
  }
}

TEST_F(FrontierWalkTest, EqualValuesComeBackWhateverIsOpened) {
  Build({4, 2, 32}, 3000, 46, SmallBlocks());
  const std::vector<float> value(32, 0.75f);
  for (std::int64_t r = 0; r < 3000; ++r) {
    for (int h = 0; h < 2; ++h) cache_->SetValue(r, h, value.data());
  }
  std::vector<int> blocks(46);
  std::iota(blocks.begin(), blocks.end(), 0);
  ASSERT_TRUE(plan_->Build(kv_, blocks, 1).status.ok());
  Walk();
  for (const float tau : {1.0f, 0.5f, 0.3f, 0.01f, 0.0f}) {
    for (const float x : Attend(tau)) EXPECT_NEAR(x, 0.75f, 2e-6f) << "tau " << tau;
  }
}

TEST_F(FrontierWalkTest, NoRowNeedsToBeExact) {
  Config config = SmallBlocks();
  config.sink = 0;
  BuildAndWalk({4, 2, 16}, 640, 10, config);
  for (const float tau : {0.5f, 0.01f}) ExpectRestated(tau, kTolerance);
  // Nothing is captured before the first cluster is open.
  LayerStats stats;
  Attend(0.999f, 1, &stats);
  EXPECT_GT(stats.stat_opened_rows, 0u);
}

TEST_F(FrontierWalkTest, LogitsThatOverflowOpenEverything) {
  BuildAndWalk({4, 2, 16}, 3000, 46, SmallBlocks());
  for (float& x : q_) x *= 1e20f;
  LayerStats stats;
  const std::vector<float> out = Attend(0.5f, 1, &stats);
  EXPECT_EQ(stats.union_rows, 2u * 3000);
  for (int h = 0; h < shape_.q_heads; ++h) EXPECT_LT(test::RelativeL2(HeadOf(out, h), Exact(h)), 1e-5);
}

TEST_F(FrontierWalkTest, BitsDoNotDependOnThreads) {
  BuildAndWalk({9, 3, 64}, 5000, 75, SmallBlocks());
  for (const float tau : {1.0f, 0.02f}) {
    const std::vector<float> one = Attend(tau, 1);
    for (const int n_threads : {2, 3, 7}) EXPECT_EQ(Attend(tau, n_threads), one);
  }
}

TEST_F(FrontierWalkTest, PackedCopiesGiveTheSameRows) {
  BuildAndWalk({6, 2, 64}, 1000, 15, SmallBlocks());
  const std::vector<float> direct = Attend(0.05f);
  BuildAndWalk({6, 2, 64}, 1000, 15, SmallBlocks(PackedFormat::kF16));
  const std::vector<float> packed = Attend(0.05f);
  for (int h = 0; h < shape_.q_heads; ++h) EXPECT_LT(test::RelativeL2(HeadOf(packed, h), HeadOf(direct, h)), 1e-6);
}

TEST_F(FrontierWalkTest, ReplayIsWhatStoppingThereGives) {
  BuildAndWalk({6, 2, 40}, 3000, 46, SmallBlocks());
  const std::vector<float> sinks = {0.5f, 2.0f, -1.0f, 3.0f, 0.0f, 1.0f};
  params_.sinks = sinks.data();
  ExpectReplayedStops();
}

}  // namespace
}  // namespace scsa
