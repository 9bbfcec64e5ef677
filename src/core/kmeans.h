// SPDX-License-Identifier: Apache-2.0
//
// Clustering of the keys of one small block: a principal-direction split, refined by k-means with a cap on the size.
#pragma once

#include <cstdint>
#include <vector>

namespace scsa {

struct KMeansParams {
  int cluster_size = 8;       // rows per cluster on average
  int max_cluster_size = 16;  // most rows of a cluster, >= cluster_size
  int rounds = 2;             // k-means rounds, >= 0
  int power_iterations = 3;   // per split, >= 1
};

// Reusable memory, one per thread.
struct KMeansScratch {
  std::vector<float> rows, swap, norms, weights, centroids, centroid_norms, dots, best, mean, direction;
  std::vector<std::uint16_t> order, order_swap, ranking, slot_of, fill;
  std::vector<int> bounds;
};

// Slots that `n` rows are divided into: ceil(n / cluster_size).
inline int KMeansSlots(int n, int cluster_size) { return (n + cluster_size - 1) / cluster_size; }

// Groups n keys ([n][head_dim], dense, finite) into KMeansSlots clusters; a cluster may end up empty.
//   members [n]: row indices by cluster, ascending inside a cluster; offsets [slots + 1].
// 1. Recursive halving by the leading principal direction of the set (power iteration, started at the deviation of the
// row
//    that is farthest from the mean), the share of slots deciding where the projections are cut. Neighbouring slots are
//    neighbours in the tree.
// 2. Rounds of Lloyd's algorithm from there: each row, in row order, joins the nearest centroid (Euclidean, lower slot
//    first among equals) that has not yet max_cluster_size members.
// Deterministic. n in 1 ... 65535. Throws std::bad_alloc. Thread-safe with one scratch per thread.
void PrincipalKMeans(const float* keys, int n, int head_dim, const KMeansParams& params, KMeansScratch& scratch,
                     std::uint16_t* members, std::uint16_t* offsets);

}  // namespace scsa
