// SPDX-License-Identifier: Apache-2.0
#include "core/audit_statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/audit.h"
#include "scsa/audit.h"

namespace scsa {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<AuditSample> Samples(const std::vector<float>& errors, int together = 1) {
  std::vector<AuditSample> samples;
  for (const float error : errors) samples.push_back({0, error, 0, static_cast<std::int16_t>(together)});
  return samples;
}

AuditSummary Summarize(const std::vector<AuditSample>& samples) {
  AuditSummary summary;
  EXPECT_TRUE(SummarizeAudit(samples, &summary).ok());
  return summary;
}

TEST(MedianLowerRank, IsThatOfTheTablesOfTheSignTest) {
  // Ranks of 95 % confidence intervals of a median, as printed in textbooks.
  EXPECT_EQ(MedianLowerRank(5, 0.025), 0);
  EXPECT_EQ(MedianLowerRank(6, 0.025), 1);
  EXPECT_EQ(MedianLowerRank(10, 0.025), 2);
  EXPECT_EQ(MedianLowerRank(20, 0.025), 6);
  EXPECT_EQ(MedianLowerRank(30, 0.025), 10);
  EXPECT_EQ(MedianLowerRank(50, 0.025), 18);
  EXPECT_EQ(MedianLowerRank(100, 0.025), 40);
  // Far beyond the range of 2^-n: n / 2 - 1.96 sqrt(n) / 2, which the normal distribution gives, within one.
  EXPECT_NEAR(MedianLowerRank(100000, 0.025), 50000 - 1.95996 * std::sqrt(100000) / 2, 1.0);
}

TEST(SummarizeAudit, GivesMeanQuantilesAndInterval) {
  std::vector<float> errors;
  for (int i = 1; i <= 20; ++i) errors.push_back(static_cast<float>(21 - i));
  const AuditSummary summary = Summarize(Samples(errors));
  EXPECT_EQ(summary.outputs, 20u);
  EXPECT_EQ(summary.observations, 20u);
  EXPECT_NEAR(summary.mean, 10.5, 1e-9);
  EXPECT_DOUBLE_EQ(summary.median, 10.5);
  EXPECT_DOUBLE_EQ(summary.median_low, 6);
  EXPECT_DOUBLE_EQ(summary.median_high, 15);
  EXPECT_NEAR(summary.p90, 18.1, 1e-9);   // position 17.1 of 0 ... 19
  EXPECT_NEAR(summary.p99, 19.81, 1e-9);  // position 18.81
}

TEST(SummarizeAudit, OutputsAuditedTogetherCountAsOneObservation) {
  // Twenty observations of three equal outputs: the interval of twenty values.
  std::vector<float> errors;
  for (int i = 0; i < 60; ++i) errors.push_back(static_cast<float>(1 + i / 3));
  const AuditSummary summary = Summarize(Samples(errors, 3));
  EXPECT_EQ(summary.outputs, 60u);
  EXPECT_EQ(summary.observations, 20u);
  EXPECT_DOUBLE_EQ(summary.median_low, 6);
  EXPECT_DOUBLE_EQ(summary.median_high, 15);
}

TEST(SummarizeAudit, FewObservationsHaveNoInterval) {
  const AuditSummary few = Summarize(Samples({3, 1, 2, 5, 4}));
  EXPECT_DOUBLE_EQ(few.median, 3);
  EXPECT_EQ(few.median_low, 0);
  EXPECT_EQ(few.median_high, kInfinity);
  const AuditSummary none = Summarize({});
  EXPECT_EQ(none.outputs, 0u);
  EXPECT_EQ(none.median_high, kInfinity);
}

TEST(SummarizeAudit, AnInfiniteErrorStaysAtTheTop) {
  const AuditSummary summary = Summarize(Samples({1, kInfinity, 2, 3, kInfinity, 4, 5}));
  EXPECT_EQ(summary.mean, kInfinity);
  EXPECT_DOUBLE_EQ(summary.median, 4);
  EXPECT_EQ(summary.p90, kInfinity);
  EXPECT_EQ(summary.median_high, kInfinity);
  EXPECT_DOUBLE_EQ(summary.median_low, 1);
}

TEST(HasDrifted, MeanByItsLowerBound) {
  // Mean 3 and deviation sqrt(8 / 7): lower bound 3 - 4.7853 sqrt(8 / 7) / sqrt(8) = 1.1913.
  const std::vector<float> errors = {2, 4, 2, 4, 2, 4, 2, 4};
  EXPECT_TRUE(HasDrifted(errors, CalibrationStatistic::kMean, 1.19));
  EXPECT_FALSE(HasDrifted(errors, CalibrationStatistic::kMean, 1.20));
  EXPECT_FALSE(HasDrifted(std::span(errors).first(7), CalibrationStatistic::kMean, 0.1));
}

TEST(HasDrifted, LongerSpansSeeSmallerDrifts) {
  // Over 32 values: 3 - 3.3749 sqrt(32 / 31) / sqrt(32) = 2.3938; the last 16 and 8 alone do not reach that.
  std::vector<float> errors;
  for (int i = 0; i < 32; ++i) errors.push_back(i % 2 == 0 ? 2.0f : 4.0f);
  EXPECT_TRUE(HasDrifted(errors, CalibrationStatistic::kMean, 2.39));
  EXPECT_FALSE(HasDrifted(errors, CalibrationStatistic::kMean, 2.40));
  EXPECT_FALSE(HasDrifted(std::span(errors).last(31), CalibrationStatistic::kMean, 2.39));
}

TEST(HasDrifted, OldErrorsDoNotHideNewOnes) {
  std::vector<float> errors(24, 0.01f);
  for (int i = 0; i < 8; ++i) errors.push_back(i % 2 == 0 ? 0.9f : 1.1f);
  EXPECT_TRUE(HasDrifted(errors, CalibrationStatistic::kMean, 0.8));
}

TEST(HasDrifted, MedianByOrderStatistics) {
  // P(at most 1 of 16 below the median) = 17 / 65536: the second smallest of the last 16 is the bound. Of 8, no value
  // is: 1 / 256 is too likely.
  std::vector<float> errors(16, 5.0f);
  errors[3] = 0.0f;
  EXPECT_TRUE(HasDrifted(errors, CalibrationStatistic::kMedian, 4.9));
  errors[7] = 0.0f;
  EXPECT_FALSE(HasDrifted(errors, CalibrationStatistic::kMedian, 4.9));
  EXPECT_FALSE(HasDrifted(std::vector<float>(8, 5.0f), CalibrationStatistic::kMedian, 0.1));
}

TEST(HasDrifted, InfiniteErrorsCountAsLarge) {
  EXPECT_TRUE(HasDrifted(std::vector<float>(8, kInfinity), CalibrationStatistic::kMean, 0.1));
  std::vector<float> one(32, 0.01f);
  one[20] = kInfinity;
  EXPECT_FALSE(HasDrifted(one, CalibrationStatistic::kMean, 0.02));
}

// Log-normal errors with the mean at the tolerance and a deviation as large: half a million tests.
TEST(HasDrifted, NeverFiresOnHeadsThatMeetTheirTolerance) {
  std::mt19937 random(11);
  const double sigma = std::sqrt(std::log(2.0));
  std::normal_distribution<double> normal(-sigma * sigma / 2, sigma);
  int fired = 0;
  for (int head = 0; head < 250; ++head) {
    std::vector<float> errors;
    for (int i = 0; i < 1000; ++i) {
      errors.push_back(static_cast<float>(std::exp(normal(random))));
      const std::span<const float> recent(errors);
      const std::span<const float> last = recent.last(std::min<std::size_t>(errors.size(), kMaxDriftSpan));
      fired += HasDrifted(last, CalibrationStatistic::kMean, 2.0) ? 1 : 0;
      fired += HasDrifted(last, CalibrationStatistic::kMedian, 2.0) ? 1 : 0;
    }
  }
  EXPECT_EQ(fired, 0);
}

std::vector<std::uint64_t> Due(double share, std::uint64_t seed, std::uint64_t slots, std::uint64_t at_a_time) {
  AuditSchedule schedule(share, seed);
  std::vector<std::uint64_t> due;
  for (std::uint64_t end = at_a_time; end <= slots; end += at_a_time) {
    while (const auto slot = schedule.TakeDue(end)) {
      EXPECT_LT(*slot, end);
      EXPECT_GE(*slot, end - at_a_time);
      due.push_back(*slot);
    }
  }
  return due;
}

TEST(AuditSchedule, TakesOneSlotOfEachStretch) {
  for (const double share : {1.0, 0.4, 1.0 / 3, 0.01}) {
    const std::vector<std::uint64_t> due = Due(share, 5, 3000, 3);
    ASSERT_EQ(due.size(), static_cast<std::size_t>(std::lround(3000 * share))) << share;
    for (std::size_t i = 0; i < due.size(); ++i) {
      EXPECT_GE(static_cast<double>(due[i]), std::floor(static_cast<double>(i) / share)) << share;
      EXPECT_LT(static_cast<double>(due[i]), std::floor(static_cast<double>(i + 1) / share)) << share;
    }
  }
}

TEST(AuditSchedule, DependsOnTheSeedAndNotOnHowSlotsArrive) {
  EXPECT_EQ(Due(0.01, 5, 3000, 3), Due(0.01, 5, 3000, 50));
  EXPECT_NE(Due(0.01, 5, 3000, 3), Due(0.01, 6, 3000, 3));
  // No place within the stretches is preferred: 3000 places of 100, in tenths of the stretch, by chi-squared with 9
  // degrees of freedom (27.9 at 0.1 %).
  std::vector<int> tenths(10, 0);
  for (const std::uint64_t slot : Due(0.01, 7, 300000, 100)) ++tenths[slot % 100 / 10];
  double chi_squared = 0;
  for (const int n : tenths) chi_squared += (n - 300.0) * (n - 300.0) / 300.0;
  EXPECT_LT(chi_squared, 27.9);
}

}  // namespace
}  // namespace scsa
