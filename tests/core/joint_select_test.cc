// SPDX-License-Identifier: Apache-2.0
#include "core/joint_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace scsa {
namespace {

// The rule of the header, restated with a full sort and sums from the small end.
std::vector<std::int32_t> Restated(const std::vector<float>& shares, const std::vector<float>& rows, float tau) {
  std::vector<std::int32_t> order;
  for (std::int32_t c = 0; c < std::ssize(shares); ++c) {
    if (rows[c] > 0) order.push_back(c);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return shares[a] / rows[a] > shares[b] / rows[b]; });
  double closed = 0;
  while (!order.empty() && closed + shares[order.back()] < tau) {
    closed += shares[order.back()];
    order.pop_back();
  }
  std::sort(order.begin(), order.end());
  return order;
}

struct Problem {
  std::vector<float> shares;
  std::vector<float> rows;
};

// Heavy-tailed shares that sum to 0.9: the rest is exact mass.
Problem RandomProblem(int n, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::lognormal_distribution<float> mass(0.0f, 3.0f);
  std::uniform_int_distribution<int> members(0, 16);
  Problem p;
  for (int c = 0; c < n; ++c) {
    p.rows.push_back(static_cast<float>(members(rng)));
    p.shares.push_back(p.rows.back() > 0 ? mass(rng) : 0.0f);
  }
  const float total = std::accumulate(p.shares.begin(), p.shares.end(), 0.0f);
  for (float& share : p.shares) share *= 0.9f / total;
  return p;
}

TEST(JointSelectTest, OpensTheShortestPrefixOfTheOrder) {
  JointSelector selector;
  std::vector<std::int32_t> opened = {7};  // must be replaced
  for (const int n : {1, 2, 31, 960, 5000}) {
    const Problem p = RandomProblem(n, 10u + static_cast<std::uint32_t>(n));
    for (const float tau : {0.5f, 0.2f, 0.05f, 0.01f, 0.001f}) {
      selector.Select(p.shares, p.rows, tau, opened);
      EXPECT_EQ(opened, Restated(p.shares, p.rows, tau)) << n << " clusters, tau " << tau;
    }
  }
}

TEST(JointSelectTest, ZeroTauOpensEveryClusterThatHasRows) {
  const Problem p = RandomProblem(300, 3);
  JointSelector selector;
  std::vector<std::int32_t> opened;
  selector.Select(p.shares, p.rows, 0.0f, opened);
  EXPECT_EQ(std::ssize(opened), std::ranges::count_if(p.rows, [](float rows) { return rows > 0; }));
}

TEST(JointSelectTest, OpensNothingWhenAllMassIsExact) {
  JointSelector selector;
  std::vector<std::int32_t> opened;
  selector.Select(std::vector<float>{0.0f, 0.004f}, std::vector<float>{8, 8}, 0.01f, opened);
  EXPECT_TRUE(opened.empty());
  selector.Select({}, {}, 0.0f, opened);
  EXPECT_TRUE(opened.empty());
}

TEST(JointSelectTest, EqualKeysOpenInIndexOrder) {
  const std::vector<float> shares(10, 0.1f);
  const std::vector<float> rows(10, 4.0f);
  JointSelector selector;
  std::vector<std::int32_t> opened;
  selector.Select(shares, rows, 0.35f, opened);  // three of 0.1 may stay closed
  EXPECT_EQ(opened, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(JointSelectTest, OrderAgreesWithSelectAtEveryThreshold) {
  const Problem p = RandomProblem(960, 77);
  const std::vector<float> taus = {0.5f, 0.1f, 0.05f, 0.01f};
  JointSelector selector;
  std::vector<std::int32_t> order, opened, counts(taus.size());
  selector.Order(p.shares, p.rows, taus, order, counts);
  for (std::size_t t = 0; t < taus.size(); ++t) {
    selector.Select(p.shares, p.rows, taus[t], opened);
    std::vector<std::int32_t> prefix(order.begin(), order.begin() + counts[t]);
    std::ranges::sort(prefix);
    EXPECT_EQ(prefix, opened) << "tau " << taus[t];
  }
}

}  // namespace
}  // namespace scsa
