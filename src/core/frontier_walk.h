// SPDX-License-Identifier: Apache-2.0
//
// Hierarchical selection of preset `fast`: the clusters that one KV head opens are found by a walk down a BlockTree, so
// that the work follows what is opened and not the context.
//
// The frontier is a set of nodes and clusters that together cover every row of the usable blocks exactly once. With qs
// a scaled query of the KV head, a node of M rows, with mean c, value mean u and variance v (block_tree.h), has
//   logit     a = qs . c
//   spread    s = 1/2 sum_d v_d qs_d^2
//   estimate  e = M exp(a + s + kOptimism sqrt(2 s))        tail      M exp(a) (1 + tail_shrink s) at u
// and a cluster has those of joint_operator.h. sqrt(2 s) is the standard deviation of the logits below the node: the
// second cumulant of many rows says little about the few of them that may matter, so a node is taken to hold more than
// that until it is refined. With E a query head's exact mass, C the sum of the estimates of its
// frontier's closed members and O that of the opened clusters,
//   the closed share is the mean over the query heads of C / (C + O + E).
// The walk begins at the root. While the closed share is not below tau, the most important closed member of the
// frontier is refined: a node is replaced by its children, a block's by its clusters, and a cluster is opened.
// Importance is the mean over the query heads of e / N, for a cluster divided by its members in units of the mean
// cluster (Config::cluster_size): attention mass for about the same number of bytes. N is C + O + E, as it was when it
// last left [N / 2, 2 N] for one of the heads: importances are then computed again, for all heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/block_plan.h"
#include "core/block_tree.h"
#include "core/coverage.h"
#include "core/joint_kernels.h"
#include "core/kernels.h"
#include "scsa/config.h"
#include "scsa/types.h"

namespace scsa {

// Which nodes a query row may use as a whole.
class TreeCover {
 public:
  // Throws std::bad_alloc. The tree is in line with the plan that `coverage` is of.
  void Find(const BlockTree& tree, const Coverage& coverage);

  // Whether all blocks below the node that are built are usable, and there are any.
  bool Whole(int level, std::int64_t index) const { return At(level, index) == kUsable; }
  // Whether some are usable and some are not: such a node is no member of a frontier, but those below may be.
  bool Mixed(int level, std::int64_t index) const { return At(level, index) == (kUsable | kUnusable); }

 private:
  enum : std::uint8_t { kUsable = 1, kUnusable = 2 };
  std::uint8_t At(int level, std::int64_t index) const {
    return below_[static_cast<std::size_t>(level)][static_cast<std::size_t>(index)];
  }
  std::vector<std::vector<std::uint8_t>> below_;  // of each level and node: what kinds of blocks lie below
  // What that follows from.
  std::vector<std::uint8_t> usable_;
  std::uint64_t changes_ = 0;
  bool found_ = false;
};

// What a walk is over. All of it outlives the walk.
struct WalkInputs {
  const BlockPlan* plan = nullptr;
  const BlockTree* tree = nullptr;  // in line with the plan
  const TreeCover* cover = nullptr;
  int kv_head = 0;
  const float* q = nullptr;      // [group][head_dim], scaled
  const float* sinks = nullptr;  // [group] logits, nullptr: none
  SoftmaxState exact;            // of the rows outside the usable blocks
};

// Standard deviations of the logits below a node by which its estimate is raised. Chosen by `scsa bench scaling`
// (docs/measurements.md): with less, needles stay hidden and thresholds must be so small that everything opens; with
// more, blocks are refined in vain.
inline constexpr double kOptimism = 4.0;

// One walk of one KV head. Kept from call to call, so that its lists keep their memory. After a function threw
// std::bad_alloc, Start is the only one that may be called.
class FrontierWalk {
 public:
  FrontierWalk(const Shape& shape, const Config& config) : shape_(shape), config_(config) {}

  // Puts the roots into the frontier. Throws std::bad_alloc.
  void Start(const WalkInputs& in);
  // Goes on until the closed share is below tau, or everything is open. The order of refinement does not depend on tau:
  // smaller and smaller thresholds continue one and the same walk. Throws std::bad_alloc.
  void Run(float tau);
  // Clusters in the order in which they were opened, counted through all blocks.
  std::span<const std::int32_t> opened() const { return opened_; }

