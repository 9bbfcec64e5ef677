// SPDX-License-Identifier: Apache-2.0
//
// Attention over packed 8-bit rows (int8_rows.h). Per-target code: included once per SIMD target.
//
// A batch is up to 64 rows, the pairs of one block being a segment of it. Per slab of up to four query vectors it goes
// through the phases of a tile (attend-inl.h): logits, softmax, values. Segment by segment, the queries are brought
// into the block's frame before the logits, and the values' sums out of it.

#if defined(SCSA_CORE_INT8_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_INT8_ROWS_INL_H_
#undef SCSA_CORE_INT8_ROWS_INL_H_
#else
#define SCSA_CORE_INT8_ROWS_INL_H_
#endif

#include <algorithm>
#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/int8_rows.h"
#include "core/integers-inl.h"
#include "core/row_tile-inl.h"
#include "core/rows-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

inline constexpr std::size_t kInt8Slab = 4;
inline constexpr std::size_t kBatchPairs = kTileRows / 2;
// Register blocks of keys hold up to four pairs. What a block computes beyond the end of a segment is not used.
inline constexpr std::size_t kPairBlock = 4;
inline constexpr std::size_t kBatchRoom = kTileRows + 2 * kPairBlock;  // rows
inline constexpr float kRowSteps = 127.0f;

// The middle of each dimension's range over the rows, and its half in 127 steps.
HWY_INLINE void ChooseFrame(const float* HWY_RESTRICT vectors, std::span<const std::uint16_t> order,
                            std::size_t head_dim, float* HWY_RESTRICT mid, float* HWY_RESTRICT step) {
  const EightTag d;
  for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d)) {
    auto smallest = hn::LoadU(d, vectors + order[0] * head_dim + dim);
    auto largest = smallest;
    for (const std::uint16_t row : order) {
      const auto x = hn::LoadU(d, vectors + row * head_dim + dim);
      smallest = hn::Min(smallest, x);
      largest = hn::Max(largest, x);
    }
    const auto middle = hn::MulAdd(hn::Set(d, 0.5f), hn::Sub(largest, smallest), smallest);
    const auto reach = hn::Max(hn::Sub(largest, middle), hn::Sub(middle, smallest));
    hn::StoreU(middle, d, mid + dim);
    hn::StoreU(hn::Mul(reach, hn::Set(d, 1.0f / kRowSteps)), d, step + dim);
  }
}

HWY_INLINE hn::VFromD<hn::Rebind<std::int8_t, EightTag>> StoredAs(const float* x, const float* mid, const float* step) {
  const EightTag d;
  const auto s = hn::LoadU(d, step);
  const auto steps = hn::Div(hn::Sub(hn::LoadU(d, x), hn::LoadU(d, mid)), s);
  const auto limit = hn::Set(d, kRowSteps);
  const auto clamped = hn::Min(hn::Max(hn::IfThenElseZero(hn::Gt(s, hn::Zero(d)), steps), hn::Neg(limit)), limit);
  return hn::DemoteTo(hn::Rebind<std::int8_t, EightTag>(), hn::NearestInt(clamped));
}

void StoreInt8RowsTarget(const Int8RowLayout& layout, const float* keys, const float* values,
                         std::span<const std::uint16_t> order, std::byte* record) {
  std::memset(record, 0, layout.bytes());
  if (order.empty()) return;
  const hn::Rebind<std::int8_t, EightTag> d8;
  const auto head_dim = static_cast<std::size_t>(layout.head_dim());
  const std::size_t dims = layout.dims();
  const Int8Rows rows = layout.Rows(record);
  ChooseFrame(keys, order, head_dim, rows.key_mid, rows.key_step);
  ChooseFrame(values, order, head_dim, rows.value_mid, rows.value_step);
  rows.largest_key_step[0] = *std::max_element(rows.key_step, rows.key_step + head_dim);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const float* key = keys + order[i] * head_dim;
    for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d8)) {
      hn::StoreU(StoredAs(key + dim, rows.key_mid + dim, rows.key_step + dim), d8, rows.keys + i * dims + dim);
    }
  }
  for (std::size_t i = 0; i < order.size(); i += 2) {
    const float* even = values + order[i] * head_dim;
    const float* odd = i + 1 < order.size() ? values + order[i + 1] * head_dim : nullptr;
    for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d8)) {
      const float* mid = rows.value_mid + dim;
      const float* step = rows.value_step + dim;
      const auto first = StoredAs(even + dim, mid, step);
      const auto second = odd == nullptr ? hn::Zero(d8) : StoredAs(odd + dim, mid, step);
      hn::StoreInterleaved2(first, second, d8, rows.values + i * dims + 2 * dim);
    }
  }
}

