// SPDX-License-Identifier: Apache-2.0
#include "stats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace scsa::tool {

double Mean(std::span<const double> values) {
  if (values.empty()) return 0.0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double Quantile(std::span<const double> values, double p) {
  if (values.empty()) return 0.0;
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const double position = p * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  const double fraction = position - static_cast<double>(below);
  return sorted[below] + fraction * (sorted[above] - sorted[below]);
}

Spread SpreadOf(std::span<const double> values) {
  return {.median = Quantile(values, 0.5), .p10 = Quantile(values, 0.1), .p90 = Quantile(values, 0.9)};
}

Interval WilsonInterval(int successes, int trials) {
  if (trials == 0) return {};
  constexpr double kZ = 1.959963984540054;  // 97.5 % quantile of the normal distribution
  const double n = trials;
  const double p = successes / n;
  const double centre = (p + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half = kZ / (1 + kZ * kZ / n) * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  return {.low = std::max(centre - half, 0.0), .high = std::min(centre + half, 1.0)};
}

std::vector<double> LogSoftmax(std::span<const float> logits) {
  std::vector<double> log_p(logits.begin(), logits.end());
  if (log_p.empty()) return log_p;
  const double max = *std::max_element(log_p.begin(), log_p.end());
  double sum = 0.0;
  for (const double x : log_p) sum += std::exp(x - max);
  const double log_sum = max + std::log(sum);
  for (double& x : log_p) x -= log_sum;
  return log_p;
}

double KlDivergence(std::span<const double> log_p, std::span<const double> log_q) {
  double kl = 0.0;
  for (std::size_t i = 0; i < log_p.size(); ++i) {
    const double p = std::exp(log_p[i]);
    if (p > 0.0) kl += p * (log_p[i] - log_q[i]);
  }
  return std::max(kl, 0.0);  // rounding can leave a value just below zero for equal distributions
}

int Argmax(std::span<const float> values) {
  return static_cast<int>(std::max_element(values.begin(), values.end()) - values.begin());
}

double RelativeError(std::span<const float> a, std::span<const double> b) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    difference += d * d;
    norm += b[i] * b[i];
  }
  if (difference == 0.0) return 0.0;
  return norm > 0.0 ? std::sqrt(difference / norm) : std::numeric_limits<double>::infinity();
}

}  // namespace scsa::tool
