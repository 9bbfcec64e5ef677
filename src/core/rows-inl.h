// SPDX-License-Identifier: Apache-2.0
//
// Loading cached rows of any format as f32 vectors, and exp. Per-target code: included once per SIMD target.

#if defined(SCSA_CORE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_ROWS_INL_H_
#undef SCSA_CORE_ROWS_INL_H_
#else
#define SCSA_CORE_ROWS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "scsa/types.h"

// Targets without f16 conversion instructions. Highway's replacement there knows no infinities and does not round.
#undef SCSA_SOFT_F16
#if HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#define SCSA_SOFT_F16 1
#else
#define SCSA_SOFT_F16 0
#endif

// Accumulators live in registers only if the compiler unrolls the loops over them completely.
#undef SCSA_UNROLL
#if HWY_COMPILER_CLANG
#define SCSA_UNROLL _Pragma("unroll")
#else
#define SCSA_UNROLL _Pragma("GCC unroll 16")
#endif

// Targets with 32 vector registers hold larger register blocks.
#undef SCSA_MANY_REGISTERS
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
#define SCSA_MANY_REGISTERS 1
#else
#define SCSA_MANY_REGISTERS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Vectors of f32 for head_dims that are a multiple of the full vector, and of 8 lanes at most for the others: no loop
// over dimensions ever has a remainder, whatever the target, since head_dim is a multiple of 8.
using FullTag = hn::ScalableTag<float>;
using EightTag = hn::CappedTag<float, 8>;

template <class D>
HWY_INLINE hn::VFromD<D> F16ToF32(D d, hn::VFromD<hn::Rebind<std::uint16_t, D>> bits) {
#if SCSA_SOFT_F16
  // Moves exponent and mantissa into place; the multiplication corrects the exponent's bias and makes subnormals exact.
  const hn::RebindToUnsigned<D> du;
  const auto wide = hn::PromoteTo(du, bits);
  const auto magnitude = hn::And(wide, hn::Set(du, 0x7FFFu));
  const auto finite = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112f));
  const hn::RebindToSigned<D> di;
  const auto special = hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7BFF)));
  const auto infinity = hn::IfThenElseZero(special, hn::Set(du, 0x7F800000u));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(wide, magnitude));
  return hn::BitCast(d, hn::Or(hn::Or(hn::BitCast(du, finite), infinity), sign));
#else
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
#endif
}

// An f16 value in every lane.
template <class D>
HWY_INLINE hn::VFromD<D> BroadcastF16(D d, const std::uint8_t* src) {
  std::uint16_t bits;
  std::memcpy(&bits, src, sizeof(bits));
  return F16ToF32(d, hn::Set(hn::Rebind<std::uint16_t, D>(), bits));
}

// Scale of the q8_0 block that holds dimension `dim`, in every lane.
template <class D>
HWY_INLINE hn::VFromD<D> BlockScale(D d, const std::uint8_t* row, std::size_t dim) {
  return BroadcastF16(d, row + dim / kQ8BlockSize * kQ8BlockBytes);
}

// The row's values from dimension `dim`, a multiple of Lanes(d), on; for q8_0 without the block's scale.
template <DType kType, class D>
HWY_INLINE hn::VFromD<D> LoadUnscaled(D d, const std::uint8_t* row, std::size_t dim) {
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + dim);
  } else if constexpr (kType == DType::kF16) {
    return F16ToF32(d, hn::LoadU(hn::Rebind<std::uint16_t, D>(), reinterpret_cast<const std::uint16_t*>(row) + dim));
  } else if constexpr (kType == DType::kBF16) {
    const hn::Rebind<std::uint16_t, D> d16;
    const auto upper = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(row) + dim);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(hn::RebindToUnsigned<D>(), upper)));
  } else {
    static_assert(kQ8BlockSize % hn::MaxLanes(D()) == 0);
    const std::uint8_t* from = row + dim / kQ8BlockSize * kQ8BlockBytes + 2 + dim % kQ8BlockSize;
    const auto integers = hn::LoadU(hn::Rebind<std::int8_t, D>(), reinterpret_cast<const std::int8_t*>(from));
    return hn::ConvertTo(d, hn::PromoteTo(hn::RebindToSigned<D>(), integers));
  }
}

// The same with the scale.
template <DType kType, class D>
HWY_INLINE hn::VFromD<D> LoadValues(D d, const std::uint8_t* row, std::size_t dim) {
  const auto values = LoadUnscaled<kType>(d, row, dim);
  if constexpr (kType == DType::kQ8_0) return hn::Mul(values, BlockScale(d, row, dim));
  return values;
}

// exp(x) for x <= 0, relative error below 2e-7. Exactly 0 below -87.3, at -inf too.
// Cody-Waite reduction and the polynomial of Cephes' expf (S. Moshier, netlib.org/cephes).
template <class D>
HWY_INLINE hn::VFromD<D> ExpNonPositive(D d, hn::VFromD<D> x) {
  const hn::RebindToSigned<D> di;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  const auto magic = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const auto n = hn::Sub(shifted, magic);
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  auto p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::BitCast(di, shifted), hn::Set(di, 127))));
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, -87.3f)), hn::Mul(p, power));
}

// cap * tanh(x / cap)
template <class D>
HWY_INLINE hn::VFromD<D> SoftCap(D d, hn::VFromD<D> x, float cap) {
  const auto magnitude = hn::Abs(x);
  const auto e = ExpNonPositive(d, hn::Mul(magnitude, hn::Set(d, -2.0f / cap)));
  const auto one = hn::Set(d, 1.0f);
  const auto capped = hn::Mul(hn::Set(d, cap), hn::Div(hn::Sub(one, e), hn::Add(one, e)));
  return hn::CopySignToAbs(capped, x);
}

// exp of one value, through the same code as whole vectors.
HWY_INLINE float ExpNonPositive(float x) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(ExpNonPositive(d, hn::Set(d, x)));
}

template <class D>
HWY_INLINE void Scale(D d, float* HWY_RESTRICT values, std::size_t count, float factor) {
  const auto f = hn::Set(d, factor);
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) hn::StoreU(hn::Mul(hn::LoadU(d, values + i), f), d, values + i);
}

// Of n floats. The last vector is read as a whole.
template <class D>
HWY_INLINE float SumOf(D d, const float* HWY_RESTRICT x, std::size_t n) {
  auto sum = hn::Zero(d);
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) sum = hn::Add(sum, hn::LoadU(d, x + i));
  if (i < n) sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, n - i), hn::LoadU(d, x + i)));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_ROWS_INL_H_
