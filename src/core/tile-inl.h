// SPDX-License-Identifier: Apache-2.0
//
// Attention of a tile of query vectors. Per-target code: included once per SIMD target.
//
// Vectors run along the queries: a lane is a query vector, and keys and values are broadcast. So neither the keys nor
// the weights need a transpose, and the softmax over rows has no horizontal step. For every block of 64 rows each panel
// of queries goes through three phases while its logits stay in the first cache level: logits (register blocks of rows
// x queries over the dimensions), softmax (lane by lane), values (register blocks of dimensions x queries over the
// rows).

#if defined(SCSA_CORE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_TILE_INL_H_
#undef SCSA_CORE_TILE_INL_H_
#else
#define SCSA_CORE_TILE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/rows-inl.h"
#include "core/softmax_state.h"
#include "core/tile.h"
#include "core/workspace.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

// Rows of a block, a word of the visible sets.
inline constexpr std::size_t kBlock = 64;
// A register block: kBroadcast rows or dimensions times kPanelVecs vectors of queries. As many accumulators as leave
// registers for the operands.
inline constexpr std::size_t kBroadcast = SCSA_MANY_REGISTERS ? 8 : 4;
inline constexpr std::size_t kPanelVecs = 3;
inline constexpr std::size_t kPanel = kPanelVecs * hn::MaxLanes(FullTag());
static_assert(kBlock % kBroadcast == 0);

// Softmax states of a tile's vectors (SoftmaxState), lane by lane.
struct TileState {
  TileState(ScratchLayout& layout, std::size_t head_dim, std::size_t padded)
      : max(layout.Take<float>(padded)), sum(layout.Take<float>(padded)), num(layout.Take<float>(padded * head_dim)) {}
  float* max;  // [panel][kPanel]
  float* sum;  // the same
  float* num;  // [panel][head_dim][kPanel]
};

HWY_INLINE std::size_t PaddedVectors(const TileArgs& args) {
  return hwy::RoundUpTo(static_cast<std::size_t>(args.n), kPanel);
}

// The arrays of a tile.
struct TileScratch {
  TileScratch(ScratchLayout layout, std::size_t head_dim, std::size_t padded)
      : state(layout, head_dim, padded),
        q(layout.Take<float>(padded * head_dim)),
        k(layout.Take<float>(kBlock * head_dim)),
        v(layout.Take<float>(kBlock * head_dim)),
        weights(layout.Take<float>(kBlock * kPanel)),
        row(layout.Take<float>(head_dim)),
        bytes(layout.bytes()) {}
  TileScratch(const TileArgs& args, void* memory)
      : TileScratch(ScratchLayout(memory), static_cast<std::size_t>(args.head_dim), PaddedVectors(args)) {}

  TileState state;
  float* q;        // [panel][head_dim][kPanel], multiplied by the scale
  float* k;        // [kBlock][head_dim]
  float* v;        // [head_dim / kBroadcast][kBlock][kBroadcast]
  float* weights;  // [kBlock][kPanel], logits first
  float* row;      // [head_dim]
  std::size_t bytes;
};

// Eight values of row r from dimension `dim` on, to where AddValuesPanel looks for them.
HWY_INLINE void StoreValues(const float* HWY_RESTRICT values, std::size_t r, std::size_t dim,
                            float* HWY_RESTRICT packed) {
  for (std::size_t j = 0; j < 8; j += kBroadcast) {
    std::memcpy(packed + (dim + j) * kBlock + r * kBroadcast, values + j, kBroadcast * sizeof(float));
  }
}

// A block's rows as f32. Rows that nobody sees become zeros, whatever they hold: a weight of zero does not undo what is
// not a number.
template <DType kType, bool kValues>
HWY_NOINLINE void PackRows(const std::uint8_t* const* rows, std::uint64_t seen, std::size_t head_dim,
                           float* HWY_RESTRICT packed) {
  const EightTag d;
  constexpr std::size_t kEight = 8;
  for (std::size_t r = 0; r < kBlock; ++r) {
    const bool wanted = (seen >> r & 1) != 0;
    const std::uint8_t* row = rows[r];
    for (std::size_t dim = 0; dim < head_dim; dim += kEight) {
      HWY_ALIGN float values[kEight] = {};
      for (std::size_t j = 0; wanted && j < kEight; j += hn::Lanes(d)) {
        hn::Store(LoadValues<kType>(d, row, dim + j), d, values + j);
      }
      if constexpr (kValues) {
        StoreValues(values, r, dim, packed);
      } else {
        std::memcpy(packed + r * head_dim + dim, values, sizeof(values));
      }
    }
  }
}

