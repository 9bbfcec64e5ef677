// SPDX-License-Identifier: Apache-2.0
//
// Packed 8-bit rows: what is stored, and attention over it against double precision, on every SIMD target.
#include "core/int8_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::Vector;

constexpr int kHeadDims[] = {8, 24, 64, 128, 136, 512};

// Rows of one block and their record, which ends with the last byte of its memory.
struct PackedBlock {
  PackedBlock(int head_dim, int n_rows, int room, std::uint32_t seed)
      : layout(head_dim, room), dims(static_cast<std::size_t>(head_dim)), record(layout.bytes()) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    keys.resize(dims * n_rows);
    values.resize(dims * n_rows);
    for (float& x : keys) x = normal(random);
    for (float& x : values) x = normal(random);
    for (int r = 0; r < n_rows; ++r) {
      keys[r * dims + seed % dims] = 40.0f + 0.1f * keys[r * dims + seed % dims];  // large and hardly varying
      values[r * dims + (seed + 1) % dims] = -2.5f;                                // constant
    }
    order.resize(n_rows);
    std::iota(order.begin(), order.end(), std::uint16_t{0});
    std::ranges::shuffle(order, random);
    StoreInt8Rows(layout, keys.data(), values.data(), order, record.data());
  }

  // What the record says about packed row `row`, which is row order[row].
  Vector StoredKey(int row) const {
    const ConstInt8Rows rows = layout.Rows(record.data());
    Vector key(dims);
    for (std::size_t d = 0; d < dims; ++d) {
      key[d] = double{rows.key_mid[d]} + double{rows.key_step[d]} * rows.keys[row * layout.dims() + d];
    }
    return key;
  }
  Vector StoredValue(int row) const {
    const ConstInt8Rows rows = layout.Rows(record.data());
    Vector value(dims);
    for (std::size_t d = 0; d < dims; ++d) {
      const int stored = rows.values[row / 2 * 2 * layout.dims() + 2 * d + row % 2];
      value[d] = double{rows.value_mid[d]} + double{rows.value_step[d]} * stored;
    }
    return value;
  }

  Int8RowLayout layout;
  std::size_t dims;
  std::vector<float> keys, values;
  std::vector<std::uint16_t> order;
  std::vector<std::byte> record;
};

TEST(StoreInt8Rows, EachValueIsWithinHalfAStepOfItsDimension) {
  test::OnEveryTarget([] {
    for (const int head_dim : kHeadDims) {
      for (const int n_rows : {1, 2, 63, 64}) {
        const PackedBlock block(head_dim, n_rows, 64, 3);
        for (std::size_t d = 0; d < block.dims; ++d) {
          const auto range = [&](const std::vector<float>& rows) {
            float low = rows[d];
            float high = rows[d];
            for (int r = 1; r < n_rows; ++r) {
              low = std::min(low, rows[r * block.dims + d]);
              high = std::max(high, rows[r * block.dims + d]);
            }
            return double{high} - double{low};
          };
          // Half of 1 / 254 of the range, and the rounding of a float.
          const double key_error = range(block.keys) / 508 * 1.0001 + 4e-6;
          const double value_error = range(block.values) / 508 * 1.0001 + 4e-7;
          for (int r = 0; r < n_rows; ++r) {
            ASSERT_NEAR(block.StoredKey(r)[d], block.keys[block.order[r] * block.dims + d], key_error);
            ASSERT_NEAR(block.StoredValue(r)[d], block.values[block.order[r] * block.dims + d], value_error);
          }
        }
      }
    }
  });
}

