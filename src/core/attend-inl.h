// SPDX-License-Identifier: Apache-2.0
//
// Scoring and online softmax over tiles of rows. Per-target code: included once per SIMD target.
//
// A tile is up to 64 rows that at least one query vector sees. For a slab of up to four query vectors a tile goes
// through three phases while its rows stay in the first cache levels: logits (register blocks of rows x queries, one
// shared transpose for the horizontal sums), softmax (tile maximum, one rescale when the running maximum grows, exp),
// and values (register blocks of queries x dimensions over all rows). Each K and V element is converted to f32 once per
// slab.

#if defined(SCSA_CORE_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_ATTEND_INL_H_
#undef SCSA_CORE_ATTEND_INL_H_
#else
#define SCSA_CORE_ATTEND_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/fetch-inl.h"
#include "core/kernels.h"
#include "core/row_tile-inl.h"
#include "core/rows-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

static_assert(kTileRows == kFirstRows);
inline constexpr std::size_t kMaxSlab = 4;
// Row pointers are repeated up to a multiple of the largest row block, so that scoring has no remainder.
inline constexpr std::size_t kRowBlock = 8;

// logits[i * kTileRows + r] = q[i] . k[r] for r < count, rounded up to the row block.
template <DType kType, std::size_t kQueries, class D>
HWY_NOINLINE void ScoreTile(D d, std::size_t head_dim, const float* const* q, const std::uint8_t* const* k,
                            std::size_t count, float* HWY_RESTRICT logits, Fetcher& fetch) {
  using V = hn::VFromD<D>;
  constexpr std::size_t kRows = kScoreRows<kQueries>;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  const float* qs[kQueries];
  for (std::size_t i = 0; i < kQueries; ++i) qs[i] = q[i];
  for (std::size_t r0 = 0; r0 < count; r0 += kRows) {
    fetch.Step(kRows);
    const std::uint8_t* rows[kRows];
    V acc[kQueries][kRows];
    SCSA_UNROLL
    for (std::size_t r = 0; r < kRows; ++r) {
      rows[r] = k[r0 + r];
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) acc[i][r] = hn::Zero(d);
    }
    for (std::size_t dim = 0; dim < head_dim; dim += kLanes) {
      V qv[kQueries];
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) qv[i] = hn::LoadU(d, qs[i] + dim);
      SCSA_UNROLL
      for (std::size_t r = 0; r < kRows; ++r) {
        const V kv = LoadValues<kType>(d, rows[r], dim);
        SCSA_UNROLL
        for (std::size_t i = 0; i < kQueries; ++i) acc[i][r] = hn::MulAdd(kv, qv[i], acc[i][r]);
      }
    }
    StoreBlock<kQueries, kRows>(d, acc, logits + r0, kTileRows);
  }
}

// The same over q8_0 rows with integer dot products: q16[i] holds the quantised values of query i as 16-bit integers,
// scales[i] one scale per block of 32. Products of two 8-bit values pair up in 32-bit lanes without overflow.
template <std::size_t kQueries>
HWY_NOINLINE void ScoreTileQuantized(std::size_t blocks, const std::int16_t* const* q16, const float* const* scales,
                                     const std::uint8_t* const* k, std::size_t count, float* HWY_RESTRICT logits,
                                     Fetcher& fetch) {
  using D16 = hn::CappedTag<std::int16_t, kQ8BlockSize>;
  const D16 d16;
  const hn::Rebind<std::int8_t, D16> d8;
#if HWY_TARGET == HWY_SCALAR
  const hn::CappedTag<std::int32_t, 1> d32;
#else
  const hn::RepartitionToWide<D16> d32;
#endif
  const hn::RebindToFloat<decltype(d32)> d;
  using V = hn::VFromD<decltype(d)>;
  constexpr std::size_t kLanes = hn::MaxLanes(D16());
  constexpr std::size_t kRows = kScoreRows<kQueries>;
  for (std::size_t r0 = 0; r0 < count; r0 += kRows) {
    fetch.Step(kRows);
    V acc[kQueries][kRows];
    SCSA_UNROLL
    for (std::size_t r = 0; r < kRows; ++r) {
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) acc[i][r] = hn::Zero(d);
    }
    for (std::size_t b = 0; b < blocks; ++b) {
      V query_scale[kQueries];
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) query_scale[i] = hn::Set(d, scales[i][b]);
      SCSA_UNROLL
      for (std::size_t r = 0; r < kRows; ++r) {
        const std::uint8_t* block = k[r0 + r] + b * kQ8BlockBytes;
        const V scale = BroadcastF16(d, block);
        const std::int8_t* values = reinterpret_cast<const std::int8_t*>(block + 2);
        hn::VFromD<decltype(d32)> even[kQueries];
        hn::VFromD<decltype(d32)> odd[kQueries];
        SCSA_UNROLL
        for (std::size_t i = 0; i < kQueries; ++i) even[i] = odd[i] = hn::Zero(d32);
        SCSA_UNROLL
        for (std::size_t j = 0; j < kQ8BlockSize; j += kLanes) {
          const auto kv = hn::PromoteTo(d16, hn::LoadU(d8, values + j));
          SCSA_UNROLL
          for (std::size_t i = 0; i < kQueries; ++i) {
            const auto qv = hn::LoadU(d16, q16[i] + b * kQ8BlockSize + j);
            even[i] = hn::ReorderWidenMulAccumulate(d32, kv, qv, even[i], odd[i]);
          }
        }
        SCSA_UNROLL
        for (std::size_t i = 0; i < kQueries; ++i) {
          const V dot = hn::ConvertTo(d, hn::Add(even[i], odd[i]));
          acc[i][r] = hn::MulAdd(dot, hn::Mul(scale, query_scale[i]), acc[i][r]);
        }
      }
    }
    StoreBlock<kQueries, kRows>(d, acc, logits + r0, kTileRows);
  }
}

