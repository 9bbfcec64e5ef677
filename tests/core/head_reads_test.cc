// SPDX-License-Identifier: Apache-2.0
//
// What a layer counts per KV head.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "scsa/layer.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;

class HeadReadsTest : public ::testing::TestWithParam<Preset> {
 protected:
  static constexpr std::int64_t kRows = 700;
  const Shape shape_{4, 2, 32};
  SyntheticCache cache_{shape_, kRows, DType::kF16};
  std::unique_ptr<Layer> layer_;

  void SetUp() override {
    Config config = ConfigFor(GetParam());
    config.block_size = GetParam() == Preset::kFast ? 64 : 256;
    if (GetParam() == Preset::kSeed) {
      config.cluster_size = 16;
      config.rebuild_interval = 64;
    }
    ASSERT_TRUE(Layer::Create(shape_, config, &layer_).ok());
  }
  void Step() {
    std::normal_distribution<float> normal;
    std::vector<float> q(4 * 32);
    for (float& x : q) x = normal(random_);
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape_);
    LogitParams params;
    params.scale = 1.0f / std::sqrt(32.0f);
    ASSERT_TRUE(
        layer_->Attend(test::ViewQueries(q, shape_), cache_.View(kRows), {}, params, Verify::kNone, 2, workspace_, view)
            .ok());
  }

 private:
  std::mt19937 random_{5};
  Workspace workspace_;
};

TEST_P(HeadReadsTest, TellOneHeadThatOpensEverythingFromOneThatOpensNothing) {
  const auto heads_per_kv_head = static_cast<int>(layer_->taus().size()) / 2;
  for (int head = 0; head < 2 * heads_per_kv_head; ++head) {
    ASSERT_TRUE(layer_->SetTau(head, head < heads_per_kv_head ? 0.0f : 1.0f).ok());
  }
  constexpr std::uint64_t kSteps = 3;
  for (std::uint64_t i = 0; i < kSteps; ++i) Step();
  const LayerStats stats = layer_->stats();
  ASSERT_EQ(stats.sparse_steps, kSteps);
  const std::span<const HeadReads> reads = layer_->head_reads();
  ASSERT_EQ(reads.size(), 2u);
  const std::uint64_t exact = layer_->config().sink + kRows - layer_->sealed_end();
  EXPECT_EQ(reads[0].rows_visible, kSteps * kRows);
  EXPECT_EQ(reads[1].rows_visible, kSteps * kRows);
  EXPECT_EQ(reads[0].rows_read, kSteps * kRows);
  EXPECT_EQ(reads[1].rows_read, kSteps * exact);
  EXPECT_EQ(reads[0].rows_read + reads[1].rows_read, stats.union_rows);
  EXPECT_EQ(reads[0].bytes_read + reads[1].bytes_read, stats.bytes_read);
  // What head 0 opened: f16 rows of K and V where they lie (fast), or packed as q8_0 (seed). Summaries of both are of
  // the same size where clusters are balanced, but of preset `fast` head 1 alone reads value means, 32 bytes for 8
  // rows.
  const bool fast = GetParam() == Preset::kFast;
  const std::uint64_t opened = (kRows - exact) * (fast ? 128 : 68);
  const std::uint64_t closed = fast ? layer_->sealed_end() / 8 * 32 : 0;
  EXPECT_EQ(reads[0].bytes_read - reads[1].bytes_read, kSteps * (opened - closed));

  layer_->ResetStats();
  EXPECT_EQ(layer_->head_reads()[0].rows_read, 0u);
}

TEST_P(HeadReadsTest, ExactAnswersCountNowhere) {
  ASSERT_TRUE(layer_->StartCalibration(0.02f).ok());
  Step();
  EXPECT_EQ(layer_->stats().calibration_steps, 1u);
  for (const HeadReads& head : layer_->head_reads()) EXPECT_EQ(head.rows_visible, 0u);
}

INSTANTIATE_TEST_SUITE_P(Presets, HeadReadsTest, ::testing::Values(Preset::kSeed, Preset::kFast),
                         [](const auto& test) { return std::string(PresetName(test.param)); });

}  // namespace
}  // namespace scsa
