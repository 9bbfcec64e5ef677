// SPDX-License-Identifier: Apache-2.0
//
// What `scsa bench scaling` counts, on a small layer. No time is asserted.
#include "scaling_bench.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "scsa/layer.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

ScalingOptions SmallOptions(Preset preset) {
  ScalingOptions options;
  options.shape = {4, 2, 32};
  options.preset = preset;
  options.threads = 2;
  options.repetitions = 3;
  return options;
}

TEST(MeasureScaling, TauZeroReadsEverything) {
  for (const Preset preset : {Preset::kSeed, Preset::kFast}) {
    ScalingOptions options = SmallOptions(preset);
    options.tau = 0.0f;
    const SyntheticCache cache(options.shape, 4096, 1, 2);
    Progress progress;
    std::vector<std::string> names;
    for (const ScalingMode& mode : ScalingModes(preset)) {
      names.push_back(mode.name);
      EXPECT_EQ(mode.config.selection, names.size() == 1 ? Selection::kFlat : Selection::kHierarchical);
      const ScalingResult result = MeasureScaling(options, mode, cache, 4096, progress);
      EXPECT_EQ(result.rows, 4096);
      EXPECT_EQ(result.mode, mode.name);
      EXPECT_EQ(result.tau_mean, 0.0);
      EXPECT_DOUBLE_EQ(result.attend_rows, 1.0);
      // Exact up to rounding: f32, and the 8-bit copies that seed reads.
      EXPECT_LT(result.error_mean, preset == Preset::kSeed ? 0.02 : 1e-5);
      EXPECT_GT(result.plan_bytes, 0u);
      EXPECT_LE(result.plan_bytes, ScalingPlanBytes(options.shape, mode.config, 4096) * 3 / 2);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"flat", "hierarchical"}));
  }
}

TEST(MeasureScaling, SelectionReadsOnlyTheRowsThatAreAlwaysExact) {
  // seed: 4 first and 32 recent rows. fast: 4 first rows and those behind the last block that lies 32 rows back.
  const std::pair<Preset, double> expected[] = {{Preset::kSeed, 36.0}, {Preset::kFast, 4.0 + 256.0}};
  for (const auto& [preset, rows] : expected) {
    ScalingOptions options = SmallOptions(preset);
    options.tau = 0.05f;
    const SyntheticCache cache(options.shape, 4096, 1, 2);
    Progress progress;
    for (const ScalingMode& mode : ScalingModes(preset)) {
      const ScalingResult result = MeasureScaling(options, mode, cache, 4096, progress);
      EXPECT_DOUBLE_EQ(result.selection_rows, rows / 4096.0);
      EXPECT_GT(result.attend_rows, result.selection_rows);
      EXPECT_LT(result.attend_rows, 1.0);
      EXPECT_GT(result.error_mean, 0.0);
    }
  }
}

TEST(MeasureScaling, CalibratesWhereNoTauIsGiven) {
  ScalingOptions options = SmallOptions(Preset::kFast);
  options.tolerance = 0.01f;
  const SyntheticCache cache(options.shape, 2048, 1, 2);
  Progress progress;
  const ScalingResult result = MeasureScaling(options, ScalingModes(options.preset).front(), cache, 2048, progress);
  EXPECT_GE(result.tau_mean, kFastTauGrid[kTauGridSize - 1]);
  EXPECT_LE(result.tau_mean, kFastTauGrid[0]);
  EXPECT_LT(result.error_mean, 0.03);
}

TEST(MeasureScaling, RefusesRowsThatLeaveNothingToSeal) {
  ScalingOptions options = SmallOptions(Preset::kSeed);
  options.tau = 0.05f;
  const SyntheticCache cache(options.shape, 256, 1, 1);
  Progress progress;
  EXPECT_THROW(MeasureScaling(options, ScalingModes(options.preset).front(), cache, 256, progress), ToolError);
}

TEST(ScalingPlanBytes, FollowTheDocumentedLayout) {
  // fast, head size 128: 6 bytes per row; two rows of 128 bytes and three f32 numbers for 8 rows; five f32 vectors,
  // eight more numbers and 33 offsets of 2 bytes for 256 rows.
  EXPECT_EQ(ScalingPlanBytes({16, 8, 128}, ConfigFor(Preset::kFast), 1024),
            8192u * 6 + 1024u * (256 + 12) + 32u * (5 * 512 + 32 + 66));
  // seed: two q8_0 rows and 8 bytes per row; clusters of at least 64 rows with five vectors of 512 bytes.
  EXPECT_EQ(ScalingPlanBytes({16, 8, 128}, ConfigFor(Preset::kSeed), 1024), 8192u * 280 + 128u * 2560);
}

}  // namespace
}  // namespace scsa::tool
