// SPDX-License-Identifier: Apache-2.0
//
// Kernels over block summaries. Per-target code: included once per SIMD target.

#if defined(SCSA_CORE_JOINT_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_JOINT_KERNELS_INL_H_
#undef SCSA_CORE_JOINT_KERNELS_INL_H_
#else
#define SCSA_CORE_JOINT_KERNELS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/fetch-inl.h"
#include "core/integers-inl.h"
#include "core/joint_kernels.h"
#include "core/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

// Query heads that share a pass over the centroids or value means.
inline constexpr std::size_t kHeadSlab = 4;

// Inner loops fetch once in so many turns: a step costs as much as a turn.
inline constexpr std::size_t kStepEvery = 4;

// Clusters whose weights are rounded together, a block as a rule: sums of so many products of 16 and 8 bits stay below
// 2^31.
inline constexpr std::size_t kMaxBatch = 128;

// Queries of a slab in the frame of one block.
template <std::size_t kQueries>
struct FramedQueries {
  HWY_ALIGN std::int16_t values[kQueries][kMaxHeadDim];  // q_d step_d / scale
  float scale[kQueries];
  float offset[kQueries];  // q . mean
  float spread[kQueries];  // sum_d shape_d q_d^2
};

// largest[i]: the largest magnitude of q_i.
template <std::size_t kQueries, class D>
HWY_INLINE void FrameQueries(D d, const float* HWY_RESTRICT q, const float* largest, const ConstKeyRecord& record,
                             std::size_t head_dim, FramedQueries<kQueries>* HWY_RESTRICT out) {
  const hn::Rebind<std::int16_t, D> d16;
  using V = hn::VFromD<D>;
  V inverse[kQueries], offset[kQueries], spread[kQueries];
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) {
    out->scale[i] = largest[i] * record.largest_step[0] / kQuerySteps;
    // Where the scale would be subnormal, the query's part beyond the offset is nothing.
    inverse[i] = hn::Set(d, out->scale[i] > 1e-37f ? 1.0f / out->scale[i] : 0.0f);
    offset[i] = hn::Zero(d);
    spread[i] = hn::Zero(d);
  }
  for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d)) {
    const V step = hn::LoadU(d, record.step + dim);
    const V mean = hn::LoadU(d, record.mean + dim);
    const V shape = hn::LoadU(d, record.shape + dim);
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) {
      const V x = hn::LoadU(d, q + i * head_dim + dim);
      offset[i] = hn::MulAdd(x, mean, offset[i]);
      spread[i] = hn::MulAdd(hn::Mul(x, x), shape, spread[i]);
      const auto rounded = hn::NearestInt(hn::Mul(hn::Mul(x, step), inverse[i]));
      hn::StoreU(hn::DemoteTo(d16, rounded), d16, out->values[i] + dim);
    }
  }
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) {
    out->offset[i] = hn::GetLane(hn::SumOfLanes(d, offset[i]));
    out->spread[i] = hn::GetLane(hn::SumOfLanes(d, spread[i]));
  }
}

