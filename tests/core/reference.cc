// SPDX-License-Identifier: Apache-2.0
#include "tests/core/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace scsa::testing {
namespace {

double SmallFloatValue(std::uint16_t bits, int mantissa_bits, int bias) {
  const int exponent_bits = 15 - mantissa_bits;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

std::vector<double> AllValues(int mantissa_bits, int bias) {
  std::vector<double> values;
  for (int pattern = 0; pattern < 65536; ++pattern) {
    values.push_back(SmallFloatValue(static_cast<std::uint16_t>(pattern), mantissa_bits, bias));
  }
  return values;
}

// Values of all patterns from 0 to infinity, in ascending order. Infinity stands for the next power of two, as IEEE
// rounding has it.
std::vector<double> FiniteValues(int mantissa_bits, int bias) {
  const int infinity = ((1 << (15 - mantissa_bits)) - 1) << mantissa_bits;
  std::vector<double> values;
  for (int pattern = 0; pattern < infinity; ++pattern) {
    values.push_back(SmallFloatValue(static_cast<std::uint16_t>(pattern), mantissa_bits, bias));
  }
  values.push_back(std::ldexp(1.0, (infinity >> mantissa_bits) - bias));
  return values;
}

// The pattern whose value is nearest, the even one on a tie.
std::uint16_t NearestPattern(float value, const std::vector<double>& values) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), values.back());
  const auto high = std::lower_bound(values.begin() + 1, values.end(), magnitude);
  const auto low = high - 1;
  const double below = magnitude - *low;
  const double above = *high - magnitude;
  const bool up = above < below || (above == below && (low - values.begin()) % 2 == 1);
  return static_cast<std::uint16_t>(sign | ((up ? high : low) - values.begin()));
}

std::uint16_t F16Pattern(float value) {
  static const std::vector<double> values = FiniteValues(10, 15);
  return NearestPattern(value, values);
}

std::uint16_t BF16Pattern(float value) {
  static const std::vector<double> values = FiniteValues(7, 127);
  return NearestPattern(value, values);
}

template <class T>
void Append(T value, std::vector<std::byte>* bytes) {
  const std::size_t size = bytes->size();
  bytes->resize(size + sizeof(T));
  std::memcpy(bytes->data() + size, &value, sizeof(T));
}

template <class T>
T ReadAt(const std::byte* from, std::size_t index) {
  T value;
  std::memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

double F16Value(std::uint16_t bits) {
  static const std::vector<double> values = AllValues(10, 15);
  return values[bits];
}

double BF16Value(std::uint16_t bits) {
  static const std::vector<double> values = AllValues(7, 127);
  return values[bits];
}

std::vector<double> DecodeReference(const std::byte* row, DType type, int head_dim) {
  std::vector<double> values(static_cast<std::size_t>(head_dim));
  for (std::size_t i = 0; i < values.size(); ++i) {
    switch (type) {
      case DType::kF32:
        values[i] = static_cast<double>(ReadAt<float>(row, i));
        break;
      case DType::kF16:
        values[i] = F16Value(ReadAt<std::uint16_t>(row, i));
        break;
      case DType::kBF16:
        values[i] = BF16Value(ReadAt<std::uint16_t>(row, i));
        break;
      case DType::kQ8_0: {
        const std::byte* block = row + i / 32 * 34;
        values[i] = F16Value(ReadAt<std::uint16_t>(block, 0)) * ReadAt<std::int8_t>(block + 2, i % 32);
        break;
      }
    }
  }
  return values;
}

void EncodeReference(const std::vector<float>& values, DType type, std::vector<std::byte>* bytes) {
  switch (type) {
    case DType::kF32:
      for (const float value : values) Append(value, bytes);
      return;
    case DType::kF16:
      for (const float value : values) Append(F16Pattern(value), bytes);
      return;
    case DType::kBF16:
      for (const float value : values) Append(BF16Pattern(value), bytes);
      return;
    case DType::kQ8_0:
      break;
  }
  for (std::size_t first = 0; first < values.size(); first += 32) {
    float largest = 0.0f;
    for (std::size_t i = first; i < std::min(values.size(), first + 32); ++i) {
      largest = std::max(largest, std::fabs(values[i]));
    }
    const float scale = largest / 127.0f;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    Append(F16Pattern(scale), bytes);
    for (std::size_t i = first; i < first + 32; ++i) {
      Append(static_cast<std::int8_t>(i < values.size() ? std::lround(values[i] * inverse) : 0), bytes);
    }
  }
}

TestCache::TestCache(const Shape& shape, DType k_type, DType v_type, std::int64_t n_kv, Layout layout, unsigned seed,
                     int misalign)
    : shape_(shape) {
  const auto strides = [&](DType type, std::int64_t* row_stride, std::int64_t* head_stride) {
    const auto row = static_cast<std::int64_t>(RowBytes(type, shape.head_dim));
    *row_stride = layout == Layout::kHeadMajor ? row : row * shape.kv_heads + (layout == Layout::kPadded ? 20 : 0);
    *head_stride = layout == Layout::kHeadMajor ? row * n_kv : row;
    const std::int64_t end = (n_kv - 1) * *row_stride + (shape.kv_heads - 1) * *head_stride + row;
    return static_cast<std::size_t>(n_kv == 0 ? 0 : end) + static_cast<std::size_t>(misalign);
  };
  view_.k_type = k_type;
  view_.v_type = v_type;
  view_.n_kv = n_kv;
  k_.resize(strides(k_type, &view_.k_row_stride, &view_.k_head_stride));
  v_.resize(strides(v_type, &view_.v_row_stride, &view_.v_head_stride));
  view_.k = k_.data() + misalign;
  view_.v = v_.data() + misalign;
  std::mt19937 generator(seed);
  const auto dims = static_cast<std::size_t>(shape.head_dim);
  for (std::int64_t row = 0; row < n_kv; ++row) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      SetKey(row, head, RandomVector(dims, 1.0f, &generator));
      SetValue(row, head, RandomVector(dims, 1.0f, &generator));
    }
  }
}