  // Of the frontier as it is now: weighs its closed members. Throws std::bad_alloc.
  void WeighTail();
  // Folds part `part` of n_parts of the tail that was weighed into empty states of the query heads. Thread-safe.
  void FoldTail(int part, int n_parts, const SoftmaxState& state) const;

  std::int64_t scored_nodes() const { return std::ssize(nodes_); }
  std::int64_t scored_blocks() const { return std::ssize(blocks_); }

 private:
  struct Node {
    int level;
    std::int64_t index;
    bool closed;  // in the frontier
  };
  // A member of the queue. place >= 0: the most important closed cluster of blocks_[place]; otherwise node
  // nodes_[~place].
  struct Member {
    float importance;
    std::int32_t place;
  };
  struct LessImportant {
    bool operator()(const Member& a, const Member& b) const {
      return a.importance != b.importance ? a.importance < b.importance : a.place > b.place;
    }
  };
  // Sums of one query head, relative to exp(gauge).
  struct Mass {
    double gauge = 0;
    double closed = 0;
    double captured = 0;  // exact mass and opened clusters
    double settled = 0;   // the N of importances
    double exact_gauge = 0;
    double exact = 0;  // exact mass relative to exp(exact_gauge)
    double total() const { return closed + captured; }
  };

  std::size_t Slots() const { return static_cast<std::size_t>(in_.plan->slots()); }
  std::size_t Group() const { return static_cast<std::size_t>(shape_.group()); }
  // Where the weights of a block for a query head begin.
  std::size_t WeightsAt(std::size_t block, std::size_t head) const { return (block * Group() + head) * Slots(); }
  BlockRange Range(std::size_t block) const;

  void AddNodes(int level, std::int64_t index);
  void AddClusters(std::int64_t block);
  double ClosedShare() const;
  bool Settled() const;
  void Settle();
  void Weigh(std::size_t head);
  void Push(float importance, std::int32_t place);
  void PushNode(std::size_t node);
  void WeighClusters(std::size_t block);
  void PushBestCluster(std::size_t block);
  void OpenBestCluster(std::size_t block);
  void Expand(std::size_t node);

  Shape shape_;
  Config config_;
  WalkInputs in_;
  std::vector<float> squares_;  // [group][head_dim], of the queries' values
  std::vector<Mass> masses_;    // [group]
  std::vector<Member> queue_;   // a heap, the most important one first

  std::vector<Node> nodes_;        // all that were scored
  std::vector<double> exponents_;  // [nodes][group]: logs of the estimates
  std::vector<double> log_tails_;  // [nodes][group]: of the tail weights
  // Blocks whose clusters are in the frontier or opened. Weights are relative to exp(gauge) of their block and head.
  std::vector<std::int32_t> blocks_;
  std::vector<const std::byte*> data_;  // [blocks], their memory
  std::vector<double> block_gauges_;    // [blocks][group]
  std::vector<double> block_closed_;    // [blocks][group]: sum of the closed clusters' estimates
  std::vector<double> block_captured_;  // [blocks][group]: of the opened ones'
  std::vector<float> estimates_;        // [blocks][group][slots]
  std::vector<float> tails_;            // [blocks][group][slots]
  std::vector<float> importances_;      // [blocks][slots]; below 0: opened, or without members
  std::vector<std::uint8_t> open_;      // [blocks][slots]
  std::vector<std::int32_t> best_;      // [blocks]: the most important closed cluster, as it is in the queue
  std::vector<std::int32_t> opened_;
  bool overflow_ = false;      // a logit did: estimates say nothing, and everything opens
  std::vector<float> shares_;  // [slots], scratch

  // WeighTail: relative to exp(tail_gauges_).
  std::vector<double> tail_gauges_;   // [group]
  std::vector<float> block_weights_;  // [blocks][group][slots]
  std::vector<float> node_weights_;   // [nodes][group], 0 for those that were refined
};

}  // namespace scsa