// Pairs of the next batch: `bytes` of each are fetched, starting `at` behind its keys, while the pair in the same place
// of this batch is worked on.
struct NextPairs {
  const std::byte* const* pairs;
  std::size_t n;
  std::size_t at;
  std::size_t bytes;

  HWY_INLINE void Fetch(std::size_t p) const {
    if (p >= n) return;
    for (std::size_t line = 0; line < bytes; line += 64) hwy::Prefetch(pairs[p] + at + line);
  }
};

// A slab of queries in the frame of one block.
struct Int8Queries {
  HWY_ALIGN std::int16_t values[kInt8Slab][kMaxHeadDim];  // q_d key_step_d / scale; [dims]
  float scale[kInt8Slab];
  float offset[kInt8Slab];  // q . key_mid
};

template <class D>
HWY_INLINE void FrameQuery(D d, const float* HWY_RESTRICT q, float largest, const ConstInt8Rows& rows,
                           std::size_t head_dim, std::size_t i, Int8Queries* HWY_RESTRICT out) {
  const hn::Rebind<std::int16_t, D> d16;
  // Where the scale would be subnormal, the query's part beyond the offset is nothing. Where it would overflow, so does
  // a logit that is not the offset.
  const float scale = std::min(largest * rows.largest_key_step[0] / kQuerySteps, FLT_MAX);
  const auto inverse = hn::Set(d, scale > 1e-37f ? 1.0f / scale : 0.0f);
  auto offset = hn::Zero(d);
  for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d)) {
    const auto x = hn::LoadU(d, q + dim);
    offset = hn::MulAdd(x, hn::LoadU(d, rows.key_mid + dim), offset);
    const auto rounded = hn::NearestInt(hn::Mul(hn::Mul(x, hn::LoadU(d, rows.key_step + dim)), inverse));
    hn::StoreU(hn::DemoteTo(d16, rounded), d16, out->values[i] + dim);
  }
  out->scale[i] = scale;
  out->offset[i] = hn::GetLane(hn::SumOfLanes(d, offset));
}

// dots[i * kBatchRoom + r] = the integer dot product of query i with row r of n_pairs pairs, rounded up to the register
// block. place: of the first pair in the batch.
template <std::size_t kQueries>
HWY_NOINLINE void ScoreInt8(std::size_t dims, const Int8Queries& q, const std::int8_t* const* pairs,
                            std::size_t n_pairs, std::int32_t* HWY_RESTRICT dots, const NextPairs& next,
                            std::size_t place) {
#if HWY_TARGET == HWY_SCALAR
  // One-lane vectors hold no pairs.
  for (std::size_t r = 0; r < 2 * n_pairs; ++r) {
    if (r % 2 == 0) next.Fetch(place + r / 2);
    const std::int8_t* row = pairs[r / 2] + r % 2 * dims;
    for (std::size_t i = 0; i < kQueries; ++i) {
      std::int32_t sum = 0;
      for (std::size_t dim = 0; dim < dims; ++dim) sum += row[dim] * q.values[i][dim];
      dots[i * kBatchRoom + r] = sum;
    }
  }
#else
  const hn::ScalableTag<std::int32_t> d32;
  const hn::Repartition<std::int16_t, decltype(d32)> d16;
  const hn::Rebind<std::int8_t, decltype(d16)> d8;
  constexpr std::size_t kRows = kScoreRows<kQueries>;
  for (std::size_t r0 = 0; r0 < 2 * n_pairs; r0 += kRows) {
    SCSA_UNROLL
    for (std::size_t r = 0; r < kRows; r += 2) next.Fetch(place + (r0 + r) / 2);
    const std::int8_t* rows[kRows];
    hn::VFromD<decltype(d32)> acc[kQueries][kRows];
    SCSA_UNROLL
    for (std::size_t r = 0; r < kRows; ++r) {
      rows[r] = pairs[(r0 + r) / 2] + r % 2 * dims;
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) acc[i][r] = hn::Zero(d32);
    }
    for (std::size_t dim = 0; dim < dims; dim += hn::Lanes(d16)) {
      hn::VFromD<decltype(d16)> query[kQueries];
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) query[i] = hn::Load(d16, q.values[i] + dim);
      SCSA_UNROLL
      for (std::size_t r = 0; r < kRows; ++r) {
        const auto key = hn::PromoteTo(d16, hn::LoadU(d8, rows[r] + dim));
        SCSA_UNROLL
        for (std::size_t i = 0; i < kQueries; ++i) acc[i][r] = AddPairs(d32, key, query[i], acc[i][r]);
      }
    }
    StoreBlock<kQueries, kRows>(d32, acc, dots + r0, kBatchRoom);
  }
