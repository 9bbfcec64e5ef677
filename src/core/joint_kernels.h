// SPDX-License-Identifier: Apache-2.0
//
// Streaming kernels of preset `fast` over the summaries of a list of blocks (joint_operator.h has the formulas),
// dispatched like kernels.h. All of them are thread-safe and allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/block_summaries.h"
#include "core/kernels.h"

namespace scsa {

// Records of n_blocks blocks of one KV head.
struct BlockRange {
  const SummaryLayout* layout = nullptr;
  const std::byte* const* blocks = nullptr;  // [n_blocks]; the clusters of a block that is nullptr weigh nothing
  std::size_t keys_at = 0;                   // of the key record in a block
  std::size_t values_at = 0;                 // of the value record
  int n_blocks = 0;

  ConstKeyRecord Keys(std::int64_t block) const { return layout->Keys(blocks[block] + keys_at); }
  ConstValueRecord Values(std::int64_t block) const { return layout->Values(blocks[block] + values_at); }
};

struct EstimateSums {
  float gauge;  // weights are relative to exp(gauge); -inf when no cluster counts
  float sum;    // of the estimates
};

struct EstimateArgs {
  int n = 0;                 // query heads
  const float* q = nullptr;  // [n][head_dim], scaled
  float tail_shrink = 0.0f;
  std::int64_t stride = 0;       // of estimates and tails, from query head to query head
  std::int64_t sums_stride = 1;  // of sums
  // Fetched meanwhile.
  FetchHint next[2];
};

// For query head i and the range's cluster c, with a = q_i . centroid and s half the variance of q_i . k inside it:
//   estimates[i * stride + c] = m exp(a + s - gauge),  tails[...] = m exp(a - gauge) (1 + tail_shrink s)
// The gauge of a query head is the largest exponent log m + a + s. Products of a query with a block's steps are
// rounded to 15 bits of the largest that they could be, so that dot products are exact in 32-bit integers.
void EstimateClusters(const BlockRange& range, const EstimateArgs& args, float* estimates, float* tails,
                      EstimateSums* sums);

// shares[c] = sum_i factors[i] estimates[i * stride + c], keys[c] = shares[c] / members of c; -1 where c has no members
// or its block is not usable. block_shares, [n_blocks]: sums of the shares, or nullptr.
void SharesAndKeys(const BlockRange& range, int n, const float* estimates, std::int64_t stride, const float* factors,
                   float* shares, float* keys, float* block_shares);

// A block whose clusters are expected to hold less than this of the attention, averaged over the query heads, is light:
// what is closed of it counts at the block's mean value (docs/operator.md).
inline constexpr float kLightShare = 5e-4f;

struct TailArgs {
  int n = 0;                       // query heads
  const float* weights = nullptr;  // of the range's clusters, [n] at weights_stride
  std::int64_t weights_stride = 0;
  // [n_blocks]: tell which blocks are light. Theirs are weighed at the mean value of the block, and the value means of
  // its clusters are not read. nullptr: no block is light.
  const float* block_shares = nullptr;
  // Fetched meanwhile.
  FetchHint next[2];
};

// sums[i] = sum_c weights[i][c]; num[i * head_dim ...] += sum_c weights[i][c] (value mean of c). weights >= 0. What a
// cluster's value mean adds to the mean of its block is weighed with 15 bits relative to the block's largest weight.
// Returns of how many blocks the clusters' value means were read.
int FoldValueMeans(const BlockRange& range, const TailArgs& args, float* sums, float* num);

// num[i * head_dim ...] += sum_j weights[i * clusters.size() + j] (value mean of clusters[j]) for n query heads, in
// f32. Clusters are counted from the range's first one, and their blocks are usable. block_shares: as in TailArgs. For
// a few clusters among many; FoldValueMeans is faster per cluster.
void AddValueMeans(const BlockRange& range, std::span<const std::int32_t> clusters, int n, const float* weights,
                   const float* block_shares, float* num);

struct KeyMass {
  double mass;         // of the shares with key < at, summed in double
  std::int64_t below;  // how many keys are < at, those of clusters without members included
};
KeyMass MassBelow(const float* keys, const float* shares, std::int64_t n, float at);

// Writes the indices with keys[c] >= at, ascending, to `indices` (room for n), and returns how many there are.
std::int64_t IndicesFrom(const float* keys, std::int64_t n, float at, std::int32_t* indices);

}  // namespace scsa
