// SPDX-License-Identifier: Apache-2.0
#include "peers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

namespace scsa::tool {
namespace {

constexpr int kDim = 8;
constexpr std::int64_t kRowBytes = 32;      // 8 f16 values, key and value
constexpr std::int64_t kPageBytes = 512;    // 16 rows
constexpr std::int64_t kSummaryBytes = 32;  // minimum and maximum of 8 f16 channels

std::vector<std::int64_t> Range(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> rows(end - begin);
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}

std::vector<std::int64_t> Join(std::vector<std::int64_t> a, const std::vector<std::int64_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(RowBytesOf, IsAnF16KeyAndValue) {
  EXPECT_EQ(RowBytesOf(kDim), kRowBytes);
  EXPECT_EQ(RowBytesOf(64), 256);
}

TEST(Streaming, ReadsSinksAndRecentRows) {
  const Selection ten = SelectStreaming(100, kDim, 10 * kRowBytes);
  EXPECT_EQ(ten.rows, Join(Range(0, 4), Range(94, 100)));
  EXPECT_EQ(ten.bytes, 10 * kRowBytes);
  // A part of a row is not read.
  EXPECT_EQ(SelectStreaming(100, kDim, 11 * kRowBytes - 1).rows, ten.rows);
}

TEST(Streaming, SmallAndLargeBudgets) {
  EXPECT_EQ(SelectStreaming(100, kDim, 3 * kRowBytes).rows, (std::vector<std::int64_t>{0, 1, 99}));
  const Selection none = SelectStreaming(100, kDim, -50);  // the step's own row all the same
  EXPECT_EQ(none.rows, (std::vector<std::int64_t>{99}));
  EXPECT_EQ(none.bytes, kRowBytes);
  const Selection all = SelectStreaming(6, kDim, 100 * kRowBytes);
  EXPECT_EQ(all.rows, Range(0, 6));
  EXPECT_EQ(all.bytes, 6 * kRowBytes);
}

TEST(TopK, TakesTheLargestSumsOfWeights) {
  // Two query heads over five rows: the sums are 0.5, 0.625, 0.125, 0.5, 0.25, all exact in binary.
  const std::vector<float> weights = {0.5f, 0.125f, 0.125f, 0.25f, 0.0f,  //
                                      0.0f, 0.5f,   0.0f,   0.25f, 0.25f};
  EXPECT_EQ(SelectTopK(weights, 5, kDim, kRowBytes).rows, (std::vector<std::int64_t>{1}));
  // Rows 0 and 3 are equal: the lower one first.
  EXPECT_EQ(SelectTopK(weights, 5, kDim, 2 * kRowBytes).rows, (std::vector<std::int64_t>{0, 1}));
  const Selection three = SelectTopK(weights, 5, kDim, 3 * kRowBytes);
  EXPECT_EQ(three.rows, (std::vector<std::int64_t>{0, 1, 3}));
  EXPECT_EQ(three.bytes, 3 * kRowBytes);
  EXPECT_EQ(SelectTopK(weights, 5, kDim, 9 * kRowBytes).rows, Range(0, 5));
  EXPECT_EQ(SelectTopK(weights, 5, kDim, 0).rows, (std::vector<std::int64_t>{1}));
}

TEST(SoftmaxWeights, AreThoseOfEachHead) {
  // Keys e_0, 2 e_0, e_1; queries 3 e_0 and 4 e_1; scale 1/2: logits 1.5, 3, 0 and 0, 0, 2.
  std::vector<float> k(3 * kDim, 0.0f);
  k[0] = 1.0f;
  k[kDim] = 2.0f;
  k[2 * kDim + 1] = 1.0f;
  std::vector<float> q(2 * kDim, 0.0f);
  q[0] = 3.0f;
  q[kDim + 1] = 4.0f;
  const std::vector<float> weights = SoftmaxWeights(q, k, kDim, 0.5f);
  const double first = std::exp(1.5) + std::exp(3.0) + 1.0;
  const double second = 2.0 + std::exp(2.0);
  const std::vector<double> expected = {std::exp(1.5) / first, std::exp(3.0) / first, 1.0 / first,
                                        1.0 / second,          1.0 / second,          std::exp(2.0) / second};
  ASSERT_EQ(weights.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(weights[i], expected[i], 1e-6) << i;
}

// Six pages and five rows. Keys are zero but for one row of some pages.
class QuestTest : public testing::Test {
 protected:
  static constexpr std::int64_t kRows = 101;

  QuestTest() : k_(kRows * kDim, 0.0f) {}
  void SetKey(int page, int row, int channel, float value) {
    k_[(page * QuestPages::kPageRows + row) * kDim + channel] = value;
  }
  // Bytes that are read whatever is chosen, for n = 101: the summaries of the pages 1 ... 5, the first page, five rows.
  static constexpr std::int64_t kFixed = 5 * kSummaryBytes + kPageBytes + 5 * kRowBytes;

  std::vector<float> k_;
};

TEST_F(QuestTest, BoundsComeFromMinimumAndMaximumPerChannel) {
  SetKey(1, 3, 0, 1.0f);    // q_0 = 2: bound 2
  SetKey(2, 15, 1, -4.0f);  // q_1 = -1: bound 4, from the minimum
  SetKey(3, 0, 0, -9.0f);   // bound 0: the other rows of the page are zero
  SetKey(4, 7, 0, 1.5f);    // with the next one, of another row, bound 3 + 0.5
  SetKey(4, 8, 1, -0.5f);
  std::vector<float> q(kDim, 0.0f);
  q[0] = 2.0f;
  q[1] = -1.0f;
  const QuestPages pages(k_, kDim);
  const Selection one = pages.Select(q, kRows, kFixed + kPageBytes);
  EXPECT_EQ(one.rows, Join(Join(Range(0, 16), Range(32, 48)), Range(96, 101)));
  EXPECT_EQ(one.bytes, kFixed + kPageBytes);
  const Selection two = pages.Select(q, kRows, kFixed + 3 * kPageBytes - 1);
  EXPECT_EQ(two.rows, Join(Join(Join(Range(0, 16), Range(32, 48)), Range(64, 80)), Range(96, 101)));
  EXPECT_EQ(two.bytes, kFixed + 2 * kPageBytes);
  const Selection three = pages.Select(q, kRows, kFixed + 3 * kPageBytes);
  EXPECT_EQ(three.rows, Join(Join(Range(0, 48), Range(64, 80)), Range(96, 101)));
}

TEST_F(QuestTest, QueryHeadsAddUp) {
  SetKey(1, 0, 0, 3.0f);  // first head 3, second 0
  SetKey(2, 0, 0, 2.0f);  // first head 2, second head 2
  SetKey(2, 0, 1, 2.0f);
  std::vector<float> q(2 * kDim, 0.0f);
  q[0] = 1.0f;
  q[kDim + 1] = 1.0f;
  const QuestPages pages(k_, kDim);
  EXPECT_EQ(pages.Select(q, kRows, kFixed + kPageBytes).rows, Join(Join(Range(0, 16), Range(32, 48)), Range(96, 101)));
}

TEST_F(QuestTest, FirstAndLastPageAreAlwaysRead) {
  const QuestPages pages(k_, kDim);
  const std::vector<float> q(kDim, 1.0f);
  const Selection least = pages.Select(q, kRows, 0);
  EXPECT_EQ(least.rows, Join(Range(0, 16), Range(96, 101)));
  EXPECT_EQ(least.bytes, kFixed);
  // A last page that is full is read, not scored; equal scores: the lower page.
  const Selection full = pages.Select(q, 96, 4 * kSummaryBytes + 3 * kPageBytes);
  EXPECT_EQ(full.rows, Join(Range(0, 32), Range(80, 96)));
  EXPECT_EQ(full.bytes, 4 * kSummaryBytes + 3 * kPageBytes);
  EXPECT_EQ(pages.Select(q, kRows, 1 << 20).rows, Range(0, kRows));
  // One page: no summaries.
  const Selection short_cache = pages.Select(q, 7, 0);
  EXPECT_EQ(short_cache.rows, Range(0, 7));
  EXPECT_EQ(short_cache.bytes, 7 * kRowBytes);
}

}  // namespace
}  // namespace scsa::tool
