// SPDX-License-Identifier: Apache-2.0
//
// What the kernels over tiles of up to 64 rows share: horizontal sums of register blocks, and the softmax of a tile.
// Per-target code: included once per SIMD target.

#if defined(SCSA_CORE_ROW_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_ROW_TILE_INL_H_
#undef SCSA_CORE_ROW_TILE_INL_H_
#else
#define SCSA_CORE_ROW_TILE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

inline constexpr std::size_t kTileRows = 64;

// Four horizontal sums of 32-bit lanes: lane r of the result is the sum of the lanes of ar.
template <class D, class V = hn::VFromD<D>>
HWY_INLINE void StoreSums4([[maybe_unused]] D d, V a0, V a1, V a2, V a3, hn::TFromD<D>* HWY_RESTRICT sums) {
#if HWY_TARGET == HWY_SCALAR
  sums[0] = hn::GetLane(a0);
  sums[1] = hn::GetLane(a1);
  sums[2] = hn::GetLane(a2);
  sums[3] = hn::GetLane(a3);
#else
  const hn::RepartitionToWide<hn::RebindToUnsigned<D>> d64;
  const V s01 = hn::Add(hn::InterleaveLower(d, a0, a1), hn::InterleaveUpper(d, a0, a1));
  const V s23 = hn::Add(hn::InterleaveLower(d, a2, a3), hn::InterleaveUpper(d, a2, a3));
  const auto w01 = hn::BitCast(d64, s01);
  const auto w23 = hn::BitCast(d64, s23);
  // Each 128-bit block now holds the four partial sums of that block.
  const V blocks =
      hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, w01, w23)), hn::BitCast(d, hn::InterleaveUpper(d64, w01, w23)));
  const hn::CappedTag<hn::TFromD<D>, 4> d4;
  if constexpr (hn::MaxLanes(D()) == 16) {
    const hn::Half<D> d8;
    const auto half = hn::Add(hn::LowerHalf(d8, blocks), hn::UpperHalf(d8, blocks));
    hn::StoreU(hn::Add(hn::LowerHalf(d4, half), hn::UpperHalf(d4, half)), d4, sums);
  } else if constexpr (hn::MaxLanes(D()) == 8) {
    hn::StoreU(hn::Add(hn::LowerHalf(d4, blocks), hn::UpperHalf(d4, blocks)), d4, sums);
  } else {
    static_assert(hn::MaxLanes(D()) == 4);
    hn::StoreU(blocks, d4, sums);
  }
#endif
}

// Stores the sums of a block of accumulators, acc[query][row], into sums[query * stride + row].
template <std::size_t kQueries, std::size_t kRows, class D>
HWY_INLINE void StoreBlock(D d, const hn::VFromD<D> (*acc)[kRows], hn::TFromD<D>* HWY_RESTRICT sums,
                           std::size_t stride) {
  if constexpr (kRows == 2) {
    static_assert(kQueries % 2 == 0);
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; i += 2) {
      HWY_ALIGN hn::TFromD<D> four[4];
      StoreSums4(d, acc[i][0], acc[i][1], acc[i + 1][0], acc[i + 1][1], four);
      std::memcpy(sums + i * stride, four, 2 * sizeof(four[0]));
      std::memcpy(sums + (i + 1) * stride, four + 2, 2 * sizeof(four[0]));
    }
  } else {
    static_assert(kRows % 4 == 0);
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) {
      SCSA_UNROLL
      for (std::size_t r = 0; r < kRows; r += 4) {
        StoreSums4(d, acc[i][r], acc[i][r + 1], acc[i][r + 2], acc[i][r + 3], sums + i * stride + r);
      }
    }
  }
}

// Rows per register block: enough independent chains to hide the latency of a multiply-add, and no more accumulators
// than registers.
template <std::size_t kQueries>
inline constexpr std::size_t kScoreRows = kQueries == 1                             ? 8
                                          : (kQueries == 4 && !SCSA_MANY_REGISTERS) ? 2
                                                                                    : 4;

HWY_INLINE std::uint64_t LowBits(std::size_t count) {
  return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// Turns one query's logits into weights exp(x - max) and folds their sum into the state. `seen`: bit r says whether the
// query sees row r; weights of unseen rows, and of those that pad the vector, are exactly 0.
template <class D>
HWY_INLINE void SoftmaxTile(D d, std::size_t head_dim, float softcap, std::uint64_t seen, std::size_t count,
                            float* HWY_RESTRICT x, float* HWY_RESTRICT max, float* HWY_RESTRICT sum,
                            float* HWY_RESTRICT num) {
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  const std::size_t padded = hwy::RoundUpTo(count, kLanes);
  if (softcap > 0.0f) {
    for (std::size_t r = 0; r < count; r += kLanes) hn::StoreU(SoftCap(d, hn::LoadU(d, x + r), softcap), d, x + r);
  }
  const std::uint64_t all = padded == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << padded) - 1;
  for (std::uint64_t hidden = all & ~seen; hidden != 0; hidden &= hidden - 1) {
    x[std::countr_zero(hidden)] = -HUGE_VALF;
  }
  // A dot product that overflows counts as the largest float, so that a difference of two stays a number.
  const auto limit = hn::Set(d, FLT_MAX);
  auto tile_max = hn::Set(d, -HUGE_VALF);
  for (std::size_t r = 0; r < padded; r += kLanes) {
    const auto bounded = hn::Min(hn::LoadU(d, x + r), limit);
    hn::StoreU(bounded, d, x + r);
    tile_max = hn::Max(tile_max, bounded);
  }
  const float new_max = std::max(*max, hn::GetLane(hn::MaxOfLanes(d, tile_max)));
  if (new_max == -HUGE_VALF) {
    for (std::size_t r = 0; r < padded; r += kLanes) hn::StoreU(hn::Zero(d), d, x + r);
    return;
  }
  if (new_max > *max) {
    const float factor = ExpNonPositive(*max - new_max);
    *max = new_max;
    *sum *= factor;
    // Any head_dim is a multiple of eight lanes, not of the vectors that run along the rows.
    Scale(EightTag(), num, head_dim, factor);
  }
  const auto shift = hn::Set(d, new_max);
  auto tile_sum = hn::Zero(d);
  for (std::size_t r = 0; r < padded; r += kLanes) {
    const auto weight = ExpNonPositive(d, hn::Sub(hn::LoadU(d, x + r), shift));
    hn::StoreU(weight, d, x + r);
    tile_sum = hn::Add(tile_sum, weight);
  }
  *sum += hn::GetLane(hn::SumOfLanes(d, tile_sum));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_ROW_TILE_INL_H_
