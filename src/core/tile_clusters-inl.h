// SPDX-License-Identifier: Apache-2.0
//
// A tile of query vectors against clusters, through the panels of tile-inl.h. Per-target code: included once per SIMD
// target.

#if defined(SCSA_CORE_TILE_CLUSTERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_TILE_CLUSTERS_INL_H_
#undef SCSA_CORE_TILE_CLUSTERS_INL_H_
#else
#define SCSA_CORE_TILE_CLUSTERS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/relative_error.h"
#include "core/tile-inl.h"
#include "core/tile_clusters.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

// What EstimateTile leaves behind.
struct TileEstimates {
  TileEstimates(void* memory, std::size_t padded, std::size_t n_blocks, std::size_t slots) {
    ScratchLayout layout(memory);
    const std::size_t n_clusters = n_blocks * slots;
    gauges = layout.Take<float>(padded);
    spreads = layout.Take<float>(n_blocks * padded);
    masses = layout.Take<float>(n_clusters * kPanel);
    tails = layout.Take<float>(n_clusters * padded);
    bytes = layout.bytes();
  }
  float* gauges;   // [panel][kPanel]
  float* spreads;  // [panel][block][kPanel]: sum_d shape_d q_d^2
  float* masses;   // [cluster][kPanel], of one panel: estimates relative to the gauge
  float* tails;    // [panel][cluster][kPanel]: logits log m + a first, then tail weights relative to the gauge
  std::size_t bytes;
};

HWY_INLINE TileState TailState(const TileArgs& args, void* memory) {
  ScratchLayout layout(memory);
  return {layout, static_cast<std::size_t>(args.head_dim), PaddedVectors(args)};
}

// Centroids of clusters first ... first + n of one block, n <= kBlock, as rows of f32.
inline void PackCentroids(const SummaryLayout& layout, const ConstKeyRecord& record, std::size_t first, std::size_t n,
                          float* HWY_RESTRICT packed) {
  const auto head_dim = static_cast<std::size_t>(layout.head_dim());
  for (std::size_t c = 0; c < n; ++c) {
    const std::int8_t* from = record.centroids + layout.CentroidAt(static_cast<int>(first + c), 0);
    float* to = packed + c * head_dim;
    for (std::size_t dim = 0; dim < head_dim; dim += 2) {
      const std::int8_t* pair = from + dim * kClusterGroup;
      to[dim] = record.mean[dim] + record.step[dim] * static_cast<float>(pair[0]);
      to[dim + 1] = record.mean[dim + 1] + record.step[dim + 1] * static_cast<float>(pair[1]);
    }
  }
}

// Value mean of a cluster as row r of a block of values.
inline void PackValueMean(const SummaryLayout& layout, const ConstValueRecord& record, std::size_t cluster,
                          std::size_t r, float* HWY_RESTRICT packed) {
  const auto head_dim = static_cast<std::size_t>(layout.head_dim());
  const std::int8_t* from = record.means + layout.ValueAt(static_cast<int>(cluster), 0);
  for (std::size_t dim = 0; dim < head_dim; dim += 8) {
    float values[8];
    for (std::size_t j = 0; j < 8; ++j) {
      values[j] = record.mean[dim + j] + record.step[dim + j] * static_cast<float>(from[(dim + j) * 2]);
    }
    StoreValues(values, r, dim, packed);
  }
}

// Logits log m + a of one block's clusters for one panel, from a at `logits`, and the panel's gauges, the largest of
// log m + a + s.
HWY_NOINLINE inline void BlockLogits(const ConstKeyRecord& record, std::size_t first, std::size_t n,
                                     const float* HWY_RESTRICT spreads, float* HWY_RESTRICT logits,
                                     float* HWY_RESTRICT gauges) {
  const FullTag d;
  using V = hn::VFromD<FullTag>;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  SCSA_UNROLL
  for (std::size_t j = 0; j < kPanelVecs; ++j) {
    const V spread = hn::Load(d, spreads + j * kLanes);
    V largest = hn::Load(d, gauges + j * kLanes);
    for (std::size_t c = 0; c < n; ++c) {
      float* at = logits + c * kPanel + j * kLanes;
      const V logit = hn::Add(hn::Load(d, at), hn::Set(d, record.log_counts[first + c]));
      hn::Store(logit, d, at);
      largest = hn::Max(largest, hn::MulAdd(hn::Set(d, record.half_traces[first + c]), spread, logit));
    }
    hn::Store(largest, d, gauges + j * kLanes);
  }
}