// num[i][dim0 ...] += sum_r p[i][r] v[r][dim0 ...] for kVecs vectors of dimensions. dim0 is a multiple of kVecs vectors
// and kVecs a power of two, so kShared vectors always lie in one q8_0 block.
template <DType kType, std::size_t kQueries, std::size_t kVecs, class D>
HWY_INLINE void AddValueBlock(D d, std::size_t dim0, const float* HWY_RESTRICT p, const std::uint8_t* const* v,
                              std::size_t count, float* const* num, Fetcher& fetch) {
  using V = hn::VFromD<D>;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  constexpr std::size_t kShared = kType == DType::kQ8_0 ? std::min<std::size_t>(kVecs, kQ8BlockSize / kLanes) : kVecs;
  V acc[kQueries][kVecs];
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) {
    SCSA_UNROLL
    for (std::size_t j = 0; j < kVecs; ++j) acc[i][j] = hn::LoadU(d, num[i] + dim0 + j * kLanes);
  }
  for (std::size_t r = 0; r < count; ++r) {
    fetch.Step(1);
    SCSA_UNROLL
    for (std::size_t j0 = 0; j0 < kVecs; j0 += kShared) {
      V weights[kQueries];
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) weights[i] = hn::Set(d, p[i * kTileRows + r]);
      if constexpr (kType == DType::kQ8_0) {
        // Fewer multiplications than scaling the values, and no register for the scale.
        const V scale = BlockScale(d, v[r], dim0 + j0 * kLanes);
        SCSA_UNROLL
        for (std::size_t i = 0; i < kQueries; ++i) weights[i] = hn::Mul(weights[i], scale);
      }
      SCSA_UNROLL
      for (std::size_t j = j0; j < j0 + kShared; ++j) {
        const V values = LoadUnscaled<kType>(d, v[r], dim0 + j * kLanes);
        SCSA_UNROLL
        for (std::size_t i = 0; i < kQueries; ++i) acc[i][j] = hn::MulAdd(weights[i], values, acc[i][j]);
      }
    }
  }
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) {
    SCSA_UNROLL
    for (std::size_t j = 0; j < kVecs; ++j) hn::StoreU(acc[i][j], d, num[i] + dim0 + j * kLanes);
  }
}

// Blocks of kVecs vectors while they fit, then of half as many: a block always starts at a multiple of its own size.
template <DType kType, std::size_t kQueries, std::size_t kVecs, class D>
HWY_INLINE void AddValueBlocks(D d, std::size_t dim, std::size_t head_dim, const float* HWY_RESTRICT p,
                               const std::uint8_t* const* v, std::size_t count, float* const* num, Fetcher& fetch) {
  constexpr std::size_t kStep = kVecs * hn::MaxLanes(D());
  for (; dim + kStep <= head_dim; dim += kStep) AddValueBlock<kType, kQueries, kVecs>(d, dim, p, v, count, num, fetch);
  if constexpr (kVecs > 1) AddValueBlocks<kType, kQueries, kVecs / 2>(d, dim, head_dim, p, v, count, num, fetch);
}