// dots[i * stride + c] = the integer dot product of query i with cluster c of kGroups groups of 8. pairs: of
// dimensions.
template <std::size_t kQueries, std::size_t kGroups>
HWY_INLINE void DotGroups(const FramedQueries<kQueries>& q, const std::int8_t* HWY_RESTRICT centroids,
                          std::size_t pairs, std::int32_t* HWY_RESTRICT dots, std::size_t stride, Fetcher& fetch) {
#if HWY_TARGET == HWY_SCALAR
  // One-lane vectors hold no pairs.
  fetch.Step(pairs * kGroups);
  for (std::size_t g = 0; g < kGroups; ++g) {
    for (std::size_t i = 0; i < kQueries; ++i) {
      std::int32_t sums[kClusterGroup] = {};
      for (std::size_t p = 0; p < pairs; ++p) {
        const std::int8_t* at = centroids + (g * pairs + p) * 2 * kClusterGroup;
        for (std::size_t c = 0; c < kClusterGroup; ++c) {
          sums[c] += at[2 * c] * q.values[i][2 * p] + at[2 * c + 1] * q.values[i][2 * p + 1];
        }
      }
      std::copy_n(sums, kClusterGroup, dots + i * stride + g * kClusterGroup);
    }
  }
#else
  // A vector of sums holds two groups where it can, one, or a part of one.
  const hn::CappedTag<std::int32_t, kClusterGroup*(kGroups % 2 == 0 ? 2 : 1)> d32;
  const hn::Repartition<std::int16_t, decltype(d32)> d16;
  const hn::Rebind<std::int8_t, decltype(d16)> d8;
  using V = hn::VFromD<decltype(d32)>;
  constexpr std::size_t kLanes = hn::MaxLanes(decltype(d32)());
  constexpr std::size_t kAtOnce = kLanes > kClusterGroup ? 2 : 1;  // groups
  constexpr std::size_t kParts = kAtOnce * kClusterGroup / kLanes;
  constexpr std::size_t kVectors = kGroups / kAtOnce;
  V acc[kVectors][kQueries][kParts];
  SCSA_UNROLL
  for (std::size_t g = 0; g < kVectors; ++g) {
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) {
      SCSA_UNROLL
      for (std::size_t part = 0; part < kParts; ++part) acc[g][i][part] = hn::Zero(d32);
    }
  }
  for (std::size_t p = 0; p < pairs; ++p) {
    if (p % kStepEvery == 0) fetch.Step(kStepEvery * kGroups);
    hn::VFromD<decltype(d16)> query[kQueries];
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) query[i] = BroadcastPair(d32, q.values[i] + 2 * p);
    SCSA_UNROLL
    for (std::size_t g = 0; g < kVectors; ++g) {
      const std::int8_t* at = centroids + (g * kAtOnce * pairs + p) * 2 * kClusterGroup;
      SCSA_UNROLL
      for (std::size_t part = 0; part < kParts; ++part) {
        hn::VFromD<decltype(d16)> k;
        if constexpr (kAtOnce == 2) {
          const hn::Half<decltype(d8)> half;
          const auto next = hn::LoadU(half, at + pairs * 2 * kClusterGroup);
          k = hn::PromoteTo(d16, hn::Combine(d8, next, hn::LoadU(half, at)));
        } else {
          k = hn::PromoteTo(d16, hn::LoadU(d8, at + part * 2 * kLanes));
        }
        SCSA_UNROLL
        for (std::size_t i = 0; i < kQueries; ++i) acc[g][i][part] = AddPairs(d32, k, query[i], acc[g][i][part]);
      }
    }
  }
  SCSA_UNROLL
  for (std::size_t g = 0; g < kVectors; ++g) {
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) {
      SCSA_UNROLL
      for (std::size_t part = 0; part < kParts; ++part) {
        hn::StoreU(acc[g][i][part], d32, dots + i * stride + g * kAtOnce * kClusterGroup + part * kLanes);
      }
    }
  }
#endif
}

// Accumulators of kGroups groups, one vector per query and one for a centroid share the registers.
template <std::size_t kQueries>
inline constexpr std::size_t kScoreGroups = SCSA_MANY_REGISTERS || kQueries <= 2 ? 4 : 2;

