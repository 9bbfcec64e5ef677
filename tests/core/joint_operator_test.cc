// SPDX-License-Identifier: Apache-2.0
#include "core/joint_operator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

#include "tests/core/joint_operator_fixture.h"
#include "tests/core/plain_clusters.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::JointOperatorTest;
using test::PlainCluster;
using test::SmallBlocks;
using test::Vector;

// What the other tests take from the plan follows from the cached rows.
TEST_F(JointOperatorTest, SummariesDescribeTheirRows) {
  Build({4, 2, 40}, 700, 10, SmallBlocks());
  for (int kv_head = 0; kv_head < 2; ++kv_head) {
    std::map<std::int64_t, Vector> variances;  // per block, summed over the rows
    std::vector<int> uses(640, 0);
    const std::vector<PlainCluster> clusters = ClustersOf(kv_head);
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

// The keys of every block but five are moved so that each logit falls by 6.
TEST_F(JointOperatorTest, LightBlocksCountAtTheirMeanValue) {
  test::OnEveryTarget([&] {
    Build({2, 2, 40}, 1000, 15, SmallBlocks());
    std::vector<int> blocks(15);
    std::iota(blocks.begin(), blocks.end(), 0);
    for (int h = 0; h < 2; ++h) {
      const Vector q = test::ToDouble(q_.data() + h * 40, 40);
      for (std::int64_t r = 320; r < 960; ++r) {
        Vector key = cache_->DecodedKey(r, h);
        for (int d = 0; d < 40; ++d) key[d] -= 6.0 / params_.scale * q[d] / test::DotOf(q, q);
        cache_->SetKey(r, h, std::vector<float>(key.begin(), key.end()).data());
      }
    }
    ASSERT_TRUE(plan_->Build(kv_, blocks, 1).status.ok());
    for (const float tau : {0.3f, 0.05f}) {
      ExpectRestated(tau, 2e-5);
      std::int64_t rows = 0;
      const Vector light = Restated(0, tau, &rows)[0];
      EXPECT_GT(test::RelativeL2(light, Restated(0, tau, 0.0, &rows)[0]), 1e-4) << "no block is light";
      EXPECT_GT(test::RelativeL2(light, Restated(0, tau, 1.0, &rows)[0]), 1e-4) << "all blocks are light";
    }
    ExpectReplayedStops();
  });
}

// Of a light block a step reads the centroids, and of the values the mean and step: 40 floats each.
TEST_F(JointOperatorTest, ValueMeansOfLightBlocksAreNotRead) {
  LayerStats none;
  LayerStats all;
  Build({4, 2, 40}, 1000, 15, SmallBlocks());
  Attend(1.0f, 1, &none);
  const std::vector<float> sinks(4, 25.0f);
  params_.sinks = sinks.data();
  Attend(1.0f, 1, &all);
  ASSERT_EQ(none.stat_opened_rows, 0u);
  ASSERT_EQ(all.union_rows, none.union_rows);
  EXPECT_EQ(none.bytes_read - all.bytes_read, 2u * 15 * plan_->slots() * 40);
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
  for (const PackedFormat format : {PackedFormat::kQ8_0, PackedFormat::kInt8}) {
    Build({6, 2, 64}, 1000, 15, SmallBlocks(format));
    const std::vector<float> quantised = Attend(0.05f);
    for (int h = 0; h < shape_.q_heads; ++h) {
      // 8 bits: a row differs by at most 1/254 of its largest value (q8_0), or of the range of its block.
      EXPECT_LT(test::RelativeL2(HeadOf(quantised, h), HeadOf(direct, h)), 0.02);
    }
  }
}

TEST_F(JointOperatorTest, BitsOfInt8RowsDoNotDependOnThreads) {
  Build({9, 3, 64}, 3000, 46, SmallBlocks(PackedFormat::kInt8));
  const std::vector<float> one = Attend(0.02f, 1);
  for (const int n_threads : {2, 3, 7}) EXPECT_EQ(Attend(0.02f, n_threads), one);
}

// 128 bytes of an opened row in place of 256.
TEST_F(JointOperatorTest, Int8RowsAreHalfTheBytesOfTheCache) {
  LayerStats direct;
  Build({6, 2, 64}, 1000, 15, SmallBlocks());
  Attend(0.05f, 1, &direct);
  LayerStats packed;
  Build({6, 2, 64}, 1000, 15, SmallBlocks(PackedFormat::kInt8));
  Attend(0.05f, 1, &packed);
  ASSERT_EQ(packed.union_rows, direct.union_rows);  // chosen from the same summaries
  ASSERT_GT(direct.stat_opened_rows, 0u);
  EXPECT_EQ(direct.bytes_read - packed.bytes_read, direct.stat_opened_rows / shape_.group() * 128);
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
  ExpectReplayedStops();
}

TEST_F(JointOperatorTest, ReplayReadsTheInt8RowsThatAStepReads) {
  Build({6, 2, 40}, 1500, 23, SmallBlocks(PackedFormat::kInt8));
  ExpectReplayedStops();
}

TEST_F(JointOperatorTest, OtherRowFormatsWork) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kQ8_0}) {
    Build({6, 2, 40}, 1000, 15, SmallBlocks(), type);
    ExpectRestated(0.05f, 2e-5);
  }
}

}  // namespace
}  // namespace scsa
