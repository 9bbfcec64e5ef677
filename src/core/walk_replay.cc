// SPDX-License-Identifier: Apache-2.0
//
// Calibration of hierarchical selection: what a step would have answered had its walk stopped at each threshold.
#include <algorithm>
#include <array>
#include <atomic>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "core/joint_operator.h"
#include "core/parallel.h"
#include "core/relative_error.h"
#include "core/softmax_state.h"

namespace scsa {

// One walk passes all thresholds. Where it passes one, the output is that of the rows opened so far and of the tail of
// the frontier as it is there.
Status JointOperator::ReplayWalk(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                                 std::span<const int> in_play, const float* exact, std::int64_t exact_head_stride,
                                 int n_threads, Workspace& workspace, std::span<float> errors) {
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  const int kv_heads = shape_.kv_heads;
  if (Status status = scoring_.Prepare(plan, query, workspace); !status.ok()) return status;
  cover_.Find(*query.tree, scoring_.coverage());
  enum : std::size_t { kOpen, kTail, kTotal, kStates };
  StateArray states;
  const auto lay_out = [&](void* block) {
    ScratchLayout layout(block);
    states = StateArray(layout, kStates * static_cast<std::size_t>(kv_heads), group, head_dim);
    return layout.bytes();
  };
  void* block = workspace.impl().Reserve(ScratchUser::kCalibration, lay_out(nullptr));
  if (block == nullptr) return {StatusCode::kOutOfMemory, std::string()};
  lay_out(block);

  const int n_parts = scoring_.n_parts();
  ParallelFor(n_threads, std::int64_t{n_parts} * kv_heads, [&](std::int64_t task, int) {
    scoring_.Run(static_cast<int>(task / n_parts), static_cast<int>(task % n_parts), 0, -1);
  });
  const auto judge = [&](int kv_head) {
    const std::size_t at = kStates * static_cast<std::size_t>(kv_head);
    Head& head = heads_[kv_head];
    scoring_.Finish(kv_head);
    StartWalk(plan, query, kv_head);
    const SoftmaxState open = states.Cleared(at + kOpen);
    MergeStates(head_dim, group, scoring_.exact(kv_head), open);
    std::size_t done = 0;
    std::array<float, kMaxHeadDim> output;
    const auto n_thresholds = static_cast<std::size_t>(in_play[static_cast<std::size_t>(kv_head)]);
    for (std::size_t t = 0; t < n_thresholds; ++t) {
      head.walk->Run(thresholds[t]);
      const std::span<const std::int32_t> opened = head.walk->opened().subspan(done);
      done += opened.size();
      head.opened.assign(opened.begin(), opened.end());
      std::ranges::sort(head.opened);
      scoring_.FindRows(kv_head, head.opened, &head.rows);
      scoring_.AttendOpened(kv_head, head.rows, 0, head.rows.size(), open);
      head.walk->WeighTail();
      const SoftmaxState tail = states.Cleared(at + kTail);
      head.walk->FoldTail(0, 1, tail);
      const SoftmaxState total = states.Cleared(at + kTotal);
      MergeStates(head_dim, group, open, total);
      MergeStates(head_dim, group, tail, total);
      for (int i = 0; i < group; ++i) {
        const std::int64_t q_head = std::int64_t{kv_head} * group + i;
        WriteHeadOutput(total, i, head_dim, query.params.sinks == nullptr ? nullptr : query.params.sinks + q_head,
                        output.data());
        errors[static_cast<std::size_t>(q_head) * thresholds.size() + t] =
            RelativeError(output.data(), exact + q_head * exact_head_stride, head_dim);
      }
    }
  };
  std::atomic<bool> out_of_memory{false};
  ParallelFor(n_threads, kv_heads, [&](std::int64_t kv_head, int) {
    try {
      judge(static_cast<int>(kv_head));
    } catch (const std::bad_alloc&) {
      out_of_memory.store(true, std::memory_order_relaxed);
    }
  });
  return out_of_memory ? Status{StatusCode::kOutOfMemory, std::string()} : Status::Ok();
}

}  // namespace scsa