// Exponents log m + a + s of one block's clusters into `estimates`, and s into `tails`.
template <std::size_t kQueries>
HWY_NOINLINE void BlockExponents(const SummaryLayout& layout, const ConstKeyRecord& record, const float* q,
                                 const float* largest_of, float* HWY_RESTRICT estimates, float* HWY_RESTRICT tails,
                                 std::int64_t stride, float* HWY_RESTRICT gauges, Fetcher& fetch) {
  const EightTag d;
  const hn::RebindToSigned<EightTag> d32;
  const auto head_dim = static_cast<std::size_t>(layout.head_dim());
  const auto slots = static_cast<std::size_t>(layout.slots());
  const std::size_t pairs = head_dim / 2;
  FramedQueries<kQueries> framed;
  if (head_dim % hn::MaxLanes(FullTag()) == 0) {
    FrameQueries<kQueries>(FullTag(), q, largest_of, record, head_dim, &framed);
  } else {
    FrameQueries<kQueries>(EightTag(), q, largest_of, record, head_dim, &framed);
  }
  constexpr std::size_t kGroups = kScoreGroups<kQueries>;
  constexpr std::size_t kAtOnce = kGroups * kClusterGroup;
  HWY_ALIGN std::int32_t dots[kQueries * kAtOnce];
  hn::VFromD<EightTag> largest[kQueries];
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) largest[i] = hn::Set(d, gauges[i]);
  for (std::size_t c = 0; c < slots;) {
    const std::int8_t* centroids = record.centroids + c * head_dim;
    std::size_t n = kClusterGroup;
    if (slots - c >= kAtOnce) {
      n = kAtOnce;
      DotGroups<kQueries, kGroups>(framed, centroids, pairs, dots, kAtOnce, fetch);
    } else {
      DotGroups<kQueries, 1>(framed, centroids, pairs, dots, kAtOnce, fetch);
    }
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) {
      const auto scale = hn::Set(d, framed.scale[i]);
      const auto offset = hn::Set(d, framed.offset[i]);
      const auto spread = hn::Set(d, framed.spread[i]);
      float* exponents = estimates + static_cast<std::int64_t>(i) * stride + static_cast<std::int64_t>(c);
      float* halves = tails + static_cast<std::int64_t>(i) * stride + static_cast<std::int64_t>(c);
      for (std::size_t j = 0; j < n; j += hn::Lanes(d)) {
        const auto dot = hn::ConvertTo(d, hn::Load(d32, dots + i * kAtOnce + j));
        const auto s = hn::Mul(hn::LoadU(d, record.half_traces + c + j), spread);
        const auto a = hn::MulAdd(dot, scale, offset);
        const auto exponent = hn::Add(hn::Add(hn::LoadU(d, record.log_counts + c + j), a), s);
        hn::StoreU(s, d, halves + j);
        hn::StoreU(exponent, d, exponents + j);
        largest[i] = hn::Max(largest[i], exponent);
      }
    }
    c += n;
  }
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) gauges[i] = hn::GetLane(hn::MaxOfLanes(d, largest[i]));
}

using ExponentFunction = void (*)(const SummaryLayout&, const ConstKeyRecord&, const float*, const float*, float*,
                                  float*, std::int64_t, float*, Fetcher&);
inline constexpr ExponentFunction kExponentFunctions[kHeadSlab] = {&BlockExponents<1>, &BlockExponents<2>,
                                                                   &BlockExponents<3>, &BlockExponents<4>};

