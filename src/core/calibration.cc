// SPDX-License-Identifier: Apache-2.0
#include "core/calibration.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/relative_error.h"

namespace scsa {
namespace {

// Steps of a window that look at every threshold.
constexpr int kProbeSteps = 4;
constexpr double kNone = -std::numeric_limits<double>::infinity();

// A mass and a numerator under a common gauge.
struct Accumulator {
  double mass = 0;
  std::array<double, kMaxHeadDim> num{};

  // Adds `weight` times (sum, num).
  void Add(double weight, double sum, const float* vector, int head_dim) {
    mass += weight * sum;
    for (int d = 0; d < head_dim; ++d) num[d] += weight * vector[d];
  }
};

float RelativeError(const Accumulator& opened, const Accumulator& tail, const float* exact, int head_dim) {
  const double mass = opened.mass + tail.mass;
  return RelativeErrorOf([&](int d) { return (opened.num[d] + tail.num[d]) / mass; }, exact, head_dim);
}

}  // namespace

void ReplayStops(const ReplayInputs& in, float errors[kTauGridSize]) {
  double gauge = std::max<double>(in.exact_rows.max[0], in.sink);
  for (int c = 0; c < in.n_clusters; ++c) gauge = std::max<double>(gauge, in.log_tail[c]);
  for (int i = 0; i < in.counts[kTauGridSize - 1]; ++i) {
    gauge = std::max<double>(gauge, in.opened.max[in.order[i] * in.opened_stride]);
  }
  const auto weight = [gauge](double log) { return log == kNone ? 0.0 : std::exp(log - gauge); };

  Accumulator opened;
  Accumulator tail;
  opened.Add(weight(in.exact_rows.max[0]), in.exact_rows.sum[0], in.exact_rows.num, in.head_dim);
  opened.mass += weight(in.sink);
  for (int c = 0; c < in.n_clusters; ++c) tail.Add(weight(in.log_tail[c]), 1, in.value_means[c], in.head_dim);

  int done = 0;
  for (int g = 0; g < kTauGridSize; ++g) {
    for (; done < in.counts[g]; ++done) {
      const int c = in.order[done];
      const std::int64_t at = c * in.opened_stride;
      tail.Add(-weight(in.log_tail[c]), 1, in.value_means[c], in.head_dim);
      opened.Add(weight(in.opened.max[at]), in.opened.sum[at], in.opened.num + at * in.head_dim, in.head_dim);
    }
    // What the subtractions leave of an empty tail is rounding.
    if (done == in.n_clusters) tail = Accumulator{};
    errors[g] = RelativeError(opened, tail, in.exact_output, in.head_dim);
  }
}

void CalibrationWindow::Start(float tolerance) {
  for (auto& head : errors_) {
    for (auto& values : head) values.clear();
  }
  tolerance_ = tolerance;
  steps_ = 0;
  open_ = true;
}

void CalibrationWindow::BeginStep() {
  const std::size_t needed = static_cast<std::size_t>(steps_) + 1;
  for (auto& head : errors_) {
    for (auto& values : head) {
      if (values.capacity() < needed) values.reserve(std::max<std::size_t>(32, 2 * needed));
    }
  }
  for (auto& head : errors_) {
    for (auto& values : head) values.resize(needed);
  }
  ++steps_;
}

void CalibrationWindow::Record(int q_head, const float errors[kTauGridSize]) {
  for (int g = 0; g < kTauGridSize; ++g) errors_[q_head][g].back() = errors[g];
}

float CalibrationWindow::Statistic(CalibrationStatistic statistic, std::size_t first_head, std::size_t n_heads,
                                   int grid_index) const {
  std::vector<float> values;
  for (std::size_t h = first_head; h < first_head + n_heads; ++h) {
    values.insert(values.end(), errors_[h][grid_index].begin(), errors_[h][grid_index].end());
  }
  if (statistic == CalibrationStatistic::kMedian) return Median(values);
  double sum = 0;
  for (const float value : values) sum += value;
  return static_cast<float>(sum / static_cast<double>(values.size()));
}

int CalibrationWindow::ThresholdsInPlay(CalibrationStatistic statistic, std::size_t first_head,
                                        std::size_t n_heads) const {
  if (steps_ < kProbeSteps) return kTauGridSize;
  const float limit = 0.5f * tolerance_;
  const std::size_t n = n_heads * static_cast<std::size_t>(steps_);
  for (int g = 0; g < kTauGridSize; ++g) {
    double sum = 0;
    std::size_t within = 0;
    for (std::size_t h = first_head; h < first_head + n_heads; ++h) {
      for (const float error : errors_[h][g]) {
        sum += error;
        within += error <= limit;
      }
    }
    const bool enough = statistic == CalibrationStatistic::kMean
                            ? sum <= static_cast<double>(limit) * static_cast<double>(n)
                            : 2 * within > n;
    if (enough) return g + 1;
  }
  return kTauGridSize;
}

void CalibrationWindow::Finish(CalibrationStatistic statistic, float tau_default, std::span<float> taus) {
  std::vector<float> chosen(taus.size(), tau_default);
  const std::size_t group = errors_.size() / taus.size();
  for (std::size_t h = 0; steps_ > 0 && h < taus.size(); ++h) {
    std::array<float, kTauGridSize> errors;
    for (int g = 0; g < kTauGridSize; ++g) errors[g] = Statistic(statistic, h * group, group, g);
    chosen[h] = ThresholdWithin(grid_, errors, tolerance_, statistic == CalibrationStatistic::kMean);
  }
  std::ranges::copy(chosen, taus.begin());
  open_ = false;
}

float ThresholdWithin(std::span<const float, kTauGridSize> grid, std::span<const float, kTauGridSize> errors,
                      float tolerance, bool interpolate) {
  for (int g = 0; g < kTauGridSize; ++g) {
    if (!(errors[g] <= tolerance)) continue;
    if (!interpolate || g == 0 || !std::isfinite(errors[g - 1])) return grid[g];
    const float part = (tolerance - errors[g]) / (errors[g - 1] - errors[g]);
    return grid[g] * std::pow(grid[g - 1] / grid[g], part);
  }
  return grid.back();
}

float Median(std::span<const float> values) {
  std::vector<float> sorted(values.begin(), values.end());
  std::ranges::sort(sorted);
  const std::size_t middle = sorted.size() / 2;
  if (sorted.size() % 2 == 1) return sorted[middle];
  return 0.5f * sorted[middle - 1] + 0.5f * sorted[middle];
}

}  // namespace scsa
