// SPDX-License-Identifier: Apache-2.0
//
// The measuring protocol of `scsa bench scaling`: one layer over a synthetic cache, for context lengths that no model
// needs to be run at.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "progress.h"
#include "scsa/config.h"
#include "scsa/types.h"
#include "stats.h"
#include "synthetic_cache.h"

namespace scsa::tool {

// A way to select clusters that is measured beside others.
struct ScalingMode {
  std::string name;
  Config config;
};
std::vector<ScalingMode> ScalingModes(Preset preset);

struct ScalingOptions {
  Shape shape{16, 8, 128};
  Preset preset = Preset::kSeed;
  std::optional<float> tau;        // of every head; otherwise calibrated
  std::optional<float> tolerance;  // of the calibration; the preset's own when not given
  int threads = 1;
  int repetitions = 15;
  std::uint64_t seed = 1;
};

struct ScalingResult {
  std::int64_t rows = 0;
  std::string mode;
  double build_ms = 0.0;
  std::uint64_t plan_bytes = 0;
  double tau_mean = 0.0;        // over the heads that have one
  Spread selection_ms;          // at tau = 1: the summaries are scored, nothing but the always exact rows is read
  double selection_rows = 0.0;  // share of the rows read then
  Spread attend_ms;             // at the heads' own tau
  double attend_rows = 0.0;     // share of the rows read then, each once per KV head
  double error_mean = 0.0;      // relative L2 error of a query head's output against exact attention
  Spread exact_ms;              // ExactAttention over all rows, in turns with the two above
};

// Memory that the cache of `rows` rows and its plan need, at most.
std::uint64_t ScalingCacheBytes(const Shape& shape, std::int64_t rows);
std::uint64_t ScalingPlanBytes(const Shape& shape, const Config& config, std::int64_t rows);

// Builds the plan over the first `rows` rows of the cache, calibrates where no tau is given, and times selection,
// attention and exact attention in turns on the same queries. Throws ToolError when the operator fails or does not
// answer sparsely.
ScalingResult MeasureScaling(const ScalingOptions& options, const ScalingMode& mode, const SyntheticCache& cache,
                             std::int64_t rows, Progress& progress);

}  // namespace scsa::tool