// The clusters [first, n) of Exponentiate, as far as they fill vectors. Returns the sum of their estimates.
template <class D>
HWY_INLINE float ExponentiateWith(D d, std::size_t* first, std::size_t n, float gauge, float tail_shrink,
                                  float* HWY_RESTRICT estimates, float* HWY_RESTRICT tails) {
  const auto shift = hn::Set(d, gauge);
  const auto shrink = hn::Set(d, tail_shrink);
  const auto one = hn::Set(d, 1.0f);
  auto sum = hn::Zero(d);
  std::size_t c = *first;
  for (; c + hn::Lanes(d) <= n; c += hn::Lanes(d)) {
    const auto exponent = hn::Sub(hn::LoadU(d, estimates + c), shift);
    const auto s = hn::LoadU(d, tails + c);
    const auto estimate = ExpNonPositive(d, exponent);
    const auto tail = hn::Mul(ExpNonPositive(d, hn::Sub(exponent, s)), hn::MulAdd(shrink, s, one));
    hn::StoreU(estimate, d, estimates + c);
    hn::StoreU(tail, d, tails + c);
    sum = hn::Add(sum, estimate);
  }
  *first = c;
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Exponents into estimates and tails, relative to the gauge. n: a multiple of 8.
inline EstimateSums Exponentiate(std::size_t n, float gauge, float tail_shrink, float* HWY_RESTRICT estimates,
                                 float* HWY_RESTRICT tails) {
  if (!(gauge > -HUGE_VALF)) {
    std::fill_n(estimates, n, 0.0f);
    std::fill_n(tails, n, 0.0f);
    return {-HUGE_VALF, 0.0f};
  }
  std::size_t done = 0;
  float sum = ExponentiateWith(FullTag(), &done, n, gauge, tail_shrink, estimates, tails);
  if (done < n) sum += ExponentiateWith(EightTag(), &done, n, gauge, tail_shrink, estimates, tails);
  return {gauge, sum};
}

void EstimateClustersTarget(const BlockRange& range, const EstimateArgs& args, float* estimates, float* tails,
                            EstimateSums* sums) {
  const SummaryLayout& layout = *range.layout;
  const std::int64_t head_dim = layout.head_dim();
  const std::int64_t slots = layout.slots();
  const std::int64_t n_slabs =
      (args.n + static_cast<std::int64_t>(kHeadSlab) - 1) / static_cast<std::int64_t>(kHeadSlab);
  // One step per pair of dimensions and group of clusters; the hints take turns.
  const std::int64_t block_steps = n_slabs * (slots / kClusterGroup) * head_dim / 2;
  Fetcher fetch[2] = {Fetcher(args.next[0], (range.n_blocks + 1) / 2 * block_steps),
                      Fetcher(args.next[1], std::max(1, range.n_blocks / 2) * block_steps)};
  for (std::int64_t i = 0; i < args.n; i += kHeadSlab) {
    const std::int64_t heads = std::min<std::int64_t>(kHeadSlab, args.n - i);
    float gauges[kHeadSlab];
    float largest[kHeadSlab];
    for (std::int64_t h = 0; h < heads; ++h) {
      gauges[h] = -HUGE_VALF;
      largest[h] = LargestMagnitude(args.q + (i + h) * head_dim, static_cast<std::size_t>(head_dim));
    }
    for (std::int64_t b = 0; b < range.n_blocks; ++b) {
      float* block_estimates = estimates + i * args.stride + b * slots;
      float* block_tails = tails + i * args.stride + b * slots;
      if (range.blocks[b] == nullptr) {
        for (std::int64_t h = 0; h < heads; ++h) {
          std::fill_n(block_estimates + h * args.stride, slots, -HUGE_VALF);
          std::fill_n(block_tails + h * args.stride, slots, 0.0f);
        }
        continue;
      }
      const ConstKeyRecord record = range.Keys(b);
      kExponentFunctions[heads - 1](layout, record, args.q + i * head_dim, largest, block_estimates, block_tails,
                                    args.stride, gauges, fetch[b % 2]);
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      sums[(i + h) * args.sums_stride] =
          Exponentiate(static_cast<std::size_t>(range.n_blocks * slots), gauges[h], args.tail_shrink,
                       estimates + (i + h) * args.stride, tails + (i + h) * args.stride);
    }
  }
}

void SharesAndKeysTarget(const BlockRange& range, int n, const float* estimates, std::int64_t stride,
                         const float* factors, float* shares, float* keys, float* block_shares) {
  const EightTag d;
  const SummaryLayout& layout = *range.layout;
  const std::int64_t slots = layout.slots();
  const auto none = hn::Set(d, -1.0f);
  for (std::int64_t b = 0; b < range.n_blocks; ++b) {
    if (range.blocks[b] == nullptr) {
      std::fill_n(shares + b * slots, slots, 0.0f);
      std::fill_n(keys + b * slots, slots, -1.0f);
      if (block_shares != nullptr) block_shares[b] = 0.0f;
      continue;
    }
    const ConstKeyRecord record = range.Keys(b);
    auto sum = hn::Zero(d);
    for (std::int64_t c = 0; c < slots; c += static_cast<std::int64_t>(hn::Lanes(d))) {
      auto share = hn::Zero(d);
      for (std::int64_t i = 0; i < n; ++i) {
        share = hn::MulAdd(hn::Set(d, factors[i]), hn::LoadU(d, estimates + i * stride + b * slots + c), share);
      }
      const auto count = hn::LoadU(d, record.counts + c);
      hn::StoreU(share, d, shares + b * slots + c);
      sum = hn::Add(sum, share);
      hn::StoreU(hn::IfThenElse(hn::Gt(count, hn::Zero(d)), hn::Div(share, count), none), d, keys + b * slots + c);
    }
    if (block_shares != nullptr) block_shares[b] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

// Weights of one block's clusters for a slab of query heads, as 16-bit integers of pairs.
template <std::size_t kQueries>
struct BlockWeights {
  HWY_ALIGN std::int16_t values[kQueries][kMaxBatch];
  float scale[kQueries];  // of the integers
};

// num[i][dim0 ...] += sum_c weights[i][c] (value mean of c - the block's mean), for kVecs vectors of dimensions.
template <std::size_t kQueries, std::size_t kVecs, class D>
HWY_INLINE void AddMeansBlock(D d, std::size_t dim0, std::size_t head_dim, const ConstValueRecord& record,
                              const std::int8_t* means, std::size_t n_pairs, const BlockWeights<kQueries>& weights,
                              float* const* num, Fetcher& fetch_k, Fetcher& fetch_v) {
  using V = hn::VFromD<D>;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
#if HWY_TARGET == HWY_SCALAR
  if (dim0 % 8 == 0) {
    fetch_k.Step(n_pairs);
    fetch_v.Step(n_pairs);
  }
  std::int32_t acc[kQueries][kVecs] = {};
  for (std::size_t p = 0; p < n_pairs; ++p) {
    for (std::size_t v = 0; v < kVecs; ++v) {
      const std::int8_t* at = means + (p * head_dim + dim0 + v) * 2;
      for (std::size_t i = 0; i < kQueries; ++i) {
        acc[i][v] += at[0] * weights.values[i][2 * p] + at[1] * weights.values[i][2 * p + 1];
      }
    }
  }
  const auto converted = [&](std::size_t i, std::size_t v) { return hn::Set(d, static_cast<float>(acc[i][v])); };
#else
  const hn::RebindToSigned<D> d32;
  const hn::Repartition<std::int16_t, decltype(d32)> d16;
  const hn::Rebind<std::int8_t, decltype(d16)> d8;
  hn::VFromD<decltype(d32)> acc[kQueries][kVecs];
  SCSA_UNROLL
  for (std::size_t i = 0; i < kQueries; ++i) {
    SCSA_UNROLL
    for (std::size_t v = 0; v < kVecs; ++v) acc[i][v] = hn::Zero(d32);
  }
  for (std::size_t p = 0; p < n_pairs; ++p) {
    if (p % kStepEvery == 0) {
      fetch_k.Step(kStepEvery * kVecs * kLanes / 8);
      fetch_v.Step(kStepEvery * kVecs * kLanes / 8);
    }
    hn::VFromD<decltype(d16)> both[kQueries];
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) both[i] = BroadcastPair(d32, weights.values[i] + 2 * p);
    const std::int8_t* at = means + (p * head_dim + dim0) * 2;
    SCSA_UNROLL
    for (std::size_t v = 0; v < kVecs; ++v) {
      const auto values = hn::PromoteTo(d16, hn::LoadU(d8, at + v * 2 * kLanes));
      SCSA_UNROLL
      for (std::size_t i = 0; i < kQueries; ++i) acc[i][v] = AddPairs(d32, values, both[i], acc[i][v]);
    }
  }
  const auto converted = [&](std::size_t i, std::size_t v) { return hn::ConvertTo(d, acc[i][v]); };
#endif
  SCSA_UNROLL
  for (std::size_t v = 0; v < kVecs; ++v) {
    const std::size_t dim = dim0 + v * kLanes;
    const V step = hn::LoadU(d, record.step + dim);
    SCSA_UNROLL
    for (std::size_t i = 0; i < kQueries; ++i) {
      const V deviation = hn::Mul(step, hn::Set(d, weights.scale[i]));
      hn::StoreU(hn::MulAdd(converted(i, v), deviation, hn::LoadU(d, num[i] + dim)), d, num[i] + dim);
    }
  }
}

template <std::size_t kQueries, std::size_t kVecs, class D>
HWY_INLINE void AddMeansBlocks(D d, std::size_t dim, std::size_t head_dim, const ConstValueRecord& record,
                               const std::int8_t* means, std::size_t n_pairs, const BlockWeights<kQueries>& weights,
                               float* const* num, Fetcher& fetch_k, Fetcher& fetch_v) {
  constexpr std::size_t kStep = kVecs * hn::MaxLanes(D());
  for (; dim + kStep <= head_dim; dim += kStep) {
    AddMeansBlock<kQueries, kVecs>(d, dim, head_dim, record, means, n_pairs, weights, num, fetch_k, fetch_v);
  }
  if constexpr (kVecs > 1) {
    AddMeansBlocks<kQueries, kVecs / 2>(d, dim, head_dim, record, means, n_pairs, weights, num, fetch_k, fetch_v);
  }
}

// A cluster that weighs less than 2^-16 of the block's largest counts through the block's mean.
template <std::size_t kQueries>
HWY_INLINE void RoundBlockWeights(const float* HWY_RESTRICT weights, std::int64_t stride, std::size_t n,
                                  BlockWeights<kQueries>* HWY_RESTRICT out) {
  for (std::size_t i = 0; i < kQueries; ++i) {
    out->scale[i] = RoundWeights(EightTag(), weights + static_cast<std::int64_t>(i) * stride, n, out->values[i]);
  }
}

// The deviations of one batch of a block's clusters from the block's mean, for a slab of query heads.
template <std::size_t kQueries>
HWY_NOINLINE void AddMeans(std::size_t head_dim, const ConstValueRecord& record, const std::int8_t* means,
                           std::size_t n, const float* weights, std::int64_t weights_stride, float* const* num,
                           Fetcher& fetch_k, Fetcher& fetch_v) {
  BlockWeights<kQueries> rounded;
  RoundBlockWeights<kQueries>(weights, weights_stride, n, &rounded);
  constexpr std::size_t kVecs = SCSA_MANY_REGISTERS || kQueries <= 2 ? 4 : 2;
  if (head_dim % hn::MaxLanes(FullTag()) == 0) {
    AddMeansBlocks<kQueries, kVecs>(FullTag(), 0, head_dim, record, means, n / 2, rounded, num, fetch_k, fetch_v);
  } else {
    AddMeansBlocks<kQueries, kVecs>(EightTag(), 0, head_dim, record, means, n / 2, rounded, num, fetch_k, fetch_v);
  }
}

using MeansFunction = void (*)(std::size_t, const ConstValueRecord&, const std::int8_t*, std::size_t, const float*,
                               std::int64_t, float* const*, Fetcher&, Fetcher&);
inline constexpr MeansFunction kMeansFunctions[kHeadSlab] = {&AddMeans<1>, &AddMeans<2>, &AddMeans<3>, &AddMeans<4>};

// num += weight mean
template <class D>
HWY_INLINE void AddMeanWith(D d, std::size_t head_dim, const float* HWY_RESTRICT mean, float weight,
                            float* HWY_RESTRICT num) {
  for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d)) {
    const auto sum = hn::MulAdd(hn::Set(d, weight), hn::LoadU(d, mean + dim), hn::LoadU(d, num + dim));
    hn::StoreU(sum, d, num + dim);
  }
}