// Turns the logits of one block's clusters into tail weights and estimated masses, and adds the latter to `sums`.
HWY_NOINLINE inline void BlockWeightsOf(const ConstKeyRecord& record, std::size_t n, float tail_shrink,
                                        const float* HWY_RESTRICT spreads, const float* HWY_RESTRICT gauges,
                                        float* HWY_RESTRICT tails, float* HWY_RESTRICT masses,
                                        float* HWY_RESTRICT sums) {
  const FullTag d;
  using V = hn::VFromD<FullTag>;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  const V one = hn::Set(d, 1.0f);
  const V shrink = hn::Set(d, tail_shrink);
  SCSA_UNROLL
  for (std::size_t j = 0; j < kPanelVecs; ++j) {
    const V spread = hn::Load(d, spreads + j * kLanes);
    const V gauge = hn::Load(d, gauges + j * kLanes);
    V sum = hn::Load(d, sums + j * kLanes);
    for (std::size_t c = 0; c < n; ++c) {
      float* tail = tails + c * kPanel + j * kLanes;
      const V s = hn::Mul(hn::Set(d, record.half_traces[c]), spread);
      const V exponent = hn::Sub(hn::Load(d, tail), gauge);
      const V mass = ExpNonPositive(d, hn::Add(exponent, s));
      hn::Store(mass, d, masses + c * kPanel + j * kLanes);
      sum = hn::Add(sum, mass);
      hn::Store(hn::Mul(ExpNonPositive(d, exponent), hn::MulAdd(shrink, s, one)), d, tail);
    }
    hn::Store(sum, d, sums + j * kLanes);
  }
}

// shares[c] += sum over the lanes of factors * masses
HWY_NOINLINE inline void AddShares(std::size_t n, const float* HWY_RESTRICT masses, const float* HWY_RESTRICT factors,
                                   float* HWY_RESTRICT shares) {
  const FullTag d;
  using V = hn::VFromD<FullTag>;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  for (std::size_t c = 0; c < n; ++c) {
    V share = hn::Zero(d);
    SCSA_UNROLL
    for (std::size_t j = 0; j < kPanelVecs; ++j) {
      const std::size_t at = j * kLanes;
      share = hn::MulAdd(hn::Load(d, masses + c * kPanel + at), hn::Load(d, factors + at), share);
    }
    shares[c] += hn::GetLane(hn::SumOfLanes(d, share));
  }
}

