// SPDX-License-Identifier: Apache-2.0
//
// The measuring protocol of `scsa bench quality`: rows, bytes and error of the presets and of other methods' selection
// rules on captured queries and rows.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "capture_file.h"
#include "progress.h"

namespace scsa::tool {

inline constexpr int kQualityCalibrationSteps = 32;  // the first steps of a capture; the others are measured

// How often the audit's 95 % interval of the median error held the true one, which every output was computed for.
struct AuditCoverage {
  int windows = 0;
  int held = 0;
};

struct QualityOptions {
  std::optional<double> tolerance;  // of calibration; otherwise each preset's own
  int threads = 1;
  // Share of the outputs that the audit of the presets takes; 0: its interval is not checked.
  double audit = 0.0;
};

// One method at one budget, over all layers, measured steps and query heads of a capture.
struct QualityResult {
  std::string method;               // "fast", "seed", "streaming", "quest", "top-k"
  std::string budget;               // "tolerance 0.015", "as fast", "10 %", "20 %"
  std::optional<double> tolerance;  // of a preset
  double rows_read = 0.0;           // share of the visible rows, each once per KV head
  double bytes_read = 0.0;          // per step, of all captured layers together; summaries included
  double bytes_share = 0.0;         // of what exact attention reads
  double err_mean = 0.0;            // relative L2 error of a query head's output
  double err_median = 0.0;
  double err_p90 = 0.0;
  double err_p99 = 0.0;
  std::optional<AuditCoverage> audit = std::nullopt;  // of a preset, when it was asked for
};

// ToolError when the capture has too few steps, or when an operator fails. In the order of the report: presets, then
// the other methods with the budget of preset `fast`, with 10 % and with 20 % of the bytes that exact attention reads.
std::vector<QualityResult> MeasureQuality(const Capture& capture, const QualityOptions& options, Progress& progress);

}  // namespace scsa::tool
