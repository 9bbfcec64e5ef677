// SPDX-License-Identifier: Apache-2.0
//
// Sparse attention of preset `fast` over a BlockPlan: all query heads of a KV head open one set of clusters together.
//
// With qs = scale * q, and a cluster of m keys with centroid c, value mean u, trace t of its key covariance, in a block
// whose variance shape is w (block_summaries.h):
//   logit     a = qs . c
//   spread    s = t / 2 * sum_d w_d qs_d^2                      half the variance of qs . k inside the cluster
//   estimate  e = m exp(a + s)                                  second-cumulant estimate of the cluster's mass
//   tail      m exp(a) (1 + tail_shrink * s) at u               what the cluster contributes when it stays closed
// A cluster's share is the mean over the query heads of e / (sum of all e + E), E being the exact mass of the head:
// rows outside the usable blocks and the head's attention sink. JointSelector opens by share per row until the shares
// of the closed clusters sum to less than tau. With JointQuery::tree, FrontierWalk chooses.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/block_plan.h"
#include "core/frontier_walk.h"
#include "core/joint_scoring.h"
#include "core/joint_select.h"
#include "core/workspace.h"
#include "scsa/config.h"
#include "scsa/layer.h"
#include "scsa/types.h"

namespace scsa {

class JointOperator {
 public:
  JointOperator(const Shape& shape, const Config& config);
  ~JointOperator();

  // Sparse output into out (head h at out + h * out_head_stride). taus: one per KV head. Adds to the row, byte and call
  // counters of `stats`. The bits do not depend on n_threads. kOutOfMemory, and kFailedPrecondition where a row of the
  // query's sample has changed: `out` may hold anything.
  Status Attend(const BlockPlan& plan, const JointQuery& query, std::span<const float> taus, int n_threads,
                Workspace& workspace, float* out, std::int64_t out_head_stride, LayerStats& stats);

  // Of the last Attend, which succeeded: the blocks that served it, and how many of their rows were opened.
  const Coverage& coverage() const { return scoring_.coverage(); }
  void AddOpenedRows(const BlockPlan& plan, std::span<std::int64_t> opened) const;

  // What stopping at each of `thresholds` (largest first) would have given, against the exact output `exact`:
  // errors[h * thresholds.size() + t] is the relative L2 error of query head h. in_play, [kv_heads]: how many
  // thresholds are looked at, at least one; the error at the last of them stands in for those at smaller ones.
  Status Replay(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                std::span<const int> in_play, const float* exact, std::int64_t exact_head_stride, int n_threads,
                Workspace& workspace, std::span<float> errors);

 private:
  struct ReplayStates;
  struct Head {
    JointSelector selector;
    std::unique_ptr<FrontierWalk> walk;  // of queries with a tree
    std::vector<std::int32_t> opened;    // clusters
    OpenedRows rows;                     // of the opened clusters
    std::vector<std::int32_t> counts;    // of Replay: opened clusters per threshold
    int reading_parts = 0;               // of what is read: the others are empty
    // Of one call: parts of either half that are not done, and whether the opened set is decided.
    std::atomic<int> scoring_left{0};
    std::atomic<int> reading_left{0};
    std::atomic<bool> decided{false};
    std::atomic<int> folded_blocks{0};  // of one call: those whose clusters' value means were read
  };

  int ReadingParts(const JointQuery& query) const;
  bool Decide(const BlockPlan& plan, const JointQuery& query, int kv_head, float tau);
  void StartWalk(const BlockPlan& plan, const JointQuery& query, int kv_head);
  void Read(const JointQuery& query, int kv_head, int part, int n_parts, const SoftmaxState& state);
  void Count(const BlockPlan& plan, const JointQuery& query, LayerStats& stats) const;

  // Of Replay: clusters that open at threshold t and not at larger ones.
  std::span<const std::int32_t> Segment(int kv_head, std::int64_t t) const;
  void CutIntoSegments(std::span<const float> thresholds, int kv_head);
  void ReadSegment(int kv_head, std::int64_t t, int thread, const ReplayStates& states);
  void JudgeThresholds(const JointQuery& query, int kv_head, const ReplayStates& states, const float* exact,
                       std::int64_t exact_head_stride, std::int64_t n_errors, float* errors) const;

  // Replay without and with a tree. Errors of thresholds out of play are left alone.
  Status ReplaySegments(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                        std::span<const int> in_play, const float* exact, std::int64_t exact_head_stride, int n_threads,
                        Workspace& workspace, std::span<float> errors);
  Status ReplayWalk(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                    std::span<const int> in_play, const float* exact, std::int64_t exact_head_stride, int n_threads,
                    Workspace& workspace, std::span<float> errors);

  Shape shape_;
  Config config_;
  JointScoring scoring_;
  TreeCover cover_;                      // of queries with a tree
  std::unique_ptr<Head[]> heads_;        // [kv_heads]
  std::vector<OpenedRows> replay_rows_;  // [threads]
};

}  // namespace scsa