#endif
}

// Weights of a slab as integers, relative to the largest one of each query in the batch.
struct Int8Weights {
  HWY_ALIGN std::int16_t values[kInt8Slab][kTileRows];
  float scale[kInt8Slab];
};

// sums[i * kMaxHeadDim + dim0 ...] = sum_r weights[i][r] (stored value of row r) over the rows of n_pairs pairs, of
// which `place` is the first in the batch; for kVecs vectors of dimensions.
template <std::size_t kQueries, std::size_t kVecs>
HWY_INLINE void SumValuesBlock(std::size_t dim0, const std::int8_t* const* pairs, std::size_t n_pairs,
                               std::size_t values_at, const Int8Weights& weights, std::int32_t* HWY_RESTRICT sums,
                               const NextPairs& next, std::size_t place) {
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t i = 0; i < kQueries; ++i) {
    for (std::size_t dim = dim0; dim < dim0 + kVecs; ++dim) {
      std::int32_t sum = 0;
      for (std::size_t p = 0; p < n_pairs; ++p) {
        const std::int8_t* at = pairs[p] + values_at + 2 * dim;
        sum += at[0] * weights.values[i][2 * (place + p)] + at[1] * weights.values[i][2 * (place + p) + 1];
      }
      sums[i * kMaxHeadDim + dim] = sum;
    }
  }
  for (std::size_t p = 0; dim0 == 0 && p < n_pairs; ++p) next.Fetch(place + p);
#else
  const hn::ScalableTag<std::int32_t> d32;
  const hn::Repartition<std::int16_t, decltype(d32)> d16;
  const hn::Rebind<std::int8_t, decltype(d16)> d8;
  constexpr std::size_t kLanes = hn::MaxLanes(decltype(d32)());
  hn::VFromD<decltype(d32)> acc[kQueries][kVecs];
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) {
    SCSA_UNROLL
    for (std::size_t v = 0; v < kVecs; ++v) acc[i][v] = hn::Zero(d32);
  }
  for (std::size_t p = 0; p < n_pairs; ++p) {
    if (dim0 == 0) next.Fetch(place + p);
    hn::VFromD<decltype(d16)> both[kQueries];
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) both[i] = BroadcastPair(d32, weights.values[i] + 2 * (place + p));
    const std::int8_t* at = pairs[p] + values_at + 2 * dim0;
    SCSA_UNROLL
    for (std::size_t v = 0; v < kVecs; ++v) {
      const auto values = hn::PromoteTo(d16, hn::LoadU(d8, at + v * 2 * kLanes));
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) acc[i][v] = AddPairs(d32, values, both[i], acc[i][v]);
    }
  }
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) {
    SCSA_UNROLL
    for (std::size_t v = 0; v < kVecs; ++v) hn::StoreU(acc[i][v], d32, sums + i * kMaxHeadDim + dim0 + v * kLanes);
  }
