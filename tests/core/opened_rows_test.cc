// SPDX-License-Identifier: Apache-2.0
//
// The rows of opened clusters, from the cache and from each packed format, against the plan's lists of members.
#include "core/opened_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/block_plan.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

constexpr Shape kShape{6, 2, 64};
constexpr int kBlocks = 5;

struct Built {
  explicit Built(PackedFormat format, int sink = 5) : cache(kShape, 64 * kBlocks, DType::kF16, 3), kv(cache.View()) {
    Config config = ConfigFor(Preset::kFast);
    config.block_size = 64;
    config.sink = sink;  // odd: the first block ends with half a pair
    config.packed_format = format;
    plan = std::make_unique<BlockPlan>(kShape, config);
    std::vector<int> blocks(kBlocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    EXPECT_TRUE(plan->Build(kv, blocks, 1).status.ok());
  }
  test::SyntheticCache cache;
  KvView kv;
  std::unique_ptr<BlockPlan> plan;
};

std::vector<std::int32_t> SomeClusters(int slots, int one_in, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> clusters;
  for (std::int32_t c = 0; c < slots * kBlocks; ++c) {
    if (random() % one_in == 0) clusters.push_back(c);
  }
  return clusters;
}

// Softmax attention of the group over the members of the clusters, in double.
std::vector<test::Vector> Restated(const Built& built, int kv_head, std::span<const std::int32_t> rows,
                                   const std::vector<float>& q) {
  std::vector<test::Vector> out;
  for (int i = 0; i < kShape.group(); ++i) {
    test::PlainSoftmax softmax(kShape.head_dim);
    const test::Vector query = test::ToDouble(q.data() + i * kShape.head_dim, kShape.head_dim);
    for (const std::int32_t row : rows) {
      const auto decoded = [&](const std::byte* from) { return test::DecodedRow(from, DType::kF16, kShape.head_dim); };
      softmax.Add(test::DotOf(query, decoded(built.kv.KRow(row, kv_head))), decoded(built.kv.VRow(row, kv_head)));
    }
    out.push_back(softmax.Output());
  }
  return out;
}

struct Format {
  PackedFormat format;
  double tolerance;  // of an output
};
constexpr Format kFormats[] = {
    {PackedFormat::kNone, 1e-5}, {PackedFormat::kF16, 1e-5}, {PackedFormat::kQ8_0, 0.02}, {PackedFormat::kInt8, 0.02}};

TEST(OpenedRows, AreTheMembersOfTheClustersInEveryFormat) {
  const std::vector<float> q = [] {
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    std::vector<float> drawn(kShape.group() * kShape.head_dim);
    for (float& x : drawn) x = 0.2f * normal(random);
    return drawn;
  }();
  for (const Format& format : kFormats) {
    const Built built(format.format);
    OpenedRows rows;
    for (int kv_head = 0; kv_head < kShape.kv_heads; ++kv_head) {
      for (const int one_in : {1, 2, 5, 20}) {
        SCOPED_TRACE(testing::Message() << "format " << static_cast<int>(format.format) << ", one in " << one_in);
        const std::vector<std::int32_t> clusters = SomeClusters(built.plan->slots(), one_in, one_in + kv_head);
        std::vector<std::int32_t> members;
        built.plan->AppendRows(kv_head, clusters, members);
        rows.Find(*built.plan, built.kv, kv_head, clusters);
        EXPECT_EQ(rows.n_rows(), members.size());

        // In two parts, whose states merge.
        std::vector<float> max(kShape.group(), -std::numeric_limits<float>::infinity());
        std::vector<float> sum(kShape.group()), num(q.size());
        const SoftmaxState state{max.data(), sum.data(), num.data()};
        const OpenedRows::Queries queries{kShape.group(), q.data(), 0.0f};
        const std::size_t half = rows.size() / 2;
        rows.Attend(0, half, queries, state);
        rows.Attend(half, rows.size() - half, queries, state);
        const std::vector<test::Vector> expected = Restated(built, kv_head, members, q);
        for (int i = 0; i < kShape.group(); ++i) {
          test::Vector out(kShape.head_dim);
          for (int d = 0; d < kShape.head_dim; ++d) out[d] = double{num[i * kShape.head_dim + d]} / sum[i];
          EXPECT_LT(test::RelativeL2(out, expected[i]), format.tolerance);
        }

        // With logits of 0 each row counts as one.
        const std::vector<float> zero(q.size(), 0.0f);
        std::ranges::fill(max, -std::numeric_limits<float>::infinity());
        std::ranges::fill(sum, 0.0f);
        std::ranges::fill(num, 0.0f);
        rows.Attend(0, rows.size(), {kShape.group(), zero.data(), 0.0f}, state);
        for (const float total : sum) EXPECT_EQ(total, static_cast<float>(members.size()));
      }
    }
  }
}

TEST(OpenedRows, NoClustersAreNoRows) {
  for (const Format& format : kFormats) {
    const Built built(format.format);
    OpenedRows rows;
    rows.Find(*built.plan, built.kv, 0, SomeClusters(built.plan->slots(), 2, 1));
    rows.Find(*built.plan, built.kv, 0, {});
    EXPECT_EQ(rows.n_rows(), 0u);
    EXPECT_EQ(rows.size(), 0u);
  }
}

// Rows of neighbouring clusters that share a pair are read with it once.
TEST(OpenedRows, PairsAreNotReadTwice) {
  const Built built(PackedFormat::kInt8);
  std::vector<std::int32_t> all(static_cast<std::size_t>(built.plan->slots()) * kBlocks);
  std::iota(all.begin(), all.end(), 0);
  OpenedRows rows;
  rows.Find(*built.plan, built.kv, 0, all);
  EXPECT_EQ(rows.n_rows(), 64u * kBlocks - 5);
  EXPECT_EQ(rows.size(), 32u * kBlocks - 2);  // 59 rows of the first block are 30 pairs
}

TEST(BlockPlan, MemoryOfInt8RowsIsWithinTwoThirdsOfTheCache) {
  // Blocks and clusters of preset fast.
  const Shape shape{14, 2, 64};
  Config config = ConfigFor(Preset::kFast);
  config.packed_format = PackedFormat::kInt8;
  const BlockPlan plan(shape, config);
  const double cache = 256.0 * shape.kv_heads * 2 * shape.head_dim * 2;
  EXPECT_LT(static_cast<double>(plan.BlockBytes()), 0.65 * cache);
  EXPECT_EQ(plan.OpenedRowBytes({}), 128u);
}

}  // namespace
}  // namespace scsa
