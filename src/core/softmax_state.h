// SPDX-License-Identifier: Apache-2.0
//
// What every operator does at the two ends of a stream of rows: starting from empty states, and turning a state into a
// head's output.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/kernels.h"

namespace scsa {

// Empties the states of `n` vectors.
inline void ClearStates(const SoftmaxState& state, std::int64_t n, int head_dim) {
  std::fill_n(state.max, n, -std::numeric_limits<float>::infinity());
  std::fill_n(state.sum, n, 0.0f);
  std::fill_n(state.num, n * head_dim, 0.0f);
}

// out[head_dim] = num / sum of vector i, with the attention-sink logit (nullptr: none) in the normaliser. Zeros for an
// empty state.
inline void WriteHeadOutput(const SoftmaxState& state, std::int64_t i, int head_dim, const float* sink, float* out) {
  float factor = 0.0f;
  if (state.sum[i] > 0.0f) {
    factor = 1.0f / state.sum[i];
    if (sink != nullptr) {
      // Relative to the larger of the two exponents, so that neither overflows.
      const float max = std::max(state.max[i], *sink);
      const float kept = std::exp(state.max[i] - max);
      factor = kept / (state.sum[i] * kept + std::exp(*sink - max));
    }
  }
  const float* num = state.num + i * head_dim;
  for (int d = 0; d < head_dim; ++d) out[d] = num[d] * factor;
}

}  // namespace scsa
