// SPDX-License-Identifier: Apache-2.0
#include "core/prompt_thresholds.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace scsa {
namespace {

constexpr std::span<const float, kTauGridSize> kGrid(kFastTauGrid);

PromptThresholds Make(float tolerance, double share = 0.25, int kv_heads = 1) {
  PromptThresholds thresholds(kv_heads, kGrid);
  PromptConfig config;
  config.tolerance = tolerance;
  config.share = share;
  thresholds.Set(config);
  return thresholds;
}

// Errors in proportion to the threshold.
std::array<float, kTauGridSize> Proportional(float factor) {
  std::array<float, kTauGridSize> errors;
  for (int g = 0; g < kTauGridSize; ++g) errors[g] = factor * kGrid[g];
  return errors;
}

TEST(PromptThresholdsTest, TheFirstTilesChooseAThresholdWithinTheTolerance) {
  PromptThresholds thresholds = Make(0.035f);
  EXPECT_EQ(thresholds.heads()[0].tau, 0.0f);
  thresholds.Add(0, Proportional(1.0f));
  EXPECT_FLOAT_EQ(thresholds.heads()[0].tau, 0.035f);
  // Errors of 0.07 and 0.1 enclose 0.08 at a third of the way, in log tau.
  thresholds = Make(0.08f);
  thresholds.Add(0, Proportional(1.0f));
  EXPECT_NEAR(thresholds.heads()[0].tau, 0.07f * std::pow(0.1f / 0.07f, 1.0f / 3), 1e-6f);
}

TEST(PromptThresholdsTest, LaterTilesMoveIt) {
  PromptThresholds thresholds = Make(0.035f);
  thresholds.Add(0, Proportional(1.0f));
  thresholds.Add(0, Proportional(3.0f));  // the mean is twice the threshold: 0.035 lies between 0.03 and 0.05
  EXPECT_NEAR(thresholds.heads()[0].tau, 0.015f * std::pow(0.025f / 0.015f, 0.25f), 1e-6f);
  // What the second tile would have had at the threshold in force.
  EXPECT_EQ(thresholds.heads()[0].audited, 1u);
  EXPECT_NEAR(thresholds.heads()[0].error_sum, 3 * 0.035, 1e-6);
  EXPECT_EQ(thresholds.heads()[0].measured, 2u);
}

TEST(PromptThresholdsTest, OldTilesFade) {
  PromptThresholds thresholds = Make(0.05f);
  for (int i = 0; i < 100; ++i) thresholds.Add(0, Proportional(100.0f));
  // Not even the smallest threshold is within the tolerance: none is in force.
  EXPECT_EQ(thresholds.heads()[0].tau, 0.0f);
  EXPECT_EQ(thresholds.heads()[0].audited, 0u);
  for (int i = 0; i < 100; ++i) thresholds.Add(0, Proportional(1.0f));
  EXPECT_NEAR(thresholds.heads()[0].tau, 0.05f, 1e-4f);
}

TEST(PromptThresholdsTest, AnOutputThatIsNoNumberIsForgottenToo) {
  PromptThresholds thresholds = Make(0.05f);
  std::array<float, kTauGridSize> broken;
  broken.fill(std::numeric_limits<float>::infinity());
  thresholds.Add(0, broken);
  EXPECT_EQ(thresholds.heads()[0].tau, 0.0f);
  for (int i = 0; i < 100; ++i) thresholds.Add(0, Proportional(1.0f));
  EXPECT_NEAR(thresholds.heads()[0].tau, 0.05f, 1e-3f);
  EXPECT_TRUE(std::isfinite(thresholds.heads()[0].error_sum));
}

TEST(PromptThresholdsTest, MeasuresTheShareThatIsAskedFor) {
  PromptThresholds thresholds = Make(0.05f, 1.0 / 16, 2);
  // Two tiles to begin with, as often as they could not be measured.
  EXPECT_EQ(thresholds.TakeMeasured(0, 10), 2);
  EXPECT_EQ(thresholds.TakeMeasured(0, 10), 2);
  EXPECT_EQ(thresholds.TakeMeasured(0, 1), 1);
  thresholds.Add(0, Proportional(1.0f));
  int measured = 0;
  for (int call = 0; call < 80; ++call) measured += thresholds.TakeMeasured(0, 10);
  EXPECT_EQ(measured, 800 / 16);
  // The heads are counted apart.
  EXPECT_EQ(thresholds.TakeMeasured(1, 10), 2);
}

TEST(PromptThresholdsTest, SettingForgetsEverything) {
  PromptThresholds thresholds = Make(0.05f);
  thresholds.Add(0, Proportional(1.0f));
  thresholds.head(0).tiles = 5;
  thresholds.Set(thresholds.config());
  EXPECT_EQ(thresholds.heads()[0].tau, 0.0f);
  EXPECT_EQ(thresholds.heads()[0].measured, 0u);
  EXPECT_EQ(thresholds.heads()[0].tiles, 0u);
  EXPECT_EQ(thresholds.TakeMeasured(0, 10), 2);
}

}  // namespace
}  // namespace scsa
