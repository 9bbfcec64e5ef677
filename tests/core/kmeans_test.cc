// SPDX-License-Identifier: Apache-2.0
#include "core/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "scsa/target.h"

namespace scsa {
namespace {

struct Clusters {
  std::vector<std::uint16_t> members;
  std::vector<std::uint16_t> offsets;
};

Clusters Group(const std::vector<float>& keys, int head_dim, const KMeansParams& params) {
  const auto n = static_cast<int>(std::ssize(keys)) / head_dim;
  Clusters out{std::vector<std::uint16_t>(n), std::vector<std::uint16_t>(KMeansSlots(n, params.cluster_size) + 1)};
  KMeansScratch scratch;
  PrincipalKMeans(keys.data(), n, head_dim, params, scratch, out.members.data(), out.offsets.data());
  return out;
}

std::vector<float> RandomKeys(int n, int head_dim, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> keys(static_cast<std::size_t>(n) * head_dim);
  for (float& x : keys) x = normal(rng);
  return keys;
}

void ExpectPartition(const Clusters& clusters, int n, int max_size) {
  std::vector<int> seen(n, 0);
  EXPECT_EQ(clusters.offsets.front(), 0);
  EXPECT_EQ(clusters.offsets.back(), n);
  for (std::size_t c = 0; c + 1 < clusters.offsets.size(); ++c) {
    ASSERT_LE(clusters.offsets[c], clusters.offsets[c + 1]);
    EXPECT_LE(clusters.offsets[c + 1] - clusters.offsets[c], max_size);
    EXPECT_TRUE(std::is_sorted(clusters.members.begin() + clusters.offsets[c],
                               clusters.members.begin() + clusters.offsets[c + 1]));
  }
  for (const std::uint16_t member : clusters.members) {
    ASSERT_LT(member, n);
    ++seen[member];
  }
  EXPECT_EQ(std::ranges::count(seen, 1), n);
}

// Sum over the rows of the squared distance to the mean of their cluster.
double Spread(const std::vector<float>& keys, int head_dim, const Clusters& clusters) {
  double total = 0;
  for (std::size_t c = 0; c + 1 < clusters.offsets.size(); ++c) {
    for (int d = 0; d < head_dim; ++d) {
      double sum = 0;
      double squares = 0;
      const int count = clusters.offsets[c + 1] - clusters.offsets[c];
      for (int i = clusters.offsets[c]; i < clusters.offsets[c + 1]; ++i) {
        const double x = keys[static_cast<std::size_t>(clusters.members[i]) * head_dim + d];
        sum += x;
        squares += x * x;
      }
      if (count > 0) total += squares - sum * sum / count;
    }
  }
  return total;
}

TEST(KMeansTest, PartitionsOddSizesWithinTheCap) {
  for (const int n : {1, 2, 7, 8, 9, 63, 252, 256, 1000}) {
    for (const int head_dim : {8, 40, 64}) {
      const KMeansParams params;
      ExpectPartition(Group(RandomKeys(n, head_dim, 1), head_dim, params), n, params.max_cluster_size);
    }
  }
}

TEST(KMeansTest, SplitAloneIsBalanced) {
  const Clusters clusters = Group(RandomKeys(256, 16, 2), 16, {.rounds = 0});
  for (std::size_t c = 0; c + 1 < clusters.offsets.size(); ++c) {
    EXPECT_EQ(clusters.offsets[c + 1] - clusters.offsets[c], 8);
  }
}

TEST(KMeansTest, EqualKeysRespectTheCap) {
  const KMeansParams params;
  ExpectPartition(Group(std::vector<float>(200 * 8, 1.5f), 8, params), 200, params.max_cluster_size);
}

// 32 far-apart groups of 8 rows, interleaved: each must become one cluster.
TEST(KMeansTest, FindsSeparateGroupsOnEveryTarget) {
  constexpr int kHeadDim = 24;
  const std::vector<float> centres = RandomKeys(32, kHeadDim, 5);
  const std::vector<float> noise = RandomKeys(256, kHeadDim, 6);
  std::vector<float> keys(256 * kHeadDim);
  for (int i = 0; i < 256; ++i) {
    for (int d = 0; d < kHeadDim; ++d) {
      keys[i * kHeadDim + d] = 100.0f * centres[i % 32 * kHeadDim + d] + 0.01f * noise[i * kHeadDim + d];
    }
  }
  for (const std::string& target : AvailableTargets()) {
    ASSERT_TRUE(ForceTarget(target).ok());
    const Clusters clusters = Group(keys, kHeadDim, {.rounds = 8});
    int pure = 0;
    for (std::size_t c = 0; c + 1 < clusters.offsets.size(); ++c) {
      std::set<int> groups;
      for (int i = clusters.offsets[c]; i < clusters.offsets[c + 1]; ++i) groups.insert(clusters.members[i] % 32);
      pure += groups.size() == 1 && clusters.offsets[c + 1] - clusters.offsets[c] == 8;
    }
    EXPECT_GE(pure, 24) << target;  // Lloyd's algorithm may end with two groups in one cluster here and there
  }
  ASSERT_TRUE(ForceTarget("").ok());
}

TEST(KMeansTest, RoundsTightenTheClusters) {
  const std::vector<float> keys = RandomKeys(256, 8, 9);
  const double split = Spread(keys, 8, Group(keys, 8, {.rounds = 0}));
  const double refined = Spread(keys, 8, Group(keys, 8, {.rounds = 2}));
  EXPECT_LT(refined, split);
  // Random assignment leaves the whole variance, less what 32 means absorb.
  Clusters arbitrary;
  for (int i = 0; i < 256; ++i) arbitrary.members.push_back(static_cast<std::uint16_t>(i));
  for (int c = 0; c <= 32; ++c) arbitrary.offsets.push_back(static_cast<std::uint16_t>(8 * c));
  EXPECT_LT(split, 0.75 * Spread(keys, 8, arbitrary));
}

TEST(KMeansTest, IsDeterministic) {
  const std::vector<float> keys = RandomKeys(256, 64, 4);
  const Clusters a = Group(keys, 64, {});
  const Clusters b = Group(keys, 64, {});
  EXPECT_EQ(a.members, b.members);
  EXPECT_EQ(a.offsets, b.offsets);
}

}  // namespace
}  // namespace scsa