template <std::size_t kQueries>
inline constexpr std::size_t kValueVecs = kQueries == 1   ? 8
                                          : kQueries == 2 ? (SCSA_MANY_REGISTERS ? 8 : 4)
                                          : kQueries == 3 ? 4
                                                          : (SCSA_MANY_REGISTERS ? 4 : 2);

// num[i] += sum_r p[i * kTileRows + r] v[r]
template <DType kType, std::size_t kQueries, class D>
HWY_NOINLINE void AddValues(D d, std::size_t head_dim, const float* HWY_RESTRICT p, const std::uint8_t* const* v,
                            std::size_t count, float* const* num, Fetcher& fetch) {
  AddValueBlocks<kType, kQueries, kValueVecs<kQueries>>(d, 0, head_dim, p, v, count, num, fetch);
}

// The bits of `bits` at the set positions of `mask`, moved together.
HWY_INLINE std::uint64_t Compress(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t packed = 0;
  for (std::size_t to = 0; mask != 0; mask &= mask - 1, ++to) {
    packed |= (bits >> std::countr_zero(mask) & 1) << to;
  }
  return packed;
}

template <class D>
using ScoreFunction = void (*)(D, std::size_t, const float* const*, const std::uint8_t* const*, std::size_t, float*,
                               Fetcher&);
template <class D>
using ValueFunction = void (*)(D, std::size_t, const float*, const std::uint8_t* const*, std::size_t, float* const*,
                               Fetcher&);
using QuantizedFunction = void (*)(std::size_t, const std::int16_t* const*, const float* const*,
                                   const std::uint8_t* const*, std::size_t, float*, Fetcher&);

// Kernels of one row type, by the number of query vectors in a slab minus one.
template <DType kType, class D>
inline constexpr ScoreFunction<D> kScoreFunctions[kMaxSlab] = {&ScoreTile<kType, 1, D>, &ScoreTile<kType, 2, D>,
                                                               &ScoreTile<kType, 3, D>, &ScoreTile<kType, 4, D>};
template <DType kType, class D>
inline constexpr ValueFunction<D> kValueFunctions[kMaxSlab] = {&AddValues<kType, 1, D>, &AddValues<kType, 2, D>,
                                                               &AddValues<kType, 3, D>, &AddValues<kType, 4, D>};
inline constexpr QuantizedFunction kQuantizedFunctions[kMaxSlab] = {&ScoreTileQuantized<1>, &ScoreTileQuantized<2>,
                                                                    &ScoreTileQuantized<3>, &ScoreTileQuantized<4>};

template <class D>
const ScoreFunction<D>* ScoreFunctions(DType type) {
  switch (type) {
    case DType::kF32:
      return kScoreFunctions<DType::kF32, D>;
    case DType::kF16:
      return kScoreFunctions<DType::kF16, D>;
    case DType::kBF16:
      return kScoreFunctions<DType::kBF16, D>;
    case DType::kQ8_0:
      break;
  }
  return kScoreFunctions<DType::kQ8_0, D>;
}

template <class D>
const ValueFunction<D>* ValueFunctions(DType type) {
  switch (type) {
    case DType::kF32:
      return kValueFunctions<DType::kF32, D>;
    case DType::kF16:
      return kValueFunctions<DType::kF16, D>;
    case DType::kBF16:
      return kValueFunctions<DType::kBF16, D>;
    case DType::kQ8_0:
      break;
  }
  return kValueFunctions<DType::kQ8_0, D>;
}

// Logits of a slab with integer dot products.
inline void ScoreSlabQuantized(int head_dim, const QuantizedQuery* const* queries, std::size_t n,
                               const std::uint8_t* const* k, std::size_t count, float* HWY_RESTRICT logits,
                               Fetcher& fetch) {
  HWY_ALIGN std::int16_t q16[kMaxSlab][kMaxHeadDim];
  const std::int16_t* values[kMaxSlab];
  const float* scales[kMaxSlab];
  const std::size_t blocks = hwy::DivCeil(static_cast<std::size_t>(head_dim), std::size_t{kQ8BlockSize});
  const hn::CappedTag<std::int16_t, kQ8BlockSize> d16;
  const hn::Rebind<std::int8_t, decltype(d16)> d8;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < blocks * kQ8BlockSize; j += hn::Lanes(d16)) {
      hn::Store(hn::PromoteTo(d16, hn::LoadU(d8, queries[i]->values + j)), d16, q16[i] + j);
    }
    values[i] = q16[i];
    scales[i] = queries[i]->scales;
  }
  kQuantizedFunctions[n - 1](blocks, values, scales, k, count, logits, fetch);
}

