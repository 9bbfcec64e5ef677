// SPDX-License-Identifier: Apache-2.0
//
// What the cases of `scsa bench kernels` count, and what becomes of their times. No rate is asserted.
#include "kernel_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "scsa/target.h"

namespace scsa::tool {
namespace {

// Small caches, so that the data sets are small.
KernelSetup SmallSetup() {
  KernelSetup setup;
  setup.head_dim = 64;
  setup.rows = 1024;
  setup.threads = 2;
  setup.heads = {1, 3};
  setup.caches = {.l2 = std::size_t{64} << 10, .last_level = std::size_t{1} << 20};
  return setup;
}

std::vector<KernelCase> CasesOf(const KernelSetup& setup, const std::vector<std::string>& primitives) {
  std::vector<KernelCase> cases;
  for (const CaseSet& set : CaseSets(setup, primitives)) {
    for (KernelCase& kernel : set.make()) cases.push_back(std::move(kernel));
  }
  return cases;
}

const KernelCase& Find(const std::vector<KernelCase>& cases, const std::string& format, int heads, CacheState cache) {
  const auto found = std::ranges::find_if(cases, [&](const KernelCase& kernel) {
    return kernel.label.format == format && kernel.label.heads == heads && kernel.cache == cache;
  });
  EXPECT_NE(found, cases.end()) << format << " " << heads;
  return *found;
}

TEST(KernelCases, EveryPrimitiveHasItsCases) {
  std::set<std::tuple<std::string, std::string, int, CacheState>> seen;
  for (const KernelCase& kernel : CasesOf(SmallSetup(), PrimitiveNames())) {
    EXPECT_TRUE(seen.emplace(kernel.label.primitive, kernel.label.format, kernel.label.heads, kernel.cache).second);
    EXPECT_GT(kernel.rows, 0.0);
    EXPECT_GT(kernel.bytes, 0.0);
    kernel.run(2);  // in particular over the end of the data
  }
  // Hot and cold, 1 and 3 heads: attend in 4 formats, packed and both gathers in 1 each, score and accumulate in 2, two
  // estimates and a tail; and two ways to cluster.
  EXPECT_EQ(seen.size(), 4u * (4 + 1 + 2 + 2 + 2 + 2 + 1) + 2);
}

TEST(KernelCases, CountRowsBytesAndMultiplyAdds) {
  const KernelSetup setup = SmallSetup();
  const std::vector<KernelCase> cases = CasesOf(setup, {"attend"});
  // A hot unit of f16 rows: half of 64 KiB, 256 bytes for each row's key and value; one unit for each of two threads.
  const KernelCase& hot = Find(cases, "f16", 3, CacheState::kHot);
  EXPECT_EQ(hot.rows, 2.0 * 128);
  EXPECT_EQ(hot.bytes, 2.0 * 128 * 256);
  EXPECT_EQ(hot.multiply_adds, 2.0 * 128 * 3 * 2 * 64);
  // A cold pass: 1,024 rows of each of 4 KV heads; q8_0 takes 2 blocks of 34 bytes per 64 values.
  const KernelCase& cold = Find(cases, "q8_0", 3, CacheState::kCold);
  EXPECT_EQ(cold.rows, 4096.0);
  EXPECT_EQ(cold.bytes, 4096.0 * 2 * 68);
  EXPECT_EQ(cold.multiply_adds, 4096.0 * 3 * 2 * 64);
}

TEST(KernelCases, GatherCountsTheRowsThatItReads) {
  // An eighth of 8 blocks of 256 rows, key and value of 128 bytes each, on two threads.
  const KernelCase hot = Find(CasesOf(SmallSetup(), {"gather"}), "f16", 1, CacheState::kHot);
  EXPECT_EQ(hot.rows, 2.0 * 256);
  EXPECT_EQ(hot.bytes, 2.0 * 256 * 256);
  // The same rows in 8 bits.
  const KernelCase packed = Find(CasesOf(SmallSetup(), {"gather-int8"}), "int8", 1, CacheState::kHot);
  EXPECT_EQ(packed.rows, 2.0 * 256);
  EXPECT_EQ(packed.bytes, 2.0 * 256 * 128);
}

TEST(KernelCases, CountClustersOfEstimates) {
  const KernelSetup setup = SmallSetup();
  // A region of 4,096 rows: 32 clusters with centroid, two directions, residual and one number, f32.
  const KernelCase seed = Find(CasesOf(setup, {"estimate-seed"}), "f32", 1, CacheState::kHot);
  EXPECT_EQ(seed.rows, 2.0 * 32);
  EXPECT_EQ(seed.bytes, 2.0 * 32 * (4 * 64 + 1) * 4);
  // Eight blocks of 32 clusters: a byte per value of a centroid, three f32 numbers per cluster, three vectors and eight
  // more numbers per block; a value mean is a byte per value, two f32 vectors per block.
  const KernelCase estimate = Find(CasesOf(setup, {"estimate-fast"}), "8-bit", 3, CacheState::kHot);
  EXPECT_EQ(estimate.rows, 2.0 * 256);
  EXPECT_EQ(estimate.bytes, 2.0 * (256 * (64 + 12) + 8 * (3 * 64 + 8) * 4));
  EXPECT_EQ(estimate.multiply_adds, 2.0 * 3 * (256 * 64 + 8 * 2 * 64));
  const KernelCase tail = Find(CasesOf(setup, {"tail-fast"}), "8-bit", 3, CacheState::kHot);
  EXPECT_EQ(tail.rows, 2.0 * 256);
  EXPECT_EQ(tail.bytes, 2.0 * (256 * 64 + 8 * 2 * 64 * 4));
  EXPECT_EQ(tail.multiply_adds, 2.0 * 3 * (256 * 64 + 8 * 2 * 64));
  // Clustering has no count of multiply-adds: it depends on the keys.
  EXPECT_FALSE(CasesOf(setup, {"cluster-fast"}).front().multiply_adds.has_value());
}

TEST(KernelSetup, ColdDataExceedsTheLastCache) {
  KernelSetup setup;
  setup.caches = {.l2 = std::size_t{1} << 20, .last_level = std::size_t{256} << 20};
  EXPECT_EQ(setup.ColdBytes(), std::size_t{1024} << 20);
  setup.caches = {.l2 = std::size_t{1} << 20, .last_level = 0};
  EXPECT_EQ(setup.ColdBytes(), std::size_t{128} << 20);
}

TEST(MeasureCases, RatesFollowFromTheCounts) {
  KernelCase kernel;
  kernel.label = {.primitive = "p", .format = "f", .heads = 2};
  kernel.cache = CacheState::kHot;
  kernel.rows = 10.0;
  kernel.bytes = 640.0;
  kernel.multiply_adds = 2560.0;
  std::multiset<std::string> ran;
  volatile double sink = 0.0;
  kernel.run = [&](std::int64_t repeats) {
    ran.insert(ActiveTarget());
    for (std::int64_t i = 0; i < repeats * 1000; ++i) sink = sink + 1.0;
  };
  const std::vector<std::string> targets = AvailableTargets();
  KernelCase other = kernel;
  other.label.heads = 3;
  other.multiply_adds.reset();
  const KernelCase cases[] = {kernel, other};
  std::vector<int> rounds;
  const std::vector<KernelResult> results =
      MeasureCases(cases, targets, 5, [&](int round) { rounds.push_back(round); });
  EXPECT_EQ(rounds, (std::vector<int>{0, 1, 2, 3, 4}));
  ASSERT_EQ(results.size(), 2 * targets.size());
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const KernelResult& result = results[t];
    EXPECT_EQ(result.target, targets[t]);
    EXPECT_EQ(result.label.heads, 2);
    EXPECT_GE(ran.count(targets[t]), 5u);
    EXPECT_LE(result.rows_s.p10, result.rows_s.median);
    EXPECT_LE(result.rows_s.median, result.rows_s.p90);
    EXPECT_GT(result.rows_s.p10, 0.0);
    EXPECT_NEAR(result.bytes_s / result.rows_s.median, 64.0, 1e-9);
    ASSERT_TRUE(result.multiply_adds_s.has_value());
    EXPECT_NEAR(*result.multiply_adds_s / result.rows_s.median, 256.0, 1e-9);
  }
  for (std::size_t t = 0; t < targets.size(); ++t) {
    EXPECT_EQ(results[targets.size() + t].target, targets[t]);
    EXPECT_EQ(results[targets.size() + t].label.heads, 3);
    EXPECT_FALSE(results[targets.size() + t].multiply_adds_s.has_value());
  }
  EXPECT_EQ(ActiveTarget(), AvailableTargets().front());  // the best one again
}

}  // namespace
}  // namespace scsa::tool
