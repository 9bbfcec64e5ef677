// SPDX-License-Identifier: Apache-2.0
#include "core/prompt_operator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "tests/core/plain_clusters.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;
using test::Vector;

// The last rows of a cache as queries of a prompt under a causal mask, and blocks over its first rows.
class PromptOperatorTest : public ::testing::Test {
 protected:
  void Build(const Shape& shape, std::int64_t n_rows, int n_q, int n_blocks, DType type = DType::kF16) {
    shape_ = shape;
    n_q_ = n_q;
    config_ = ConfigFor(Preset::kFast);
    config_.block_size = 64;
    cache_ = std::make_unique<SyntheticCache>(shape, n_rows, type, 11);
    kv_ = cache_->View();
    BuildPlan(n_blocks);
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    q_.resize(static_cast<std::size_t>(n_q) * RowFloats());
    // Neighbours look for the same keys, as those of a text do.
    std::vector<float> common(RowFloats());
    for (float& x : common) x = 2.0f * normal(random);
    for (std::size_t i = 0; i < q_.size(); ++i) q_[i] = common[i % RowFloats()] + 0.5f * normal(random);
    params_ = LogitParams{.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim))};
    visible_.assign(n_q, std::vector<bool>(n_rows, true));
    for (int i = 0; i < n_q; ++i) std::fill(visible_[i].end() - (n_q - 1 - i), visible_[i].end(), false);
    SetThresholds(0.015f, 1e-9);
  }
  void BuildPlan(int n_blocks) {
    plan_ = std::make_unique<BlockPlan>(shape_, config_);
    std::vector<int> blocks(n_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    ASSERT_TRUE(plan_->Build(kv_, blocks, 1).status.ok());
    operator_ = std::make_unique<PromptOperator>(shape_, config_);
  }
  void SetThresholds(float tolerance, double share) {
    thresholds_ = std::make_unique<PromptThresholds>(shape_.kv_heads, TauGrid(Preset::kFast));
    PromptConfig config;
    config.tolerance = tolerance;
    config.share = share;
    thresholds_->Set(config);
  }
  // As if tiles had been measured.
  void ForceTau(float tau) {
    for (int h = 0; h < shape_.kv_heads; ++h) thresholds_->head(h) = {.tau = tau, .measured = 1};
  }

  std::size_t RowFloats() const { return static_cast<std::size_t>(shape_.q_heads) * shape_.head_dim; }
  std::vector<float> Attend(int n_threads = 1) {
    const std::int64_t words = (kv_.n_kv + 63) / 64;
    std::vector<std::uint64_t> bitmaps;
    for (const std::vector<bool>& row : visible_) {
      const std::vector<std::uint64_t> of_row = test::Bitmap(row);
      bitmaps.insert(bitmaps.end(), of_row.begin(), of_row.end());
    }
    const QueryView q{q_.data(), static_cast<std::int64_t>(RowFloats()), shape_.head_dim, n_q_};
    std::vector<float> out(q_.size());
    const OutView view{out.data(), q.row_stride, q.head_stride};
    const VisibleSets visible{bitmaps.data(), words};
    const PromptQuery query{q, kv_, visible, params_};
    EXPECT_TRUE(operator_->Attend(*plan_, query, *thresholds_, n_threads, workspace_, view).ok());
    return out;
  }
  Vector VectorOf(const std::vector<float>& out, int row, int q_head) const {
    return test::ToDouble(out.data() + row * RowFloats() + std::int64_t{q_head} * shape_.head_dim, shape_.head_dim);
  }
  Vector Exact(int row, int q_head) const {
    return test::ExactHead(*cache_, shape_, kv_.n_kv, q_.data() + row * RowFloats(), q_head, params_, &visible_[row]);
  }
  double MeanError(const std::vector<float>& out, const std::vector<float>& exact, int kv_head, int first_row,
                   int end_row) const {
    double sum = 0;
    for (int i = first_row; i < end_row; ++i) {
      for (int h = kv_head * shape_.group(); h < (kv_head + 1) * shape_.group(); ++h) {
        sum += test::RelativeL2(VectorOf(out, i, h), VectorOf(exact, i, h));
      }
    }
    return sum / ((end_row - first_row) * shape_.group());
  }

  // The rows of one tile for one KV head, in double: outputs by query row, then query head of the group.
  std::vector<Vector> Restated(int kv_head, int first_row, int end_row, double tau, std::int64_t* rows_read) const {
    std::vector<bool> seen_by_all(kv_.n_kv, true);
    std::vector<test::RestatedQuery> queries;
    for (int i = first_row; i < end_row; ++i) {
      for (std::int64_t r = 0; r < kv_.n_kv; ++r) seen_by_all[r] = seen_by_all[r] && visible_[i][r];
      for (int h = kv_head * shape_.group(); h < (kv_head + 1) * shape_.group(); ++h) {
        queries.push_back({q_.data() + i * RowFloats() + std::int64_t{h} * shape_.head_dim, h, &visible_[i]});
      }
    }
    return test::RestateJointMethod(*cache_, shape_, config_, params_, kv_head,
                                    test::UsableClusters(*plan_, shape_, kv_head, seen_by_all), queries, tau,
                                    /*light_share=*/0.0, rows_read);
  }

  void ExpectRestated(float tau) {
    ForceTau(tau);
    const std::vector<float> out = Attend();
    for (int h = 0; h < shape_.kv_heads; ++h) {
      std::int64_t rows_read = 0;
      for (int first = 0; first < n_q_; first += kPromptTileRows) {
        const int end = std::min(n_q_, first + kPromptTileRows);
        std::int64_t rows_of_tile = 0;
        const std::vector<Vector> expected = Restated(h, first, end, tau, &rows_of_tile);
        rows_read += rows_of_tile;
        for (int i = first; i < end; ++i) {
          for (int j = 0; j < shape_.group(); ++j) {
            ASSERT_LT(
                test::RelativeL2(VectorOf(out, i, h * shape_.group() + j), expected[(i - first) * shape_.group() + j]),
                2e-5)
                << "tau " << tau << ", row " << i;
          }
        }
      }
      EXPECT_EQ(thresholds_->heads()[h].rows_read, static_cast<std::uint64_t>(rows_read)) << "tau " << tau;
      EXPECT_EQ(thresholds_->heads()[h].sparse, thresholds_->heads()[h].tiles);
    }
  }

  Shape shape_;
  int n_q_ = 0;
  Config config_;
  std::unique_ptr<SyntheticCache> cache_;
  KvView kv_;
  std::unique_ptr<BlockPlan> plan_;
  std::unique_ptr<PromptOperator> operator_;
  std::unique_ptr<PromptThresholds> thresholds_;
  std::vector<std::vector<bool>> visible_;  // [query row][cached row]
  std::vector<float> q_;
  LogitParams params_;
  Workspace workspace_;
};

