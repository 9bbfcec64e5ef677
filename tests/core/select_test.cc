// SPDX-License-Identifier: Apache-2.0
#include "core/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::DotOf;
using test::SyntheticCache;
using test::Vector;

constexpr double kNone = -std::numeric_limits<double>::infinity();

TEST(EstimateBlock, MatchesTheSecondCumulant) {
  test::OnEveryTarget([] {
    for (const int rank : {0, 1, 2, 5}) {
      const Shape shape{3, 1, 24};
      const SyntheticCache cache(shape, 300, DType::kF16, 11);
      Config config;
      config.rank = rank;
      config.cluster_size = 40;
      Block block;
      ASSERT_TRUE(BuildBlock(cache.View(), 0, 24, 0, 300, config, &block).ok());
      const float scale = 0.3f;
      std::vector<float> qs = test::RandomQueries(shape, 4);
      for (float& x : qs) x *= scale;
      std::vector<float> squared = qs;
      for (float& x : squared) x *= x;
      // A stride wider than the block: blocks share one array.
      const std::int64_t stride = block.n_clusters + 3;
      std::vector<float> log_tail(3 * stride), priority(3 * stride),
          scratch(EstimateScratch(3, block.n_clusters, rank));
      EstimateBlock(block, 24, rank, 3, qs.data(), squared.data(), {log_tail.data(), priority.data(), stride},
                    scratch.data());
      for (int h = 0; h < 3; ++h) {
        const Vector q = test::ToDouble(qs.data() + h * 24, 24);
        for (int c = 0; c < block.n_clusters; ++c) {
          const double a = DotOf(q, test::ToDouble(block.centroids.data() + c * 24, 24));
          double variance = 0;
          for (int j = 0; j < rank; ++j) {
            const double x = DotOf(q, test::ToDouble(block.directions.data() + (c * rank + j) * 24, 24));
            variance += x * x;
          }
          for (int d = 0; d < 24; ++d) variance += q[d] * q[d] * block.residuals[c * 24 + d];
          const double log_tail_weight = a + std::log(static_cast<double>(block.RowsOf(c)));
          EXPECT_NEAR(log_tail[h * stride + c], log_tail_weight, 1e-5);
          EXPECT_NEAR(priority[h * stride + c], log_tail_weight + variance / 2, 2e-5);
        }
      }
    }
  });
}

struct Clusters {
  std::vector<float> priority;
  std::vector<float> log_tail;
};

// Clusters whose two estimates agree: no variance.
Clusters Tight(const std::vector<float>& priority) { return {priority, priority}; }

// The stop rule restated: sort, then the first prefix whose complement is below tau of it and what the prefix holds.
std::vector<int> PlainOpened(const Clusters& clusters, double log_exact_mass, double tau) {
  const auto& [priority, log_tail] = clusters;
  std::vector<int> order(priority.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return priority[a] > priority[b]; });
  std::size_t opened = 0;
  for (;; ++opened) {
    double closed = 0;
    double captured = std::exp(log_exact_mass);
    for (std::size_t i = 0; i < opened; ++i) captured += std::exp(static_cast<double>(log_tail[order[i]]));
    for (std::size_t i = opened; i < order.size(); ++i) closed += std::exp(static_cast<double>(priority[order[i]]));
    if (opened == order.size() || closed / (closed + captured) < tau) break;
  }
  order.resize(opened);
  return order;
}

std::vector<std::vector<int>> Opened(const Clusters& clusters, double log_exact_mass, const std::vector<float>& taus) {
  const std::vector<float>& priority = clusters.priority;
  std::vector<std::int32_t> order(priority.size()), counts(taus.size());
  std::vector<double> mass(priority.size());
  OpenBestFirst(priority.data(), clusters.log_tail.data(), static_cast<int>(priority.size()), log_exact_mass, taus,
                order.data(), mass.data(), counts);
  std::vector<std::vector<int>> out;
  for (const std::int32_t count : counts) out.emplace_back(order.begin(), order.begin() + count);
  return out;
}

TEST(OpenBestFirst, MatchesThePlainStopRule) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const std::vector<float> taus(std::begin(kTauGrid), std::end(kTauGrid));
  for (const std::size_t n : {1u, 2u, 17u, 64u, 200u}) {
    for (const double log_exact_mass : {kNone, -3.0, 2.0, 8.0}) {
      Clusters clusters = Tight(std::vector<float>(n));
      for (std::size_t c = 0; c < n; ++c) {
        clusters.log_tail[c] = 2 * normal(random);
        clusters.priority[c] = clusters.log_tail[c] + std::abs(normal(random));
      }
      const std::vector<std::vector<int>> got = Opened(clusters, log_exact_mass, taus);
      for (std::size_t t = 0; t < taus.size(); ++t) {
        EXPECT_EQ(got[t], PlainOpened(clusters, log_exact_mass, taus[t])) << n << " " << taus[t];
        // One threshold alone decides the same.
        EXPECT_EQ(Opened(clusters, log_exact_mass, {taus[t]})[0], got[t]);
      }
    }
  }
}

