// SPDX-License-Identifier: Apache-2.0
#include "core/prompt_thresholds.h"

#include <algorithm>
#include <cmath>

#include "core/calibration.h"

namespace scsa {
namespace {

// Tiles that the first thresholds are chosen from.
constexpr int kFirstMeasured = 2;
// A running mean is one over about so many tiles: a text changes, and so does the number of visible rows.
constexpr std::uint64_t kMemory = 8;
// Larger errors count as this one. An output that is no number must not stay in the mean for ever.
constexpr float kLargestError = 4.0f;

// Error at `tau`, linear in log tau between the grid values.
float ErrorAt(std::span<const float, kTauGridSize> grid, std::span<const float, kTauGridSize> errors, float tau) {
  for (int g = 0; g < kTauGridSize; ++g) {
    if (grid[g] > tau) continue;
    if (g == 0) return errors[0];
    const float part = std::log(tau / grid[g]) / std::log(grid[g - 1] / grid[g]);
    return errors[g] + part * (errors[g - 1] - errors[g]);
  }
  return errors.back();
}

}  // namespace

void PromptThresholds::Set(const PromptConfig& config) {
  config_ = config;
  std::ranges::fill(heads_, PromptHead{});
  std::ranges::fill(unmeasured_, 0.0);
}

int PromptThresholds::TakeMeasured(int kv_head, int n_tiles) {
  if (heads_[kv_head].measured == 0) return std::min(n_tiles, kFirstMeasured);
  unmeasured_[kv_head] += n_tiles * config_.share;
  const int due = static_cast<int>(unmeasured_[kv_head]);
  unmeasured_[kv_head] -= due;
  return due;
}

void PromptThresholds::Add(int kv_head, std::span<const float, kTauGridSize> errors) {
  PromptHead& head = heads_[kv_head];
  std::array<float, kTauGridSize>& mean = errors_[kv_head];
  // The threshold in force was chosen without this tile.
  if (head.tau > 0.0f) {
    ++head.audited;
    head.error_sum += static_cast<double>(std::min(ErrorAt(grid_, errors, head.tau), kLargestError));
  }
  const float weight = 1.0f / static_cast<float>(std::min(++head.measured, kMemory));
  for (int g = 0; g < kTauGridSize; ++g) {
    const float before = head.measured == 1 ? 0.0f : mean[g];
    mean[g] = before + weight * (std::min(errors[g], kLargestError) - before);
  }
  head.tau = mean.back() <= config_.tolerance ? ThresholdWithin(grid_, mean, config_.tolerance, true) : 0.0f;
}

}  // namespace scsa