TEST(StoreInt8Rows, WhatIsBeyondTheRowsAndTheirDimensionsIsZero) {
  test::OnEveryTarget([] {
    const PackedBlock block(24, 5, 8, 1);
    const std::size_t dims = block.layout.dims();
    ASSERT_EQ(dims, 32u);
    const ConstInt8Rows rows = block.layout.Rows(block.record.data());
    for (std::size_t i = 0; i < 8 * dims; ++i) {
      const std::size_t row = i / dims;
      const std::size_t d = i % dims;
      if (row < 5 && d < 24) continue;
      EXPECT_EQ(rows.keys[i], 0) << row << ", " << d;
      EXPECT_EQ(rows.values[row / 2 * 2 * dims + 2 * d + row % 2], 0) << row << ", " << d;
    }
    EXPECT_EQ(reinterpret_cast<const std::byte*>(rows.values + 8 * dims), block.record.data() + block.layout.bytes());
  });
}

// A run over pairs of several blocks.
struct PairRun {
  std::vector<const std::byte*> records, pairs;
  std::vector<std::uint8_t> seen;
  std::vector<const PackedBlock*> blocks;
  std::vector<int> first_rows;  // packed rows

  void Add(const PackedBlock& block, int pair, std::uint8_t which) {
    records.push_back(block.record.data());
    pairs.push_back(block.record.data() + block.layout.PairAt(pair));
    seen.push_back(which);
    blocks.push_back(&block);
    first_rows.push_back(2 * pair);
  }

  Int8RunArgs Args(int n, const std::vector<float>& q, float softcap = 0.0f) const {
    return {.layout = &blocks[0]->layout,
            .n = n,
            .q = q.data(),
            .softcap = softcap,
            .n_pairs = std::ssize(pairs),
            .records = records.data(),
            .pairs = pairs.data(),
            .seen = seen.data()};
  }
};

class AttendInt8RowsTest : public ::testing::Test {
 protected:
  // Attends and compares with double precision over what the records say, from a state that already holds some rows.
  static void Expect(const PairRun& run, int head_dim, int n, float softcap, float spread) {
    const auto dims = static_cast<std::size_t>(head_dim);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> q(dims * n);
    for (float& x : q) x = spread * normal(random) / std::sqrt(static_cast<float>(head_dim));
    std::vector<float> max(n, -1.0f), sum(n, 2.0f), num(dims * n, 0.5f);
    AttendInt8Rows(run.Args(n, q, softcap), {max.data(), sum.data(), num.data()});
    for (int i = 0; i < n; ++i) {
      const Vector query = test::ToDouble(q.data() + i * dims, head_dim);
      double largest_q = 0;
      for (const double x : query) largest_q = std::max(largest_q, std::fabs(x));
      Vector logits;
      std::vector<Vector> values;
      double gauge = -1.0;
      double logit_error = 1e-5;  // of f32
      for (std::size_t p = 0; p < run.pairs.size(); ++p) {
        const PackedBlock& block = *run.blocks[p];
        // A query is rounded to half a step of 15 bits in each dimension; errors of dimensions are independent.
        const double step = largest_q * block.layout.Rows(block.record.data()).largest_key_step[0] / 16383;
        logit_error = std::max(logit_error, 1e-5 + 5 * 0.29 * step * 74 * std::sqrt(static_cast<double>(head_dim)));
        for (int r = 0; r < 2; ++r) {
          if ((run.seen[p] >> r & 1) == 0) continue;
          double logit = test::DotOf(query, block.StoredKey(run.first_rows[p] + r));
          if (softcap > 0) logit = softcap * std::tanh(logit / softcap);
          logits.push_back(logit);
          values.push_back(block.StoredValue(run.first_rows[p] + r));
          gauge = std::max(gauge, logit);
        }
      }
      double mass = 2.0 * std::exp(-1.0 - gauge);
      Vector expected(dims, 0.5 * std::exp(-1.0 - gauge));
      double weight_of_values = 0;
      for (std::size_t r = 0; r < logits.size(); ++r) {
        const double weight = std::exp(logits[r] - gauge);
        mass += weight;
        weight_of_values += weight;
        for (std::size_t d = 0; d < dims; ++d) expected[d] += weight * values[r][d];
      }
      ASSERT_NEAR(max[i], gauge, logit_error + 1e-6 * std::fabs(gauge));
      ASSERT_NEAR(sum[i] * std::exp(max[i] - gauge), mass, mass * 4 * logit_error);
      // Weights are rounded to half of 1 / 32767 of the batch's largest; the stored part of a value is below 5.
      const double rounding = 5.0 * 0.5 / 32767 * std::sqrt(static_cast<double>(logits.size())) * 4 +
                              5.0 * weight_of_values * 4 * logit_error;
      for (std::size_t d = 0; d < dims; ++d) {
        ASSERT_NEAR(num[i * dims + d] * std::exp(max[i] - gauge), expected[d], rounding + 1e-6 * std::fabs(expected[d]))
            << "vector " << i << " of " << n << ", dimension " << d << " of " << head_dim;
      }
    }
  }
};