HWY_INLINE void AddMean(std::size_t head_dim, const float* mean, float weight, float* num) {
  if (head_dim % hn::MaxLanes(FullTag()) == 0) {
    AddMeanWith(FullTag(), head_dim, mean, weight, num);
  } else {
    AddMeanWith(EightTag(), head_dim, mean, weight, num);
  }
}

int FoldValueMeansTarget(const BlockRange& range, const TailArgs& args, float* sums, float* num) {
  const SummaryLayout& layout = *range.layout;
  const std::int64_t slots = layout.slots();
  const auto head_dim = static_cast<std::size_t>(layout.head_dim());
  constexpr auto kSlab = static_cast<std::int64_t>(kHeadSlab);
  constexpr auto kBatch = static_cast<std::int64_t>(kMaxBatch);
  std::fill_n(sums, args.n, 0.0f);
  // One step per pair of clusters and eight dimensions.
  const std::int64_t block_steps = (args.n + kSlab - 1) / kSlab * (slots / 2) * layout.head_dim() / 8;
  Fetcher fetch_k(args.next[0], range.n_blocks * block_steps);
  Fetcher fetch_v(args.next[1], range.n_blocks * block_steps);
  int read = 0;
  for (std::int64_t b = 0; b < range.n_blocks; ++b) {
    if (range.blocks[b] == nullptr) continue;
    const ConstValueRecord record = range.Values(b);
    const float* weights = args.weights + b * slots;
    float block_sums[kMaxQHeads];
    float total = 0.0f;
    for (std::int64_t i = 0; i < args.n; ++i) {
      block_sums[i] = SumOf(EightTag(), weights + i * args.weights_stride, static_cast<std::size_t>(slots));
      sums[i] += block_sums[i];
      total += block_sums[i];
    }
    if (total == 0.0f) continue;
    if (args.block_shares != nullptr && args.block_shares[b] < kLightShare) {
      fetch_k.Step(static_cast<std::size_t>(block_steps));
      fetch_v.Step(static_cast<std::size_t>(block_steps));
    } else {
      ++read;
      for (std::int64_t c0 = 0; c0 < slots; c0 += kBatch) {
        const std::int64_t n = std::min(kBatch, slots - c0);
        for (std::int64_t first = 0; first < args.n; first += kSlab) {
          const std::int64_t heads = std::min(kSlab, args.n - first);
          float* head_num[kHeadSlab];
          for (std::int64_t h = 0; h < heads; ++h) head_num[h] = num + static_cast<std::size_t>(first + h) * head_dim;
          kMeansFunctions[heads - 1](head_dim, record, record.means + static_cast<std::size_t>(c0) * head_dim,
                                     static_cast<std::size_t>(n), weights + first * args.weights_stride + c0,
                                     args.weights_stride, head_num, fetch_k, fetch_v);
        }
      }
    }
    for (std::int64_t i = 0; i < args.n; ++i) {
      AddMean(head_dim, record.mean, block_sums[i], num + static_cast<std::size_t>(i) * head_dim);
    }
  }
  return read;
}

