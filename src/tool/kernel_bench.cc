// SPDX-License-Identifier: Apache-2.0
#include "kernel_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "scsa/target.h"
#include "timing.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr double kSampleSeconds = 4e-3;
constexpr std::int64_t kMaxRepeats = 1 << 20;

void UseTarget(const std::string& target) {
  if (const Status status = ForceTarget(target); !status.ok()) throw ToolError(status.message());
}

// Repeats that make a sample long enough for the clock. Warms caches, threads and memory up on the way.
std::int64_t Repeats(const KernelCase& kernel) {
  kernel.run(1);
  std::int64_t repeats = 1;
  for (;;) {
    const double seconds = SecondsOf([&] { kernel.run(repeats); });
    if (seconds >= 0.5 * kSampleSeconds || repeats >= kMaxRepeats) {
      const double needed = std::ceil(static_cast<double>(repeats) * kSampleSeconds / seconds);
      return std::clamp(static_cast<std::int64_t>(needed), std::int64_t{1}, kMaxRepeats);
    }
    repeats *= 4;
  }
}

}  // namespace

std::vector<KernelResult> MeasureCases(std::span<const KernelCase> cases, const std::vector<std::string>& targets,
                                       int repetitions, const std::function<void(int round)>& on_round) {
  const auto n_targets = static_cast<int>(targets.size());
  const int n_arms = n_targets * static_cast<int>(cases.size());
  std::vector<std::int64_t> repeats;
  for (const KernelCase& kernel : cases) {
    for (const std::string& target : targets) {
      UseTarget(target);
      repeats.push_back(Repeats(kernel));
    }
  }
  int begun = -1;
  const auto seconds = TimeInterleaved(n_arms, repetitions, [&](int arm, int round) {
    if (round > begun) on_round(begun = round);
    UseTarget(targets[arm % n_targets]);
    cases[arm / n_targets].run(repeats[arm]);
  });
  UseTarget("");

  std::vector<KernelResult> results;
  for (int arm = 0; arm < n_arms; ++arm) {
    const KernelCase& kernel = cases[arm / n_targets];
    std::vector<double> rates;
    for (const double s : seconds[arm]) rates.push_back(kernel.rows * static_cast<double>(repeats[arm]) / s);
    KernelResult& result = results.emplace_back();
    result.label = kernel.label;
    result.cache = kernel.cache;
    result.target = targets[arm % n_targets];
    result.rows_s = SpreadOf(rates);
    result.bytes_s = result.rows_s.median * kernel.bytes / kernel.rows;
    if (kernel.multiply_adds) result.multiply_adds_s = result.rows_s.median * *kernel.multiply_adds / kernel.rows;
  }
  return results;
}

}  // namespace scsa::tool
