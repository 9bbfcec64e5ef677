// SPDX-License-Identifier: Apache-2.0
//
// A Layer of preset `fast`: when blocks are built and dropped, calibration, and that answers stay right meanwhile.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "core/block_plan.h"
#include "scsa/layer.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;

constexpr std::int64_t kRows = 900;

Config SmallBlocks() {
  Config config = ConfigFor(Preset::kFast);
  config.block_size = 64;
  config.recent = 32;
  return config;
}

class FastLayerTest : public ::testing::Test {
 protected:
  void SetUp() override { Make(SmallBlocks()); }

  void Make(const Config& config) { ASSERT_TRUE(Layer::Create(shape_, config, &layer_).ok()); }

  std::vector<float> Attend(std::int64_t n_kv, Verify verify = Verify::kNone,
                            const std::vector<bool>* visible = nullptr, int n_threads = 1) {
    const std::vector<float> q = test::RandomQueries(shape_, static_cast<std::uint32_t>(n_kv));
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape_);
    std::vector<std::uint64_t> words;
    if (visible != nullptr) words = test::Bitmap(*visible);
    const VisibleSets sets{visible != nullptr ? words.data() : nullptr, 0};
    EXPECT_TRUE(layer_
                    ->Attend(test::ViewQueries(q, shape_), cache_.View(n_kv), sets, params_, verify, n_threads,
                             workspace_, view)
                    .ok());
    return out;
  }

  double ErrorAgainstExact(const std::vector<float>& out, std::int64_t n_kv,
                           const std::vector<bool>* visible = nullptr) const {
    const std::vector<float> q = test::RandomQueries(shape_, static_cast<std::uint32_t>(n_kv));
    double worst = 0;
    for (int h = 0; h < shape_.q_heads; ++h) {
      const auto head = test::ToDouble(out.data() + std::int64_t{h} * shape_.head_dim, shape_.head_dim);
      worst =
          std::max(worst, test::RelativeL2(head, test::ExactHead(cache_, shape_, n_kv, q.data(), h, params_, visible)));
    }
    return worst;
  }
  void SetTaus(float tau) {
    for (int h = 0; h < shape_.kv_heads; ++h) ASSERT_TRUE(layer_->SetTau(h, tau).ok());
  }

  Shape shape_{6, 2, 32};
  LogitParams params_{.scale = 1.0f / std::sqrt(32.0f)};
  SyntheticCache cache_{shape_, kRows, DType::kF16};
  std::unique_ptr<Layer> layer_;
  Workspace workspace_;
};

TEST_F(FastLayerTest, BlocksSealWhenTheirRowsAndTheRecentOnesAreThere) {
  Attend(64 + 31);  // block 0 ends at row 64, 32 recent rows stay out
  EXPECT_EQ(layer_->sealed_end(), 4);
  EXPECT_EQ(layer_->stats().exact_steps, 1u);
  Attend(64 + 32);
  EXPECT_EQ(layer_->sealed_end(), 64);
  EXPECT_EQ(layer_->stats().sparse_steps, 1u);
  Attend(640);
  EXPECT_EQ(layer_->sealed_end(), 576);
  EXPECT_EQ(layer_->stats().rebuild_count, 9u);
}

TEST_F(FastLayerTest, SealDelayPutsBuildingOff) {
  Config config = SmallBlocks();
  config.seal_delay = 20;
  Make(config);
  Attend(64 + 32 + 19);
  EXPECT_EQ(layer_->sealed_end(), 4);
  Attend(64 + 32 + 20);
  EXPECT_EQ(layer_->sealed_end(), 64);
}

TEST_F(FastLayerTest, SealBuildsEverythingAtOnce) {
  ASSERT_TRUE(layer_->Seal(cache_.View(), 650, 2).ok());
  EXPECT_EQ(layer_->sealed_end(), 640);
  EXPECT_EQ(layer_->stats().rebuild_count, 10u);
  SetTaus(0.0f);
  EXPECT_LT(ErrorAgainstExact(Attend(700), 700), 1e-5);
  EXPECT_EQ(layer_->stats().sparse_steps, 1u);
}

TEST_F(FastLayerTest, ZeroTauIsExactWhileTheContextGrows) {
  SetTaus(0.0f);
  for (std::int64_t n = 60; n <= kRows; n += 7) EXPECT_LT(ErrorAgainstExact(Attend(n), n), 1e-5) << n;
  EXPECT_GT(layer_->stats().sparse_steps, 100u);
}

TEST_F(FastLayerTest, GrowingStepByStepGivesTheSameBitsAsStartingLate) {
  SetTaus(0.05f);
  for (std::int64_t n = 100; n < 800; n += 33) Attend(n);
  const std::vector<float> grown = Attend(800);
  Make(SmallBlocks());
  SetTaus(0.05f);
  EXPECT_EQ(Attend(800, Verify::kNone, nullptr, 3), grown);
}

