// SPDX-License-Identifier: Apache-2.0
#include "core/kernels.h"
#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/attend.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/attend-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

void AttendRunTarget(const RunArgs& args, const SoftmaxState& state) {
  if (args.head_dim % static_cast<int>(hn::MaxLanes(FullTag())) == 0) {
    AttendRunWith(FullTag(), args, state);
  } else {
    AttendRunWith(EightTag(), args, state);
  }
}

void ScoreRowsTarget(int head_dim, int n, const float* q, const std::byte* k, std::int64_t k_stride, DType k_type,
                     std::int64_t n_rows, float* logits, std::int64_t logits_stride) {
  if (head_dim % static_cast<int>(hn::MaxLanes(FullTag())) == 0) {
    ScoreRowsWith(FullTag(), head_dim, n, q, k, k_stride, k_type, n_rows, logits, logits_stride);
  } else {
    ScoreRowsWith(EightTag(), head_dim, n, q, k, k_stride, k_type, n_rows, logits, logits_stride);
  }
}

void AccumulateRowsTarget(int head_dim, int n, const float* weights, std::int64_t weights_stride, const std::byte* v,
                          std::int64_t v_stride, DType v_type, std::int64_t n_rows, float* num) {
  if (head_dim % static_cast<int>(hn::MaxLanes(FullTag())) == 0) {
    AccumulateRowsWith(FullTag(), head_dim, n, weights, weights_stride, v, v_stride, v_type, n_rows, num);
  } else {
    AccumulateRowsWith(EightTag(), head_dim, n, weights, weights_stride, v, v_stride, v_type, n_rows, num);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scsa {

HWY_EXPORT(AttendRunTarget);
HWY_EXPORT(ScoreRowsTarget);
HWY_EXPORT(AccumulateRowsTarget);

void AttendRun(const RunArgs& args, const SoftmaxState& state) { SCSA_DISPATCH(AttendRunTarget)(args, state); }

void ScoreRows(int head_dim, int n, const float* q, const std::byte* k, std::int64_t k_stride, DType k_type,
               std::int64_t n_rows, float* logits, std::int64_t logits_stride) {
  SCSA_DISPATCH(ScoreRowsTarget)(head_dim, n, q, k, k_stride, k_type, n_rows, logits, logits_stride);
}

void AccumulateRows(int head_dim, int n, const float* weights, std::int64_t weights_stride, const std::byte* v,
                    std::int64_t v_stride, DType v_type, std::int64_t n_rows, float* num) {
  SCSA_DISPATCH(AccumulateRowsTarget)
  (head_dim, n, weights, weights_stride, v, v_stride, v_type, n_rows, num);
}

}  // namespace scsa
#endif  // HWY_ONCE