template <bool kValues>
void PackRowsOf(DType type, const std::uint8_t* const* rows, std::uint64_t seen, std::size_t head_dim,
                float* HWY_RESTRICT packed) {
  switch (type) {
    case DType::kF32:
      return PackRows<DType::kF32, kValues>(rows, seen, head_dim, packed);
    case DType::kF16:
      return PackRows<DType::kF16, kValues>(rows, seen, head_dim, packed);
    case DType::kBF16:
      return PackRows<DType::kBF16, kValues>(rows, seen, head_dim, packed);
    case DType::kQ8_0:
      return PackRows<DType::kQ8_0, kValues>(rows, seen, head_dim, packed);
  }
}

// Where the rows of a block from row `first` on lie. Those that are not `seen` are not read.
HWY_INLINE void PlaceRows(const std::byte* base, std::int64_t stride, const std::int32_t* rows, std::int64_t first,
                          std::uint64_t seen, const std::uint8_t** places) {
  for (; seen != 0; seen &= seen - 1) {
    const int r = std::countr_zero(seen);
    const std::int64_t row = rows == nullptr ? first + r : rows[first + r];
    places[r] = reinterpret_cast<const std::uint8_t*>(base + row * stride);
  }
}

// Dimensions whose products are added one by one. A longer chain is rounded at the magnitude of the whole sum more
// often, and a logit's error is a relative error of its weight.
inline constexpr std::size_t kChainDims = 16;

// logits[r][i] = q_i . k_r for the rows below n_rows, rounded up to kBroadcast.
HWY_NOINLINE void ScorePanel(std::size_t head_dim, std::size_t n_rows, const float* HWY_RESTRICT q,
                             const float* HWY_RESTRICT k, float* HWY_RESTRICT logits) {
  const FullTag d;
  using V = hn::VFromD<FullTag>;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  for (std::size_t r0 = 0; r0 < n_rows; r0 += kBroadcast) {
    const float* HWY_RESTRICT rows = k + r0 * head_dim;
    float* HWY_RESTRICT sums = logits + r0 * kPanel;
    for (std::size_t dim0 = 0; dim0 < head_dim; dim0 += kChainDims) {
      V acc[kBroadcast][kPanelVecs];
      SCSA_UNROLL
      for (std::size_t r = 0; r < kBroadcast; ++r) {
        SCSA_UNROLL
        for (std::size_t j = 0; j < kPanelVecs; ++j) acc[r][j] = hn::Zero(d);
      }
      const std::size_t end = std::min(dim0 + kChainDims, head_dim);
      for (std::size_t dim = dim0; dim < end; ++dim) {
        V queries[kPanelVecs];
        SCSA_UNROLL
        for (std::size_t j = 0; j < kPanelVecs; ++j) queries[j] = hn::Load(d, q + dim * kPanel + j * kLanes);
        SCSA_UNROLL
        for (std::size_t r = 0; r < kBroadcast; ++r) {
          const V key = hn::Set(d, rows[r * head_dim + dim]);
          SCSA_UNROLL
          for (std::size_t j = 0; j < kPanelVecs; ++j) acc[r][j] = hn::MulAdd(key, queries[j], acc[r][j]);
        }
      }
      SCSA_UNROLL
      for (std::size_t r = 0; r < kBroadcast; ++r) {
        SCSA_UNROLL
        for (std::size_t j = 0; j < kPanelVecs; ++j) {
          float* HWY_RESTRICT sum = sums + r * kPanel + j * kLanes;
          hn::Store(dim0 == 0 ? acc[r][j] : hn::Add(hn::Load(d, sum), acc[r][j]), d, sum);
        }
      }
    }
  }
}