template <class D>
void AttendRunWith(D d, const RunArgs& args, const SoftmaxState& state) {
  const ScoreFunction<D>* score = ScoreFunctions<D>(args.k_type);
  const ValueFunction<D>* add_values = ValueFunctions<D>(args.v_type);
  const bool integer_scores = args.quantized != nullptr && args.k_type == DType::kQ8_0;
  const std::size_t head_dim = static_cast<std::size_t>(args.head_dim);
  const std::size_t n = static_cast<std::size_t>(args.n);
  const auto* k = reinterpret_cast<const std::uint8_t*>(args.k);
  const auto* v = reinterpret_cast<const std::uint8_t*>(args.v);

  HWY_ALIGN float logits[kMaxSlab * kTileRows];
  const std::uint8_t* k_rows[kTileRows + kRowBlock];
  const std::uint8_t* v_rows[kTileRows];
  Fetcher fetch_k(args.next_k, args.n_rows);
  Fetcher fetch_v(args.next_v, args.n_rows);

  for (std::int64_t first = 0; first < args.n_rows; first += kTileRows) {
    const std::size_t in_tile = static_cast<std::size_t>(std::min<std::int64_t>(kTileRows, args.n_rows - first));
    const std::int64_t word = (args.first_bit + first) / 64;
    std::uint64_t in_use = LowBits(in_tile);  // rows that some query sees
    if (args.visible != nullptr) {
      std::uint64_t seen_by_any = 0;
      for (std::size_t i = 0; i < n; ++i) seen_by_any |= args.visible[i][word];
      in_use &= seen_by_any;
      if (in_use == 0) continue;
    }
    const bool whole = in_use == LowBits(in_tile);
    const std::uint8_t* const tile_k = k + first * args.k_stride;
    const std::uint8_t* const tile_v = v + first * args.v_stride;
    std::size_t count = 0;
    if (args.k_places != nullptr) {
      for (; count < in_tile; ++count) {
        const std::int64_t row = first + static_cast<std::int64_t>(count);
        k_rows[count] = reinterpret_cast<const std::uint8_t*>(args.k_places[row]);
        v_rows[count] = reinterpret_cast<const std::uint8_t*>(args.v_places[row]);
      }
      const std::int64_t next = first + static_cast<std::int64_t>(kTileRows);
      const auto steps = static_cast<std::int64_t>(in_tile);
      const bool last = next >= args.n_rows;
      fetch_k = Fetcher(last ? args.next_k : ScatteredRows(args, args.k_places, args.k_type, next), steps);
      fetch_v = Fetcher(last ? args.next_v : ScatteredRows(args, args.v_places, args.v_type, next), steps);
    } else if (whole) {
      for (; count < in_tile; ++count) {
        k_rows[count] = tile_k + static_cast<std::int64_t>(count) * args.k_stride;
        v_rows[count] = tile_v + static_cast<std::int64_t>(count) * args.v_stride;
      }
    } else {
      for (std::uint64_t bits = in_use; bits != 0; bits &= bits - 1, ++count) {
        k_rows[count] = tile_k + std::countr_zero(bits) * args.k_stride;
        v_rows[count] = tile_v + std::countr_zero(bits) * args.v_stride;
      }
    }
    for (std::size_t r = count; r % kRowBlock != 0; ++r) k_rows[r] = k_rows[count - 1];

    for (std::size_t i = 0; i < n;) {
      const float* q[kMaxSlab];
      const QuantizedQuery* quantized[kMaxSlab];
      float* num[kMaxSlab];
      std::size_t index[kMaxSlab];
      std::uint64_t seen[kMaxSlab];
      std::size_t slab = 0;
      for (; i < n && slab < kMaxSlab; ++i) {
        std::uint64_t bits = in_use;
        if (args.visible != nullptr) bits &= args.visible[i][word];
        if (bits == 0) continue;
        index[slab] = i;
        q[slab] = args.q + i * head_dim;
        quantized[slab] = integer_scores ? args.quantized + i : nullptr;
        num[slab] = state.num + i * head_dim;
        seen[slab] = whole ? bits : Compress(bits, in_use);
        ++slab;
      }
      if (slab == 0) break;
      if (integer_scores) {
        ScoreSlabQuantized(args.head_dim, quantized, slab, k_rows, count, logits, fetch_k);
      } else {
        score[slab - 1](d, head_dim, q, k_rows, count, logits, fetch_k);
      }
      for (std::size_t s = 0; s < slab; ++s) {
        SoftmaxTile(FullTag(), head_dim, args.softcap, seen[s], count, logits + s * kTileRows, state.max + index[s],
                    state.sum + index[s], num[s]);
      }
      add_values[slab - 1](d, head_dim, logits, v_rows, count, num, fetch_v);
    }
  }
}