TEST_F(FastLayerTest, WritesDropTheirBlockAlone) {
  Attend(640);
  const std::int64_t rows[] = {130, 131, 2};  // block 2; the first rows are in no block
  layer_->NotifyWrites(rows);
  EXPECT_EQ(layer_->stats().dropped_blocks, 1u);
  EXPECT_EQ(layer_->sealed_end(), 128);
  SetTaus(0.0f);
  EXPECT_LT(ErrorAgainstExact(Attend(640), 640), 1e-5);
  EXPECT_EQ(layer_->sealed_end(), 576);  // built again
}

TEST_F(FastLayerTest, AFullCheckFindsAChangedRow) {
  Attend(640);
  SetTaus(0.0f);
  const std::vector<float> value(32, 3.0f);
  cache_.SetValue(300, 1, value.data());
  const std::vector<float> out = Attend(640, Verify::kFull);
  EXPECT_EQ(layer_->stats().dropped_blocks, 1u);
  EXPECT_LT(ErrorAgainstExact(out, 640), 1e-5);
}

TEST_F(FastLayerTest, SamplingFindsAChangedRowWithinItsRound) {
  Attend(640);
  const std::vector<float> value(32, 3.0f);
  cache_.SetValue(300, 1, value.data());
  // 64 rows, one per call, of one of the two KV heads after the other.
  int calls = 0;
  while (layer_->stats().dropped_blocks == 0 && calls < 2 * 64) {
    Attend(640, Verify::kSample);
    ++calls;
  }
  EXPECT_EQ(layer_->stats().dropped_blocks, 1u);
}

TEST_F(FastLayerTest, SamplingFindsARewrittenBlockAtOnce) {
  Attend(640);
  const std::vector<float> value(32, 3.0f);
  for (std::int64_t r = 256; r < 320; ++r) {
    for (int h = 0; h < 2; ++h) cache_.SetKey(r, h, value.data());
  }
  SetTaus(0.0f);
  const std::vector<float> out = Attend(640, Verify::kSample);
  EXPECT_EQ(layer_->stats().dropped_blocks, 1u);
  EXPECT_EQ(layer_->stats().step_failures, 0u);
  EXPECT_LT(ErrorAgainstExact(out, 640), 1e-5);
}

TEST_F(FastLayerTest, HiddenRowsAreNeverSeen) {
  Attend(640);
  SetTaus(0.0f);
  std::vector<bool> visible(640, true);
  for (std::int64_t r = 200; r < 210; ++r) visible[r] = false;
  visible[1] = false;
  EXPECT_LT(ErrorAgainstExact(Attend(640, Verify::kNone, &visible), 640, &visible), 1e-5);
  EXPECT_EQ(layer_->stats().dropped_blocks, 0u);  // the block still serves who sees all of it
}

TEST_F(FastLayerTest, SeveralQueryRowsAreAnsweredEachForItself) {
  Attend(700);
  SetTaus(0.0f);
  const std::int64_t stride = std::int64_t{shape_.q_heads} * shape_.head_dim;
  std::vector<float> q = test::RandomQueries(shape_, 1);
  const std::vector<float> second = test::RandomQueries(shape_, 2);
  q.insert(q.end(), second.begin(), second.end());
  std::vector<bool> all(700, true);
  std::vector<bool> fewer(700, true);
  for (std::int64_t r = 500; r < 700; ++r) fewer[r] = false;
  std::vector<std::uint64_t> words = test::Bitmap(all);
  const auto word_stride = std::ssize(words);
  const std::vector<std::uint64_t> more = test::Bitmap(fewer);
  words.insert(words.end(), more.begin(), more.end());
  std::vector<float> out(q.size());
  ASSERT_TRUE(layer_
                  ->Attend({q.data(), stride, shape_.head_dim, 2}, cache_.View(700), {words.data(), word_stride},
                           params_, Verify::kNone, 2, workspace_, {out.data(), stride, shape_.head_dim})
                  .ok());
  EXPECT_EQ(layer_->stats().sparse_steps, 2u);
  for (int h = 0; h < shape_.q_heads; ++h) {
    const auto head = [&](int row) {
      return test::ToDouble(out.data() + row * stride + std::int64_t{h} * shape_.head_dim, shape_.head_dim);
    };
    EXPECT_LT(test::RelativeL2(head(0), test::ExactHead(cache_, shape_, 700, q.data(), h, params_, &all)), 1e-5);
    EXPECT_LT(test::RelativeL2(head(1), test::ExactHead(cache_, shape_, 700, second.data(), h, params_, &fewer)), 1e-5);
  }
}

