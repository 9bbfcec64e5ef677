// SPDX-License-Identifier: Apache-2.0
//
// Sparse attention of the rows of a prompt over a BlockPlan, preset `fast`. The formulas are those of joint_operator.h;
// a tile of consecutive query rows opens one set of clusters together with all query heads of a KV head, so that the
// work is that of matrices (tile.h, tile_clusters.h). Thresholds come from tiles that are answered exactly and judged
// at every threshold of the grid on the way: their rows are read in opening order, and what each threshold leaves
// closed is kept as a tail until the last row was read.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/block_plan.h"
#include "core/coverage.h"
#include "core/joint_kernels.h"
#include "core/prompt_thresholds.h"
#include "core/tile.h"
#include "scsa/config.h"
#include "scsa/exact.h"
#include "scsa/layer.h"
#include "scsa/types.h"

namespace scsa {

// The rows of a prompt that are answered in one call.
struct PromptQuery {
  const QueryView& q;
  const KvView& kv;
  const VisibleSets& visible;  // bitmaps, of every row
  const LogitParams& params;
};

class PromptOperator {
 public:
  PromptOperator(const Shape& shape, const Config& config) : shape_(shape), config_(config) {}

  // Answers the query and takes what was measured into `thresholds`. The bits do not depend on n_threads. Throws
  // std::bad_alloc; then, and with kOutOfMemory, `out` may hold anything.
  Status Attend(const BlockPlan& plan, const PromptQuery& query, PromptThresholds& thresholds, int n_threads,
                Workspace& workspace, const OutView& out);

 private:
  using Errors = std::array<float, kTauGridSize>;
  struct Task {
    int kv_head = 0;
    int tile = 0;
    bool measure = false;
    // Results.
    bool measured = false;
    bool sparse = false;
    std::uint64_t rows_read = 0;
    std::uint64_t rows_visible = 0;
    Errors errors{};
  };
  struct Scratch;  // of a thread, laid out in the workspace
  struct Lists {   // of a thread
    std::vector<std::uint64_t> seen_by_all, seen_by_any;
    Coverage coverage;
    std::vector<const std::byte*> blocks;  // of the plan, nullptr where not usable
    std::vector<std::int32_t> opened, closed, rows, counts;
  };
  // What the tasks of a call have in common.
  struct Call {
    const BlockPlan& plan;
    const PromptQuery& query;
    const PromptThresholds& thresholds;
    const OutView& out;
    std::byte* memory;  // of all threads
    std::size_t bytes;  // of one
  };

  Status Run(const Call& call, std::span<Task> tasks, int n_threads);
  void RunTile(const Call& call, Task& task, Lists& lists, const Scratch& scratch) const;
  void AnswerSparsely(const Call& call, Task& task, Lists& lists, const Scratch& scratch, const TileArgs& args,
                      const BlockRange& range, std::uint64_t covered) const;
  void Measure(const Call& call, Task& task, Lists& lists, const Scratch& scratch, const TileArgs& args,
               const BlockRange& range) const;
  void AttendClusters(const Call& call, int kv_head, std::span<const std::int32_t> clusters, Lists& lists,
                      const TileArgs& args, const Scratch& scratch) const;

  Shape shape_;
  Config config_;
  std::vector<Task> tasks_;
  std::vector<Lists> lists_;  // [threads]
};

}  // namespace scsa
