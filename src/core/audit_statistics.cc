// SPDX-License-Identifier: Apache-2.0
#include "core/audit_statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <new>
#include <vector>

#include "scsa/audit.h"

namespace scsa {
namespace {

constexpr double kIntervalAlpha = 0.025;  // at either end
constexpr double kDriftAlpha = 0.001;
// Quantiles of Student's t at 1 - kDriftAlpha, for kDriftSpans[i] - 1 degrees of freedom.
constexpr double kDriftT[] = {4.7853, 3.7328, 3.3749};
static_assert(std::size(kDriftT) == std::size(kDriftSpans));

// Quantile p with linear interpolation between order statistics (R's type 7). sorted is not empty.
double Quantile(std::span<const float> sorted, double p) {
  const double at = p * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const double part = at - static_cast<double>(below);
  // Infinite values must not meet a factor of 0.
  if (part == 0 || sorted[below] == sorted[below + 1]) return sorted[below];
  return (1 - part) * sorted[below] + part * sorted[below + 1];
}

double LowerBoundOfMean(std::span<const float> errors, double t) {
  const auto n = static_cast<double>(errors.size());
  double mean = 0;
  for (const float error : errors) mean += std::min(error, kLargestDriftError) / n;
  double squares = 0;
  for (const float error : errors) {
    const double delta = std::min(error, kLargestDriftError) - mean;
    squares += delta * delta;
  }
  return mean - t * std::sqrt(squares / (n - 1) / n);
}

double LowerBoundOfMedian(std::span<const float> errors) {
  const int rank = MedianLowerRank(static_cast<int>(errors.size()), kDriftAlpha);
  if (rank == 0) return 0;
  std::array<float, kMaxDriftSpan> sorted{};
  const auto end = std::ranges::copy(errors, sorted.begin()).out;
  std::sort(sorted.begin(), end);
  return sorted[rank - 1];
}

}  // namespace

int MedianLowerRank(int n, double alpha) {
  double log = -n * std::log(2.0);  // of P(Binomial(n, 1/2) = rank); the probability itself may underflow
  double below = 0;                 // P(Binomial(n, 1/2) <= rank)
  int rank = 0;
  for (; rank < n; ++rank) {
    below += std::exp(log);
    if (below > alpha) break;
    log += std::log((n - rank) / (rank + 1.0));
  }
  return rank;
}

bool HasDrifted(std::span<const float> errors, CalibrationStatistic statistic, double limit) {
  for (std::size_t i = 0; i < std::size(kDriftSpans); ++i) {
    const auto span = static_cast<std::size_t>(kDriftSpans[i]);
    if (errors.size() < span) break;
    const std::span<const float> last = errors.last(span);
    const double bound =
        statistic == CalibrationStatistic::kMean ? LowerBoundOfMean(last, kDriftT[i]) : LowerBoundOfMedian(last);
    if (bound > limit) return true;
  }
  return false;
}

Status SummarizeAudit(std::span<const AuditSample> samples, AuditSummary* summary) {
  AuditSummary result;
  if (samples.empty()) {
    *summary = result;
    return Status::Ok();
  }
  std::vector<float> errors;
  try {
    errors.reserve(samples.size());
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory for the figures of the audit");
  }
  double observations = 0;
  for (const AuditSample& sample : samples) {
    errors.push_back(sample.error);
    result.mean += sample.error / static_cast<double>(samples.size());
    observations += 1.0 / sample.together;
  }
  std::ranges::sort(errors);
  result.outputs = errors.size();
  // The sum of n times 1/n may fall short of 1.
  result.observations = static_cast<std::uint64_t>(observations + 1e-6);
  result.median = Quantile(errors, 0.5);
  result.p90 = Quantile(errors, 0.9);
  result.p99 = Quantile(errors, 0.99);
  const int rank = MedianLowerRank(static_cast<int>(result.observations), kIntervalAlpha);
  if (rank > 0) {
    // As if the outputs of an observation were equal, the widest case: each is `together` neighbours in the order.
    const double width = static_cast<double>(errors.size()) / static_cast<double>(result.observations);
    const auto outside = static_cast<std::size_t>((rank - 1) * width);
    result.median_low = errors[outside];
    result.median_high = errors[errors.size() - 1 - outside];
  }
  *summary = result;
  return Status::Ok();
}

}  // namespace scsa