void AddValueMeansTarget(const BlockRange& range, std::span<const std::int32_t> clusters, int n, const float* weights,
                         const float* block_shares, float* num) {
  const EightTag d;
  const hn::RebindToSigned<EightTag> d32;
  const hn::Rebind<std::int8_t, EightTag> d8;
  const SummaryLayout& layout = *range.layout;
  const std::int32_t slots = layout.slots();
  const auto head_dim = static_cast<std::size_t>(layout.head_dim());
  for (std::size_t j = 0; j < clusters.size(); ++j) {
    const std::int32_t block = clusters[j] / slots;
    const ConstValueRecord record = range.Values(block);
    if (block_shares != nullptr && block_shares[block] < kLightShare) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
        AddMean(head_dim, record.mean, weights[i * clusters.size() + j], num + i * head_dim);
      }
      continue;
    }
    const std::int32_t slot = clusters[j] % slots;
    const std::int8_t* pairs = record.means + layout.ValueAt(slot - slot % 2, 0);
    for (std::size_t dim = 0; dim < head_dim; dim += hn::Lanes(d)) {
      hn::VFromD<decltype(d8)> even, odd;
      hn::LoadInterleaved2(d8, pairs + 2 * dim, even, odd);
      const auto steps = hn::ConvertTo(d, hn::PromoteTo(d32, slot % 2 == 0 ? even : odd));
      const auto mean = hn::MulAdd(steps, hn::LoadU(d, record.step + dim), hn::LoadU(d, record.mean + dim));
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
        float* at = num + i * head_dim + dim;
        hn::StoreU(hn::MulAdd(hn::Set(d, weights[i * clusters.size() + j]), mean, hn::LoadU(d, at)), d, at);
      }
    }
  }
}