TEST(OpenBestFirst, Ends) {
  const Clusters priority = Tight({1.0f, 2.0f, 2.0f, -60.0f, 2.0f});
  // Zero opens all, however small the rest; ties open in index order; one opens nothing where something is exact.
  EXPECT_EQ(Opened(priority, 0.0, {0.0f})[0], (std::vector<int>{1, 2, 4, 0, 3}));
  EXPECT_TRUE(Opened(priority, 0.0, {1.0f})[0].empty());
  // Without any exact mass the uncaptured fraction starts at one, which is not below one.
  EXPECT_EQ(Opened(priority, kNone, {1.0f})[0], (std::vector<int>{1}));
  EXPECT_TRUE(Opened(Tight({}), kNone, {0.5f})[0].empty());
  // The exact mass alone may already be enough.
  EXPECT_TRUE(Opened(priority, 20.0, {0.01f})[0].empty());
  // Gauge: the same decision for logits far outside the range of exp.
  EXPECT_EQ(Opened(Tight({5001.0f, 5002.0f}), 5000.0, {0.4f})[0], (std::vector<int>{1}));
  EXPECT_EQ(Opened(Tight({-5001.0f, -5000.0f}), -5002.0, {0.4f})[0], (std::vector<int>{1}));
}

// A cluster whose second cumulant is 20 above what it is sure to hold is opened, and the others are still needed.
TEST(OpenBestFirst, AnOverestimateDoesNotEndTheOpeningOfOthers) {
  const Clusters clusters = {{20.0f, 1.0f, 0.5f}, {0.0f, 1.0f, 0.5f}};
  // Captured after the first: exp(0) and the exact mass exp(0); closed: e + sqrt(e) = 4.37, a share of 0.69.
  EXPECT_EQ(Opened(clusters, 0.0, {0.7f})[0], (std::vector<int>{0}));
  EXPECT_EQ(Opened(clusters, 0.0, {0.6f})[0], (std::vector<int>{0, 1}));
}

TEST(OpenBestFirst, OpensEverythingWhereAnEstimateIsNotFinite) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(Opened(Tight({1.0f, bad, 0.0f}), 0.0, {0.5f, 0.1f}),
              (std::vector<std::vector<int>>{{0, 1, 2}, {0, 1, 2}}));
    EXPECT_EQ(Opened(Tight({1.0f, 0.0f}), bad, {0.5f})[0], (std::vector<int>{0, 1}));
  }
}

TEST(FoldTail, IsTheMomentTermOfTheClosedClusters) {
  test::OnEveryTarget([] {
    const Shape shape{2, 1, 16};
    const SyntheticCache cache(shape, 300, DType::kF16, 13);
    Config config;
    config.cluster_size = 20;
    std::vector<Region> regions(2);
    for (int r = 0; r < 2; ++r) {
      regions[r].heads.resize(1);
      ASSERT_TRUE(BuildBlock(cache.View(), 0, 16, r * 160, r * 160 + 140, config, &regions[r].heads[0]).ok());
    }
    const int n = 16;
    ASSERT_EQ(regions[0].heads[0].n_clusters + regions[1].heads[0].n_clusters, n);
    std::vector<float> log_tail(n);
    std::vector<HeadSet> opened(n);
    for (int c = 0; c < n; ++c) {
      log_tail[c] = 300.0f + 2.0f * std::sin(static_cast<float>(c));
      if (c % 3 == 0) opened[c].set(0);
      opened[c].set(1);
    }
    std::vector<float> num(16, 0.0f);
    float max = -std::numeric_limits<float>::infinity();
    float sum = 0;
    FoldTail(regions, 0, 16, 0, log_tail.data(), opened.data(), {&max, &sum, num.data()});
    double mass = 0;
    Vector expected(16, 0.0);
    for (int c = 0; c < n; ++c) {
      if (c % 3 == 0) continue;
      const Block& block = regions[c / 8].heads[0];
      const double weight = std::exp(static_cast<double>(log_tail[c]) - 300);
      mass += weight;
      for (int d = 0; d < 16; ++d) expected[d] += weight * block.value_means[(c % 8) * 16 + d];
    }
    const double gauge = std::exp(static_cast<double>(max) - 300);
    // The weights' logarithms near 300 carry rounding of 1.5e-5 each.
    EXPECT_NEAR(gauge * sum / mass, 1.0, 1e-4);
    for (int d = 0; d < 16; ++d) EXPECT_NEAR(gauge * num[d] / mass, expected[d] / mass, 1e-4);

    // A head that opened everything has no tail.
    max = -std::numeric_limits<float>::infinity();
    sum = 0;
    std::ranges::fill(num, 0.0f);
    FoldTail(regions, 0, 16, 1, log_tail.data(), opened.data(), {&max, &sum, num.data()});
    EXPECT_EQ(max, -std::numeric_limits<float>::infinity());
    EXPECT_EQ(sum, 0);
    EXPECT_EQ(num, std::vector<float>(16, 0.0f));
  });
}

}  // namespace
}  // namespace scsa