#endif
}

template <std::size_t kQueries, std::size_t kVecs>
HWY_INLINE void SumValuesBlocks(std::size_t dim, std::size_t dims, const std::int8_t* const* pairs, std::size_t n_pairs,
                                std::size_t values_at, const Int8Weights& weights, std::int32_t* HWY_RESTRICT sums,
                                const NextPairs& next, std::size_t place) {
  constexpr std::size_t kStep = kVecs * hn::MaxLanes(hn::ScalableTag<std::int32_t>());
  for (; dim + kStep <= dims; dim += kStep) {
    SumValuesBlock<kQueries, kVecs>(dim, pairs, n_pairs, values_at, weights, sums, next, place);
  }
  if constexpr (kVecs > 1) {
    SumValuesBlocks<kQueries, kVecs / 2>(dim, dims, pairs, n_pairs, values_at, weights, sums, next, place);
  }
}

template <std::size_t kQueries>
HWY_NOINLINE void SumValues(std::size_t dims, const std::int8_t* const* pairs, std::size_t n_pairs,
                            std::size_t values_at, const Int8Weights& weights, std::int32_t* HWY_RESTRICT sums,
                            const NextPairs& next, std::size_t place) {
  constexpr std::size_t kVecs = SCSA_MANY_REGISTERS || kQueries <= 2 ? 4 : 2;
  SumValuesBlocks<kQueries, kVecs>(0, dims, pairs, n_pairs, values_at, weights, sums, next, place);
}

using ScoreInt8Function = void (*)(std::size_t, const Int8Queries&, const std::int8_t* const*, std::size_t,
                                   std::int32_t*, const NextPairs&, std::size_t);
using SumValuesFunction = void (*)(std::size_t, const std::int8_t* const*, std::size_t, std::size_t, const Int8Weights&,
                                   std::int32_t*, const NextPairs&, std::size_t);
inline constexpr ScoreInt8Function kScoreInt8[kInt8Slab] = {&ScoreInt8<1>, &ScoreInt8<2>, &ScoreInt8<3>, &ScoreInt8<4>};
inline constexpr SumValuesFunction kSumValues[kInt8Slab] = {&SumValues<1>, &SumValues<2>, &SumValues<3>, &SumValues<4>};

// Adds the weighted values, whose integer sums are `sums`, to num.
template <class D>
HWY_INLINE void AddFramed(D d, const ConstInt8Rows& rows, std::size_t head_dim, const std::int32_t* HWY_RESTRICT sums,
                          float scale, float weight, float* HWY_RESTRICT num) {
  const hn::RebindToSigned<D> d32;
  const auto unit = hn::Set(d, scale);
  const auto total = hn::Set(d, weight);
  for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d)) {
    const auto sum = hn::ConvertTo(d, hn::LoadU(d32, sums + dim));
    const auto step = hn::Mul(hn::LoadU(d, rows.value_step + dim), unit);
    const auto middle = hn::MulAdd(total, hn::LoadU(d, rows.value_mid + dim), hn::LoadU(d, num + dim));
    hn::StoreU(hn::MulAdd(sum, step, middle), d, num + dim);
  }
}

// The pairs of one block in a batch.
struct Segment {
  ConstInt8Rows rows;
  std::size_t first;
  std::size_t n;
};