inline void EstimateTileWith(const TileArgs& args, const BlockRange& range, float tail_shrink, void* scratch,
                             void* memory, float* shares, float* keys) {
  const TileScratch s(args, scratch);
  const SummaryLayout& layout = *range.layout;
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  const auto n = static_cast<std::size_t>(args.n);
  const auto n_blocks = static_cast<std::size_t>(range.n_blocks);
  const auto slots = static_cast<std::size_t>(layout.slots());
  const std::size_t n_clusters = n_blocks * slots;
  const std::size_t padded = PaddedVectors(args);
  const TileEstimates e(memory, padded, n_blocks, slots);
  const auto record_of = [&](std::size_t block) { return range.Keys(static_cast<std::int64_t>(block)); };
  const auto spreads_at = [&](std::size_t block, std::size_t i0) { return e.spreads + i0 * n_blocks + block * kPanel; };
  const auto spreads_of = [&](const ConstKeyRecord& record, std::size_t i0, float* spreads) {
    const FullTag d;
    for (std::size_t j = 0; j < kPanel; j += hn::Lanes(d)) {
      auto spread = hn::Zero(d);
      const float* q = s.q + i0 * head_dim + j;
      for (std::size_t dim = 0; dim < head_dim; ++dim) {
        const auto x = hn::Load(d, q + dim * kPanel);
        spread = hn::MulAdd(hn::Mul(x, x), hn::Set(d, record.shape[dim]), spread);
      }
      hn::Store(spread, d, spreads + j);
    }
  };

  std::fill_n(e.gauges, padded, -HUGE_VALF);
  for (std::size_t block = 0; block < n_blocks; ++block) {
    if (range.blocks[block] == nullptr) continue;
    const ConstKeyRecord record = record_of(block);
    for (std::size_t first = 0; first < slots; first += kBlock) {
      const std::size_t in_chunk = std::min(kBlock, slots - first);
      PackCentroids(layout, record, first, in_chunk, s.k);
      for (std::size_t i0 = 0; i0 < padded; i0 += kPanel) {
        // slots is a multiple of kBroadcast, so that nothing beyond the chunk's clusters is written.
        float* logits = e.tails + i0 * n_clusters + (block * slots + first) * kPanel;
        ScorePanel(head_dim, in_chunk, s.q + i0 * head_dim, s.k, logits);
        if (first == 0) spreads_of(record, i0, spreads_at(block, i0));
        BlockLogits(record, first, in_chunk, spreads_at(block, i0), logits, e.gauges + i0);
      }
    }
  }

  std::fill_n(shares, n_clusters, 0.0f);
  bool overflow = false;
  HWY_ALIGN float sums[kPanel];
  HWY_ALIGN float factors[kPanel];
  for (std::size_t i0 = 0; i0 < padded; i0 += kPanel) {
    std::fill_n(sums, kPanel, 0.0f);
    for (std::size_t block = 0; block < n_blocks; ++block) {
      if (range.blocks[block] == nullptr) continue;
      const ConstKeyRecord record = record_of(block);
      BlockWeightsOf(record, slots, tail_shrink, spreads_at(block, i0), e.gauges + i0,
                     e.tails + i0 * n_clusters + block * slots * kPanel, e.masses + block * slots * kPanel, sums);
    }
    for (std::size_t i = 0; i < kPanel; ++i) {
      factors[i] = 0.0f;
      if (i0 + i >= n) continue;
      const float gauge = e.gauges[i0 + i];
      overflow = overflow || !std::isfinite(gauge);
      float total = sums[i] + s.state.sum[i0 + i] * std::exp(s.state.max[i0 + i] - gauge);
      if (args.sinks != nullptr) total += std::exp(*args.sinks[i0 + i] - gauge);
      factors[i] = 1.0f / (total * static_cast<float>(n));
    }
    for (std::size_t block = 0; block < n_blocks; ++block) {
      if (range.blocks[block] == nullptr) continue;
      AddShares(slots, e.masses + block * slots * kPanel, factors, shares + block * slots);
    }
  }

  for (std::size_t block = 0; block < n_blocks; ++block) {
    if (range.blocks[block] == nullptr) {
      std::fill_n(keys + block * slots, slots, -1.0f);
      continue;
    }
    const ConstKeyRecord record = record_of(block);
    for (std::size_t c = 0; c < slots; ++c) {
      float& share = shares[block * slots + c];
      const bool can_open = record.counts[c] > 0.0f;
      if (overflow) share = can_open ? 1.0f : 0.0f;
      keys[block * slots + c] = can_open ? share / record.counts[c] : -1.0f;
    }
  }
}

inline void ClearTailWith(const TileArgs& args, void* estimates, void* memory) {
  const TileState tail = TailState(args, memory);
  const std::size_t padded = PaddedVectors(args);
  // The gauges come first in the estimates, whatever their size.
  std::copy_n(static_cast<float*>(estimates), padded, tail.max);
  std::fill_n(tail.sum, padded, 0.0f);
  std::fill_n(tail.num, padded * static_cast<std::size_t>(args.head_dim), 0.0f);
}

inline void FoldTailWith(const TileArgs& args, const BlockRange& range, const std::int32_t* clusters,
                         std::int64_t n_listed, void* estimates, void* scratch, void* memory) {
  const FullTag d;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  const TileScratch s(args, scratch);
  const TileState tail = TailState(args, memory);
  const SummaryLayout& layout = *range.layout;
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  const auto slots = static_cast<std::size_t>(layout.slots());
  const std::size_t n_clusters = static_cast<std::size_t>(range.n_blocks) * slots;
  const std::size_t padded = PaddedVectors(args);
  const TileEstimates e(estimates, padded, static_cast<std::size_t>(range.n_blocks), slots);
  HWY_ALIGN float ones[kPanel];
  std::fill_n(ones, kPanel, 1.0f);
  for (std::int64_t first = 0; first < n_listed; first += kBlock) {
    const auto n = static_cast<std::size_t>(std::min<std::int64_t>(kBlock, n_listed - first));
    for (std::size_t r = 0; r < n; ++r) {
      const auto cluster = static_cast<std::size_t>(clusters[first + static_cast<std::int64_t>(r)]);
      const ConstValueRecord record = range.Values(static_cast<std::int64_t>(cluster / slots));
      PackValueMean(layout, record, cluster % slots, r, s.v);
    }
    for (std::size_t i0 = 0; i0 < padded; i0 += kPanel) {
      const float* weights = e.tails + i0 * n_clusters;
      for (std::size_t j = 0; j < kPanel; j += kLanes) {
        auto sum = hn::Load(d, tail.sum + i0 + j);
        for (std::size_t r = 0; r < n; ++r) {
          const auto cluster = static_cast<std::size_t>(clusters[first + static_cast<std::int64_t>(r)]);
          const auto weight = hn::Load(d, weights + cluster * kPanel + j);
          hn::Store(weight, d, s.weights + r * kPanel + j);
          sum = hn::Add(sum, weight);
        }
        hn::Store(sum, d, tail.sum + i0 + j);
      }
      AddValuesPanel(head_dim, n, s.weights, s.v, ones, tail.num + i0 * head_dim);
    }
  }
}

