// SPDX-License-Identifier: Apache-2.0
#include "core/joint_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tests/core/synthetic.h"

namespace scsa {
namespace {

// Clusters with `rows` members that hold `shares` of the mass, and the keys that follow.
struct Problem {
  std::vector<float> shares;
  std::vector<float> keys;

  void Add(float share, float rows) {
    shares.push_back(share);
    keys.push_back(rows > 0 ? share / rows : -1.0f);
  }
};

// The rule of the header, restated with a full sort and sums from the small end.
std::vector<std::int32_t> Restated(const Problem& p, float tau) {
  std::vector<std::int32_t> order;
  for (std::int32_t c = 0; c < std::ssize(p.keys); ++c) {
    if (p.keys[c] >= 0) order.push_back(c);
  }
  std::ranges::stable_sort(order, [&](std::int32_t a, std::int32_t b) { return p.keys[a] > p.keys[b]; });
  double closed = 0;
  while (!order.empty() && closed + p.shares[order.back()] < tau) {
    closed += p.shares[order.back()];
    order.pop_back();
  }
  std::ranges::sort(order);
  return order;
}

std::vector<std::int32_t> Selected(JointSelector& selector, const Problem& p, float tau) {
  std::vector<std::int32_t> opened = {7};  // must be replaced
  selector.Select(p.shares, p.keys, tau, opened);
  return opened;
}

// Heavy-tailed shares that sum to 0.9: the rest is exact mass.
Problem RandomProblem(int n, std::uint32_t seed, float deviation = 3.0f) {
  std::mt19937 rng(seed);
  std::lognormal_distribution<float> mass(0.0f, deviation);
  std::uniform_int_distribution<int> members(0, 16);
  std::vector<float> rows, masses;
  for (int c = 0; c < n; ++c) {
    rows.push_back(static_cast<float>(members(rng)));
    masses.push_back(rows.back() > 0 ? mass(rng) : 0.0f);
  }
  const float total = std::max(1e-30f, std::accumulate(masses.begin(), masses.end(), 0.0f));
  Problem p;
  for (int c = 0; c < n; ++c) p.Add(masses[c] * 0.9f / total, rows[c]);
  return p;
}

TEST(JointSelectTest, OpensTheShortestPrefixOfTheOrder) {
  test::OnEveryTarget([] {
    for (const int n : {1, 2, 31, 33, 960, 5000}) {
      const Problem p = RandomProblem(n, 10u + static_cast<std::uint32_t>(n));
      for (const float tau : {1.0f, 0.5f, 0.2f, 0.05f, 0.01f, 0.001f, 1e-6f}) {
        JointSelector selector;
        EXPECT_EQ(Selected(selector, p, tau), Restated(p, tau)) << n << " clusters, tau " << tau;
      }
    }
  });
}

TEST(JointSelectTest, ZeroTauOpensEveryClusterThatHasRows) {
  const Problem p = RandomProblem(300, 3);
  JointSelector selector;
  std::vector<std::int32_t> all;
  for (std::int32_t c = 0; c < 300; ++c) {
    if (p.keys[c] >= 0) all.push_back(c);
  }
  EXPECT_EQ(Selected(selector, p, 0.0f), all);
}

TEST(JointSelectTest, OpensNothingWhenAllMassIsExact) {
  JointSelector selector;
  Problem p;
  p.Add(0.0f, 8);
  p.Add(0.004f, 8);
  EXPECT_TRUE(Selected(selector, p, 0.01f).empty());
  EXPECT_TRUE(Selected(selector, Problem(), 0.0f).empty());
}

TEST(JointSelectTest, ClustersWithoutRowsNeverOpen) {
  Problem p;
  for (int c = 0; c < 200; ++c) p.Add(0.0f, 0);
  JointSelector selector;
  for (const float tau : {0.0f, 0.5f}) EXPECT_TRUE(Selected(selector, p, tau).empty());
  p.Add(0.7f, 3);
  for (const float tau : {0.0f, 0.5f}) EXPECT_EQ(Selected(selector, p, tau), (std::vector<std::int32_t>{200}));
}

TEST(JointSelectTest, EqualKeysOpenInIndexOrder) {
  Problem p;
  for (int c = 0; c < 10; ++c) p.Add(0.1f, 4);
  JointSelector selector;
  // Three of 0.1 may stay closed.
  EXPECT_EQ(Selected(selector, p, 0.35f), (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6}));
}

// More equal keys than are ever sorted: the search over key values cannot tell them apart.
TEST(JointSelectTest, ManyEqualKeysOpenInIndexOrder) {
  Problem p;
  for (int c = 0; c < 4096; ++c) p.Add(0x1p-12f, 8);
  JointSelector selector;
  std::vector<std::int32_t> expected(4096 - 1023);  // 1,024 of them hold a quarter, which is not below it
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(Selected(selector, p, 0.25f), expected);
  EXPECT_EQ(Selected(selector, p, 0.0f).size(), 4096u);
  EXPECT_TRUE(Selected(selector, p, 1.5f).empty());
}

TEST(JointSelectTest, FewDistinctKeysWithEmptyClustersBetween) {
  std::mt19937 random(4);
  Problem p;
  for (int c = 0; c < 3000; ++c) {
    const std::uint32_t kind = random() % 4;
    const float rows = kind == 0 ? 0.0f : 8.0f;
    p.Add(rows > 0 ? std::ldexp(1.0f, -12 - 2 * static_cast<int>(kind)) : 0.0f, rows);
  }
  test::OnEveryTarget([&] {
    for (const float tau : {0.3f, 0.1f, 0.05f, 0.02f, 0.01f, 0.001f, 0.0f}) {
      JointSelector selector;
      EXPECT_EQ(Selected(selector, p, tau), Restated(p, tau)) << "tau " << tau;
    }
  });
}

TEST(JointSelectTest, KeysOfZeroOpenOnlyAtZeroTau) {
  Problem p;
  for (int c = 0; c < 500; ++c) p.Add(0.0f, static_cast<float>(c % 3));
  JointSelector selector;
  EXPECT_TRUE(Selected(selector, p, 1e-6f).empty());
  std::vector<std::int32_t> with_rows;
  for (std::int32_t c = 0; c < 500; ++c) {
    if (c % 3 != 0) with_rows.push_back(c);
  }
  EXPECT_EQ(Selected(selector, p, 0.0f), with_rows);
}

TEST(JointSelectTest, ExtremeKeysAreOrderedToo) {
  Problem p;
  std::mt19937 random(6);
  for (int c = 0; c < 400; ++c) {
    // Down to the smallest subnormal number.
    p.Add(std::ldexp(1.0f, -1 - static_cast<int>(random() % 149)), 1);
  }
  for (const float tau : {100.0f, 0.5f, 1e-3f, 1e-20f, 1e-38f, 1e-44f, 0.0f}) {
    JointSelector selector;
    EXPECT_EQ(Selected(selector, p, tau), Restated(p, tau)) << "tau " << tau;
  }
}

// What JointScoring hands over when a logit has overflowed.
TEST(JointSelectTest, SharesOfOneOpenEverything) {
  Problem p;
  for (int c = 0; c < 1000; ++c) {
    p.shares.push_back(c % 10 == 0 ? 0.0f : 1.0f);
    p.keys.push_back(c % 10 == 0 ? -1.0f : 1.0f);
  }
  JointSelector selector;
  EXPECT_EQ(Selected(selector, p, 0.3f).size(), 900u);
}

// The selector starts its search where the last one ended. That must not show.
TEST(JointSelectTest, EarlierCallsDoNotMatter) {
  std::mt19937 random(8);
  JointSelector used;
  for (int call = 0; call < 600; ++call) {
    const int n = static_cast<int>(random() % 2000);
    Problem p = RandomProblem(n, static_cast<std::uint32_t>(call), 0.5f + 0.5f * static_cast<float>(random() % 10));
    // Jumps between very different keys, and back.
    const float size = std::ldexp(1.0f, -static_cast<int>(random() % 2) * static_cast<int>(random() % 100));
    for (float& share : p.shares) share *= size;
    for (float& key : p.keys) key = key >= 0 ? key * size : key;
    const float tau = random() % 10 == 0 ? 0.0f : size * std::ldexp(1.0f, -static_cast<int>(random() % 16));
    EXPECT_EQ(Selected(used, p, tau), Restated(p, tau)) << "call " << call << ", " << n << " clusters, tau " << tau;
  }
}

// Thresholds as close to the sum of the closed shares as f32 allows: only sums in double tell the two apart, and all
// ways to the stop must tell them apart alike.
TEST(JointSelectTest, ThresholdsNextToASumDoNotDependOnTheWay) {
  test::OnEveryTarget([] {
    std::mt19937 random(12);
    JointSelector used;
    for (int trial = 0; trial < 100; ++trial) {
      const Problem p = RandomProblem(960, 200u + static_cast<std::uint32_t>(trial), 2.0f);
      std::vector<std::int32_t> order, counts(1);
      used.Order(p.shares, p.keys, std::vector<float>{0.0f}, order, counts);
      double closed = 0;
      for (auto left = 300 + random() % 300; left > 0; --left) {
        closed += p.shares[order.back()];
        order.pop_back();
      }
      const auto tau = static_cast<float>(closed);
      const std::vector<std::int32_t> expected = Restated(p, tau);
      for (const float before : {0.3f, 0.9f, 0.99f, 1.01f, 1.1f, 3.0f}) {
        Selected(used, p, tau * before);
        ASSERT_EQ(Selected(used, p, tau), expected) << "trial " << trial << ", after " << before << " tau";
      }
      used.Order(p.shares, p.keys, std::vector<float>{tau}, order, counts);
      ASSERT_EQ(counts[0], std::ssize(expected)) << "trial " << trial;
    }
  });
}

TEST(JointSelectTest, OrderAgreesWithSelectAtEveryThreshold) {
  const Problem p = RandomProblem(960, 77);
  const std::vector<float> taus = {0.5f, 0.1f, 0.05f, 0.01f};
  JointSelector selector;
  std::vector<std::int32_t> order, counts(taus.size());
  selector.Order(p.shares, p.keys, taus, order, counts);
  EXPECT_EQ(std::ssize(order), std::ranges::count_if(p.keys, [](float key) { return key >= 0; }));
  for (std::size_t t = 0; t < taus.size(); ++t) {
    std::vector<std::int32_t> prefix(order.begin(), order.begin() + counts[t]);
    std::ranges::sort(prefix);
    EXPECT_EQ(prefix, Selected(selector, p, taus[t])) << "tau " << taus[t];
  }
}

}  // namespace
}  // namespace scsa