template <class D>
void ScoreRowsWith(D d, int head_dim, int n, const float* q, const std::byte* k, std::int64_t k_stride, DType k_type,
                   std::int64_t n_rows, float* logits, std::int64_t logits_stride) {
  const ScoreFunction<D>* score = ScoreFunctions<D>(k_type);
  const auto* rows = reinterpret_cast<const std::uint8_t*>(k);
  HWY_ALIGN float tile[kMaxSlab * kTileRows];
  Fetcher no_fetch(FetchHint(), n_rows);
  const std::uint8_t* k_rows[kTileRows + kRowBlock];
  for (std::int64_t first = 0; first < n_rows; first += kTileRows) {
    const std::size_t count = static_cast<std::size_t>(std::min<std::int64_t>(kTileRows, n_rows - first));
    for (std::size_t r = 0; r < hwy::RoundUpTo(count, kRowBlock); ++r) {
      k_rows[r] = rows + (first + static_cast<std::int64_t>(std::min(r, count - 1))) * k_stride;
    }
    for (int i = 0; i < n; i += static_cast<int>(kMaxSlab)) {
      const std::size_t slab = static_cast<std::size_t>(std::min(n - i, static_cast<int>(kMaxSlab)));
      const float* queries[kMaxSlab];
      for (std::size_t s = 0; s < slab; ++s) queries[s] = q + (i + static_cast<std::int64_t>(s)) * head_dim;
      score[slab - 1](d, static_cast<std::size_t>(head_dim), queries, k_rows, count, tile, no_fetch);
      for (std::size_t s = 0; s < slab; ++s) {
        std::memcpy(logits + (i + static_cast<std::int64_t>(s)) * logits_stride + first, tile + s * kTileRows,
                    count * sizeof(float));
      }
    }
  }
}

template <class D>
void AccumulateRowsWith(D d, int head_dim, int n, const float* weights, std::int64_t weights_stride, const std::byte* v,
                        std::int64_t v_stride, DType v_type, std::int64_t n_rows, float* num) {
  const ValueFunction<D>* add_values = ValueFunctions<D>(v_type);
  const auto* base = reinterpret_cast<const std::uint8_t*>(v);
  HWY_ALIGN float tile[kMaxSlab * kTileRows];
  const std::uint8_t* v_rows[kTileRows];
  Fetcher no_fetch(FetchHint(), n_rows);
  for (std::int64_t first = 0; first < n_rows; first += kTileRows) {
    const std::size_t count = static_cast<std::size_t>(std::min<std::int64_t>(kTileRows, n_rows - first));
    for (std::size_t r = 0; r < count; ++r) {
      v_rows[r] = base + (first + static_cast<std::int64_t>(r)) * v_stride;
    }
    for (int i = 0; i < n; i += static_cast<int>(kMaxSlab)) {
      const std::size_t slab = static_cast<std::size_t>(std::min(n - i, static_cast<int>(kMaxSlab)));
      float* sums[kMaxSlab];
      for (std::size_t s = 0; s < slab; ++s) {
        const std::int64_t vector = i + static_cast<std::int64_t>(s);
        sums[s] = num + vector * head_dim;
        std::memcpy(tile + s * kTileRows, weights + vector * weights_stride + first, count * sizeof(float));
      }
      add_values[slab - 1](d, static_cast<std::size_t>(head_dim), tile, v_rows, count, sums, no_fetch);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_ATTEND_INL_H_