KeyMass MassBelowTarget(const float* keys, const float* shares, std::int64_t n, float at) {
  // Sums in double throughout: rounding must not let a mass fall on one side of a threshold here and on the other where
  // shares are added up one by one.
  const hn::CappedTag<double, 8> d64;
  const hn::Rebind<float, decltype(d64)> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto bound = hn::Set(d, at);
  auto sum0 = hn::Zero(d64);
  auto sum1 = hn::Zero(d64);
  std::int64_t below = 0;
  std::int64_t c = 0;
  const auto add = [&](std::int64_t first, auto& sum) {
    const auto is_below = hn::Lt(hn::LoadU(d, keys + first), bound);
    sum = hn::Add(sum, hn::PromoteTo(d64, hn::IfThenElseZero(is_below, hn::LoadU(d, shares + first))));
    below += static_cast<std::int64_t>(hn::CountTrue(d, is_below));
  };
  for (; c + 2 * lanes <= n; c += 2 * lanes) {
    add(c, sum0);
    add(c + lanes, sum1);
  }
  double mass = hn::GetLane(hn::SumOfLanes(d64, hn::Add(sum0, sum1)));
  for (; c < n; ++c) {
    if (!(keys[c] < at)) continue;
    mass += static_cast<double>(shares[c]);
    ++below;
  }
  return {mass, below};
}

std::int64_t IndicesFromTarget(const float* keys, std::int64_t n, float at, std::int32_t* indices) {
  const EightTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto bound = hn::Set(d, at);
  std::int64_t count = 0;
  std::int64_t c = 0;
  for (; c + lanes <= n; c += lanes) {
    std::uint8_t bits[8] = {};  // of at most 8 lanes; StoreMaskBits may write 8 bytes
    hn::StoreMaskBits(d, hn::Ge(hn::LoadU(d, keys + c), bound), bits);
    for (unsigned left = bits[0]; left != 0; left &= left - 1) {
      indices[count++] = static_cast<std::int32_t>(c) + std::countr_zero(left);
    }
  }
  for (; c < n; ++c) {
    if (keys[c] >= at) indices[count++] = static_cast<std::int32_t>(c);
  }
  return count;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_JOINT_KERNELS_INL_H_
