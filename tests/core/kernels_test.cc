// SPDX-License-Identifier: Apache-2.0
//
// Every row kernel against plain double-precision code, on every SIMD target that this machine can run.
#include "core/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "scsa/target.h"
#include "tests/core/reference.h"

namespace scsa {
namespace {

using testing::DecodeReference;
using testing::EncodeReference;
using testing::RandomVector;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};
constexpr int kHeadDims[] = {8, 24, 32, 40, 64, 72, 80, 96, 128, 256, 512};

class KernelsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(ForceTarget(GetParam()).ok());
    ASSERT_EQ(ActiveTarget(), GetParam());
  }
  void TearDown() override { ASSERT_TRUE(ForceTarget("").ok()); }
};

INSTANTIATE_TEST_SUITE_P(Targets, KernelsTest, ::testing::ValuesIn(AvailableTargets()),
                         [](const auto& param) { return param.param; });

// ------------------------------------------------------------------------------------------------ row formats

TEST_P(KernelsTest, DecodesEveryF16Pattern) {
  std::vector<std::uint16_t> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
  std::vector<float> decoded(patterns.size());
  for (std::size_t i = 0; i < patterns.size(); i += 8) {
    DecodeRow(reinterpret_cast<const std::byte*>(patterns.data() + i), DType::kF16, 8, decoded.data() + i);
  }
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    const double expected = testing::F16Value(patterns[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(decoded[i])) << i;
    } else {
      ASSERT_EQ(static_cast<double>(decoded[i]), expected) << i;
      ASSERT_EQ(std::signbit(decoded[i]), (i & 0x8000) != 0) << i;
    }
  }
}

TEST_P(KernelsTest, DecodesRowsOfEveryType) {
  std::mt19937 generator(1);
  for (const DType type : kTypes) {
    for (const int head_dim : kHeadDims) {
      std::vector<std::byte> row;
      EncodeReference(RandomVector(static_cast<std::size_t>(head_dim), 2.0f, &generator), type, &row);
      ASSERT_EQ(row.size(), RowBytes(type, head_dim));
      std::vector<float> decoded(static_cast<std::size_t>(head_dim));
      DecodeRow(row.data(), type, head_dim, decoded.data());
      const std::vector<double> expected = DecodeReference(row.data(), type, head_dim);
      for (std::size_t i = 0; i < decoded.size(); ++i) {
        ASSERT_EQ(decoded[i], static_cast<float>(expected[i])) << DTypeName(type) << " " << head_dim << " " << i;
      }
    }
  }
}

TEST_P(KernelsTest, EncodesRowsOfEveryType) {
  std::mt19937 generator(2);
  for (const DType type : kTypes) {
    for (const int head_dim : kHeadDims) {
      const std::vector<float> values = RandomVector(static_cast<std::size_t>(head_dim), 3.0f, &generator);
      std::vector<std::byte> expected;
      EncodeReference(values, type, &expected);
      std::vector<std::byte> encoded(RowBytes(type, head_dim), std::byte{0xAA});
      EncodeRow(values.data(), type, head_dim, encoded.data());
      ASSERT_EQ(encoded, expected) << DTypeName(type) << " " << head_dim;
    }
  }
}

