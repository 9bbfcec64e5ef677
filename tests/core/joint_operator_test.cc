// SPDX-License-Identifier: Apache-2.0
#include "core/joint_operator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

#include "tests/core/plain_clusters.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::PlainCluster;
using test::SyntheticCache;
using test::Vector;

Config SmallBlocks(PackedFormat packed = PackedFormat::kNone) {
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
    operator_ = std::make_unique<JointOperator>(shape, config);
    visible_.assign(n_rows, true);
    q_ = test::RandomQueries(shape, 23);
    params_ = LogitParams{.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim))};
  }

  std::vector<float> Attend(float tau, int n_threads = 1, LayerStats* stats = nullptr) {
    const std::vector<std::uint64_t> words = test::Bitmap(visible_);
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
    return {q_.data(), shape_.head_dim, &kv_, words.data(), params_};
  }

  Vector HeadOf(const std::vector<float>& out, int q_head) const {
    return test::ToDouble(out.data() + std::int64_t{q_head} * shape_.head_dim, shape_.head_dim);
  }
  Vector Exact(int q_head) const {
    return test::ExactHead(*cache_, shape_, cache_->n_rows(), q_.data(), q_head, params_, &visible_);
  }

  std::vector<PlainCluster> UsableClusters(int kv_head) const {
    return test::UsableClusters(*plan_, shape_, kv_head, visible_);
  }

  // The method for one KV head, in double.
  std::vector<Vector> Restated(int kv_head, double tau, std::int64_t* rows_read) const {
    std::vector<test::RestatedQuery> queries;
    for (int i = 0; i < shape_.group(); ++i) {
      const int q_head = kv_head * shape_.group() + i;
      queries.push_back({q_.data() + std::int64_t{q_head} * shape_.head_dim, q_head, &visible_});
    }
    return test::RestateJointMethod(*cache_, shape_, config_, params_, kv_head, UsableClusters(kv_head), queries, tau,
                                    rows_read);
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
        EXPECT_LT(test::RelativeL2(HeadOf(out, h * shape_.group() + i), expected[i]), tolerance) << "tau " << tau;
      }
    }
    EXPECT_EQ(stats.union_rows, static_cast<std::uint64_t>(rows)) << "tau " << tau;
  }

  Shape shape_;
  Config config_;
  std::unique_ptr<SyntheticCache> cache_;
  KvView kv_;
  std::unique_ptr<BlockPlan> plan_;
  std::unique_ptr<JointOperator> operator_;
  std::vector<bool> visible_;
  std::vector<float> q_;
  LogitParams params_;
  Workspace workspace_;
};

// What the other tests take from the plan follows from the cached rows.
TEST_F(JointOperatorTest, SummariesDescribeTheirRows) {
  Build({4, 2, 40}, 700, 10, SmallBlocks());
  for (int kv_head = 0; kv_head < 2; ++kv_head) {
    std::map<std::int64_t, Vector> variances;  // per block, summed over the rows
    std::vector<int> uses(640, 0);
    const std::vector<PlainCluster> clusters = UsableClusters(kv_head);
    for (const PlainCluster& cluster : clusters) {
      const auto count = static_cast<double>(cluster.rows.size());
      Vector key_mean(40, 0.0), value_mean(40, 0.0), variance(40, 0.0);
      for (const std::int64_t r : cluster.rows) {
        ++uses.at(r);
        for (int d = 0; d < 40; ++d) {
          key_mean[d] += cache_->DecodedKey(r, kv_head)[d] / count;
          value_mean[d] += cache_->DecodedValue(r, kv_head)[d] / count;
        }
      }
      for (const std::int64_t r : cluster.rows) {
        for (int d = 0; d < 40; ++d) variance[d] += std::pow(cache_->DecodedKey(r, kv_head)[d] - key_mean[d], 2);
      }
      Vector& block = variances.try_emplace(cluster.rows[0] / 64, Vector(40, 0.0)).first->second;
      double trace = 0;
      for (int d = 0; d < 40; ++d) {
        EXPECT_NEAR(cluster.centroid[d], key_mean[d], 0.5001 * cluster.key_step[d] + 1e-6);
        EXPECT_NEAR(cluster.value_mean[d], value_mean[d], 0.5001 * cluster.value_step[d] + 1e-6);
        trace += variance[d];
        block[d] += variance[d];
      }
      EXPECT_NEAR(cluster.half_trace, trace / count / 2, 1e-5 * trace + 1e-10);
    }
    for (const PlainCluster& cluster : clusters) {
      const Vector& block = variances.at(cluster.rows[0] / 64);
      const double total = std::accumulate(block.begin(), block.end(), 0.0);
      for (int d = 0; d < 40; ++d) EXPECT_NEAR(cluster.shape[d], block[d] / total, 1e-6);
    }
    // Every row but the first ones is in one cluster.
    std::vector<int> expected(640, 1);
    std::fill_n(expected.begin(), config_.sink, 0);
    EXPECT_EQ(uses, expected);
  }
}

TEST_F(JointOperatorTest, FollowsTheFormulasOnEveryTarget) {
  test::OnEveryTarget([&] {
    Build({6, 2, 40}, 1000, 15, SmallBlocks());
    for (const float tau : {0.3f, 0.05f, 0.005f}) ExpectRestated(tau, 2e-5);
  });
}

TEST_F(JointOperatorTest, FollowsTheFormulasAcrossManyChunks) {
  Build({3, 1, 64}, 3000, 46, SmallBlocks());
  ExpectRestated(0.02f, 2e-5);
}

