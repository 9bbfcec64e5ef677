// SPDX-License-Identifier: Apache-2.0
//
// Sparse attention of preset `fast` over a BlockPlan: all query heads of a KV head open one set of clusters together.
//
// With qs = scale * q, and a cluster of m keys with centroid c, value mean u, trace t of its key covariance, in a block
// whose variance shape is w (HeadSummaries):
//   logit     a = qs . c
//   spread    s = t / 2 * sum_d w_d qs_d^2                      half the variance of qs . k inside the cluster
//   estimate  e = m exp(a + s)                                  second-cumulant estimate of the cluster's mass
//   tail      m exp(a) (1 + tail_shrink * s) at u               what the cluster contributes when it stays closed
// A cluster's share is the mean over the query heads of e / (sum of all e + E), E being the exact mass of the head:
// rows outside the usable blocks and the head's attention sink. JointSelector opens by share per row until the shares
// of the closed clusters sum to less than tau.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/block_plan.h"
#include "core/joint_select.h"
#include "core/kernels.h"
#include "core/workspace.h"
#include "scsa/config.h"
#include "scsa/layer.h"
#include "scsa/types.h"

namespace scsa {

// One query row and what it may see.
struct JointQuery {
  const float* q = nullptr;  // vector of query head h at q + h * head_stride
  std::int64_t head_stride = 0;
  const KvView* kv = nullptr;
  const std::uint64_t* visible = nullptr;  // bitmap of kv->n_kv rows
  LogitParams params;
};

class JointOperator {
 public:
  JointOperator(const Shape& shape, const Config& config);
  ~JointOperator();

  // Sparse output into out (head h at out + h * out_head_stride). taus: one per KV head. Adds to the row, byte and call
  // counters of `stats`. The bits do not depend on n_threads. kOutOfMemory leaves `out` untouched.
  Status Attend(const BlockPlan& plan, const JointQuery& query, std::span<const float> taus, int n_threads,
                Workspace& workspace, float* out, std::int64_t out_head_stride, LayerStats& stats);

  // What stopping at each of `thresholds` (largest first) would have given, against the exact output `exact`:
  // errors[h * thresholds.size() + t] is the relative L2 error of query head h.
  Status Replay(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds, const float* exact,
                std::int64_t exact_head_stride, int n_threads, Workspace& workspace, std::span<float> errors);

  // Whether any block of `plan` is usable for the query, that is, built with every covered row visible.
  bool AnyUsable(const BlockPlan& plan, const JointQuery& query);

 private:
  struct Scoring;
  struct ReplayStates;
  struct Head {
    JointSelector selector;
    std::vector<std::int32_t> opened;  // clusters
    std::vector<std::int32_t> rows;    // rows of opened clusters: of the cache, or of the packed copies
    std::vector<std::int32_t> counts;  // of Replay: opened clusters per threshold
  };

  void FindUsable(const BlockPlan& plan, const JointQuery& query);
  Status Score(const BlockPlan& plan, const JointQuery& query, int n_threads, Workspace& workspace, Scoring* scoring);
  void Shares(const BlockPlan& plan, const JointQuery& query, int kv_head, const Scoring& scoring);
  RunArgs OpenedRun(const BlockPlan& plan, const JointQuery& query, int kv_head, const Scoring& scoring,
                    std::span<const std::int32_t> rows) const;
  void FoldTail(const BlockPlan& plan, int kv_head, const Scoring& scoring, int chunk, const SoftmaxState& state) const;
  void Count(const BlockPlan& plan, const JointQuery& query, const Scoring& scoring, LayerStats& stats) const;
  void ReplayHead(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds, int kv_head,
                  const Scoring& scoring, const ReplayStates& states, const float* exact,
                  std::int64_t exact_head_stride, std::span<float> errors);
  void ExpandRows(const BlockPlan& plan, int kv_head, std::span<const std::int32_t> clusters,
                  std::vector<std::int32_t>& rows) const;

  Shape shape_;
  Config config_;
  std::vector<std::uint8_t> usable_;                               // per block
  std::vector<std::pair<std::int64_t, std::int64_t>> exact_runs_;  // [first row, end row), starts are multiples of 64
  std::vector<Head> heads_;
};

}  // namespace scsa
