// SPDX-License-Identifier: Apache-2.0
//
// Hierarchical selection of preset `seed`: the clusters that one query head opens are found by a walk down the tree of
// cluster_tree.h, so that the work follows what is opened and not the context.
//
// The frontier is a set of nodes and clusters that covers every sealed row once. With qs a scaled query, a node of M
// rows, with mean c, value mean u and variance v, has
//   logit     a = qs . c
//   priority  p = a + log M + 1/2 sum_d v_d qs_d^2        tail      M exp(a) at u
// and a cluster has those of select.h. The walk begins at the root. While the stop rule of select.h does not hold over
// the frontier,
//   sum_{closed} exp(p) / (sum_{closed} exp(p) + sum_{opened} m exp(a) + E) < tau,
// the closed member with the largest p is refined, the one with the lower clusters first among equals: a node is
// replaced by its children, a cluster is opened. With tau = 0 everything is opened, and as soon as the walk meets an
// estimate that is not finite, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/cluster_tree.h"
#include "core/kernels.h"
#include "core/plan.h"
#include "core/workspace.h"

namespace scsa {

// One query head. All of it outlives the walk.
struct WalkQuery {
  int kv_head = 0;
  const float* q = nullptr;          // [head_dim], scaled
  const float* q_squared = nullptr;  // [head_dim], element by element
  double log_exact_mass = 0;         // log E, -inf for none
};

class ClusterWalk {
 public:
  enum class Place : std::uint8_t { kClosed, kOpened, kRefined };
  // A node or cluster that was scored.
  struct Member {
    ClusterRange range;
    float log_tail;  // a + log M
    float priority;
    Place place;
    std::int32_t children;  // with kRefined: where the first one is among the members; the second one follows it
  };

  // Memory of walks over n_clusters clusters. Only what a walk comes to is touched.
  struct Scratch {
    Member* members = nullptr;       // [2 n_clusters - 1]
    std::int32_t* queue = nullptr;   // [n_clusters]
    std::int32_t* opened = nullptr;  // [n_clusters]
  };
  // Of n_walks walks, one after the other.
  static Scratch Take(ScratchLayout& layout, std::size_t n_walks, std::size_t n_clusters);
  static Scratch At(const Scratch& all, std::size_t walk, std::size_t n_clusters);

  // At the root. The regions, of which there is one at least, have the nodes of a tree.
  ClusterWalk(std::span<const Region> regions, int head_dim, int rank, const WalkQuery& query, const Scratch& scratch);

  // Goes on until the stop rule holds, or everything is open. The order does not depend on tau: smaller and smaller
  // thresholds continue one and the same walk.
  void Run(float tau);

  // Clusters in the order in which they were opened, counted through the regions. Callers may reorder them.
  std::span<std::int32_t> opened() const { return {scratch_.opened, n_opened_}; }
  // Folds the closed members of the frontier into a state of one vector, empty before.
  void FoldTail(const SoftmaxState& state) const;

  // The root is the first one.
  std::span<const Member> members() const { return {scratch_.members, n_members_}; }

 private:
  bool Before(std::int32_t a, std::int32_t b) const;
  void Score(const ClusterRange& range);
  double Relative(double exponent) const;
  bool Stops(double tau) const;
  bool Settled() const;
  void Settle();
  const float* ValueMean(const Member& member) const;

  std::span<const Region> regions_;
  int head_dim_;
  int rank_;
  WalkQuery query_;
  Scratch scratch_;
  std::size_t n_members_ = 0;
  std::size_t n_queued_ = 0;  // the closed ones, a heap
  std::size_t n_opened_ = 0;
  bool opens_all_ = false;
  // Relative to exp(gauge_).
  double gauge_ = 0;
  double closed_ = 0;
  double captured_ = 0;  // exact mass and opened clusters
  double settled_ = 0;   // their sum when they were last added up anew
};

}  // namespace scsa
