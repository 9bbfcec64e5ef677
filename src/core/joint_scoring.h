// SPDX-License-Identifier: Apache-2.0
//
// The first half of a step of preset `fast`: exact attention over the rows outside the plan, and estimates of every
// cluster (joint_operator.h has the formulas). Cut into parts that may run in any order and on any thread; which parts
// there are depends on the plan and on what is visible alone.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/block_plan.h"
#include "core/block_tree.h"
#include "core/coverage.h"
#include "core/joint_kernels.h"
#include "core/kernels.h"
#include "core/opened_rows.h"
#include "core/state_array.h"
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
  bool sees_all = false;                   // the caller knows that every row is visible
  LogitParams params;
  HeadReads* reads = nullptr;  // [kv_heads], counted up; nullptr: not counted
  // Compared with the blocks' fingerprints meanwhile.
  std::optional<BlockPlan::Sample> sample = {};
  // In line with the plan: clusters are found by a walk (frontier_walk.h). nullptr: every cluster is scored.
  const BlockTree* tree = nullptr;
};

// Query heads are numbered through the whole layer. Kept from call to call, so that its lists keep their memory.
class JointScoring {
 public:
  JointScoring(const Shape& shape, const Config& config) : shape_(shape), config_(config) {}

  // Finds the parts of a query and lays the scratch arrays out in `workspace`. With a tree there are exact parts alone
  // and no clusters. kOutOfMemory. Throws std::bad_alloc.
  Status Prepare(const BlockPlan& plan, const JointQuery& query, Workspace& workspace);

  const Coverage& coverage() const { return coverage_; }
  const float* queries(int kv_head) const { return qs_ + std::int64_t{kv_head} * shape_.group() * shape_.head_dim; }
  std::int64_t n_clusters() const { return n_clusters_; }
  int n_chunks() const { return n_chunks_; }            // of the blocks: what one part scores, or folds the tail of
  int n_parts() const { return n_exact_ + n_chunks_; }  // per KV head

  // Part `part` of a KV head. next_part < 0: none follows on this thread; otherwise (next_kv_head, next_part) does, and
  // what it reads first is fetched meanwhile.
  void Run(int kv_head, int part, int next_kv_head, int next_part) const;

  // After all parts of the KV head: merges its exact states into exact(kv_head), and fills shares and keys. Where a
  // logit overflowed, every cluster's share is 1.
  void Finish(int kv_head) const;

  const float* shares(int kv_head) const { return shares_ + kv_head * n_clusters_; }
  const float* keys(int kv_head) const { return keys_ + kv_head * n_clusters_; }
  // Tail weights of a query head, in each chunk relative to a gauge of its own.
  float* tails(int q_head) const { return tails_ + q_head * n_clusters_; }
  SoftmaxState exact(int kv_head) const { return exact_[static_cast<std::size_t>(kv_head) * n_exact_states_]; }

  // Folds weights at the value means of the chunk's clusters, of a light block at its mean value, into empty states of
  // the KV head's query heads. weights: of all clusters, [group][n_clusters], relative to the chunk's gauges like
  // tails(). next: what the caller reads afterwards. Returns of how many blocks the clusters' value means were read.
  int FoldTail(int kv_head, int chunk, const float* weights, std::pair<FetchHint, FetchHint> next,
               const SoftmaxState& state) const;

  // The same for a few clusters, weighted by tails(). scratch: [group][clusters.size()].
  void FoldTailOf(int kv_head, std::span<const std::int32_t> clusters, float* scratch, const SoftmaxState& state) const;

  void FindRows(int kv_head, std::span<const std::int32_t> clusters, OpenedRows* rows) const {
    rows->Find(*plan_, *query_->kv, kv_head, clusters);
  }
  // `n` of rows.size() from `first` on, by the KV head's query heads.
  void AttendOpened(int kv_head, const OpenedRows& rows, std::size_t first, std::size_t n,
                    const SoftmaxState& state) const {
    rows.Attend(first, n, {shape_.group(), queries(kv_head), query_->params.softcap}, state);
  }

 private:
  struct ExactPart {
    std::size_t first_run, end_run;  // of pieces_
  };

  EstimateSums& Sums(int q_head, int chunk) const { return sums_[std::int64_t{q_head} * n_chunks_ + chunk]; }
  std::int64_t FirstCluster(int chunk) const { return std::int64_t{chunk} * chunk_blocks_ * plan_->slots(); }
  float* BlockShares(int kv_head) const { return block_shares_ + std::int64_t{kv_head} * n_blocks_; }
  BlockRange Range(int kv_head, int first_block, int n_blocks) const;
  BlockRange ChunkRange(int kv_head, int chunk) const;
  RunArgs ExactRun(int kv_head, std::pair<std::int64_t, std::int64_t> rows) const;
  std::pair<FetchHint, FetchHint> FirstReads(int kv_head, int part) const;
  void CutExactRuns();
  void FetchOffsets(int kv_head, int block) const;

  Shape shape_;
  Config config_;
  const BlockPlan* plan_ = nullptr;  // of the present query
  const JointQuery* query_ = nullptr;
  Coverage coverage_;
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces_;  // exact rows, [first, end)
  std::vector<ExactPart> exact_parts_;
  int n_blocks_ = 0;  // of the coverage; 0 with a tree
  int chunk_blocks_ = 0;
  std::int64_t n_clusters_ = 0;
  int n_chunks_ = 0;
  int n_exact_ = 0;
  int n_exact_states_ = 0;
  // Scratch.
  const std::byte** blocks_ = nullptr;  // [n_blocks], nullptr where a block is not usable
  float* qs_ = nullptr;                 // [q_heads][head_dim], scaled
  float* estimates_ = nullptr;          // [q_heads][n_clusters]
  float* tails_ = nullptr;              // [q_heads][n_clusters]
  EstimateSums* sums_ = nullptr;
  float* shares_ = nullptr;        // [kv_heads][n_clusters]
  float* keys_ = nullptr;          // [kv_heads][n_clusters]
  float* block_shares_ = nullptr;  // [kv_heads][n_blocks]
  const std::uint64_t** visible_ = nullptr;
  StateArray exact_;  // [kv_heads][n_exact_states]
};

}  // namespace scsa
