// SPDX-License-Identifier: Apache-2.0
//
// Moments of whole blocks, and of ever more blocks together: what hierarchical selection looks at before it looks at
// clusters.
//
// Level 0 has a node for every block of a BlockPlan, a node of level L + 1 covers kFanOut neighbours of level L, and
// the last level has one node. A node holds, per KV head, what follows exactly from the summaries of the clusters below
// it (block_summaries.h). With m the members of a cluster, c its centroid, u its value mean, t the trace of its key
// covariance and w the variance shape of its block:
//   mean       = sum m c / sum m                              value mean = sum m u / sum m
//   variance_d = sum m (t w_d + (c_d - mean_d)^2) / sum m     the full diagonal
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/block_plan.h"
#include "scsa/types.h"

namespace scsa {

// Each [head_dim].
struct NodeMoments {
  const float* mean = nullptr;
  const float* variance = nullptr;
  const float* value_mean = nullptr;
};

// Not thread-safe; reading is, between two calls of Update.
class BlockTree {
 public:
  static constexpr int kFanOut = 8;

  explicit BlockTree(const Shape& shape) : shape_(shape) {}

  // Brings every node in line with the blocks that are built now: nodes above blocks that came, went or were built anew
  // are computed again. Throws std::bad_alloc; the next call then goes on.
  void Update(const BlockPlan& plan, int n_threads);

  // Gives up the memory of a block's node. Until the next Update nothing else may be done with the tree.
  void Release(int block) {
    if (n_levels() > 0 && block < n_nodes(0)) levels_[0][static_cast<std::size_t>(block)].moments.reset();
  }
  void Clear() {
    levels_.clear();
    changes_ = kNever;
  }
  // BlockPlan::changes() that the nodes are in line with.
  std::uint64_t changes() const { return changes_; }

  int n_levels() const { return static_cast<int>(levels_.size()); }
  std::int64_t n_nodes(int level) const { return std::ssize(levels_[static_cast<std::size_t>(level)]); }
  // Rows of the built blocks below a node. A node without rows has no moments.
  std::int64_t rows(int level, std::int64_t index) const { return At(level, index).rows; }
  NodeMoments moments(int level, std::int64_t index, int kv_head) const;

 private:
  struct Node {
    std::unique_ptr<float[]> moments;  // [kv_heads][mean, variance, value mean][head_dim]
    std::int64_t rows = 0;
    std::uint64_t version = 0;  // of the block that it was computed from; level 0
    bool stale = true;
  };

  const Node& At(int level, std::int64_t index) const {
    return levels_[static_cast<std::size_t>(level)][static_cast<std::size_t>(index)];
  }
  void MarkStale(const BlockPlan& plan);
  // Sets the rows of a stale node, and makes or frees the memory of its moments.
  void Prepare(const BlockPlan& plan, int level, std::int64_t index);
  float* MomentsOf(Node& node, int kv_head) const {
    return node.moments.get() + std::size_t{3} * static_cast<std::size_t>(kv_head) * shape_.head_dim;
  }
  void FromBlock(const BlockPlan& plan, std::int64_t block, int kv_head, float* moments) const;
  void FromChildren(int level, std::int64_t index, int kv_head, float* moments) const;

  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  Shape shape_;
  std::vector<std::vector<Node>> levels_;
  std::uint64_t changes_ = kNever;
};

}  // namespace scsa
