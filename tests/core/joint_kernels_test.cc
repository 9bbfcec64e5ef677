// SPDX-License-Identifier: Apache-2.0
#include "core/joint_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "scsa/target.h"

namespace scsa {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

TEST(JointKernelsTest, EstimatesFollowTheFormulasOnEveryTarget) {
  for (const std::string& target : AvailableTargets()) {
    ASSERT_TRUE(ForceTarget(target).ok());
    for (const int slots : {8, 16, 32}) {
      constexpr int kBlocks = 5;
      const int n = kBlocks * slots;
      std::mt19937 rng(static_cast<std::uint32_t>(slots));
      std::normal_distribution<float> normal(0.0f, 6.0f);
      std::uniform_real_distribution<float> uniform(0.0f, 2.0f);
      std::vector<std::uint8_t> usable = {1, 0, 1, 1, 0};
      std::vector<float> logits(n), counts(n), traces(n), spreads(kBlocks);
      for (int c = 0; c < n; ++c) {
        logits[c] = normal(rng);
        counts[c] = c % 7 == 3 ? kEmpty : std::log(static_cast<float>(1 + c % 11));
        traces[c] = uniform(rng);
      }
      for (float& spread : spreads) spread = uniform(rng);
      std::vector<float> estimates = logits;
      std::vector<float> tails(n, -1.0f);
      const EstimateSums sums = EstimateClusters({.n_blocks = kBlocks,
                                                  .slots = slots,
                                                  .usable = usable.data(),
                                                  .spreads = spreads.data(),
                                                  .log_counts = counts.data(),
                                                  .half_traces = traces.data(),
                                                  .tail_shrink = 0.5f},
                                                 estimates.data(), tails.data());
      double gauge = -std::numeric_limits<double>::infinity();
      for (int c = 0; c < n; ++c) {
        if (usable[c / slots] == 0) continue;
        const double s = static_cast<double>(traces[c]) * spreads[c / slots];
        gauge = std::max(gauge, static_cast<double>(logits[c]) + counts[c] + s);
      }
      EXPECT_NEAR(sums.gauge, gauge, 1e-4);
      double sum = 0;
      for (int c = 0; c < n; ++c) {
        double estimate = 0;
        double tail = 0;
        if (usable[c / slots] != 0 && counts[c] != kEmpty) {
          const double s = static_cast<double>(traces[c]) * spreads[c / slots];
          estimate = std::exp(static_cast<double>(logits[c]) + counts[c] + s - sums.gauge);
          tail = std::exp(static_cast<double>(logits[c]) + counts[c] - sums.gauge) * (1 + 0.5 * s);
        }
        sum += estimate;
        EXPECT_NEAR(estimates[c], estimate, 1e-5 * estimate + 1e-30) << target << " cluster " << c;
        EXPECT_NEAR(tails[c], tail, 1e-5 * tail + 1e-30) << target << " cluster " << c;
      }
      EXPECT_NEAR(sums.sum, sum, 1e-5 * sum);
    }
  }
  ASSERT_TRUE(ForceTarget("").ok());
}

TEST(JointKernelsTest, NothingUsableWeighsNothing) {
  const std::vector<std::uint8_t> usable = {0, 0};
  const std::vector<float> zeros(16, 0.0f);
  std::vector<float> estimates(16, 3.0f), tails(16, 3.0f);
  const EstimateSums sums = EstimateClusters({.n_blocks = 2,
                                              .slots = 8,
                                              .usable = usable.data(),
                                              .spreads = zeros.data(),
                                              .log_counts = zeros.data(),
                                              .half_traces = zeros.data(),
                                              .tail_shrink = 0.5f},
                                             estimates.data(), tails.data());
  EXPECT_EQ(sums.gauge, kEmpty);
  EXPECT_EQ(sums.sum, 0.0f);
  EXPECT_EQ(estimates, zeros);
  EXPECT_EQ(tails, zeros);
}

}  // namespace
}  // namespace scsa