TEST_F(JointOperatorTest, HolesAndAttentionSinksCount) {
  Build({4, 2, 16}, 700, 10, SmallBlocks());
  for (std::int64_t r = 130; r < 140; ++r) visible_[r] = false;  // block 2 is not usable
  visible_[2] = false;                                           // block 0 does not cover the first rows
  visible_[699] = false;
  const std::vector<float> sinks = {0.5f, 2.0f, -1.0f, 3.0f};
  params_.sinks = sinks.data();
  for (const float tau : {0.2f, 0.01f}) ExpectRestated(tau, 2e-5);
}

TEST_F(JointOperatorTest, ZeroTauIsExact) {
  Build({6, 2, 40}, 1000, 15, SmallBlocks());
  const std::vector<float> out = Attend(0.0f);
  for (int h = 0; h < shape_.q_heads; ++h) EXPECT_LT(test::RelativeL2(HeadOf(out, h), Exact(h)), 1e-5);
}

TEST_F(JointOperatorTest, PackedCopiesGiveTheSameRows) {
  Build({6, 2, 64}, 1000, 15, SmallBlocks());
  const std::vector<float> direct = Attend(0.05f);
  Build({6, 2, 64}, 1000, 15, SmallBlocks(PackedFormat::kF16));
  // The rows of each block are a run of their own, so sums are rounded elsewhere.
  const std::vector<float> packed = Attend(0.05f);
  for (int h = 0; h < shape_.q_heads; ++h) EXPECT_LT(test::RelativeL2(HeadOf(packed, h), HeadOf(direct, h)), 1e-6);
  Build({6, 2, 64}, 1000, 15, SmallBlocks(PackedFormat::kQ8_0));
  const std::vector<float> quantised = Attend(0.05f);
  for (int h = 0; h < shape_.q_heads; ++h) {
    // 8 bits: a row differs by at most 1/254 of its largest value.
    EXPECT_LT(test::RelativeL2(HeadOf(quantised, h), HeadOf(direct, h)), 0.02);
  }
}

TEST_F(JointOperatorTest, EqualValuesComeBackWhateverIsOpened) {
  Build({4, 2, 32}, 700, 10, SmallBlocks());
  const std::vector<float> value(32, 0.75f);
  for (std::int64_t r = 0; r < 700; ++r) {
    for (int h = 0; h < 2; ++h) cache_->SetValue(r, h, value.data());
  }
  const std::vector<int> blocks = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  ASSERT_TRUE(plan_->Build(kv_, blocks, 1).status.ok());
  for (const float tau : {1.0f, 0.3f, 0.01f, 0.0f}) {
    for (const float x : Attend(tau)) EXPECT_NEAR(x, 0.75f, 2e-6f) << "tau " << tau;
  }
}

TEST_F(JointOperatorTest, BitsDoNotDependOnThreads) {
  Build({9, 3, 64}, 3000, 46, SmallBlocks());
  const std::vector<float> one = Attend(0.02f, 1);
  for (const int n_threads : {2, 3, 7}) EXPECT_EQ(Attend(0.02f, n_threads), one);
}

// The second half of a step waits for the first inside one parallel region, head by head.
TEST_F(JointOperatorTest, ManyHeadsOnManyThreadsGiveTheSameBitsAgainAndAgain) {
  Build({24, 12, 16}, 1500, 22, SmallBlocks());
  LayerStats stats;
  const std::vector<float> one = Attend(0.02f, 1, &stats);
  for (int repetition = 0; repetition < 200; ++repetition) {
    const int n_threads = 2 + repetition % 5;
    LayerStats again;
    ASSERT_EQ(Attend(0.02f, n_threads, &again), one) << n_threads << " threads, repetition " << repetition;
    ASSERT_EQ(again.union_rows, stats.union_rows);
    ASSERT_EQ(again.bytes_read, stats.bytes_read);
  }
}

TEST_F(JointOperatorTest, MoreThreadsThanPartsDoNotWaitForEver) {
  Build({2, 1, 16}, 64, 1, SmallBlocks());
  const std::vector<float> one = Attend(0.02f, 1);
  for (int repetition = 0; repetition < 50; ++repetition) ASSERT_EQ(Attend(0.02f, 16), one);
}

TEST_F(JointOperatorTest, ReplayIsWhatStoppingThereGives) {
  Build({6, 2, 40}, 1500, 23, SmallBlocks());
  const std::vector<float> sinks = {0.5f, 2.0f, -1.0f, 3.0f, 0.0f, 1.0f};
  params_.sinks = sinks.data();
  std::vector<float> exact(q_.size());
  for (int h = 0; h < shape_.q_heads; ++h)
    std::ranges::copy(Exact(h), exact.begin() + std::int64_t{h} * shape_.head_dim);
  const std::vector<std::uint64_t> words = test::Bitmap(visible_);
  std::vector<float> errors(shape_.q_heads * kTauGridSize);
  ASSERT_TRUE(
      operator_->Replay(*plan_, Query(words), kTauGrid, exact.data(), shape_.head_dim, 2, workspace_, errors).ok());
  for (int t = 0; t < kTauGridSize; ++t) {
    const std::vector<float> out = Attend(kTauGrid[t]);
    for (int h = 0; h < shape_.q_heads; ++h) {
      const double error = test::RelativeL2(HeadOf(out, h), HeadOf(exact, h));
      EXPECT_NEAR(errors[h * kTauGridSize + t], error, 1e-5 + 1e-3 * error) << "tau " << kTauGrid[t];
    }
  }
  // A looser threshold must be able to show a larger error, or the test above compares nothing.
  EXPECT_GT(errors[0], errors[kTauGridSize - 1]);
}

TEST_F(JointOperatorTest, OtherRowFormatsWork) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kQ8_0}) {
    Build({6, 2, 40}, 1000, 15, SmallBlocks(), type);
    ExpectRestated(0.05f, 2e-5);
  }
}

}  // namespace
}  // namespace scsa
