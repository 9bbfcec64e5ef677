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
#include <cstdint>
#include <cstring>

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

#if HWY_TARGET != HWY_SCALAR
// A pair of neighbouring 16-bit integers in all 32-bit lanes, to be multiplied by AddPairs.
template <class D32>
HWY_INLINE hn::VFromD<hn::Repartition<std::int16_t, D32>> BroadcastPair(D32 d32, const std::int16_t* at) {
  std::int32_t pair;
  std::memcpy(&pair, at, sizeof(pair));
  return hn::BitCast(hn::Repartition<std::int16_t, D32>(), hn::Set(d32, pair));
}
#endif

// Rounds n weights >= 0 to 15 bits of the largest one, and returns what a unit of the integers is worth. n: whole
// vectors.
template <class D>
HWY_INLINE float RoundWeights(D d, const float* HWY_RESTRICT weights, std::size_t n, std::int16_t* HWY_RESTRICT out) {
  constexpr float kSteps = 32767.0f;
  const hn::Rebind<std::int16_t, D> d16;
  auto largest = hn::Zero(d);
  for (std::size_t i = 0; i < n; i += hn::Lanes(d)) largest = hn::Max(largest, hn::LoadU(d, weights + i));
  const float scale = hn::GetLane(hn::MaxOfLanes(d, largest)) / kSteps;
  const auto inverse = hn::Set(d, scale > 1e-37f ? 1.0f / scale : 0.0f);
  for (std::size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(d, weights + i), inverse));
    hn::StoreU(hn::DemoteTo(d16, rounded), d16, out + i);
  }
  return scale;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_INTEGERS_INL_H_
