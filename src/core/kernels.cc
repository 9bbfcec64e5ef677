// SPDX-License-Identifier: Apache-2.0
#include "core/kernels.h"

#include <bit>

#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

const char* ExecutedTargetName() { return hwy::TargetName(HWY_TARGET); }

// ------------------------------------------------------------------------------------------------ softmax states

void MergeStatesTarget(int head_dim, int n, const SoftmaxState& src, const SoftmaxState& dst) {
  const EightTag d;
  const std::size_t dims = static_cast<std::size_t>(head_dim);
  for (int i = 0; i < n; ++i) {
    if (src.max[i] == -HUGE_VALF) continue;
    float* HWY_RESTRICT to = dst.num + static_cast<std::size_t>(i) * dims;
    const float* HWY_RESTRICT from = src.num + static_cast<std::size_t>(i) * dims;
    const float max = src.max[i] > dst.max[i] ? src.max[i] : dst.max[i];
    const float keep = ExpNonPositive(dst.max[i] - max);
    const float add = ExpNonPositive(src.max[i] - max);
    dst.max[i] = max;
    dst.sum[i] = dst.sum[i] * keep + src.sum[i] * add;
    const auto keep_all = hn::Set(d, keep);
    const auto add_all = hn::Set(d, add);
    for (std::size_t j = 0; j < dims; j += hn::Lanes(d)) {
      const auto kept = hn::Mul(hn::LoadU(d, to + j), keep_all);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, from + j), add_all, kept), d, to + j);
    }
  }
}

// ------------------------------------------------------------------------------------------------ row formats

template <DType kType>
void DecodeRowAs(const std::uint8_t* HWY_RESTRICT src, std::size_t head_dim, float* HWY_RESTRICT dst) {
  const EightTag d;
  for (std::size_t j = 0; j < head_dim; j += hn::Lanes(d)) hn::StoreU(LoadValues<kType>(d, src, j), d, dst + j);
}

void DecodeRowTarget(const std::byte* src, DType type, int head_dim, float* dst) {
  const auto* from = reinterpret_cast<const std::uint8_t*>(src);
  const std::size_t dims = static_cast<std::size_t>(head_dim);
  switch (type) {
    case DType::kF32:
      return DecodeRowAs<DType::kF32>(from, dims, dst);
    case DType::kF16:
      return DecodeRowAs<DType::kF16>(from, dims, dst);
    case DType::kBF16:
      return DecodeRowAs<DType::kBF16>(from, dims, dst);
    case DType::kQ8_0:
      return DecodeRowAs<DType::kQ8_0>(from, dims, dst);
  }
}

#if SCSA_SOFT_F16
// Rounds to nearest, ties to even. Overflow gives infinity; a NaN stays a quiet NaN.
std::uint16_t F16FromF32(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u | (magnitude >> 13 & 0x1FFu));
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lets the FPU round to multiples of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1);
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}
#endif

void EncodeF16(const float* HWY_RESTRICT src, std::size_t head_dim, std::uint8_t* HWY_RESTRICT dst) {
#if SCSA_SOFT_F16
  for (std::size_t j = 0; j < head_dim; ++j) {
    const std::uint16_t bits = F16FromF32(src[j]);
    std::memcpy(dst + j * sizeof(bits), &bits, sizeof(bits));
  }
#else
  const EightTag d;
  const hn::Rebind<hwy::float16_t, EightTag> d16;
  const hn::Rebind<std::uint16_t, EightTag> du16;
  for (std::size_t j = 0; j < head_dim; j += hn::Lanes(d)) {
    const auto rounded = hn::BitCast(du16, hn::DemoteTo(d16, hn::LoadU(d, src + j)));
    hn::StoreU(rounded, du16, reinterpret_cast<std::uint16_t*>(dst) + j);
  }
#endif
}

void EncodeBF16(const float* HWY_RESTRICT src, std::size_t head_dim, std::uint8_t* HWY_RESTRICT dst) {
  for (std::size_t j = 0; j < head_dim; ++j) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(src[j]);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const std::uint32_t rounded = is_nan ? bits | 0x400000u : bits + 0x7FFFu + (bits >> 16 & 1);
    const auto upper = static_cast<std::uint16_t>(rounded >> 16);
    std::memcpy(dst + j * sizeof(upper), &upper, sizeof(upper));
  }
}