TEST_P(KernelsTest, RoundsHalfFloatsToNearestEven) {
  std::vector<float> values;
  // All midpoints between neighbouring f16 values, the floats on either side of them, and the values themselves.
  for (int bits = 0; bits < 0x7C00; bits += 7) {
    const auto here = static_cast<float>(testing::F16Value(static_cast<std::uint16_t>(bits)));
    const auto next =
        bits == 0x7BFF ? 65536.0f : static_cast<float>(testing::F16Value(static_cast<std::uint16_t>(bits + 1)));
    const float middle = here + (next - here) / 2.0f;
    for (const float value : {here, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  for (const float value :
       {65504.0f, 65519.99f, 65520.0f, 1e6f, HUGE_VALF, -HUGE_VALF, 1e-8f, 5.9e-8f, 2.98e-8f, 0.0f}) {
    values.push_back(value);
  }
  values.resize((values.size() + 7) / 8 * 8);
  for (const DType type : {DType::kF16, DType::kBF16}) {
    std::vector<std::byte> expected;
    EncodeReference(values, type, &expected);
    for (std::size_t i = 0; i < values.size(); i += 8) {
      std::byte encoded[16];
      EncodeRow(values.data() + i, type, 8, encoded);
      for (std::size_t j = 0; j < 8; ++j) {
        ASSERT_EQ(std::memcmp(encoded + 2 * j, expected.data() + 2 * (i + j), 2), 0)
            << DTypeName(type) << " of " << values[i + j];
      }
    }
  }
}

TEST_P(KernelsTest, KeepsNotANumber) {
  const std::vector<float> values(8, std::numeric_limits<float>::quiet_NaN());
  for (const DType type : {DType::kF16, DType::kBF16}) {
    std::byte encoded[16];
    EncodeRow(values.data(), type, 8, encoded);
    std::vector<float> decoded(8);
    DecodeRow(encoded, type, 8, decoded.data());
    for (const float value : decoded) EXPECT_TRUE(std::isnan(value));
  }
}

TEST_P(KernelsTest, RoundsHalvesOfQ8AwayFromZero) {
  // The largest value makes the scale 1.
  const std::vector<float> values = {127.0f, 0.5f, -0.5f, 1.5f, -1.5f, 2.49999976f, 0.49999997f, -126.5f};
  const std::vector<int> expected = {127, 1, -1, 2, -2, 2, 0, -127};
  std::byte encoded[34];
  EncodeRow(values.data(), DType::kQ8_0, 8, encoded);
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(static_cast<std::int8_t>(encoded[2 + i]), expected[i]) << i;
  for (std::size_t i = 8; i < 32; ++i) EXPECT_EQ(encoded[2 + i], std::byte{0}) << i;
}

TEST_P(KernelsTest, EncodesZerosAsZeros) {
  const std::vector<float> zeros(40, 0.0f);
  std::vector<std::byte> encoded(RowBytes(DType::kQ8_0, 40), std::byte{0xAA});
  EncodeRow(zeros.data(), DType::kQ8_0, 40, encoded.data());
  EXPECT_EQ(encoded, std::vector<std::byte>(encoded.size(), std::byte{0}));
}

TEST_P(KernelsTest, QuantizesQueries) {
  std::mt19937 generator(3);
  for (const int head_dim : kHeadDims) {
    const std::size_t dims = static_cast<std::size_t>(head_dim);
    const std::size_t blocks = (dims + 31) / 32;
    const std::vector<float> q = RandomVector(dims, 1.0f, &generator);
    std::vector<std::int8_t> values(blocks * 32, 99);
    std::vector<float> scales(blocks);
    QuantizeQuery(q.data(), head_dim, 0.125f, values.data(), scales.data());
    for (std::size_t b = 0; b < blocks; ++b) {
      double largest = 0.0;
      for (std::size_t i = b * 32; i < std::min(dims, (b + 1) * 32); ++i) {
        largest = std::max(largest, std::fabs(static_cast<double>(q[i])));
      }
      ASSERT_NEAR(scales[b], largest / 127.0 * 0.125, 1e-7);
      for (std::size_t i = b * 32; i < (b + 1) * 32; ++i) {
        if (i >= dims) {
          ASSERT_EQ(values[i], 0);
        } else {
          // Half a step, and a little for the rounding of the step itself.
          ASSERT_LE(std::fabs(q[i] / (largest / 127.0) - values[i]), 0.5001) << i;
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ dense vectors

TEST_P(KernelsTest, DenseVectorHelpers) {
  std::mt19937 generator(4);
  for (const std::size_t n : {0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 513}) {
    const std::vector<float> a = RandomVector(n, 1.0f, &generator);
    const std::vector<float> b = RandomVector(n, 1.0f, &generator);
    double dot = 0.0;
    double distance = 0.0;
    double magnitude = 1.0;
    for (std::size_t i = 0; i < n; ++i) {
      const double x = static_cast<double>(a[i]);
      const double y = static_cast<double>(b[i]);
      dot += x * y;
      distance += (x - y) * (x - y);
      magnitude += std::fabs(x * y);
    }
    EXPECT_NEAR(Dot(a.data(), b.data(), static_cast<std::int64_t>(n)), dot, 1e-6 * magnitude) << n;
    EXPECT_NEAR(SquaredDistance(a.data(), b.data(), static_cast<std::int64_t>(n)), distance, 1e-6 * (1.0 + distance))
        << n;
    std::vector<float> sum = a;
    AddScaled(sum.data(), b.data(), -0.75f, static_cast<std::int64_t>(n));
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_NEAR(sum[i], static_cast<double>(a[i]) - 0.75 * static_cast<double>(b[i]), 1e-6) << n << " " << i;
    }
  }
}

// ------------------------------------------------------------------------------------------------ scores

// Rows with a gap between them and a start that is aligned to the element only.
struct Rows {
  Rows(DType type, int head_dim, std::int64_t count, float deviation, std::mt19937* generator) {
    const std::size_t element = type == DType::kF32 ? 4 : 2;
    stride = static_cast<std::int64_t>(RowBytes(type, head_dim) + 3 * element);
    bytes.resize(element);
    for (std::int64_t r = 0; r < count; ++r) {
      EncodeReference(RandomVector(static_cast<std::size_t>(head_dim), deviation, generator), type, &bytes);
      decoded.push_back(DecodeReference(bytes.data() + bytes.size() - RowBytes(type, head_dim), type, head_dim));
      if (r + 1 < count) bytes.resize(bytes.size() + 3 * element, std::byte{0xFF});
    }
    bytes.shrink_to_fit();  // a sanitizer then sees every read beyond the last row
    data = bytes.data() + element;
  }
  std::vector<std::byte> bytes;
  const std::byte* data;
  std::int64_t stride;
  std::vector<std::vector<double>> decoded;
};

TEST_P(KernelsTest, ScoresRows) {
  std::mt19937 generator(5);
  for (const DType type : kTypes) {
    for (const int head_dim : kHeadDims) {
      const auto dims = static_cast<std::size_t>(head_dim);
      for (const std::int64_t n_rows : {0, 1, 7, 63, 64, 65, 130}) {
        if (n_rows == 0 && head_dim > 8) continue;
        const Rows rows(type, head_dim, n_rows, 1.0f, &generator);
        for (const int n : {1, 2, 3, 4, 5, 9}) {
          const std::vector<float> q = RandomVector(static_cast<std::size_t>(n) * dims, 1.0f, &generator);
          const std::int64_t logits_stride = n_rows + 5;
          std::vector<float> logits(static_cast<std::size_t>(n * logits_stride), 1234.0f);
          ScoreRows(head_dim, n, q.data(), rows.data, rows.stride, type, n_rows, logits.data(), logits_stride);
          for (int i = 0; i < n; ++i) {
            for (std::int64_t r = 0; r < n_rows; ++r) {
              double expected = 0.0;
              double magnitude = 0.0;
              for (std::size_t j = 0; j < dims; ++j) {
                const double product = static_cast<double>(q[static_cast<std::size_t>(i) * dims + j]) *
                                       rows.decoded[static_cast<std::size_t>(r)][j];
                expected += product;
                magnitude += std::fabs(product);
              }
              ASSERT_NEAR(logits[static_cast<std::size_t>(i * logits_stride + r)], expected, 1e-6 * magnitude + 1e-9)
                  << DTypeName(type) << " head_dim " << head_dim << " rows " << n_rows << " n " << n;
            }
            for (std::int64_t r = n_rows; r < logits_stride; ++r) {
              ASSERT_EQ(logits[static_cast<std::size_t>(i * logits_stride + r)], 1234.0f) << "written past the rows";
            }
          }
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ softmax states

struct State {
  State(int n, int head_dim)
      : max(static_cast<std::size_t>(n), -HUGE_VALF),
        sum(static_cast<std::size_t>(n), 0.0f),
        num(static_cast<std::size_t>(n) * static_cast<std::size_t>(head_dim), 0.0f) {}
  SoftmaxState view() { return {max.data(), sum.data(), num.data()}; }
  std::vector<float> max;
  std::vector<float> sum;
  std::vector<float> num;
};

// num / sum of vector i must be the expected output, and sum * exp(max) the expected mass.
void ExpectState(const State& state, std::size_t i, const std::vector<double>& logits,
                 const std::vector<std::vector<double>>& values, double tolerance, const std::string& where) {
  const std::size_t dims = values.front().size();
  double max = -HUGE_VAL;
  for (const double x : logits) max = std::max(max, x);
  if (max == -HUGE_VAL) {
    ASSERT_EQ(state.max[i], -HUGE_VALF) << where;
    ASSERT_EQ(state.sum[i], 0.0f) << where;
    for (std::size_t j = 0; j < dims; ++j) ASSERT_EQ(state.num[i * dims + j], 0.0f) << where;
    return;
  }
  double sum = 0.0;
  std::vector<double> out(dims, 0.0);
  for (std::size_t r = 0; r < logits.size(); ++r) {
    if (logits[r] == -HUGE_VAL) continue;
    const double weight = std::exp(logits[r] - max);
    sum += weight;
    for (std::size_t j = 0; j < dims; ++j) out[j] += weight * values[r][j];
  }
  std::vector<float> actual(dims);
  for (std::size_t j = 0; j < dims; ++j) {
    out[j] /= sum;
    actual[j] = state.num[i * dims + j] / state.sum[i];
  }
  ASSERT_LE(testing::WorstRelativeError(actual, out, 1), tolerance) << where;
  const double log_mass = std::log(static_cast<double>(state.sum[i])) + static_cast<double>(state.max[i]);
  ASSERT_NEAR(log_mass, std::log(sum) + max, tolerance * (1.0 + std::fabs(max))) << where;
}

struct RunCase {
  int head_dim;
  int n;
  std::int64_t n_rows;
  DType k_type;
  DType v_type;
  float softcap = 0.0f;
  float deviation = 1.0f;
  double hidden = 0.0;  // share of rows that a query does not see
  bool quantized = false;
  std::int64_t first_bit = 0;
};

void CheckRun(const RunCase& c, unsigned seed) {
  std::mt19937 generator(seed);
  const auto dims = static_cast<std::size_t>(c.head_dim);
  const auto n = static_cast<std::size_t>(c.n);
  const Rows keys(c.k_type, c.head_dim, c.n_rows, c.deviation, &generator);
  const Rows values(c.v_type, c.head_dim, c.n_rows, 1.0f, &generator);
  const std::vector<float> q = RandomVector(n * dims, 1.0f / std::sqrt(static_cast<float>(c.head_dim)), &generator);

  const auto words = static_cast<std::size_t>((c.first_bit + c.n_rows + 63) / 64);
  std::vector<std::vector<std::uint64_t>> bitmaps(n, std::vector<std::uint64_t>(words, 0));
  std::vector<const std::uint64_t*> visible;
  std::bernoulli_distribution sees(1.0 - c.hidden);
  for (auto& bitmap : bitmaps) {
    for (std::int64_t bit = 0; bit < static_cast<std::int64_t>(words) * 64; ++bit) {
      // Bits before the run and behind it are noise that must not matter.
      if (sees(generator)) bitmap[static_cast<std::size_t>(bit / 64)] |= std::uint64_t{1} << (bit % 64);
    }
    visible.push_back(bitmap.data());
  }

  const std::size_t blocks = (dims + 31) / 32;
  std::vector<std::int8_t> q8(n * blocks * 32);
  std::vector<float> scales(n * blocks);
  std::vector<QuantizedQuery> quantized(n);
  for (std::size_t i = 0; i < n; ++i) {
    QuantizeQuery(q.data() + i * dims, c.head_dim, 1.0f, q8.data() + i * blocks * 32, scales.data() + i * blocks);
    quantized[i] = {q8.data() + i * blocks * 32, scales.data() + i * blocks};
  }

  RunArgs args;
  args.head_dim = c.head_dim;
  args.n = c.n;
  args.q = q.data();
  args.quantized = c.quantized ? quantized.data() : nullptr;
  args.softcap = c.softcap;
  args.k = keys.data;
  args.v = values.data;
  args.k_stride = keys.stride;
  args.v_stride = values.stride;
  args.k_type = c.k_type;
  args.v_type = c.v_type;
  args.n_rows = c.n_rows;
  args.visible = c.hidden > 0.0 ? visible.data() : nullptr;
  args.first_bit = c.first_bit;
  State state(c.n, c.head_dim);
  AttendRun(args, state.view());

  const std::string where = "head_dim " + std::to_string(c.head_dim) + " n " + std::to_string(c.n) + " rows " +
                            std::to_string(c.n_rows) + " K " + DTypeName(c.k_type) + " V " + DTypeName(c.v_type) +
                            " hidden " + std::to_string(c.hidden) + (c.quantized ? " quantized" : "");
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<double> logits;
    double largest = 0.0;
    for (std::size_t r = 0; r < keys.decoded.size(); ++r) {
      double x = 0.0;
      for (std::size_t j = 0; j < dims; ++j) {
        const double query = c.quantized ? static_cast<double>(scales[i * blocks + j / 32]) * q8[i * blocks * 32 + j]
                                         : static_cast<double>(q[i * dims + j]);
        x += query * keys.decoded[r][j];
      }
      if (c.softcap > 0.0f) x = static_cast<double>(c.softcap) * std::tanh(x / static_cast<double>(c.softcap));
      const std::int64_t bit = c.first_bit + static_cast<std::int64_t>(r);
      const bool seen = c.hidden == 0.0 || (bitmaps[i][static_cast<std::size_t>(bit / 64)] >> (bit % 64) & 1) != 0;
      logits.push_back(seen ? x : -HUGE_VAL);
      if (seen) largest = std::max(largest, std::fabs(x));
    }
    // An f32 logit of size x carries an error of some 1e-7 x, which is the relative error of its weight.
    if (!logits.empty()) ExpectState(state, i, logits, values.decoded, 2e-6 + 1e-6 * largest, where);
  }
}

TEST_P(KernelsTest, AttendsRowsOfEveryHeadDimAndCount) {
  unsigned seed = 100;
  for (const int head_dim : kHeadDims) {
    for (const std::int64_t n_rows : {1, 2, 7, 63, 64, 65, 200}) {
      for (const int n : {1, 2, 3, 4, 5, 7}) CheckRun({head_dim, n, n_rows, DType::kF16, DType::kF16}, ++seed);
    }
  }
}

TEST_P(KernelsTest, AttendsEveryMixOfTypes) {
  unsigned seed = 200;
  for (const DType k_type : kTypes) {
    for (const DType v_type : kTypes) {
      for (const int head_dim : {40, 64, 80, 128}) {
        for (const int n : {1, 2, 3, 4, 9}) CheckRun({head_dim, n, 150, k_type, v_type}, ++seed);
      }
    }
  }
}

TEST_P(KernelsTest, AttendsQuantizedQueries) {
  unsigned seed = 300;
  for (const int head_dim : kHeadDims) {
    for (const int n : {1, 2, 3, 4, 7}) {
      RunCase c{head_dim, n, 131, DType::kQ8_0, DType::kQ8_0};
      c.quantized = true;
      CheckRun(c, ++seed);
      c.hidden = 0.5;
      CheckRun(c, ++seed);
    }
  }
}

TEST_P(KernelsTest, HonoursVisibleSets) {
  unsigned seed = 400;
  for (const double hidden : {0.05, 0.5, 0.95, 0.999}) {
    for (const int n : {1, 2, 3, 4, 6, 20}) {
      for (const std::int64_t n_rows : {1, 65, 300}) {
        RunCase c{64, n, n_rows, DType::kF16, DType::kF16};
        c.hidden = hidden;
        c.first_bit = 128;
        CheckRun(c, ++seed);
      }
    }
  }
}

TEST_P(KernelsTest, CapsLogits) {
  unsigned seed = 500;
  for (const float softcap : {0.5f, 5.0f, 50.0f}) {
    RunCase c{64, 3, 200, DType::kF32, DType::kF32};
    c.softcap = softcap;
    c.deviation = 10.0f;
    CheckRun(c, ++seed);
  }
}

TEST_P(KernelsTest, SurvivesLargeLogits) {
  unsigned seed = 600;
  for (const float deviation : {30.0f, 300.0f, 3000.0f}) {
    RunCase c{64, 3, 200, DType::kF32, DType::kF16};
    c.deviation = deviation;
    CheckRun(c, ++seed);
  }
}

// Places in any order, some of them twice.
std::vector<std::int32_t> RandomPlaces(std::size_t count, std::int64_t n_rows, std::mt19937* generator) {
  std::uniform_int_distribution<std::int32_t> place(0, static_cast<std::int32_t>(n_rows) - 1);
  std::vector<std::int32_t> places(count);
  for (std::int32_t& p : places) p = place(*generator);
  return places;
}

TEST_P(KernelsTest, AttendsScatteredRows) {
  std::mt19937 generator(31);
  constexpr std::int64_t kRows = 150;
  for (const DType type : kTypes) {
    for (const int head_dim : {8, 40, 64, 96}) {
      const auto dims = static_cast<std::size_t>(head_dim);
      const Rows keys(type, head_dim, kRows, 1.0f, &generator);
      const Rows values(type, head_dim, kRows, 1.0f, &generator);
      for (const std::size_t count :
           {std::size_t{1}, std::size_t{7}, std::size_t{64}, std::size_t{65}, std::size_t{200}}) {
        for (const int n : {1, 3, 5}) {
          const std::vector<float> q = RandomVector(static_cast<std::size_t>(n) * dims, 0.2f, &generator);
          const std::vector<std::int32_t> places = RandomPlaces(count, kRows, &generator);
          std::vector<const std::byte*> k_places, v_places;
          for (const std::int32_t place : places) {
            k_places.push_back(keys.data + place * keys.stride);
            v_places.push_back(values.data + place * values.stride);
          }
          RunArgs args;
          args.head_dim = head_dim;
          args.n = n;
          args.q = q.data();
          args.k_type = args.v_type = type;
          args.n_rows = static_cast<std::int64_t>(count);
          args.k_places = k_places.data();
          args.v_places = v_places.data();
          State state(n, head_dim);
          AttendRun(args, state.view());
          for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
            std::vector<double> logits;
            std::vector<std::vector<double>> rows;
            for (const std::int32_t place : places) {
              double x = 0.0;
              for (std::size_t j = 0; j < dims; ++j) {
                x += static_cast<double>(q[i * dims + j]) * keys.decoded[static_cast<std::size_t>(place)][j];
              }
              logits.push_back(x);
              rows.push_back(values.decoded[static_cast<std::size_t>(place)]);
            }
            ExpectState(state, i, logits, rows, 1e-5,
                        std::string(DTypeName(type)) + " head_dim " + std::to_string(head_dim) + " rows " +
                            std::to_string(count));
          }
        }
      }
    }
  }
}

TEST_P(KernelsTest, AccumulatesWeightedRows) {
  std::mt19937 generator(32);
  constexpr std::int64_t kRows = 150;
  for (const DType type : kTypes) {
    for (const int head_dim : kHeadDims) {
      const auto dims = static_cast<std::size_t>(head_dim);
      const Rows rows(type, head_dim, kRows, 1.0f, &generator);
      for (const std::int64_t count : {0, 1, 7, 64, 65, 150}) {
        for (const int n : {1, 2, 3, 4, 5, 9}) {
          const std::int64_t stride = count + 3;
          const std::vector<float> weights = RandomVector(static_cast<std::size_t>(n * stride), 1.0f, &generator);
          const std::vector<float> before = RandomVector(static_cast<std::size_t>(n) * dims, 1.0f, &generator);
          std::vector<float> num = before;
          AccumulateRows(head_dim, n, weights.data(), stride, rows.data, rows.stride, type, count, num.data());
          for (std::size_t at = 0; at < num.size(); ++at) {
            double expected = before[at];
            double magnitude = std::fabs(before[at]);
            for (std::size_t r = 0; r < static_cast<std::size_t>(count); ++r) {
              const double weight = weights[at / dims * static_cast<std::size_t>(stride) + r];
              expected += weight * rows.decoded[r][at % dims];
              magnitude += std::fabs(weight * rows.decoded[r][at % dims]);
            }
            ASSERT_NEAR(num[at], expected, 1e-6 * magnitude)
                << DTypeName(type) << " head_dim " << head_dim << " rows " << count << " n " << n;
          }
        }
      }
    }
  }
}

TEST_P(KernelsTest, OverflowingLogitsGiveNumbers) {
  // The products overflow f32; only row 3 has the largest logit.
  std::vector<float> keys(8 * 8, 1.0f);
  for (std::size_t j = 0; j < 8; ++j) keys[3 * 8 + j] = 3e38f;
  std::vector<float> values(8 * 8);
  for (std::size_t r = 0; r < 8; ++r)
    std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(r) * 8, 8, static_cast<float>(r));
  const std::vector<float> q(8, 10.0f);
  RunArgs args;
  args.head_dim = 8;
  args.n = 1;
  args.q = q.data();
  args.k = reinterpret_cast<const std::byte*>(keys.data());
  args.v = reinterpret_cast<const std::byte*>(values.data());
  args.k_stride = args.v_stride = 32;
  args.k_type = args.v_type = DType::kF32;
  args.n_rows = 8;
  State state(1, 8);
  AttendRun(args, state.view());
  EXPECT_EQ(state.sum[0], 1.0f);
  for (const float num : state.num) EXPECT_EQ(num, 3.0f);
}

TEST_P(KernelsTest, IgnoresRowsThatNobodySees) {
  // Such rows may hold anything.
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> rows(64 * 8, nan);
  for (const std::size_t r : {0u, 5u, 63u}) std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(r) * 8, 8, 2.0f);
  const std::vector<float> q(2 * 8, 1.0f);
  const std::uint64_t first = std::uint64_t{1} | std::uint64_t{1} << 5;
  const std::uint64_t second = std::uint64_t{1} << 63;
  const std::uint64_t* visible[] = {&first, &second};
  RunArgs args;
  args.head_dim = 8;
  args.n = 2;
  args.q = q.data();
  args.k = args.v = reinterpret_cast<const std::byte*>(rows.data());
  args.k_stride = args.v_stride = 32;
  args.k_type = args.v_type = DType::kF32;
  args.n_rows = 64;
  args.visible = visible;
  State state(2, 8);
  AttendRun(args, state.view());
  EXPECT_EQ(state.sum[0], 2.0f);
  EXPECT_EQ(state.sum[1], 1.0f);
  for (std::size_t j = 0; j < 8; ++j) {
    EXPECT_EQ(state.num[j], 4.0f);
    EXPECT_EQ(state.num[8 + j], 2.0f);
  }
}

TEST_P(KernelsTest, EmptyRunChangesNothing) {
  State state(2, 16);
  state.max = {1.0f, -HUGE_VALF};
  state.sum = {2.0f, 0.0f};
  std::fill(state.num.begin(), state.num.begin() + 16, 3.0f);
  const State before = state;
  const std::vector<float> q(32, 1.0f);
  RunArgs args;
  args.head_dim = 16;
  args.n = 2;
  args.q = q.data();
  AttendRun(args, state.view());
  EXPECT_EQ(state.max, before.max);
  EXPECT_EQ(state.sum, before.sum);
  EXPECT_EQ(state.num, before.num);
}

TEST_P(KernelsTest, ExponentialIsAccurate) {
  // Two rows: the first fixes the maximum at 0, the second has logit x and value 1, so sum - 1 and num are exp(x).
  for (int step = 0; step <= 900; ++step) {
    const float x = -0.1f * static_cast<float>(step);
    std::vector<float> keys(16, 0.0f);
    keys[8] = x;
    std::vector<float> values(16, 0.0f);
    std::fill(values.begin() + 8, values.end(), 1.0f);
    std::vector<float> q(8, 0.0f);
    q[0] = 1.0f;
    RunArgs args;
    args.head_dim = 8;
    args.n = 1;
    args.q = q.data();
    args.k = reinterpret_cast<const std::byte*>(keys.data());
    args.v = reinterpret_cast<const std::byte*>(values.data());
    args.k_stride = args.v_stride = 32;
    args.k_type = args.v_type = DType::kF32;
    args.n_rows = 2;
    State state(1, 8);
    AttendRun(args, state.view());
    const double expected = std::exp(static_cast<double>(x));
    if (x >= -87.0f) {
      ASSERT_NEAR(state.num[0], expected, 2e-7 * expected) << x;
    } else {
      ASSERT_GE(state.num[0], 0.0f) << x;
      ASSERT_LE(state.num[0], 2e-38f) << x;
    }
  }
}

TEST_P(KernelsTest, RunsAddUp) {
  // A run in two calls and a merge of two states both equal the run in one call.
  std::mt19937 generator(7);
  for (const int head_dim : {8, 40, 64, 128}) {
    const Rows keys(DType::kF16, head_dim, 200, 3.0f, &generator);
    const Rows values(DType::kF16, head_dim, 200, 1.0f, &generator);
    const std::vector<float> q = RandomVector(3 * static_cast<std::size_t>(head_dim), 0.3f, &generator);
    RunArgs args;
    args.head_dim = head_dim;
    args.n = 3;
    args.q = q.data();
    args.k_stride = keys.stride;
    args.v_stride = values.stride;
    const auto attend = [&](std::int64_t first, std::int64_t count, State* state) {
      args.k = keys.data + first * keys.stride;
      args.v = values.data + first * values.stride;
      args.n_rows = count;
      AttendRun(args, state->view());
    };
    State in_two(3, head_dim);
    attend(0, 77, &in_two);
    attend(77, 123, &in_two);
    State first(3, head_dim);
    State second(3, head_dim);
    attend(0, 77, &first);
    attend(77, 123, &second);
    MergeStates(head_dim, 3, second.view(), first.view());
    for (std::size_t i = 0; i < 3; ++i) {
      std::vector<double> logits;
      for (const auto& key : keys.decoded) {
        double x = 0.0;
        for (std::size_t j = 0; j < key.size(); ++j) x += static_cast<double>(q[i * key.size() + j]) * key[j];
        logits.push_back(x);
      }
      ExpectState(in_two, i, logits, values.decoded, 1e-5, "two calls");
      ExpectState(first, i, logits, values.decoded, 1e-5, "merge");
    }
  }
}

TEST_P(KernelsTest, MergesWithEmptyStates) {
  State full(1, 8);
  full.max = {3.0f};
  full.sum = {2.0f};
  std::fill(full.num.begin(), full.num.end(), 5.0f);
  State empty(1, 8);
  State target = full;
  MergeStates(8, 1, empty.view(), target.view());
  EXPECT_EQ(target.sum[0], 2.0f);
  EXPECT_EQ(target.num, full.num);
  State fresh(1, 8);
  MergeStates(8, 1, full.view(), fresh.view());
  EXPECT_EQ(fresh.max[0], 3.0f);
  EXPECT_EQ(fresh.sum[0], 2.0f);
  EXPECT_EQ(fresh.num, full.num);
  MergeStates(8, 1, empty.view(), empty.view());
  EXPECT_EQ(empty.max[0], -HUGE_VALF);
  EXPECT_EQ(empty.sum[0], 0.0f);
}

TEST_P(KernelsTest, SameBitsWhateverTheOtherQueries) {
  // A query's result must not depend on which others share its run: slabs of every size give the same sums.
  std::mt19937 generator(8);
  const Rows keys(DType::kF16, 64, 100, 1.0f, &generator);
  const Rows values(DType::kQ8_0, 64, 100, 1.0f, &generator);
  const std::vector<float> q = RandomVector(7 * 64, 0.3f, &generator);
  RunArgs args;
  args.head_dim = 64;
  args.k = keys.data;
  args.v = values.data;
  args.k_stride = keys.stride;
  args.v_stride = values.stride;
  args.v_type = DType::kQ8_0;
  args.n_rows = 100;
  args.n = 7;
  args.q = q.data();
  State together(7, 64);
  AttendRun(args, together.view());
  for (std::size_t i = 0; i < 7; ++i) {
    args.n = 1;
    args.q = q.data() + i * 64;
    State alone(1, 64);
    AttendRun(args, alone.view());
    EXPECT_EQ(alone.max[0], together.max[i]);
    EXPECT_EQ(alone.sum[0], together.sum[i]);
    EXPECT_TRUE(
        std::equal(alone.num.begin(), alone.num.end(), together.num.begin() + static_cast<std::ptrdiff_t>(i) * 64));
  }
}

}  // namespace
}  // namespace scsa
