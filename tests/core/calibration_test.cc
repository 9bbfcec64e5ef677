// SPDX-License-Identifier: Apache-2.0
#include "core/calibration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::Vector;

constexpr float kNone = -std::numeric_limits<float>::infinity();

// One head with random states, as a step would hand them over.
struct Step {
  static constexpr int kHeadDim = 24;
  static constexpr int kClusters = 9;
  static constexpr int kStride = 2;  // the states of another head lie between

  explicit Step(float gauge) {
    std::mt19937 random(17);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>* v, std::size_t n, float offset, float size) {
      v->resize(n);
      for (float& x : *v) x = offset + size * normal(random);
    };
    fill(&max, kClusters * kStride, gauge, 2);
    fill(&sum, kClusters * kStride, 3, 0.5f);
    fill(&num, kClusters * kStride * kHeadDim, 0, 2);
    fill(&log_tail, kClusters, gauge + 3, 2);
    fill(&means, kClusters * kHeadDim, 0, 1);
    fill(&exact_num, kHeadDim, 0, 1);
    fill(&output, kHeadDim, 0, 1);
    exact_max = gauge;
    order.resize(kClusters);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    for (int g = 0; g < kTauGridSize; ++g) counts[g] = std::min(kClusters, g);
    for (int c = 0; c < kClusters; ++c) mean_of.push_back(means.data() + c * kHeadDim);
  }

  ReplayInputs Inputs() {
    ReplayInputs in;
    in.head_dim = kHeadDim;
    in.n_clusters = kClusters;
    in.order = order.data();
    in.counts = counts;
    in.exact_rows = {&exact_max, &exact_sum, exact_num.data()};
    in.sink = sink;
    in.opened = {max.data(), sum.data(), num.data()};
    in.opened_stride = kStride;
    in.log_tail = log_tail.data();
    in.value_means = mean_of.data();
    in.exact_output = output.data();
    return in;
  }

  // The output of stopping after `count` clusters, from scratch, in a gauge of 0 (the test's logits allow it).
  Vector Stopped(int count, double gauge) const {
    double mass = std::exp(sink - gauge) + std::exp(exact_max - gauge) * exact_sum;
    Vector out(kHeadDim);
    for (int d = 0; d < kHeadDim; ++d) out[d] = std::exp(exact_max - gauge) * exact_num[d];
    for (int i = 0; i < kClusters; ++i) {
      const int c = order[i];
      if (i < count) {
        const double weight = std::exp(max[c * kStride] - gauge);
        mass += weight * sum[c * kStride];
        for (int d = 0; d < kHeadDim; ++d) out[d] += weight * num[c * kStride * kHeadDim + d];
      } else {
        const double weight = std::exp(static_cast<double>(log_tail[c]) - gauge);
        mass += weight;
        for (int d = 0; d < kHeadDim; ++d) out[d] += weight * means[c * kHeadDim + d];
      }
    }
    for (double& x : out) x /= mass;
    return out;
  }

  std::vector<float> max, sum, num, log_tail, means, exact_num, output;
  std::vector<const float*> mean_of;
  float exact_max = 0;
  float exact_sum = 5;
  float sink = kNone;
  std::vector<std::int32_t> order;
  std::int32_t counts[kTauGridSize];
};

TEST(ReplayStops, EqualsStoppingAtEachThreshold) {
  for (const float gauge : {0.0f, 400.0f, -400.0f}) {
    for (const bool with_sink : {false, true}) {
      Step step(gauge);
      if (with_sink) step.sink = gauge + 2;
      float errors[kTauGridSize];
      ReplayStops(step.Inputs(), errors);
      const Vector exact = test::ToDouble(step.output.data(), Step::kHeadDim);
      for (int g = 0; g < kTauGridSize; ++g) {
        const double expected = test::RelativeL2(step.Stopped(step.counts[g], gauge), exact);
        EXPECT_NEAR(errors[g], expected, 1e-5 * expected) << g;
      }
    }
  }
}

TEST(ReplayStops, EdgeOutputs) {
  Step step(0.0f);
  // Everything is zero, the exact output too: no error, not 0 / 0.
  std::ranges::fill(step.exact_num, 0.0f);
  std::ranges::fill(step.num, 0.0f);
  std::ranges::fill(step.means, 0.0f);
  std::ranges::fill(step.output, 0.0f);
  float errors[kTauGridSize];
  ReplayStops(step.Inputs(), errors);
  for (const float error : errors) EXPECT_EQ(error, 0.0f);
  // A wrong output where the exact one is zero, or one that is no number, is never within a tolerance.
  step.exact_num[3] = 1.0f;
  ReplayStops(step.Inputs(), errors);
  for (const float error : errors) EXPECT_TRUE(std::isinf(error));
  step.output[0] = std::nanf("");
  ReplayStops(step.Inputs(), errors);
  for (const float error : errors) EXPECT_TRUE(std::isinf(error));
}