TEST_F(AttendInt8RowsTest, FollowsDoublePrecisionOnEveryTarget) {
  test::OnEveryTarget([] {
    for (const int head_dim : kHeadDims) {
      std::vector<PackedBlock> blocks;
      for (std::uint32_t b = 0; b < 5; ++b) blocks.emplace_back(head_dim, b == 0 ? 59 : 64, 64, b + 1);
      std::mt19937 random(5);
      for (const int n_pairs : {1, 2, 3, 5, 31, 32, 33, 70}) {
        PairRun run;
        for (int p = 0; p < n_pairs; ++p) {
          // Ascending pairs of the blocks, some of which have one pair alone.
          const int block = p * 5 / n_pairs;
          const int pair = static_cast<int>((p * 3 + random() % 3) % (block == 0 ? 29 : 32));
          run.Add(blocks[block], pair, static_cast<std::uint8_t>(1 + random() % 3));
        }
        for (const int n : {1, 2, 3, 4, 7}) Expect(run, head_dim, n, 0.0f, 2.0f);
      }
    }
  });
}

TEST_F(AttendInt8RowsTest, CapsLogits) {
  test::OnEveryTarget([] {
    const PackedBlock block(64, 64, 64, 2);
    PairRun run;
    for (int pair = 0; pair < 32; ++pair) run.Add(block, pair, 3);
    Expect(run, 64, 3, 1.5f, 4.0f);
  });
}

TEST_F(AttendInt8RowsTest, CountsEachRowOnceWhereLogitsAreEqual) {
  test::OnEveryTarget([] {
    const PackedBlock block(64, 64, 64, 2);
    PairRun run;
    int rows = 0;
    for (int pair = 0; pair < 32; ++pair) {
      const auto which = static_cast<std::uint8_t>(1 + pair % 3);
      run.Add(block, pair, which);
      rows += which == 3 ? 2 : 1;
    }
    const std::vector<float> q(2 * 64, 0.0f);
    std::vector<float> max(2, -std::numeric_limits<float>::infinity()), sum(2, 0.0f), num(2 * 64, 0.0f);
    AttendInt8Rows(run.Args(2, q), {max.data(), sum.data(), num.data()});
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(max[i], 0.0f);
      EXPECT_EQ(sum[i], static_cast<float>(rows));
      // The constant dimension is stored without error.
      EXPECT_NEAR(num[i * 64 + 3], -2.5f * static_cast<float>(rows), 1e-4f);
    }
  });
}

// Logits beyond the floats weigh all or nothing, as with f32 rows; they do not become NaN.
TEST_F(AttendInt8RowsTest, OverflowingLogitsStayNumbers) {
  test::OnEveryTarget([] {
    const PackedBlock block(64, 64, 64, 2);
    PairRun run;
    for (int pair = 0; pair < 32; ++pair) run.Add(block, pair, 3);
    const std::vector<float> q(64, 3e38f);
    float max = -std::numeric_limits<float>::infinity();
    float sum = 0.0f;
    std::vector<float> num(64, 0.0f);
    AttendInt8Rows(run.Args(1, q), {&max, &sum, num.data()});
    EXPECT_TRUE(std::isfinite(sum));
    for (const float x : num) EXPECT_TRUE(std::isfinite(x));
  });
}

}  // namespace
}  // namespace scsa