float MaxAbs(const float* HWY_RESTRICT src, std::size_t count) {
  const EightTag d;
  auto max = hn::Zero(d);
  for (std::size_t j = 0; j < count; j += hn::Lanes(d)) max = hn::Max(max, hn::Abs(hn::LoadU(d, src + j)));
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

// dst = round(src * factor), halves away from zero; |src * factor| < 128.
void RoundToInt8(const float* HWY_RESTRICT src, std::size_t count, float factor, std::int8_t* HWY_RESTRICT dst) {
  const EightTag d;
  const hn::RebindToSigned<EightTag> di;
  const hn::Rebind<std::int8_t, EightTag> d8;
  const auto f = hn::Set(d, factor);
  for (std::size_t j = 0; j < count; j += hn::Lanes(d)) {
    const auto x = hn::Mul(hn::LoadU(d, src + j), f);
    const auto whole = hn::ConvertTo(d, hn::ConvertTo(di, x));  // towards zero
    // The difference is exact, unlike the sum x + 0.5.
    const auto away = hn::Ge(hn::Abs(hn::Sub(x, whole)), hn::Set(d, 0.5f));
    const auto step = hn::IfThenElseZero(away, hn::CopySignToAbs(hn::Set(d, 1.0f), x));
    hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(di, hn::Add(whole, step))), d8, dst + j);
  }
}

void EncodeQ8(const float* HWY_RESTRICT src, std::size_t head_dim, std::uint8_t* HWY_RESTRICT dst) {
  for (std::size_t j = 0; j < head_dim; j += kQ8BlockSize, dst += kQ8BlockBytes) {
    const std::size_t count = head_dim - j < kQ8BlockSize ? head_dim - j : kQ8BlockSize;
    HWY_ALIGN float scale[8] = {MaxAbs(src + j, count) / 127.0f};
    HWY_ALIGN std::uint16_t scale_f16[8];
    EncodeF16(scale, 8, reinterpret_cast<std::uint8_t*>(scale_f16));
    std::memcpy(dst, scale_f16, sizeof(scale_f16[0]));
    auto* values = reinterpret_cast<std::int8_t*>(dst + 2);
    RoundToInt8(src + j, count, scale[0] == 0.0f ? 0.0f : 1.0f / scale[0], values);
    std::memset(values + count, 0, kQ8BlockSize - count);
  }
}

void EncodeRowTarget(const float* src, DType type, int head_dim, std::byte* dst) {
  auto* to = reinterpret_cast<std::uint8_t*>(dst);
  const std::size_t dims = static_cast<std::size_t>(head_dim);
  switch (type) {
    case DType::kF32:
      std::memcpy(to, src, dims * sizeof(float));
      return;
    case DType::kF16:
      return EncodeF16(src, dims, to);
    case DType::kBF16:
      return EncodeBF16(src, dims, to);
    case DType::kQ8_0:
      return EncodeQ8(src, dims, to);
  }
}

void QuantizeQueryTarget(const float* q, int head_dim, float scale, std::int8_t* values, float* scales) {
  const std::size_t dims = static_cast<std::size_t>(head_dim);
  for (std::size_t j = 0; j < dims; j += kQ8BlockSize) {
    const std::size_t count = dims - j < kQ8BlockSize ? dims - j : kQ8BlockSize;
    const float step = MaxAbs(q + j, count) / 127.0f;
    RoundToInt8(q + j, count, step == 0.0f ? 0.0f : 1.0f / step, values + j);
    std::memset(values + j + count, 0, kQ8BlockSize - count);
    scales[j / kQ8BlockSize] = step * scale;
  }
}

// ------------------------------------------------------------------------------------------------ dense vectors