// What num and sum of a state and of a tail are multiplied with to have a common gauge.
struct CommonGauge {
  float max, state, tail;
};
HWY_INLINE CommonGauge GaugeOf(const TileState& state, const TileState& tail, std::size_t i) {
  const float max = std::max(state.max[i], tail.sum[i] > 0.0f ? tail.max[i] : -HUGE_VALF);
  if (max == -HUGE_VALF) return {max, 0.0f, 0.0f};
  return {max, std::exp(state.max[i] - max), tail.sum[i] > 0.0f ? std::exp(tail.max[i] - max) : 0.0f};
}

// to[...] = state.num * of_state + tail.num * of_tail for the panel from vector i0 on, of which the factors are.
HWY_INLINE void MixPanel(std::size_t head_dim, std::size_t i0, const TileState& state, const TileState& tail,
                         const float* of_state, const float* of_tail, float* to) {
  for (std::size_t at = i0 * head_dim; at < (i0 + kPanel) * head_dim; at += kPanel) {
    for (std::size_t i = 0; i < kPanel; ++i) {
      to[at + i] = state.num[at + i] * of_state[i] + tail.num[at + i] * of_tail[i];
    }
  }
}

inline void AddTailWith(const TileArgs& args, void* memory, void* scratch) {
  const TileState state = TileScratch(args, scratch).state;
  const TileState tail = TailState(args, memory);
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  for (std::size_t i0 = 0; i0 < PaddedVectors(args); i0 += kPanel) {
    float of_state[kPanel];
    float of_tail[kPanel];
    for (std::size_t i = 0; i < kPanel; ++i) {
      const CommonGauge gauge = GaugeOf(state, tail, i0 + i);
      state.max[i0 + i] = gauge.max;
      state.sum[i0 + i] = state.sum[i0 + i] * gauge.state + tail.sum[i0 + i] * gauge.tail;
      of_state[i] = gauge.state;
      of_tail[i] = gauge.tail;
    }
    MixPanel(head_dim, i0, state, tail, of_state, of_tail, state.num);
  }
}

// 1 / (mass of vector i with its attention sink), relative to `max`.
HWY_INLINE float Normaliser(const TileArgs& args, std::size_t i, float max, float sum) {
  if (args.sinks != nullptr && i < static_cast<std::size_t>(args.n)) sum += std::exp(*args.sinks[i] - max);
  return sum > 0.0f ? 1.0f / sum : 0.0f;
}

inline void OutputWithTailWith(const TileArgs& args, void* scratch, void* memory) {
  const TileState state = TileScratch(args, scratch).state;
  const TileState tail = TailState(args, memory);
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  for (std::size_t i0 = 0; i0 < PaddedVectors(args); i0 += kPanel) {
    float of_state[kPanel];
    float of_tail[kPanel];
    for (std::size_t i = 0; i < kPanel; ++i) {
      const CommonGauge gauge = GaugeOf(state, tail, i0 + i);
      const float factor =
          Normaliser(args, i0 + i, gauge.max, state.sum[i0 + i] * gauge.state + tail.sum[i0 + i] * gauge.tail);
      of_state[i] = gauge.state * factor;
      of_tail[i] = gauge.tail * factor;
    }
    MixPanel(head_dim, i0, state, tail, of_state, of_tail, tail.num);
  }
}

inline float MeanTileErrorWith(const TileArgs& args, void* outputs, void* scratch) {
  const TileState state = TileScratch(args, scratch).state;
  const TileState other = TailState(args, outputs);
  const auto head_dim = static_cast<std::size_t>(args.head_dim);
  double sum = 0.0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(args.n); ++i) {
    const float factor = Normaliser(args, i, state.max[i], state.sum[i]);
    const std::size_t at = i / kPanel * kPanel * head_dim + i % kPanel;
    float exact[kMaxHeadDim];
    for (std::size_t dim = 0; dim < head_dim; ++dim) exact[dim] = state.num[at + dim * kPanel] * factor;
    sum += RelativeErrorOf([&](int dim) { return other.num[at + static_cast<std::size_t>(dim) * kPanel]; }, exact,
                           args.head_dim);
  }
  return static_cast<float>(sum / args.n);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_TILE_CLUSTERS_INL_H_