TEST(Median, OfOddAndEvenNumbers) {
  EXPECT_EQ(Median(std::vector<float>{3}), 3);
  EXPECT_EQ(Median(std::vector<float>{3, 1, 2}), 2);
  EXPECT_EQ(Median(std::vector<float>{4, 1, 2, 8}), 3);
  EXPECT_TRUE(std::isinf(Median(std::vector<float>{1, INFINITY, INFINITY})));
}

void RecordAll(CalibrationWindow* window, const std::vector<float>& per_grid, int head) {
  window->Record(head, per_grid.data());
}

TEST(CalibrationWindow, FreezesTheLargestThresholdWithinTheTolerance) {
  CalibrationWindow window(3, kTauGrid);
  window.Start(0.025f);
  EXPECT_TRUE(window.open());
  // Errors need not fall with tau: head 0 meets the tolerance at grid 3 and, again, from grid 6 on; head 1 never; head
  // 2 exactly at the tolerance from the first.
  for (int step = 0; step < 3; ++step) {
    window.BeginStep();
    std::vector<float> errors(kTauGridSize, 1.0f);
    errors[3] = step == 0 ? 9.0f : 0.01f;  // the median forgives one step
    for (int g = 6; g < kTauGridSize; ++g) errors[g] = 0.0f;
    RecordAll(&window, errors, 0);
    RecordAll(&window, std::vector<float>(kTauGridSize, 0.026f), 1);
    RecordAll(&window, std::vector<float>(kTauGridSize, 0.025f), 2);
  }
  EXPECT_EQ(window.steps(), 3);
  ASSERT_EQ(window.Errors(0, 3).size(), 3u);
  EXPECT_EQ(window.Errors(0, 3)[0], 9.0f);
  EXPECT_EQ(window.Errors(0, 3)[2], 0.01f);
  std::vector<float> taus(3, -1.0f);
  window.Finish(CalibrationStatistic::kMedian, 0.07f, taus);
  EXPECT_FALSE(window.open());
  EXPECT_EQ(taus, (std::vector<float>{kTauGrid[3], kTauGrid[kTauGridSize - 1], kTauGrid[0]}));

  // A new window forgets the old one; one that recorded nothing gives the default.
  window.Start(0.025f);
  EXPECT_EQ(window.steps(), 0);
  EXPECT_TRUE(window.Errors(0, 3).empty());
  window.Finish(CalibrationStatistic::kMedian, 0.07f, taus);
  EXPECT_EQ(taus, (std::vector<float>{0.07f, 0.07f, 0.07f}));
}

TEST(CalibrationWindow, ThresholdsThatWillNotBeChosenGoOutOfPlay) {
  // Errors of two heads, tolerance 0.1: pooled means 0.2, 0.2, 0.06, 0.05, 0.04 ..., so from the fifth step on the
  // fourth threshold is the last one in play, until a bad step takes its mean to (8 * 0.05 + 2 * 0.3) / 10 = 0.1 and
  // that of the fifth to 0.04 still. Head 0 alone has a mean of 0.04 at the second one.
  CalibrationWindow window(2, kTauGrid);
  window.Start(0.1f);
  const auto record = [&](const std::vector<float>& first, const std::vector<float>& second) {
    std::vector<float> errors0 = first;
    std::vector<float> errors1 = second;
    errors0.resize(kTauGridSize, 0.04f);
    errors1.resize(kTauGridSize, 0.04f);
    window.BeginStep();
    RecordAll(&window, errors0, 0);
    RecordAll(&window, errors1, 1);
  };
  for (int step = 0; step < 4; ++step) {
    EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMean, 0, 2), kTauGridSize) << step;
    EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMedian, 0, 1), kTauGridSize) << step;
    record({0.2f, 0.04f, 0.02f, 0.05f}, {0.2f, 0.36f, 0.1f, 0.05f});
  }
  EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMean, 0, 2), 4);
  EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMean, 0, 1), 2);
  EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMedian, 1, 1), 4);
  record({0.2f, 0.3f, 0.3f, 0.3f}, {0.2f, 0.3f, 0.3f, 0.3f});
  EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMean, 0, 2), 5);
  // The median forgives it.
  EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMedian, 1, 1), 4);
  // Half of the errors are not more than half of them.
  for (int step = 0; step < 3; ++step) record({0.2f, 0.3f, 0.3f, 0.3f}, {0.2f, 0.3f, 0.3f, 0.3f});
  EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMedian, 1, 1), 5);
  // Where every error is too large, all stay.
  window.Start(0.01f);
  for (int step = 0; step < 5; ++step) record({}, {});
  EXPECT_EQ(window.ThresholdsInPlay(CalibrationStatistic::kMean, 0, 2), kTauGridSize);
}

}  // namespace
}  // namespace scsa
