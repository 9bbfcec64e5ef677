// SPDX-License-Identifier: Apache-2.0
//
// The measuring protocol of `scsa bench kernels`, and its results.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernel_cases.h"
#include "stats.h"

namespace scsa::tool {

struct KernelResult {
  CaseLabel label;
  CacheState cache = CacheState::kAny;
  std::string target;
  Spread rows_s;         // rows (estimates: clusters) per second
  double bytes_s = 0.0;  // at the median, as multiply_adds_s
  std::optional<double> multiply_adds_s;
};

// Measures the cases on each target (names of AvailableTargets): a sample of every case on every target in turn, then
// the next round, so that a disturbance of the machine costs each of them a sample or two. A sample lasts a few
// milliseconds. Results: those of the first case, one per target, then those of the next. Leaves the best target in
// force. on_round is told the number of each round, from 0, before it begins.
std::vector<KernelResult> MeasureCases(std::span<const KernelCase> cases, const std::vector<std::string>& targets,
                                       int repetitions, const std::function<void(int round)>& on_round);

}  // namespace scsa::tool