TEST_F(FastLayerTest, CalibrationKeepsTheMeanErrorOfAKvHeadWithinTheTolerance) {
  constexpr float kTolerance = 0.05f;
  ASSERT_TRUE(layer_->StartCalibration(kTolerance).ok());
  for (std::int64_t n = 700; n < 732; ++n)
    EXPECT_LT(ErrorAgainstExact(Attend(n), n), 1e-5) << "exact inside the window";
  EXPECT_EQ(layer_->calibration_steps(), 32);
  ASSERT_TRUE(layer_->FinishCalibration().ok());
  ASSERT_EQ(std::ssize(layer_->taus()), shape_.kv_heads);
  for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
    const auto mean_error = [&](int grid_index) {
      double sum = 0;
      int n = 0;
      for (int i = 0; i < shape_.group(); ++i) {
        for (const float error : layer_->CalibrationErrors(kv_head * shape_.group() + i, grid_index)) {
          sum += error;
          ++n;
        }
      }
      return sum / n;
    };
    int chosen = 0;
    while (chosen < kTauGridSize - 1 && mean_error(chosen) > kTolerance) ++chosen;
    const float tau = layer_->taus()[kv_head];
    EXPECT_GE(tau, kFastTauGrid[chosen]);
    if (chosen > 0) {
      const double low = mean_error(chosen);
      const double part = (kTolerance - low) / (mean_error(chosen - 1) - low);
      EXPECT_NEAR(tau, kFastTauGrid[chosen] * std::pow(kFastTauGrid[chosen - 1] / kFastTauGrid[chosen], part), 1e-5);
    }
  }
}

TEST_F(FastLayerTest, SoftcapIsAnsweredExactly) {
  params_.softcap = 5.0f;
  EXPECT_LT(ErrorAgainstExact(Attend(640), 640), 1e-5);
  EXPECT_EQ(layer_->stats().exact_steps, 1u);
}

TEST_F(FastLayerTest, OverflowingEstimatesAndQueriesAreAnsweredLikeTheExactKernelDoes) {
  // Members of a cluster so far apart that the second cumulant of a large query overflows.
  std::vector<float> signs = test::RandomQueries({64, 1, 32}, 8);
  for (float& x : signs) x = x > 0 ? 60000.0f : -60000.0f;
  for (std::int64_t r = 64; r < 128; ++r) {
    for (int h = 0; h < 2; ++h) cache_.SetKey(r, h, signs.data() + (r - 64) * 32);
  }
  Attend(640);
  params_.scale = 1.0f;
  const std::vector<float> random = test::RandomQueries(shape_, 5);
  std::vector<float> out;
  std::vector<float> exact;
  const OutView out_view = test::ViewOut(out, shape_);
  const OutView exact_view = test::ViewOut(exact, shape_);
  // The squares of the second query overflow too.
  for (const float size : {1e17f, 1e30f}) {
    std::vector<float> q = random;
    for (float& x : q) x *= size;
    const QueryView queries = test::ViewQueries(q, shape_);
    ASSERT_TRUE(layer_->Attend(queries, cache_.View(640), {}, params_, Verify::kNone, 1, workspace_, out_view).ok());
    ASSERT_TRUE(ExactAttention(shape_, queries, cache_.View(640), {}, params_, 1, workspace_, exact_view).ok());
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_TRUE(std::isfinite(exact[i]));
      EXPECT_NEAR(out[i], exact[i], 1e-4f * (1.0f + std::fabs(exact[i]))) << size;
    }
  }
  EXPECT_EQ(layer_->stats().sparse_steps, 2u);
  EXPECT_EQ(layer_->stats().exact_steps, 1u);
}

TEST_F(FastLayerTest, RowsThatAreNotFiniteStayOutOfBlocks) {
  std::vector<float> bad(32, 0.0f);
  bad[3] = std::numeric_limits<float>::infinity();
  cache_.SetValue(70, 0, bad.data());
  std::vector<bool> visible(640, true);
  Attend(640, Verify::kNone, &visible);
  EXPECT_EQ(layer_->sealed_end(), 64);
  EXPECT_EQ(layer_->stats().build_failures, 1u);
}

TEST(FastConfigTest, ImpossibleBlocksAreRefused) {
  std::unique_ptr<Layer> layer;
  const auto message = [&](auto change) {
    Config config = ConfigFor(Preset::kFast);
    change(config);
    const Status status = Layer::Create({4, 2, 64}, config, &layer);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message([](Config& c) { c.block_size = 100; }), "block_size is 100, must be a multiple of 64 up to 32768");
  EXPECT_EQ(message([](Config& c) { c.cluster_size = 64; }),
            "cluster_size is 64, must divide block_size into a multiple of 8 clusters");
  EXPECT_EQ(message([](Config& c) { c.sink = 256; }), "sink is 256, must be less than block_size");
  EXPECT_EQ(message([](Config& c) { c.kmeans_rounds = -1; }), "kmeans_rounds is -1, must be at least 0");
  EXPECT_EQ(message([](Config& c) { c.seal_delay = -1; }), "seal_delay is -1, must be at least 0");
  EXPECT_EQ(message([](Config& c) { c.tail_shrink = 1.5f; }), "tail_shrink is 1.500000, must be in [0, 1]");
}

}  // namespace
}  // namespace scsa