// Turns the logits of a panel into weights exp(x - max) and folds them into max and sum. factors: what num has to be
// multiplied with, exp(old max - new max).
HWY_NOINLINE void SoftmaxPanel(std::size_t n_rows, float softcap, float* HWY_RESTRICT logits, float* HWY_RESTRICT max,
                               float* HWY_RESTRICT sum, float* HWY_RESTRICT factors) {
  const FullTag d;
  using V = hn::VFromD<FullTag>;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  // A dot product that overflows counts as the largest float, so that a difference of two stays a number.
  const V limit = hn::Set(d, FLT_MAX);
  const V lowest = hn::Set(d, -HUGE_VALF);
  SCSA_UNROLL
  for (std::size_t j = 0; j < kPanelVecs; ++j) {
    float* HWY_RESTRICT x = logits + j * kLanes;
    if (softcap > 0.0f) {
      for (std::size_t r = 0; r < n_rows; ++r) {
        // Hidden rows are at -inf, where the cap must leave them.
        const V raw = hn::Load(d, x + r * kPanel);
        hn::Store(hn::IfThenElse(hn::Eq(raw, lowest), raw, SoftCap(d, raw, softcap)), d, x + r * kPanel);
      }
    }
    const V old_max = hn::Load(d, max + j * kLanes);
    V new_max = old_max;
    for (std::size_t r = 0; r < n_rows; ++r) new_max = hn::Max(new_max, hn::Load(d, x + r * kPanel));
    new_max = hn::Min(new_max, limit);
    // A vector that has seen nothing yet stays at -inf; its weights are 0.
    const V shift = hn::IfThenElse(hn::Eq(new_max, lowest), hn::Zero(d), new_max);
    const V factor = ExpNonPositive(d, hn::Sub(old_max, shift));
    V total[2] = {hn::Zero(d), hn::Zero(d)};
    for (std::size_t r = 0; r < n_rows; r += 2) {
      SCSA_UNROLL
      for (std::size_t i = 0; i < 2; ++i) {
        const V bounded = hn::Min(hn::Load(d, x + (r + i) * kPanel), limit);
        const V weight = ExpNonPositive(d, hn::Sub(bounded, shift));
        hn::Store(weight, d, x + (r + i) * kPanel);
        total[i] = hn::Add(total[i], weight);
      }
    }
    hn::Store(new_max, d, max + j * kLanes);
    hn::Store(hn::MulAdd(hn::Load(d, sum + j * kLanes), factor, hn::Add(total[0], total[1])), d, sum + j * kLanes);
    hn::Store(factor, d, factors + j * kLanes);
  }
}

// num[dim][i] = num[dim][i] * factor_i + sum_r weights[r][i] v_r[dim]
HWY_NOINLINE void AddValuesPanel(std::size_t head_dim, std::size_t n_rows, const float* HWY_RESTRICT weights,
                                 const float* HWY_RESTRICT v, const float* HWY_RESTRICT factors,
                                 float* HWY_RESTRICT num) {
  const FullTag d;
  using V = hn::VFromD<FullTag>;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  for (std::size_t dim = 0; dim < head_dim; dim += kBroadcast) {
    const float* HWY_RESTRICT values = v + dim * kBlock;
    float* HWY_RESTRICT to = num + dim * kPanel;
    // Sums of their own for these rows: added one by one, rows would be rounded at the magnitude of the whole sum.
    V acc[kBroadcast][kPanelVecs];
    SCSA_UNROLL
    for (std::size_t i = 0; i < kBroadcast; ++i) {
      SCSA_UNROLL
      for (std::size_t j = 0; j < kPanelVecs; ++j) acc[i][j] = hn::Zero(d);
    }
    for (std::size_t r = 0; r < n_rows; ++r) {
      V w[kPanelVecs];
      SCSA_UNROLL
      for (std::size_t j = 0; j < kPanelVecs; ++j) w[j] = hn::Load(d, weights + r * kPanel + j * kLanes);
      SCSA_UNROLL
      for (std::size_t i = 0; i < kBroadcast; ++i) {
        const V value = hn::Set(d, values[r * kBroadcast + i]);
        SCSA_UNROLL
        for (std::size_t j = 0; j < kPanelVecs; ++j) acc[i][j] = hn::MulAdd(value, w[j], acc[i][j]);
      }
    }
    SCSA_UNROLL
    for (std::size_t i = 0; i < kBroadcast; ++i) {
      SCSA_UNROLL
      for (std::size_t j = 0; j < kPanelVecs; ++j) {
        float* HWY_RESTRICT sum = to + i * kPanel + j * kLanes;
        hn::Store(hn::MulAdd(hn::Load(d, sum), hn::Load(d, factors + j * kLanes), acc[i][j]), d, sum);
      }
    }
  }
}