void TestCache::SetKey(std::int64_t row, int kv_head, const std::vector<float>& values) {
  std::vector<std::byte> bytes;
  EncodeReference(values, view_.k_type, &bytes);
  std::copy(bytes.begin(), bytes.end(), k_.begin() + (view_.KRow(row, kv_head) - k_.data()));
}

void TestCache::SetValue(std::int64_t row, int kv_head, const std::vector<float>& values) {
  std::vector<std::byte> bytes;
  EncodeReference(values, view_.v_type, &bytes);
  std::copy(bytes.begin(), bytes.end(), v_.begin() + (view_.VRow(row, kv_head) - v_.data()));
}

std::vector<float> RandomVector(std::size_t count, float deviation, std::mt19937* generator) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(*generator);
  return values;
}

bool Sees(const VisibleSets& visible, int query_row, std::int64_t row) {
  if (visible.words == nullptr) return true;
  return (visible.words[query_row * visible.row_stride + row / 64] >> (row % 64) & 1) != 0;
}

std::vector<double> AttentionReference(const Shape& shape, const QueryView& q, const KvView& kv,
                                       const VisibleSets& visible, const LogitParams& params) {
  const auto dims = static_cast<std::size_t>(shape.head_dim);
  const auto q_heads = static_cast<std::size_t>(shape.q_heads);
  std::vector<double> out(static_cast<std::size_t>(q.n_q) * q_heads * dims, 0.0);
  for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    std::vector<std::vector<double>> keys;
    std::vector<std::vector<double>> values;
    for (std::int64_t row = 0; row < kv.n_kv; ++row) {
      keys.push_back(DecodeReference(kv.KRow(row, kv_head), kv.k_type, shape.head_dim));
      values.push_back(DecodeReference(kv.VRow(row, kv_head), kv.v_type, shape.head_dim));
    }
    for (int i = 0; i < q.n_q; ++i) {
      for (int g = 0; g < shape.group(); ++g) {
        const int head = kv_head * shape.group() + g;
        const float* query = q.data + i * q.row_stride + head * q.head_stride;
        std::vector<double> logits(keys.size(), -HUGE_VAL);
        double max = -HUGE_VAL;
        for (std::size_t row = 0; row < keys.size(); ++row) {
          if (!Sees(visible, i, static_cast<std::int64_t>(row))) continue;
          double x = 0.0;
          for (std::size_t j = 0; j < dims; ++j) x += static_cast<double>(query[j]) * keys[row][j];
          x *= static_cast<double>(params.scale);
          const auto cap = static_cast<double>(params.softcap);
          if (cap > 0.0) x = cap * std::tanh(x / cap);
          logits[row] = x;
          max = std::max(max, x);
        }
        if (max == -HUGE_VAL) continue;
        const double sink = params.sinks == nullptr ? -HUGE_VAL : static_cast<double>(params.sinks[head]);
        max = std::max(max, sink);
        double sum = std::exp(sink - max);
        double* to = out.data() + (static_cast<std::size_t>(i) * q_heads + static_cast<std::size_t>(head)) * dims;
        for (std::size_t row = 0; row < keys.size(); ++row) {
          const double weight = std::exp(logits[row] - max);
          if (weight == 0.0) continue;
          sum += weight;
          for (std::size_t j = 0; j < dims; ++j) to[j] += weight * values[row][j];
        }
        for (std::size_t j = 0; j < dims; ++j) to[j] /= sum;
      }
    }
  }
  return out;
}

double WorstRelativeError(const std::vector<float>& actual, const std::vector<double>& expected, std::size_t vectors) {
  if (actual.size() != expected.size()) return HUGE_VAL;
  const std::size_t dims = actual.size() / vectors;
  double worst = 0.0;
  for (std::size_t i = 0; i < vectors; ++i) {
    double difference = 0.0;
    double norm = 0.0;
    for (std::size_t j = i * dims; j < (i + 1) * dims; ++j) {
      const double d = static_cast<double>(actual[j]) - expected[j];
      difference += d * d;
      norm += expected[j] * expected[j];
    }
    const double error = norm == 0.0 ? (difference == 0.0 ? 0.0 : HUGE_VAL) : std::sqrt(difference / norm);
    // A NaN must not pass as small.
    if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
  }
  return worst;
}

}  // namespace scsa::testing