TEST_F(PromptOperatorTest, FollowsTheFormulasOnEveryTarget) {
  test::OnEveryTarget([&] {
    Build({6, 2, 40}, 1300, 60, 18);
    for (const float tau : {0.3f, 0.1f}) ExpectRestated(tau);
  });
}

TEST_F(PromptOperatorTest, FollowsTheFormulasInOtherShapesAndFormats) {
  Build({7, 1, 64}, 1250, 49, 18, DType::kBF16);
  ExpectRestated(0.2f);
  Build({3, 3, 8}, 1250, 5, 18, DType::kQ8_0);
  ExpectRestated(0.2f);
}

TEST_F(PromptOperatorTest, HolesAndAttentionSinksCount) {
  Build({4, 2, 16}, 1500, 60, 22);
  for (int i = 0; i < n_q_; ++i) {
    visible_[i][2] = false;                 // block 0 does not cover the first rows
    if (i == 50) visible_[i][700] = false;  // block 10 does not serve the second tile
    if (i >= 20) visible_[i][1450] = false;
  }
  const std::vector<float> sinks = {0.5f, 2.0f, -1.0f, 3.0f};
  params_.sinks = sinks.data();
  ExpectRestated(0.2f);
}

TEST_F(PromptOperatorTest, RowsOfBlocksInsideThePromptServeLaterTiles) {
  Build({2, 1, 16}, 1400, 200, 21);  // the last blocks end beyond the first queries' rows
  ExpectRestated(0.2f);
}

TEST_F(PromptOperatorTest, WithoutThresholdsOrRowsEnoughTilesAreExact) {
  Build({6, 2, 40}, 1000, 60, 15);  // below the least number of covered rows
  ForceTau(0.3f);
  const std::vector<float> out = Attend();
  for (int i = 0; i < n_q_; ++i) {
    for (int h = 0; h < shape_.q_heads; ++h) ASSERT_LT(test::RelativeL2(VectorOf(out, i, h), Exact(i, h)), 5e-6);
  }
  EXPECT_EQ(thresholds_->heads()[0].tiles, 2u);
  EXPECT_EQ(thresholds_->heads()[0].sparse, 0u);
  EXPECT_EQ(thresholds_->heads()[0].measured, 1u);  // what ForceTau pretends
}

