// SPDX-License-Identifier: Apache-2.0
//
// Dot products of 16-bit with 8-bit integers, and what they are made from. Per-target code: included once per SIMD
// target.

#if defined(SCSA_CORE_INTEGERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_INTEGERS_INL_H_
#undef SCSA_CORE_INTEGERS_INL_H_
#else
#define SCSA_CORE_INTEGERS_INL_H_
#endif

#include <cstddef>

#include "core/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

// 15 bits: sums of kMaxHeadDim products with 8-bit values stay below 2^31.
inline constexpr float kQuerySteps = 16383.0f;

inline float LargestMagnitude(const float* q, std::size_t n) {
  const EightTag d;
  auto largest = hn::Zero(d);
  for (std::size_t i = 0; i < n; i += hn::Lanes(d)) largest = hn::Max(largest, hn::Abs(hn::LoadU(d, q + i)));
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Sums of products of neighbouring pairs of 16-bit integers, added to `sum`.
template <class D32, class V16>
HWY_INLINE hn::VFromD<D32> AddPairs(D32 d32, V16 a, V16 b, hn::VFromD<D32> sum) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  // On x86 this adds neighbouring products and leaves the second sum alone.
  auto unused = hn::Zero(d32);
  return hn::ReorderWidenMulAccumulate(d32, a, b, sum, unused);
#else
  const auto wa = hn::BitCast(d32, a);
  const auto wb = hn::BitCast(d32, b);
  const auto low = hn::Mul(hn::ShiftRight<16>(hn::ShiftLeft<16>(wa)), hn::ShiftRight<16>(hn::ShiftLeft<16>(wb)));
  return hn::Add(sum, hn::Add(low, hn::Mul(hn::ShiftRight<16>(wa), hn::ShiftRight<16>(wb))));
#endif
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_INTEGERS_INL_H_
