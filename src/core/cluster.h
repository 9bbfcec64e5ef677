// SPDX-License-Identifier: Apache-2.0
//
// Clustering of the keys of one block and the moments of a cluster.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace scsa {

// Members of cluster c are members[offsets[c]] ... members[offsets[c + 1] - 1]: row indices, ascending inside a
// cluster.
struct Partition {
  std::vector<std::int32_t> members;  // a permutation of 0 ... n - 1
  std::vector<std::int32_t> offsets;  // clusters + 1
};

// Deterministic farthest-direction recursive splitting of n keys ([n][head_dim], dense, finite) until every set has at
// most cluster_size members. A set is split so:
//   mean x_bar; the member x* farthest from it (the lowest row among equals); direction d = x* - x_bar;
//   members in the order of (d . x, row), the lower half (floor(m / 2) members) to the first child, the rest to the
//   second.
// The halving bounds the depth by ceil(log2(n / cluster_size)) whatever the data, outliers and equal keys included, so
// the work is O(n log n) vector operations and the number of clusters depends on n and cluster_size alone. Children are
// emitted first child first, so that neighbours in the list are neighbours in the tree.
// n >= 1, cluster_size >= 1. Throws std::bad_alloc.
Partition SplitFarthestDirection(const float* keys, std::int64_t n, int head_dim, int cluster_size);

// Reusable memory of ClusterMoments.
struct MomentScratch {
  std::vector<float> centred;
  std::vector<float> projections;
  std::vector<float> vector;
};

// Moments of the keys of one cluster with m members, C = (1 / m) sum (k - c)(k - c)^T being their covariance:
//   centroid [head_dim]         c, the mean;
//   directions [rank][head_dim] sqrt(lambda_j) u_j, the leading eigenpairs of C, by `power_iterations` steps of power
//                               iteration each. Deflation by projection: pair j is iterated in the complement of
//                               u_0 ... u_{j-1}; lambda_j is the Rayleigh quotient. The start is the member deviation
//                               that is longest in that complement (the first among equals). Where that deviation has
//                               less than 1e-5 of the squared length of the longest, this pair and later ones are zero;
//   residual [head_dim]         max(0, C_dd - sum_j lambda_j u_jd^2), the diagonal that the kept pairs leave.
// Storing sqrt(lambda) u makes the second cumulant q^T Sigma q = sum_j (q . direction_j)^2 + sum_d residual_d q_d^2.
// Throws std::bad_alloc.
void ClusterMoments(const float* keys, std::span<const std::int32_t> members, int head_dim, int rank,
                    int power_iterations, MomentScratch& scratch, float* centroid, float* directions, float* residual);

}  // namespace scsa
