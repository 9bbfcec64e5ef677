// SPDX-License-Identifier: Apache-2.0
//
// Calibration of preset `fast`: what a step would have answered at every threshold.
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
// The thresholds' opened sets are nested, so the clusters in opening order fall into segments: segment t is open from
// threshold t on, the one after the last threshold in play never. Each is read once as opened rows and once as a tail.
struct JointOperator::ReplayStates {
  std::int64_t n_segments = 0;  // most that a head has
  StateArray opened;            // [kv_heads][segments], the last of a head unused
  StateArray closed;            // [kv_heads][segments]
  StateArray chunk;             // [threads]
  StateArray output;            // [kv_heads][2]
  float* weights = nullptr;     // [threads][group][n_clusters]
};

std::span<const std::int32_t> JointOperator::Segment(int kv_head, std::int64_t t) const {
  const Head& head = heads_[kv_head];
  const std::int32_t begin = t == 0 ? 0 : head.counts[t - 1];
  return std::span<const std::int32_t>(head.opened).subspan(begin, head.counts[t] - begin);
}

void JointOperator::CutIntoSegments(std::span<const float> thresholds, int kv_head) {
  const auto n_clusters = static_cast<std::size_t>(scoring_.n_clusters());
  Head& head = heads_[kv_head];
  scoring_.Finish(kv_head);
  head.counts.resize(thresholds.size() + 1);
  head.selector.Order({scoring_.shares(kv_head), n_clusters}, {scoring_.keys(kv_head), n_clusters}, thresholds,
                      head.opened, std::span(head.counts).first(thresholds.size()));
  head.counts.back() = static_cast<std::int32_t>(head.opened.size());
  // Rows of a block are read together.
  std::int32_t begin = 0;
  for (std::size_t t = 0; t < thresholds.size(); begin = head.counts[t++]) {
    std::sort(head.opened.begin() + begin, head.opened.begin() + head.counts[t]);
  }
}

void JointOperator::ReadSegment(int kv_head, std::int64_t t, int thread, const ReplayStates& states) {
  const int group = shape_.group();
  const std::int64_t n_clusters = scoring_.n_clusters();
  const std::int64_t n_segments = std::ssize(heads_[kv_head].counts);
  if (t >= n_segments) return;
  const std::span<const std::int32_t> clusters = Segment(kv_head, t);
  const auto at = static_cast<std::size_t>(kv_head * states.n_segments + t);
  const SoftmaxState closed = states.closed.Cleared(at);
  const SoftmaxState opened = states.opened.Cleared(at);
  if (clusters.empty()) return;
  float* weights = states.weights + std::int64_t{thread} * group * n_clusters;
  if (t + 1 == n_segments) {
    std::fill_n(weights, group * n_clusters, 0.0f);
    for (int i = 0; i < group; ++i) {
      const float* tails = scoring_.tails(kv_head * group + i);
      for (const std::int32_t cluster : clusters) weights[i * n_clusters + cluster] = tails[cluster];
    }
    for (int chunk = 0; chunk < scoring_.n_chunks(); ++chunk) {
      const SoftmaxState part = states.chunk.Cleared(static_cast<std::size_t>(thread));
      scoring_.FoldTail(kv_head, chunk, weights, {}, part);
      MergeStates(shape_.head_dim, group, part, closed);
    }
    return;
  }
  scoring_.FoldTailOf(kv_head, clusters, weights, closed);
  OpenedRows& rows = replay_rows_[static_cast<std::size_t>(thread)];
  scoring_.FindRows(kv_head, clusters, &rows);
  scoring_.AttendOpened(kv_head, rows, 0, rows.size(), opened);
}

void JointOperator::JudgeThresholds(const JointQuery& query, int kv_head, const ReplayStates& states,
                                    const float* exact, std::int64_t exact_head_stride, std::int64_t n_errors,
                                    float* errors) const {
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  const std::int64_t n_thresholds = std::ssize(heads_[kv_head].counts) - 1;
  const auto first = static_cast<std::size_t>(kv_head * states.n_segments);
  // Of each closed state: itself and all later ones.
  for (std::int64_t t = n_thresholds - 1; t >= 0; --t) {
    MergeStates(head_dim, group, states.closed[first + t + 1], states.closed[first + t]);
  }
  const SoftmaxState open = states.output.Cleared(static_cast<std::size_t>(2 * kv_head));
  MergeStates(head_dim, group, scoring_.exact(kv_head), open);
  std::array<float, kMaxHeadDim> output;
  for (std::int64_t t = 0; t < n_thresholds; ++t) {
    MergeStates(head_dim, group, states.opened[first + t], open);
    const SoftmaxState total = states.output.Cleared(static_cast<std::size_t>(2 * kv_head + 1));
    MergeStates(head_dim, group, open, total);
    MergeStates(head_dim, group, states.closed[first + t + 1], total);
    for (int i = 0; i < group; ++i) {
      const std::int64_t q_head = kv_head * group + i;
      WriteHeadOutput(total, i, head_dim, query.params.sinks == nullptr ? nullptr : query.params.sinks + q_head,
                      output.data());
      errors[q_head * n_errors + t] = RelativeError(output.data(), exact + q_head * exact_head_stride, head_dim);
    }
  }
}

