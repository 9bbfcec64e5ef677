// SPDX-License-Identifier: Apache-2.0
#include "stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace scsa::tool {
namespace {

TEST(Mean, OfNothingIsZero) { EXPECT_EQ(Mean({}), 0.0); }

TEST(Mean, Averages) { EXPECT_DOUBLE_EQ(Mean(std::vector<double>{1.0, 2.0, 6.0}), 3.0); }

TEST(Quantile, MedianOfOddAndEvenCounts) {
  EXPECT_DOUBLE_EQ(Quantile(std::vector<double>{9.0, 1.0, 5.0}, 0.5), 5.0);
  EXPECT_DOUBLE_EQ(Quantile(std::vector<double>{4.0, 1.0, 3.0, 2.0}, 0.5), 2.5);
}

TEST(Quantile, InterpolatesBetweenOrderStatistics) {
  std::vector<double> values(101);
  for (int i = 0; i <= 100; ++i) values[i] = 100.0 - i;  // order must not matter
  EXPECT_DOUBLE_EQ(Quantile(values, 0.99), 99.0);
  // Eleven values: p99 lies 0.9 of the way from the tenth to the eleventh.
  const std::vector<double> eleven = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 19};
  EXPECT_NEAR(Quantile(eleven, 0.99), 9.0 + 0.9 * 10.0, 1e-12);
}

TEST(Quantile, EndsAreMinimumAndMaximum) {
  const std::vector<double> values = {3.0, -1.0, 8.0};
  EXPECT_DOUBLE_EQ(Quantile(values, 0.0), -1.0);
  EXPECT_DOUBLE_EQ(Quantile(values, 1.0), 8.0);
  EXPECT_DOUBLE_EQ(Quantile(std::vector<double>{7.0}, 0.99), 7.0);
}

TEST(WilsonInterval, IsThatOfTheTextbook) {
  // Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
  const auto expect = [](int successes, int trials, double low, double high) {
    const Interval interval = WilsonInterval(successes, trials);
    EXPECT_NEAR(interval.low, low, 5e-5) << successes << " of " << trials;
    EXPECT_NEAR(interval.high, high, 5e-5) << successes << " of " << trials;
  };
  expect(81, 263, 0.2553, 0.3662);
  expect(15, 148, 0.0624, 0.1605);
  expect(0, 20, 0.0, 0.1611);
  expect(1, 29, 0.0061, 0.1718);
  expect(20, 20, 1.0 - 0.1611, 1.0);
}

TEST(WilsonInterval, SaysNothingWithoutTrials) {
  EXPECT_EQ(WilsonInterval(0, 0).low, 0.0);
  EXPECT_EQ(WilsonInterval(0, 0).high, 1.0);
}

TEST(SpreadOf, MedianAndDeciles) {
  std::vector<double> values(11);
  for (int i = 0; i <= 10; ++i) values[i] = 30.0 - i;
  const Spread spread = SpreadOf(values);
  EXPECT_DOUBLE_EQ(spread.median, 25.0);
  EXPECT_DOUBLE_EQ(spread.p10, 21.0);
  EXPECT_DOUBLE_EQ(spread.p90, 29.0);
  EXPECT_EQ(SpreadOf({}).median, 0.0);
}

TEST(LogSoftmax, MatchesTheDefinition) {
  const std::vector<float> logits = {1.0f, 2.0f, 4.0f};
  const double sum = std::exp(1.0) + std::exp(2.0) + std::exp(4.0);
  const std::vector<double> log_p = LogSoftmax(logits);
  EXPECT_NEAR(log_p[0], std::log(std::exp(1.0) / sum), 1e-12);
  EXPECT_NEAR(log_p[1], std::log(std::exp(2.0) / sum), 1e-12);
  EXPECT_NEAR(log_p[2], std::log(std::exp(4.0) / sum), 1e-12);
}

TEST(LogSoftmax, SurvivesLogitsBeyondTheRangeOfExp) {
  const std::vector<double> log_p = LogSoftmax(std::vector<float>{10000.0f, 10000.0f, -10000.0f});
  EXPECT_NEAR(log_p[0], std::log(0.5), 1e-12);
  EXPECT_NEAR(log_p[2], std::log(0.5) - 20000.0, 1e-9);
}

TEST(KlDivergence, MatchesTheDefinition) {
  const std::vector<double> p = {std::log(0.5), std::log(0.25), std::log(0.25)};
  const std::vector<double> q = {std::log(0.25), std::log(0.25), std::log(0.5)};
  EXPECT_NEAR(KlDivergence(p, q), 0.5 * std::log(2.0) - 0.25 * std::log(2.0), 1e-12);
  EXPECT_EQ(KlDivergence(p, p), 0.0);
}

TEST(KlDivergence, IgnoresImpossibleEntries) {
  const std::vector<double> p = {0.0, -INFINITY};
  const std::vector<double> q = {std::log(0.5), std::log(0.5)};
  EXPECT_NEAR(KlDivergence(p, q), std::log(2.0), 1e-12);
}

TEST(Argmax, TakesTheFirstOfEquals) { EXPECT_EQ(Argmax(std::vector<float>{1.0f, 3.0f, 3.0f, 2.0f}), 1); }

TEST(RelativeError, MatchesTheDefinition) {
  const std::vector<float> a = {3.0f, 4.5f};
  const std::vector<double> b = {3.0, 4.0};
  EXPECT_NEAR(RelativeError(a, b), 0.1, 1e-12);
}

TEST(RelativeError, OfZeroVectors) {
  EXPECT_EQ(RelativeError(std::vector<float>{0.0f}, std::vector<double>{0.0}), 0.0);
  EXPECT_TRUE(std::isinf(RelativeError(std::vector<float>{1.0f}, std::vector<double>{0.0})));
}

}  // namespace
}  // namespace scsa::tool