inline void BeginTileWith(const TileArgs& args, void* memory) {
  const TileScratch s(args, memory);
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  const auto n = static_cast<std::size_t>(args.n);
  const std::size_t padded = PaddedVectors(args);
  std::fill_n(s.state.num, padded * head_dim, 0.0f);
  std::fill_n(s.state.max, padded, -HUGE_VALF);
  std::fill_n(s.state.sum, padded, 0.0f);
  for (std::size_t i = 0; i < padded; ++i) {
    float* to = s.q + i / kPanel * kPanel * head_dim + i % kPanel;
    for (std::size_t dim = 0; dim < head_dim; ++dim) {
      to[dim * kPanel] = i < n ? args.q[i][dim] * args.params.scale : 0.0f;
    }
  }
}

// Rows of word `word` that vector i sees, of those in `present`.
HWY_INLINE std::uint64_t SeenRows(const TileRows& rows, std::size_t i, std::int64_t word, std::uint64_t present) {
  return rows.visible == nullptr ? present : rows.visible[i][word] & present;
}

inline void AttendTileWith(const TileArgs& args, const TileRows& rows, void* memory) {
  const TileScratch s(args, memory);
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  const auto n = static_cast<std::size_t>(args.n);
  HWY_ALIGN float factors[kPanel];
  const std::uint8_t* k_rows[kBlock] = {};
  const std::uint8_t* v_rows[kBlock] = {};
  for (std::int64_t first = 0; first < rows.n_rows; first += kBlock) {
    const std::int64_t word = (rows.first_bit + first) / static_cast<std::int64_t>(kBlock);
    const std::size_t left = static_cast<std::size_t>(std::min<std::int64_t>(kBlock, rows.n_rows - first));
    const std::uint64_t present = left == kBlock ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < n; ++i) seen |= SeenRows(rows, i, word, present);
    if (seen == 0) continue;
    PlaceRows(rows.k, rows.k_stride, rows.rows, first, seen, k_rows);
    PlaceRows(rows.v, rows.v_stride, rows.rows, first, seen, v_rows);
    PackRowsOf<false>(rows.k_type, k_rows, seen, head_dim, s.k);
    PackRowsOf<true>(rows.v_type, v_rows, seen, head_dim, s.v);

    for (std::size_t i0 = 0; i0 < n; i0 += kPanel) {
      const std::size_t lanes = std::min(kPanel, n - i0);
      std::uint64_t seen_by_any = 0;
      std::uint64_t seen_by_all = ~std::uint64_t{0};
      for (std::size_t i = 0; i < lanes; ++i) {
        const std::uint64_t seen_rows = SeenRows(rows, i0 + i, word, present);
        seen_by_any |= seen_rows;
        seen_by_all &= seen_rows;
      }
      if (seen_by_any == 0) continue;
      // Causal masks hide the last rows of a block.
      const std::size_t n_rows = hwy::RoundUpTo(kBlock - std::countl_zero(seen_by_any), kBroadcast);
      ScorePanel(head_dim, n_rows, s.q + i0 * head_dim, s.k, s.weights);
      if (~seen_by_all != 0) {
        for (std::size_t i = 0; i < lanes; ++i) {
          std::uint64_t hidden = ~SeenRows(rows, i0 + i, word, present);
          if (n_rows < kBlock) hidden &= (std::uint64_t{1} << n_rows) - 1;
          for (; hidden != 0; hidden &= hidden - 1) s.weights[std::countr_zero(hidden) * kPanel + i] = -HUGE_VALF;
        }
      }
      SoftmaxPanel(n_rows, args.params.softcap, s.weights, s.state.max + i0, s.state.sum + i0, factors);
      AddValuesPanel(head_dim, n_rows, s.weights, s.v, factors, s.state.num + i0 * head_dim);
    }
  }
}

inline void FinishTileWith(const TileArgs& args, void* memory) {
  const TileScratch s(args, memory);
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  for (std::size_t i = 0; i < static_cast<std::size_t>(args.n); ++i) {
    const float* from = s.state.num + i / kPanel * kPanel * head_dim + i % kPanel;
    for (std::size_t dim = 0; dim < head_dim; ++dim) s.row[dim] = from[dim * kPanel];
    WriteHeadOutput({s.state.max + i, s.state.sum + i, s.row}, 0, args.head_dim,
                    args.sinks == nullptr ? nullptr : args.sinks[i], args.out[i]);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_TILE_INL_H_
