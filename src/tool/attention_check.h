// SPDX-License-Identifier: Apache-2.0
//
// How far an attention output is from the exact one: references computed from the query, the cached rows and the
// visible set that the plugin's observer reports.
#pragma once

#include <memory>
#include <vector>

#include "scsa/plugin.h"

namespace scsa::tool {

// softmax(Q K^T) V of the call in double precision: [n_q][q_heads][head_dim]. Any row type that ggml can decode.
std::vector<double> ReferenceAttention(const scsa_attention_call& call, int threads);

// (visible row, query head) pairs of the call, summed over the query rows: each costs 2 * head_dim multiply-adds.
double VisiblePairs(const scsa_attention_call& call);

// ggml's own CPU flash attention on the tensors of an attention node.
class GgmlAttention {
 public:
  explicit GgmlAttention(int threads);
  ~GgmlAttention();
  GgmlAttention(const GgmlAttention&) = delete;
  GgmlAttention& operator=(const GgmlAttention&) = delete;

  // [n_q][q_heads][head_dim] of call.node, or empty when ggml cannot compute it. The node itself is not changed.
  std::vector<float> Compute(const scsa_attention_call& call) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Observer of every attention node: relative L2 errors per query head, against double precision.
class ReferenceProbe {
 public:
  // with_ggml: also measures ggml's own attention on the same tensors.
  ReferenceProbe(int threads, bool with_ggml);

  static void Observe(void* user, const scsa_attention_call* call);

  const std::vector<double>& errors() const { return errors_; }            // of the plugin's outputs
  const std::vector<double>& ggml_errors() const { return ggml_errors_; }  // of ggml's
  double multiply_adds() const { return multiply_adds_; }                  // that exact attention needs, in total

 private:
  int threads_;
  std::unique_ptr<GgmlAttention> ggml_;
  std::vector<double> errors_;
  std::vector<double> ggml_errors_;
  double multiply_adds_ = 0.0;
};

}  // namespace scsa::tool
