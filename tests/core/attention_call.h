// SPDX-License-Identifier: Apache-2.0
//
// A call of ExactAttention with its memory, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "scsa/exact.h"
#include "tests/core/reference.h"

namespace scsa::testing {

// Queries and output of one call, both with gaps between the vectors.
struct Call {
  Call(const Shape& shape, int n_q, unsigned seed) : shape_(shape), n_q_(n_q) {
    std::mt19937 generator(seed);
    head_stride_ = shape.head_dim + 3;
    row_stride_ = head_stride_ * shape.q_heads + 5;
    q = RandomVector(static_cast<std::size_t>(row_stride_ * n_q), 1.0f, &generator);
    out.assign(q.size(), kGap);
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  }
  QueryView query() const { return {q.data(), row_stride_, head_stride_, n_q_}; }

  Status Run(const KvView& kv, int n_threads) {
    return ExactAttention(shape_, query(), kv, visible, params, n_threads, workspace,
                          OutView{out.data(), row_stride_, head_stride_});
  }
  // The output vectors without the gaps, which must be untouched.
  std::vector<float> Dense() const {
    std::vector<float> dense;
    for (int i = 0; i < n_q_; ++i) {
      for (int h = 0; h < shape_.q_heads; ++h) {
        const float* from = out.data() + i * row_stride_ + h * head_stride_;
        dense.insert(dense.end(), from, from + shape_.head_dim);
        for (std::int64_t j = shape_.head_dim; j < head_stride_; ++j) EXPECT_EQ(from[j], kGap);
      }
    }
    return dense;
  }
  double ErrorAgainstReference(const KvView& kv) const {
    return WorstRelativeError(Dense(), AttentionReference(shape_, query(), kv, visible, params),
                              static_cast<std::size_t>(n_q_ * shape_.q_heads));
  }

  static constexpr float kGap = -77.0f;
  std::vector<float> q;
  std::vector<float> out;
  VisibleSets visible;
  LogitParams params;
  Workspace workspace;

 private:
  Shape shape_;
  int n_q_;
  std::int64_t head_stride_ = 0;
  std::int64_t row_stride_ = 0;
};

// Owns the bitmaps of n_q query rows.
struct Bitmaps {
  Bitmaps(int n_q, std::int64_t n_kv)
      : stride((n_kv + 63) / 64 + 1), words(static_cast<std::size_t>(n_q * stride), 0) {}
  void Set(int query, std::int64_t row) {
    words[static_cast<std::size_t>(query * stride + row / 64)] |= std::uint64_t{1} << (row % 64);
  }
  VisibleSets view() const { return {words.data(), stride}; }
  std::int64_t stride;
  std::vector<std::uint64_t> words;
};

// Relative L2 error of f32 sums against double precision.
inline constexpr double kTolerance = 5e-6;

}  // namespace scsa::testing