Status JointOperator::Replay(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                             std::span<const int> in_play, const float* exact, std::int64_t exact_head_stride,
                             int n_threads, Workspace& workspace, std::span<float> errors) {
  const auto replay = query.tree != nullptr ? &JointOperator::ReplayWalk : &JointOperator::ReplaySegments;
  Status status =
      (this->*replay)(plan, query, thresholds, in_play, exact, exact_head_stride, n_threads, workspace, errors);
  if (!status.ok()) return status;
  for (int h = 0; h < shape_.q_heads; ++h) {
    const std::span<float> of_head = errors.subspan(static_cast<std::size_t>(h) * thresholds.size(), thresholds.size());
    const auto n = static_cast<std::size_t>(in_play[static_cast<std::size_t>(h / shape_.group())]);
    std::ranges::fill(of_head.subspan(n), of_head[n - 1]);
  }
  return status;
}

Status JointOperator::ReplaySegments(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                                     std::span<const int> in_play, const float* exact, std::int64_t exact_head_stride,
                                     int n_threads, Workspace& workspace, std::span<float> errors) {
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  const int kv_heads = shape_.kv_heads;
  if (Status status = scoring_.Prepare(plan, query, workspace); !status.ok()) return status;
  ReplayStates states;
  states.n_segments = *std::ranges::max_element(in_play) + 1;
  const auto threads = static_cast<std::size_t>(std::max(1, n_threads));
  replay_rows_.resize(std::max(replay_rows_.size(), threads));
  const auto lay_out = [&](void* block) {
    ScratchLayout layout(block);
    const auto segments = static_cast<std::size_t>(kv_heads) * static_cast<std::size_t>(states.n_segments);
    states.opened = StateArray(layout, segments, group, head_dim);
    states.closed = StateArray(layout, segments, group, head_dim);
    states.chunk = StateArray(layout, threads, group, head_dim);
    states.output = StateArray(layout, 2 * static_cast<std::size_t>(kv_heads), group, head_dim);
    states.weights = layout.Take<float>(threads * group * scoring_.n_clusters());
    return layout.bytes();
  };
  void* block = workspace.impl().Reserve(ScratchUser::kCalibration, lay_out(nullptr));
  if (block == nullptr) return {StatusCode::kOutOfMemory, std::string()};
  lay_out(block);

  const int n_parts = scoring_.n_parts();
  const std::int64_t n_tasks = std::int64_t{n_parts} * kv_heads;
  ParallelForAhead(n_threads, n_tasks, [&](std::int64_t task, std::int64_t next, int) {
    scoring_.Run(static_cast<int>(task / n_parts), static_cast<int>(task % n_parts), static_cast<int>(next / n_parts),
                 next < n_tasks ? static_cast<int>(next % n_parts) : -1);
  });
  std::atomic<bool> out_of_memory{false};
  const auto guarded = [&](auto&& work) {
    try {
      work();
    } catch (const std::bad_alloc&) {
      out_of_memory.store(true, std::memory_order_relaxed);
    }
  };
  ParallelFor(n_threads, kv_heads, [&](std::int64_t kv_head, int) {
    const auto n_thresholds = static_cast<std::size_t>(in_play[static_cast<std::size_t>(kv_head)]);
    guarded([&] { CutIntoSegments(thresholds.first(n_thresholds), static_cast<int>(kv_head)); });
  });
  if (out_of_memory) return {StatusCode::kOutOfMemory, std::string()};
  // Later segments hold more clusters, so they go first.
  ParallelFor(n_threads, states.n_segments * kv_heads, [&](std::int64_t task, int thread) {
    guarded([&] {
      ReadSegment(static_cast<int>(task % kv_heads), states.n_segments - 1 - task / kv_heads, thread, states);
    });
  });
  if (out_of_memory) return {StatusCode::kOutOfMemory, std::string()};
  ParallelFor(n_threads, kv_heads, [&](std::int64_t kv_head, int) {
    JudgeThresholds(query, static_cast<int>(kv_head), states, exact, exact_head_stride, std::ssize(thresholds),
                    errors.data());
  });
  return Status::Ok();
}

}  // namespace scsa