TEST_F(PromptOperatorTest, AThresholdThatOpensMostClustersIsNotWorthATail) {
  Build({6, 2, 40}, 1300, 60, 18);
  ForceTau(1e-6f);
  const std::vector<float> out = Attend();
  for (int i = 0; i < n_q_; ++i) {
    for (int h = 0; h < shape_.q_heads; ++h) ASSERT_LT(test::RelativeL2(VectorOf(out, i, h), Exact(i, h)), 5e-6);
  }
  EXPECT_EQ(thresholds_->heads()[0].sparse, 0u);
}

// Measured tiles are exact, and their errors are those of really stopping at each threshold.
TEST_F(PromptOperatorTest, MeasuringIsWhatStoppingThereGives) {
  Build({6, 2, 40}, 1300, kPromptTileRows, 18);
  const std::vector<float> sinks = {0.5f, 2.0f, -1.0f, 3.0f, 0.0f, 1.0f};
  params_.sinks = sinks.data();
  const std::vector<float> exact = Attend();  // one tile, which is measured first
  for (int i = 0; i < n_q_; ++i) {
    for (int h = 0; h < shape_.q_heads; ++h) ASSERT_LT(test::RelativeL2(VectorOf(exact, i, h), Exact(i, h)), 5e-6);
  }
  for (int h = 0; h < shape_.kv_heads; ++h) ASSERT_EQ(thresholds_->heads()[h].measured, 1u);
  // The tolerance that is the error of really stopping at a threshold chooses that threshold.
  int compared = 0;
  for (int g = 1; g + 1 < kTauGridSize; ++g) {
    const float tau = kFastTauGrid[g];
    SetThresholds(1.0f, 1e-9);
    ForceTau(tau);
    const std::vector<float> out = Attend();
    for (int h = 0; h < shape_.kv_heads; ++h) {
      if (thresholds_->heads()[h].sparse == 0) continue;  // opened most clusters
      const auto error = static_cast<float>(MeanError(out, exact, h, 0, n_q_));
      PromptThresholds chosen(shape_.kv_heads, TauGrid(Preset::kFast));
      PromptConfig config;
      config.tolerance = error;
      chosen.Set(config);
      std::swap(*thresholds_, chosen);
      Attend();
      EXPECT_NEAR(thresholds_->heads()[h].tau, tau, 2e-3f * tau);
      std::swap(*thresholds_, chosen);
      ++compared;
    }
  }
  EXPECT_GE(compared, 4);
}

TEST_F(PromptOperatorTest, MeasuredTilesKeepTheErrorWithinTheTolerance) {
  Build({6, 2, 40}, 1800, 480, 20);
  std::vector<float> exact(q_.size());
  for (int i = 0; i < n_q_; ++i) {
    for (int h = 0; h < shape_.q_heads; ++h) {
      std::ranges::copy(Exact(i, h), exact.begin() + i * RowFloats() + std::int64_t{h} * shape_.head_dim);
    }
  }
  for (const float tolerance : {0.2f, 0.1f}) {
    SetThresholds(tolerance, 0.25);
    const std::vector<float> out = Attend();
    for (int h = 0; h < shape_.kv_heads; ++h) {
      EXPECT_GE(thresholds_->heads()[h].sparse, 4u) << tolerance;
      // Sparse and exact tiles together, so no more than the tolerance; far from nothing.
      const double error = MeanError(out, exact, h, 0, n_q_);
      EXPECT_LT(error, 1.2 * tolerance);
      EXPECT_GT(error, 0.3 * tolerance);
    }
  }
}

TEST_F(PromptOperatorTest, EqualValuesComeBackWhateverIsOpened) {
  Build({4, 2, 32}, 1300, 60, 18);
  const std::vector<float> value(32, 0.75f);
  for (std::int64_t r = 0; r < kv_.n_kv; ++r) {
    for (int h = 0; h < 2; ++h) cache_->SetValue(r, h, value.data());
  }
  BuildPlan(18);
  for (const float tau : {1.0f, 0.3f, 0.01f, 0.0f}) {
    ForceTau(tau);
    for (const float x : Attend()) ASSERT_NEAR(x, 0.75f, 2e-6f) << "tau " << tau;
  }
}

TEST_F(PromptOperatorTest, BitsDoNotDependOnThreads) {
  Build({9, 3, 64}, 1600, 300, 22);
  SetThresholds(0.1f, 0.25);
  const std::vector<float> first = Attend(1);
  const std::vector<float> second = Attend(1);
  EXPECT_NE(first, second);  // other tiles are measured, so other tiles are sparse
  for (const int n_threads : {2, 3, 7}) {
    SetThresholds(0.1f, 0.25);
    EXPECT_EQ(Attend(n_threads), first);
    EXPECT_EQ(Attend(n_threads), second);
  }
}

}  // namespace
}  // namespace scsa
