// SPDX-License-Identifier: Apache-2.0
//
// Which clusters a query head opens, decided from the summaries alone.
//
// With qs = scale * q, and a cluster of m keys with centroid c and covariance summary Sigma (cluster.h):
//   logit     a = qs . c
//   priority  p = a + log m + qs^T Sigma qs / 2        second-cumulant estimate of log sum_members exp(qs . k)
//   tail      m exp(a) at the cluster's value mean     what the cluster contributes when it stays closed
// Stop rule: clusters are opened in descending p (the lower index first among equals) until
//   sum_{closed} exp(p) / (sum_{closed} exp(p) + sum_{opened} m exp(a) + E) < tau,
// where E is the exact mass of everything that is attended exactly whatever is opened: the first rows (Config::sink),
// the unsealed and other uncovered visible rows, and the attention-sink logit of the head. An opened cluster counts as
// captured with m exp(a), which its mass cannot fall below (exp is convex): where the second cumulant is far too large,
// it opens its cluster, but it does not fill the denominator and so end the opening of others. Nothing read changes
// the decision. With tau = 0 everything is opened.
#pragma once

#include <bitset>
#include <cstdint>
#include <span>

#include "core/kernels.h"
#include "core/plan.h"
#include "scsa/types.h"

namespace scsa {

// A set of the query heads of one KV head, numbered inside the group.
using HeadSet = std::bitset<kMaxQHeads>;

// Estimates of n_clusters clusters for the query heads of one group, head h at h * stride.
struct Estimates {
  float* log_tail = nullptr;  // a + log m
  float* priority = nullptr;
  std::int64_t stride = 0;
};

// Floats of scratch that EstimateBlock needs.
constexpr std::size_t EstimateScratch(int group, int n_clusters, int rank) {
  return static_cast<std::size_t>(group) * n_clusters * (rank + 1);
}

// Fills the estimates of all clusters of `block`. qs and qs_squared (element by element): [group][head_dim].
void EstimateBlock(const Block& block, int head_dim, int rank, int group, const float* qs, const float* qs_squared,
                   const Estimates& out, float* scratch);

// The stop rule for one head, at every threshold of `taus` (largest first): counts[t] is the number of clusters opened
// at taus[t], and order[0 ... counts.back()) are the opened ones, best first. log_exact_mass = log E, -inf for none.
// log_tail[c] <= priority[c]. Where an estimate is not finite, everything is opened, in index order. order, mass: n
// values of scratch and result.
void OpenBestFirst(const float* priority, const float* log_tail, int n, double log_exact_mass,
                   std::span<const float> taus, std::int32_t* order, double* mass, std::span<std::int32_t> counts);

// Folds the tail of the clusters of KV head kv_head that `opened` does not list for `head` into a state of one vector
// (empty before). log_tail: of that head, indexed over the regions' clusters one after the other, like `opened`.
void FoldTail(std::span<const Region> regions, int kv_head, int head_dim, int head, const float* log_tail,
              const HeadSet* opened, const SoftmaxState& state);

}  // namespace scsa