// Sum over [0, n) of Term(vector at j) with four chains; `tail` handles what is left of the last vector.
struct ProductTerm {
  template <class V>
  static HWY_INLINE V Add(V a, V b, V sum) {
    return hn::MulAdd(a, b, sum);
  }
  static HWY_INLINE float AddOne(float a, float b, float sum) { return sum + a * b; }
};

struct SquaredDifferenceTerm {
  template <class V>
  static HWY_INLINE V Add(V a, V b, V sum) {
    const V difference = hn::Sub(a, b);
    return hn::MulAdd(difference, difference, sum);
  }
  static HWY_INLINE float AddOne(float a, float b, float sum) { return sum + (a - b) * (a - b); }
};

template <class Term>
HWY_INLINE float SumTerms(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, std::int64_t n) {
  const FullTag d;
  constexpr std::int64_t kLanes = hn::MaxLanes(FullTag());
  constexpr int kChains = 4;
  hn::VFromD<FullTag> sums[kChains] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  std::int64_t j = 0;
  for (; j + kChains * kLanes <= n; j += kChains * kLanes) {
    SCSA_UNROLL
    for (int c = 0; c < kChains; ++c) {
      sums[c] = Term::Add(hn::LoadU(d, a + j + c * kLanes), hn::LoadU(d, b + j + c * kLanes), sums[c]);
    }
  }
  for (; j + kLanes <= n; j += kLanes) sums[0] = Term::Add(hn::LoadU(d, a + j), hn::LoadU(d, b + j), sums[0]);
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]))));
  for (; j < n; ++j) sum = Term::AddOne(a[j], b[j], sum);
  return sum;
}

float DotTarget(const float* a, const float* b, std::int64_t n) { return SumTerms<ProductTerm>(a, b, n); }

float SquaredDistanceTarget(const float* a, const float* b, std::int64_t n) {
  return SumTerms<SquaredDifferenceTerm>(a, b, n);
}

void AddScaledTarget(float* dst, const float* src, float factor, std::int64_t n) {
  const FullTag d;
  constexpr std::int64_t kLanes = hn::MaxLanes(FullTag());
  const auto f = hn::Set(d, factor);
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    hn::StoreU(hn::MulAdd(f, hn::LoadU(d, src + j), hn::LoadU(d, dst + j)), d, dst + j);
  }
  for (; j < n; ++j) dst[j] += factor * src[j];
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scsa {

HWY_EXPORT(ExecutedTargetName);
HWY_EXPORT(MergeStatesTarget);
HWY_EXPORT(DecodeRowTarget);
HWY_EXPORT(EncodeRowTarget);
HWY_EXPORT(QuantizeQueryTarget);
HWY_EXPORT(DotTarget);
HWY_EXPORT(SquaredDistanceTarget);
HWY_EXPORT(AddScaledTarget);

const char* ExecutedTarget() { return SCSA_DISPATCH(ExecutedTargetName)(); }

void MergeStates(int head_dim, int n, const SoftmaxState& src, const SoftmaxState& dst) {
  SCSA_DISPATCH(MergeStatesTarget)(head_dim, n, src, dst);
}
void DecodeRow(const std::byte* src, DType type, int head_dim, float* dst) {
  SCSA_DISPATCH(DecodeRowTarget)(src, type, head_dim, dst);
}
void EncodeRow(const float* src, DType type, int head_dim, std::byte* dst) {
  SCSA_DISPATCH(EncodeRowTarget)(src, type, head_dim, dst);
}
void QuantizeQuery(const float* q, int head_dim, float scale, std::int8_t* values, float* scales) {
  SCSA_DISPATCH(QuantizeQueryTarget)(q, head_dim, scale, values, scales);
}
float Dot(const float* a, const float* b, std::int64_t n) { return SCSA_DISPATCH(DotTarget)(a, b, n); }
float SquaredDistance(const float* a, const float* b, std::int64_t n) {
  return SCSA_DISPATCH(SquaredDistanceTarget)(a, b, n);
}
void AddScaled(float* dst, const float* src, float factor, std::int64_t n) {
  SCSA_DISPATCH(AddScaledTarget)(dst, src, factor, n);
}

}  // namespace scsa
#endif  // HWY_ONCE