template <class D>
void AttendInt8RowsWith(D d, const Int8RunArgs& args, const SoftmaxState& state) {
  const FullTag full;
  const hn::RebindToSigned<FullTag> full32;
  const auto head_dim = static_cast<std::size_t>(args.layout->head_dim());
  const std::size_t dims = args.layout->dims();
  const std::size_t values_at = args.layout->ValuesBehindKeys();
  const auto n = static_cast<std::size_t>(args.n);
  Int8Queries framed;
  Int8Weights weights;
  HWY_ALIGN std::int32_t dots[kInt8Slab * kBatchRoom];
  HWY_ALIGN float logits[kInt8Slab][kTileRows + hn::MaxLanes(full)];
  HWY_ALIGN std::int32_t sums[kInt8Slab * kMaxHeadDim];
  const std::int8_t* pairs[kBatchPairs + kPairBlock];
  Segment segments[kBatchPairs];
  float largest[kMaxQHeads];
  for (std::size_t i = 0; i < n; ++i) largest[i] = LargestMagnitude(args.q + i * head_dim, head_dim);
  for (auto& query : framed.values) std::fill(query + head_dim, query + dims, std::int16_t{0});

  const auto end = static_cast<std::size_t>(args.n_pairs);
  for (std::size_t first = 0; first < end; first += kBatchPairs) {
    const std::size_t n_pairs = std::min(kBatchPairs, end - first);
    std::uint64_t seen = 0;
    std::size_t n_segments = 0;
    for (std::size_t p = 0; p < n_pairs; ++p) {
      if (p == 0 || args.records[first + p] != args.records[first + p - 1]) {
        segments[n_segments++] = {args.layout->Rows(args.records[first + p]), p, 0};
      }
      ++segments[n_segments - 1].n;
      pairs[p] = reinterpret_cast<const std::int8_t*>(args.pairs[first + p]);
      seen |= std::uint64_t{args.seen[first + p]} << (2 * p);
    }
    std::fill_n(pairs + n_pairs, kPairBlock, pairs[n_pairs - 1]);
    const std::size_t n_next = std::min(kBatchPairs, end - first - n_pairs);
    const NextPairs next_keys = {args.pairs + first + n_pairs, n_next, 0, 2 * dims};
    const NextPairs next_values = {next_keys.pairs, n_next, values_at, 2 * dims};

    for (std::size_t i = 0; i < n; i += kInt8Slab) {
      const std::size_t slab = std::min(kInt8Slab, n - i);
      for (std::size_t g = 0; g < n_segments; ++g) {
        const Segment& segment = segments[g];
        for (std::size_t s = 0; s < slab; ++s) {
          FrameQuery(d, args.q + (i + s) * head_dim, largest[i + s], segment.rows, head_dim, s, &framed);
        }
        kScoreInt8[slab - 1](dims, framed, pairs + segment.first, segment.n, dots, next_keys, segment.first);
        for (std::size_t s = 0; s < slab; ++s) {
          const auto scale = hn::Set(full, framed.scale[s]);
          const auto offset = hn::Set(full, framed.offset[s]);
          for (std::size_t r = 0; r < 2 * segment.n; r += hn::Lanes(full)) {
            const auto dot = hn::ConvertTo(full, hn::LoadU(full32, dots + s * kBatchRoom + r));
            hn::StoreU(hn::MulAdd(dot, scale, offset), full, logits[s] + 2 * segment.first + r);
          }
        }
      }
      for (std::size_t s = 0; s < slab; ++s) {
        SoftmaxTile(full, head_dim, args.softcap, seen, 2 * n_pairs, logits[s], state.max + i + s, state.sum + i + s,
                    state.num + (i + s) * head_dim);
        weights.scale[s] =
            RoundWeights(full, logits[s], hwy::RoundUpTo(2 * n_pairs, hn::Lanes(full)), weights.values[s]);
      }
      for (std::size_t g = 0; g < n_segments; ++g) {
        const Segment& segment = segments[g];
        kSumValues[slab - 1](dims, pairs + segment.first, segment.n, values_at, weights, sums, next_values,
                             segment.first);
        for (std::size_t s = 0; s < slab; ++s) {
          AddFramed(d, segment.rows, head_dim, sums + s * kMaxHeadDim, weights.scale[s],
                    SumOf(full, logits[s] + 2 * segment.first, 2 * segment.n), state.num + (i + s) * head_dim);
        }
      }
    }
  }
}

void AttendInt8RowsTarget(const Int8RunArgs& args, const SoftmaxState& state) {
  if (args.layout->head_dim() % static_cast<int>(hn::MaxLanes(FullTag())) == 0) {
    AttendInt8RowsWith(FullTag(), args, state);
  } else {
    AttendInt8RowsWith(EightTag(), args, state);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_INT8_ROWS_INL_H_
