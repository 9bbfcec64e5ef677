// SPDX-License-Identifier: Apache-2.0
//
// Row kernels behind every operator, dispatched at run time to the best SIMD target (target.cc). One set of functions
// serves the exact path, sinks and recent rows, and the packed rows of opened clusters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "scsa/types.h"

namespace scsa {

// Running online-softmax state of n query vectors over one stream of rows:
//   after any number of rows, exp(max[i]) * sum[i] = sum_r exp(x_ir) and exp(max[i]) * num[i] = sum_r exp(x_ir) v_r.
// An empty state has max = -inf, sum = 0, num = 0.
struct SoftmaxState {
  float* max = nullptr;  // [n]
  float* sum = nullptr;  // [n]
  float* num = nullptr;  // [n][head_dim], row i at num + i * head_dim
};

// One query vector in q8 form for integer-dot scoring against q8_0 keys: blocks of 32 values, one f32 scale each.
struct QuantizedQuery {
  const std::int8_t* values = nullptr;  // head_dim rounded up to 32, padding is 0
  const float* scales = nullptr;        // one per block
};

// Memory that will be read soon: a hint. n_rows stretches of row_bytes each.
struct FetchHint {
  const std::byte* data = nullptr;
  std::int64_t row_bytes = 0;
  std::int64_t stride = 0;  // bytes from stretch to stretch
  std::int64_t n_rows = 1;
  // nullptr: stretch r is at data + r * stride. Otherwise it is at places[r] + stride, and there is none where
  // places[r] is nullptr.
  const std::byte* const* places = nullptr;
};

// How many scattered rows AttendRun works on before it comes to those that it has fetched itself.
inline constexpr std::int64_t kFirstRows = 64;

// A run of rows that share strides and formats, attended by the n query vectors.
struct RunArgs {
  int head_dim = 0;
  int n = 0;                 // query vectors, >= 1
  const float* q = nullptr;  // [n][head_dim], dense, already multiplied by LogitParams::scale
  // With k_type == kQ8_0: n quantised queries for integer dot products, or nullptr to score in f32 with `q`.
  // Their scales include LogitParams::scale.
  const QuantizedQuery* quantized = nullptr;
  float softcap = 0.0f;  // 0: none

  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  std::int64_t k_stride = 0;  // bytes from row to row
  std::int64_t v_stride = 0;
  DType k_type = DType::kF16;
  DType v_type = DType::kF16;
  std::int64_t n_rows = 0;
  // nullptr: row r is at k + r * k_stride and v + r * v_stride. Otherwise it is at k_places[r] and v_places[r], and
  // `visible` must be nullptr. Scattered rows defeat the hardware's prefetchers: kFirstRows of them should have been
  // fetched already (FetchHint::places); AttendRun fetches the later ones as it goes.
  const std::byte* const* k_places = nullptr;
  const std::byte* const* v_places = nullptr;

  // nullptr: every query vector sees every row. Otherwise n bitmaps; bit (first_bit + r) of visible[i] (counted in
  // 64-bit words) says whether vector i sees row r. first_bit is a multiple of 64.
  const std::uint64_t* const* visible = nullptr;
  std::int64_t first_bit = 0;

  // Fetched into the cache while the run's rows are worked on, keys and values at an even pace over n_rows.
  FetchHint next_k;
  FetchHint next_v;
};

// Up to kFirstRows of a run's scattered rows, from the first-th on. places: its k_places or v_places, of rows of
// `type`.
inline FetchHint ScatteredRows(const RunArgs& run, const std::byte* const* places, DType type, std::int64_t first) {
  return {.row_bytes = static_cast<std::int64_t>(RowBytes(type, run.head_dim)),
          .n_rows = std::min(run.n_rows - first, kFirstRows),
          .places = places + first};
}

// Folds the run's rows into `state`. Rows are read once whatever n is. Thread-safe; allocates nothing.
void AttendRun(const RunArgs& args, const SoftmaxState& state);

// logits[i * logits_stride + r] = q_i . k_r over f32, f16, bf16 or q8_0 rows (no softcap): centroid scores.
void ScoreRows(int head_dim, int n, const float* q, const std::byte* k, std::int64_t k_stride, DType k_type,
               std::int64_t n_rows, float* logits, std::int64_t logits_stride);

// num[i] += sum_r weights[i * weights_stride + r] v_r for n vectors of weights over n_rows rows of any format, num
// being [n][head_dim].
void AccumulateRows(int head_dim, int n, const float* weights, std::int64_t weights_stride, const std::byte* v,
                    std::int64_t v_stride, DType v_type, std::int64_t n_rows, float* num);

// Folds state `src` into `dst` (both of n vectors).
void MergeStates(int head_dim, int n, const SoftmaxState& src, const SoftmaxState& dst);

// Row conversion. `dst` holds head_dim floats / RowBytes(type, head_dim) bytes. f16 and bf16 round to nearest even;
// q8_0 follows ggml's reference: scale = max|x| / 127 as f16, values round(x / scale) with halves away from zero.
void DecodeRow(const std::byte* src, DType type, int head_dim, float* dst);
void EncodeRow(const float* src, DType type, int head_dim, std::byte* dst);

// values: head_dim rounded up to 32 (padding zeroed); scales: one per 32 values; scale factors multiply into scales.
void QuantizeQuery(const float* q, int head_dim, float scale, std::int8_t* values, float* scales);

// Dense f32 vector helpers used by clustering. n is any length.
float Dot(const float* a, const float* b, std::int64_t n);
float SquaredDistance(const float* a, const float* b, std::int64_t n);
void AddScaled(float* dst, const float* src, float factor, std::int64_t n);  // dst += factor * src

}  // namespace scsa
