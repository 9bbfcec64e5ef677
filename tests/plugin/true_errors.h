// SPDX-License-Identifier: Apache-2.0
//
// The error of observed sparse outputs.
#pragma once

#include <ggml.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "scsa/plugin.h"

namespace scsa::plugin_test {

// Relative errors of every sparse output of one query row against double precision, from the cached rows. For a cache
// of any type, without attention sinks and softcap. An observer; user: a TrueErrors.
struct TrueErrors {
  std::vector<double> errors;

  static void Observe(void* user, const scsa_attention_call* call) {
    constexpr int kSparse = 1;
    if (call->path != kSparse) return;
    auto& all = static_cast<TrueErrors*>(user)->errors;
    for (int h = 0; h < call->q_heads; ++h) all.push_back(ErrorOf(*call, h));
  }

 private:
  static void Decode(int type, const void* base, std::int64_t offset, float* values, int n) {
    const char* row = static_cast<const char*>(base) + offset;
    if (type == GGML_TYPE_F32) {
      std::memcpy(values, row, static_cast<std::size_t>(n) * sizeof(float));
    } else {
      ggml_get_type_traits(static_cast<ggml_type>(type))->to_float(row, values, n);
    }
  }
  static double ErrorOf(const scsa_attention_call& call, int head) {
    const int dim = call.head_dim;
    const int kv_head = head / (call.q_heads / call.kv_heads);
    const float* q = call.q + head * call.q_head_stride;
    std::vector<double> out(static_cast<std::size_t>(dim), 0.0);
    std::vector<float> values(static_cast<std::size_t>(dim));
    double mass = 0;
    for (std::int64_t r = 0; r < call.n_kv; ++r) {
      if ((call.visible[r / 64] >> (r % 64) & 1) == 0) continue;
      Decode(call.k_type, call.k, r * call.k_row_stride + kv_head * call.k_head_stride, values.data(), dim);
      double logit = 0;
      for (int d = 0; d < dim; ++d) logit += static_cast<double>(q[d]) * values[d];
      // The logits of these models are far from overflow.
      const double weight = std::exp(logit * call.scale);
      mass += weight;
      Decode(call.v_type, call.v, r * call.v_row_stride + kv_head * call.v_head_stride, values.data(), dim);
      for (int d = 0; d < dim; ++d) out[d] += weight * values[d];
    }
    double difference = 0;
    double norm = 0;
    for (int d = 0; d < dim; ++d) {
      const double delta = call.out[head * call.out_head_stride + d] - out[d] / mass;
      difference += delta * delta;
      norm += out[d] / mass * (out[d] / mass);
    }
    return std::sqrt(difference / norm);
  }
};

}  // namespace scsa::plugin_test
