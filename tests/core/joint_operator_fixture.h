// SPDX-License-Identifier: Apache-2.0
//
// A JointOperator over a plan of a synthetic cache, and the method that it follows restated.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "core/block_plan.h"
#include "core/block_tree.h"
#include "core/joint_operator.h"
#include "tests/core/plain_clusters.h"
#include "tests/core/synthetic.h"

namespace scsa::test {

inline Config SmallBlocks(PackedFormat packed = PackedFormat::kNone) {
  Config config = ConfigFor(Preset::kFast);
  config.block_size = 64;
  config.packed_format = packed;
  return config;
}

// A cache with blocks built over its first `built_rows` rows.
class JointOperatorTest : public ::testing::Test {
 protected:
  void Build(const Shape& shape, std::int64_t n_rows, int n_blocks, const Config& config, DType type = DType::kF16) {
    shape_ = shape;
    config_ = config;
    cache_ = std::make_unique<SyntheticCache>(shape, n_rows, type, 11);
    kv_ = cache_->View();
    plan_ = std::make_unique<BlockPlan>(shape, config);
    std::vector<int> blocks(n_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    ASSERT_TRUE(plan_->Build(kv_, blocks, 1).status.ok());
    tree_ = nullptr;
    operator_ = std::make_unique<JointOperator>(shape, config);
    visible_.assign(n_rows, true);
    q_ = RandomQueries(shape, 23);
    params_ = LogitParams{.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim))};
  }

  std::vector<float> Attend(float tau, int n_threads = 1, LayerStats* stats = nullptr) {
    const std::vector<std::uint64_t> words = Bitmap(visible_);
    const std::vector<float> taus(shape_.kv_heads, tau);
    std::vector<float> out(q_.size());
    LayerStats unused;
    EXPECT_TRUE(operator_
                    ->Attend(*plan_, Query(words), taus, n_threads, workspace_, out.data(), shape_.head_dim,
                             stats != nullptr ? *stats : unused)
                    .ok());
    return out;
  }

  JointQuery Query(const std::vector<std::uint64_t>& words) const {
    return {.q = q_.data(),
            .head_stride = shape_.head_dim,
            .kv = &kv_,
            .visible = words.data(),
            .params = params_,
            .tree = tree_.get()};
  }
  // From here on clusters are found by a walk.
  void Walk() {
    tree_ = std::make_unique<BlockTree>(shape_);
    tree_->Update(*plan_, 1);
  }

  Vector HeadOf(const std::vector<float>& out, int q_head) const {
    return ToDouble(out.data() + std::int64_t{q_head} * shape_.head_dim, shape_.head_dim);
  }
  Vector Exact(int q_head) const {
    return ExactHead(*cache_, shape_, cache_->n_rows(), q_.data(), q_head, params_, &visible_);
  }

  std::vector<PlainCluster> ClustersOf(int kv_head) const { return UsableClusters(*plan_, shape_, kv_head, visible_); }
  std::vector<RestatedQuery> QueriesOf(int kv_head) const {
    std::vector<RestatedQuery> queries;
    for (int i = 0; i < shape_.group(); ++i) {
      const int q_head = kv_head * shape_.group() + i;
      queries.push_back({q_.data() + std::int64_t{q_head} * shape_.head_dim, q_head, &visible_});
    }
    return queries;
  }

  // The method for one KV head, in double.
  virtual std::vector<Vector> Restated(int kv_head, double tau, std::int64_t* rows_read) const {
    return Restated(kv_head, tau, 5e-4, rows_read);
  }
  std::vector<Vector> Restated(int kv_head, double tau, double light_share, std::int64_t* rows_read) const {
    return RestateJointMethod(*cache_, shape_, config_, params_, kv_head, ClustersOf(kv_head), QueriesOf(kv_head), tau,
                              light_share, rows_read);
  }

  void ExpectRestated(float tau, double tolerance) {
    LayerStats stats;
    const std::vector<float> out = Attend(tau, 1, &stats);
    std::int64_t rows = 0;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      std::int64_t rows_of_head = 0;
      const std::vector<Vector> expected = Restated(h, tau, &rows_of_head);
      rows += rows_of_head;
      for (int i = 0; i < shape_.group(); ++i) {
        EXPECT_LT(RelativeL2(HeadOf(out, h * shape_.group() + i), expected[i]), tolerance) << "tau " << tau;
      }
    }
    EXPECT_EQ(stats.union_rows, static_cast<std::uint64_t>(rows)) << "tau " << tau;
  }

  // Errors that Replay records at kTauGrid are those of really stopping there.
  void ExpectReplayedStops() {
    std::vector<float> exact(q_.size());
    for (int h = 0; h < shape_.q_heads; ++h) {
      std::ranges::copy(Exact(h), exact.begin() + std::int64_t{h} * shape_.head_dim);
    }
    const std::vector<std::uint64_t> words = Bitmap(visible_);
    std::vector<int> in_play(shape_.kv_heads, kTauGridSize);
    const auto replay = [&](std::vector<float>& errors) {
      errors.assign(static_cast<std::size_t>(shape_.q_heads * kTauGridSize), -1.0f);
      return operator_->Replay(*plan_, Query(words), kTauGrid, in_play, exact.data(), shape_.head_dim, 2, workspace_,
                               errors);
    };
    std::vector<float> errors;
    ASSERT_TRUE(replay(errors).ok());
    for (int t = 0; t < kTauGridSize; ++t) {
      const std::vector<float> out = Attend(kTauGrid[t]);
      for (int h = 0; h < shape_.q_heads; ++h) {
        const double error = RelativeL2(HeadOf(out, h), HeadOf(exact, h));
        EXPECT_NEAR(errors[h * kTauGridSize + t], error, 1e-5 + 1e-3 * error) << "tau " << kTauGrid[t];
      }
    }
    // A looser threshold must be able to show a larger error, or the test above compares nothing.
    EXPECT_GT(errors[0], errors[kTauGridSize - 1]);

    // With fewer thresholds in play the others take the error of the last one that is.
    for (int h = 0; h < shape_.kv_heads; ++h) in_play[h] = 1 + 4 * h;
    std::vector<float> fewer;
    ASSERT_TRUE(replay(fewer).ok());
    for (int h = 0; h < shape_.q_heads; ++h) {
      for (int t = 0; t < kTauGridSize; ++t) {
        const float expected = errors[h * kTauGridSize + std::min(t, in_play[h / shape_.group()] - 1)];
        EXPECT_NEAR(fewer[h * kTauGridSize + t], expected, 1e-5 + 1e-3 * expected) << h << ", tau " << kTauGrid[t];
      }
    }
  }

  Shape shape_;
  Config config_;
  std::unique_ptr<SyntheticCache> cache_;
  KvView kv_;
  std::unique_ptr<BlockPlan> plan_;
  std::unique_ptr<BlockTree> tree_;  // nullptr: every cluster is scored
  std::unique_ptr<JointOperator> operator_;
  std::vector<bool> visible_;
  std::vector<float> q_;
  LogitParams params_;
  Workspace workspace_;
};

}  // namespace scsa::test
