// SPDX-License-Identifier: Apache-2.0
//
// Synthetic caches for the tests of the sparse operator, and the plain arithmetic in double that they compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "scsa/target.h"
#include "scsa/types.h"

namespace scsa::test {

using Vector = std::vector<double>;

inline double DotOf(const Vector& a, const Vector& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

inline Vector ToDouble(const float* x, int n) { return Vector(x, x + n); }

inline Vector DecodedRow(const std::byte* row, DType type, int head_dim) {
  std::vector<float> decoded(head_dim);
  DecodeRow(row, type, head_dim, decoded.data());
  return Vector(decoded.begin(), decoded.end());
}

// |a - b| / |b|
inline double RelativeL2(const Vector& a, const Vector& b) {
  double difference = 0;
  double norm = 0;
  for (std::size_t d = 0; d < b.size(); ++d) {
    difference += (a[d] - b[d]) * (a[d] - b[d]);
    norm += b[d] * b[d];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// A softmax accumulated plainly: logits first, then one pass with the true maximum.
class PlainSoftmax {
 public:
  explicit PlainSoftmax(int head_dim) : head_dim_(head_dim) {}
  void Add(double logit, const Vector& value) {
    logits_.push_back(logit);
    values_.push_back(value);
  }
  Vector Output(double sink = -std::numeric_limits<double>::infinity()) const {
    double largest = sink;
    for (const double x : logits_) largest = std::max(largest, x);
    double mass = std::exp(sink - largest);
    Vector out(head_dim_, 0.0);
    for (std::size_t i = 0; i < logits_.size(); ++i) {
      const double weight = std::exp(logits_[i] - largest);
      mass += weight;
      for (int d = 0; d < head_dim_; ++d) out[d] += weight * values_[i][d];
    }
    for (double& x : out) x /= mass;
    return out;
  }

 private:
  int head_dim_;
  std::vector<double> logits_;
  std::vector<Vector> values_;
};

// A cache in ggml's layout: row r holds the heads one after the other. Keys come from a few wandering centres, so that
// clustering has something to find.
class SyntheticCache {
 public:
  SyntheticCache(const Shape& shape, std::int64_t n_rows, DType type, std::uint32_t seed = 1,
                 DType v_type_or = DType::kF32, bool same_types = true)
      : shape_(shape),
        n_rows_(n_rows),
        k_type_(type),
        v_type_(same_types ? type : v_type_or),
        k_(n_rows * shape.kv_heads * RowBytes(k_type_, shape.head_dim)),
        v_(n_rows * shape.kv_heads * RowBytes(v_type_, shape.head_dim)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int head_dim = shape.head_dim;
    std::vector<float> centres(std::size_t{12} * head_dim);
    for (float& x : centres) x = 1.2f * normal(random);
    std::vector<float> row(head_dim);
    for (std::int64_t r = 0; r < n_rows; ++r) {
      for (int h = 0; h < shape.kv_heads; ++h) {
        const float* centre = centres.data() + (random() % 12) * head_dim;
        for (int d = 0; d < head_dim; ++d) row[d] = centre[d] + 0.4f * normal(random);
        SetKey(r, h, row.data());
        for (int d = 0; d < head_dim; ++d) row[d] = 0.5f * centre[(d + 1) % head_dim] + 0.7f * normal(random);
        SetValue(r, h, row.data());
      }
    }
  }

  KvView View(std::int64_t n_kv) const {
    KvView kv;
    kv.k = k_.data();
    kv.v = v_.data();
    kv.k_type = k_type_;
    kv.v_type = v_type_;
    kv.k_head_stride = static_cast<std::int64_t>(RowBytes(k_type_, shape_.head_dim));
    kv.v_head_stride = static_cast<std::int64_t>(RowBytes(v_type_, shape_.head_dim));
    kv.k_row_stride = kv.k_head_stride * shape_.kv_heads;
    kv.v_row_stride = kv.v_head_stride * shape_.kv_heads;
    kv.n_kv = n_kv;
    return kv;
  }
  KvView View() const { return View(n_rows_); }

  void SetKey(std::int64_t row, int kv_head, const float* key) {
    EncodeRow(key, k_type_, shape_.head_dim, Key(row, kv_head));
  }
  void SetValue(std::int64_t row, int kv_head, const float* value) {
    EncodeRow(value, v_type_, shape_.head_dim, Value(row, kv_head));
  }
  std::byte* Key(std::int64_t row, int kv_head) {
    return k_.data() + (row * shape_.kv_heads + kv_head) * RowBytes(k_type_, shape_.head_dim);
  }
  std::byte* Value(std::int64_t row, int kv_head) {
    return v_.data() + (row * shape_.kv_heads + kv_head) * RowBytes(v_type_, shape_.head_dim);
  }
  Vector DecodedKey(std::int64_t row, int kv_head) const {
    return DecodedRow(View().KRow(row, kv_head), k_type_, shape_.head_dim);
  }
  Vector DecodedValue(std::int64_t row, int kv_head) const {
    return DecodedRow(View().VRow(row, kv_head), v_type_, shape_.head_dim);
  }
  std::int64_t n_rows() const { return n_rows_; }

 private:
  Shape shape_;
  std::int64_t n_rows_;
  DType k_type_;
  DType v_type_;
  std::vector<std::byte> k_;
  std::vector<std::byte> v_;
};

inline std::vector<float> RandomQueries(const Shape& shape, std::uint32_t seed, float size = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(std::size_t{1} * shape.q_heads * shape.head_dim);
  for (float& x : q) x = size * normal(random);
  return q;
}

inline QueryView ViewQueries(const std::vector<float>& q, const Shape& shape) {
  return {q.data(), std::int64_t{shape.q_heads} * shape.head_dim, shape.head_dim, 1};
}

inline OutView ViewOut(std::vector<float>& out, const Shape& shape) {
  out.resize(std::size_t{1} * shape.q_heads * shape.head_dim);
  return {out.data(), std::int64_t{shape.q_heads} * shape.head_dim, shape.head_dim};
}

// Exact attention of one query head over the visible rows (nullptr: all), restated plainly.
inline Vector ExactHead(const SyntheticCache& cache, const Shape& shape, std::int64_t n_kv, const float* q, int q_head,
                        const LogitParams& params, const std::vector<bool>* visible = nullptr) {
  const int kv_head = q_head / shape.group();
  const Vector query = ToDouble(q + std::int64_t{q_head} * shape.head_dim, shape.head_dim);
  PlainSoftmax softmax(shape.head_dim);
  for (std::int64_t r = 0; r < n_kv; ++r) {
    if (visible != nullptr && !(*visible)[r]) continue;
    double x = params.scale * DotOf(query, cache.DecodedKey(r, kv_head));
    if (params.softcap > 0) x = params.softcap * std::tanh(x / params.softcap);
    softmax.Add(x, cache.DecodedValue(r, kv_head));
  }
  return params.sinks == nullptr ? softmax.Output() : softmax.Output(params.sinks[q_head]);
}

// Bitmap words of a set of rows.
inline std::vector<std::uint64_t> Bitmap(const std::vector<bool>& visible) {
  std::vector<std::uint64_t> words((visible.size() + 63) / 64, 0);
  for (std::size_t r = 0; r < visible.size(); ++r) {
    if (visible[r]) words[r / 64] |= std::uint64_t{1} << (r % 64);
  }
  return words;
}

// Runs `body` once on every SIMD target of this machine.
template <class F>
void OnEveryTarget(F&& body) {
  for (const std::string& target : AvailableTargets()) {
    SCOPED_TRACE("target " + target);
    ASSERT_TRUE(ForceTarget(target).ok());
    body();
  }
  ASSERT_TRUE(ForceTarget("").ok());
}

}  // namespace scsa::test
