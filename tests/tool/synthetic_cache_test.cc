// SPDX-License-Identifier: Apache-2.0
//
// The generator against what its header says: determinism, centres, spread, runs, queries.
#include "synthetic_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/kernels.h"

namespace scsa::tool {
namespace {

constexpr Shape kShape{4, 2, 64};

std::vector<float> Decoded(const std::byte* row) {
  std::vector<float> values(kShape.head_dim);
  DecodeRow(row, DType::kF16, kShape.head_dim, values.data());
  return values;
}

// Standard deviation of row - centre over all rows and coordinates of a KV head, and the mean of the difference.
struct Deviation {
  double mean = 0.0;
  double deviation = 0.0;
};
Deviation DeviationOf(const SyntheticCache& cache, std::int64_t n, int kv_head, bool keys) {
  const KvView kv = cache.View(n);
  double sum = 0.0;
  double squares = 0.0;
  for (std::int64_t r = 0; r < n; ++r) {
    const int label = cache.CentreOfRow(r, kv_head);
    const float* centre = keys ? cache.KeyCentre(kv_head, label) : cache.ValueCentre(kv_head, label);
    const std::vector<float> row = Decoded(keys ? kv.KRow(r, kv_head) : kv.VRow(r, kv_head));
    for (int d = 0; d < kShape.head_dim; ++d) {
      const double x = static_cast<double>(row[d]) - centre[d];
      sum += x;
      squares += x * x;
    }
  }
  const double count = static_cast<double>(n) * kShape.head_dim;
  return {.mean = sum / count, .deviation = std::sqrt(squares / count)};
}

TEST(SyntheticCache, SameSeedSameBytesWhateverTheThreads) {
  constexpr std::int64_t kRows = 9000;  // several chunks, the last one not full
  const SyntheticCache one(kShape, kRows, 7, 1);
  const SyntheticCache three(kShape, kRows, 7, 3);
  const SyntheticCache other(kShape, kRows, 8, 1);
  const std::size_t bytes = static_cast<std::size_t>(kRows) * kShape.kv_heads * kShape.head_dim * 2;
  EXPECT_EQ(std::memcmp(one.View(kRows).k, three.View(kRows).k, bytes), 0);
  EXPECT_EQ(std::memcmp(one.View(kRows).v, three.View(kRows).v, bytes), 0);
  EXPECT_NE(std::memcmp(one.View(kRows).k, other.View(kRows).k, bytes), 0);
  EXPECT_EQ(one.Query(3), three.Query(3));
  EXPECT_NE(one.Query(3), one.Query(4));
  EXPECT_NE(one.Query(3), other.Query(3));
}

TEST(SyntheticCache, AShorterCacheIsAPrefix) {
  const SyntheticCache longer(kShape, 10000, 1, 2);
  const SyntheticCache shorter(kShape, 5001, 1, 2);
  const std::size_t bytes = std::size_t{5001} * kShape.kv_heads * kShape.head_dim * 2;
  EXPECT_EQ(std::memcmp(longer.View(5001).k, shorter.View(5001).k, bytes), 0);
  EXPECT_EQ(std::memcmp(longer.View(5001).v, shorter.View(5001).v, bytes), 0);
  EXPECT_EQ(longer.Query(0), shorter.Query(0));
  EXPECT_EQ(longer.View(5001).n_kv, 5001);
  EXPECT_EQ(shorter.View(6000).n_kv, 5001);  // never beyond the rows that there are
}

TEST(SyntheticCache, SpreadIsAsDocumented) {
  constexpr std::int64_t kRows = 6000;
  const SyntheticCache cache(kShape, kRows, 2, 2);
  // 384,000 normal numbers: their deviation is known to about 0.1 %, the mean to 0.002; f16 adds less.
  for (int h = 0; h < kShape.kv_heads; ++h) {
    const Deviation keys = DeviationOf(cache, kRows, h, true);
    EXPECT_NEAR(keys.deviation, 0.4, 0.01);
    EXPECT_NEAR(keys.mean, 0.0, 0.01);
    const Deviation values = DeviationOf(cache, kRows, h, false);
    EXPECT_NEAR(values.deviation, 0.7, 0.015);
    EXPECT_NEAR(values.mean, 0.0, 0.015);
  }
  // Centres are standard normal: 64 of 64 values each.
  double squares = 0.0;
  for (int c = 0; c < 64; ++c) {
    for (int d = 0; d < kShape.head_dim; ++d) squares += std::pow(cache.KeyCentre(0, c)[d], 2);
  }
  EXPECT_NEAR(squares / (64.0 * kShape.head_dim), 1.0, 0.1);
}

TEST(SyntheticCache, RowsAreNotAlike) {
  const SyntheticCache cache(kShape, 512, 3, 1);
  const KvView kv = cache.View(512);
  const std::size_t bytes = RowBytes(DType::kF16, kShape.head_dim);
  for (std::int64_t r = 1; r < 512; ++r) {
    EXPECT_NE(std::memcmp(kv.KRow(r, 0), kv.KRow(r - 1, 0), bytes), 0) << r;
    EXPECT_NE(std::memcmp(kv.KRow(r, 0), kv.KRow(r, 1), bytes), 0) << r;
  }
}

TEST(SyntheticCache, CentresComeInRunsAndAllAreUsed) {
  constexpr std::int64_t kRows = 20000;
  const SyntheticCache cache(kShape, kRows, 4, 2);
  std::vector<int> rows_of(64, 0);
  int changes = 0;
  for (std::int64_t r = 0; r < kRows; ++r) {
    const int label = cache.CentreOfRow(r, 1);
    ASSERT_GE(label, 0);
    ASSERT_LT(label, 64);
    ++rows_of[label];
    if (r > 0) changes += label != cache.CentreOfRow(r - 1, 1);
  }
  // A new draw, one row in 16, that is another centre 63 times of 64: 1,230 expected, deviation 35.
  EXPECT_NEAR(changes, 1230, 150);
  for (const int n : rows_of) EXPECT_GT(n, 0);
}

TEST(SyntheticCache, QueriesLookForTheirCentre) {
  const SyntheticCache cache(kShape, 64, 5, 1);
  EXPECT_FLOAT_EQ(cache.Sharpness(0), 0.6f);
  EXPECT_FLOAT_EQ(cache.Sharpness(1), 1.0f);
  EXPECT_FLOAT_EQ(cache.Sharpness(2), 0.6f);
  double squares = 0.0;
  int count = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const std::vector<float> q = cache.Query(i);
    ASSERT_EQ(q.size(), 4u * 64u);
    for (int h = 0; h < kShape.q_heads; ++h) {
      const float* centre = cache.KeyCentre(h / 2, cache.CentreOfQuery(i, h));
      for (int d = 0; d < kShape.head_dim; ++d, ++count) {
        squares += std::pow(q[h * kShape.head_dim + d] - (h % 2 == 0 ? 0.6 : 1.0) * centre[d], 2);
      }
    }
  }
  EXPECT_NEAR(std::sqrt(squares / count), 0.3, 0.01);
}

TEST(SyntheticCache, HeadsWithoutAGroupDifferInSharpnessToo) {
  const SyntheticCache cache({3, 3, 8}, 16, 6, 1);
  EXPECT_FLOAT_EQ(cache.Sharpness(0), 0.6f);
  EXPECT_FLOAT_EQ(cache.Sharpness(1), 0.8f);
  EXPECT_FLOAT_EQ(cache.Sharpness(2), 1.0f);
}

TEST(SyntheticCache, BytesCountKeysValuesAndLabels) {
  EXPECT_EQ(SyntheticCache::Bytes({16, 8, 128}, 524288), 524288ull * 8 * (128 * 2 * 2 + 1));
}

}  // namespace
}  // namespace scsa::tool
