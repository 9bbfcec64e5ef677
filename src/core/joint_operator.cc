// SPDX-License-Identifier: Apache-2.0
#include "core/joint_operator.h"

#include <algorithm>
#include <new>
#include <string>
#include <thread>

#include "core/parallel.h"
#include "core/softmax_state.h"

namespace scsa {
namespace {

constexpr int kBlocksPerCheck = 8;

// Parts of what a KV head reads where every cluster is scored: one for the tail of each chunk, and at least so many.
constexpr int kLeastParts = 2;

// Parts of what a KV head reads after a walk: so many of all KV heads together, up to kMostWalkParts of one, and none
// that is not worth its state for this many rows or as much work.
constexpr int kWalkParts = 32;
constexpr int kMostWalkParts = 8;
constexpr std::int64_t kWalkPartRows = 64;

Status OutOfMemory() { return {StatusCode::kOutOfMemory, std::string()}; }

// Waits for another thread, which is at work already and needs microseconds.
void WaitFor(const std::atomic<bool>& flag) {
  constexpr int kSpins = 4000;
  for (int spins = 0; !flag.load(std::memory_order_acquire); ++spins) {
    if (spins < kSpins) {
      PauseThread();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

JointOperator::JointOperator(const Shape& shape, const Config& config)
    : shape_(shape), config_(config), scoring_(shape, config), heads_(std::make_unique<Head[]>(shape.kv_heads)) {}
JointOperator::~JointOperator() = default;

// Most parts of what a KV head reads once its opened set is decided.
int JointOperator::ReadingParts(const JointQuery& query) const {
  if (query.tree == nullptr) return std::max(scoring_.n_chunks(), kLeastParts);
  return std::clamp(kWalkParts / shape_.kv_heads, kLeastParts, kMostWalkParts);
}

// The walk of a KV head whose exact parts are done, at its beginning.
void JointOperator::StartWalk(const BlockPlan& plan, const JointQuery& query, int kv_head) {
  Head& head = heads_[kv_head];
  if (head.walk == nullptr) head.walk = std::make_unique<FrontierWalk>(shape_, config_);
  head.walk->Start({.plan = &plan,
                    .tree = query.tree,
                    .cover = &cover_,
                    .kv_head = kv_head,
                    .q = scoring_.queries(kv_head),
                    .sinks = query.params.sinks == nullptr ? nullptr : query.params.sinks + kv_head * shape_.group(),
                    .exact = scoring_.exact(kv_head)});
}

// The opened set of a KV head and its rows. False when memory is short.
bool JointOperator::Decide(const BlockPlan& plan, const JointQuery& query, int kv_head, float tau) {
  Head& head = heads_[kv_head];
  const auto n = static_cast<std::size_t>(scoring_.n_clusters());
  scoring_.Finish(kv_head);
  try {
    if (query.tree != nullptr) {
      StartWalk(plan, query, kv_head);
      head.walk->Run(tau);
      head.walk->WeighTail();
      head.opened.assign(head.walk->opened().begin(), head.walk->opened().end());
      std::ranges::sort(head.opened);
    } else {
      head.selector.Select({scoring_.shares(kv_head), n}, {scoring_.keys(kv_head), n}, tau, head.opened);
    }
    scoring_.FindRows(kv_head, head.opened, &head.rows);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (query.tree != nullptr) {
    const std::int64_t work = static_cast<std::int64_t>(head.rows.n_rows()) + head.walk->scored_nodes() +
                              head.walk->scored_blocks() * std::int64_t{plan.slots()} / 2;
    head.reading_parts = static_cast<int>(std::clamp<std::int64_t>(work / kWalkPartRows, 1, ReadingParts(query)));
    return true;
  }
  head.reading_parts = ReadingParts(query);
  // Opened clusters have no tail.
  for (int i = 0; i < shape_.group(); ++i) {
    float* tails = scoring_.tails(kv_head * shape_.group() + i);
    for (const std::int32_t cluster : head.opened) tails[cluster] = 0.0f;
  }
  return true;
}

// Part `part` of `n_parts` of what a KV head reads once its opened set is decided: a share of the opened rows, and the
// tail of one chunk, or a share of the walk's tail.
void JointOperator::Read(const JointQuery& query, int kv_head, int part, int n_parts, const SoftmaxState& state) {
  Head& head = heads_[kv_head];
  const OpenedRows& rows = head.rows;
  constexpr std::size_t kMultiple = 8;  // of the kernels' row blocks
  const std::size_t per_part = ((rows.size() + n_parts - 1) / n_parts + kMultiple - 1) / kMultiple * kMultiple;
  const std::size_t first = std::min(rows.size(), part * per_part);
  const std::size_t n = std::min(per_part, rows.size() - first);
  if (query.tree != nullptr) {
    head.walk->FoldTail(part, n_parts, state);
  } else if (part < scoring_.n_chunks()) {
    const int folded =
        scoring_.FoldTail(kv_head, part, scoring_.tails(kv_head * shape_.group()), rows.FirstReads(first, n), state);
    head.folded_blocks.fetch_add(folded, std::memory_order_relaxed);
  }
  scoring_.AttendOpened(kv_head, rows, first, n, state);
}

// opened[b] += rows of block b that the last call opened, summed over the KV heads.
void JointOperator::AddOpenedRows(const BlockPlan& plan, std::span<std::int64_t> opened) const {
  for (int h = 0; h < shape_.kv_heads; ++h) {
    for (const std::int32_t cluster : heads_[h].opened) {
      const std::int32_t block = cluster / plan.slots();
      const std::uint16_t* offsets = plan.offsets(h, block) + cluster % plan.slots();
      opened[static_cast<std::size_t>(block)] += offsets[1] - offsets[0];
    }
  }
}

Status JointOperator::Attend(const BlockPlan& plan, const JointQuery& query, std::span<const float> taus, int n_threads,
                             Workspace& workspace, float* out, std::int64_t out_head_stride, LayerStats& stats) {
  const int group = shape_.group();
  const int kv_heads = shape_.kv_heads;
  const int head_dim = shape_.head_dim;
  if (Status status = scoring_.Prepare(plan, query, workspace); !status.ok()) return status;
  if (query.tree != nullptr) cover_.Find(*query.tree, scoring_.coverage());
  // Both halves of the step in one parallel region: all parts of the first half, KV head after KV head, then those of
  // the second half, which wait for the opened set of their head. Whoever finishes the last part of a head decides its
  // opened set, or merges its states. Tasks are claimed in ascending order, so whoever waits waits for running threads.
  const int n_scoring = scoring_.n_parts();
  const int n_reading = ReadingParts(query);
  StateArray parts;
  const auto lay_out = [&](void* block) {
    ScratchLayout layout(block);
    parts = StateArray(layout, static_cast<std::size_t>(n_reading) * kv_heads, group, head_dim);
    return layout.bytes();
  };
  void* block = workspace.impl().Reserve(ScratchUser::kSelect, lay_out(nullptr));
  if (block == nullptr) return OutOfMemory();
  lay_out(block);
  for (int h = 0; h < kv_heads; ++h) {
    heads_[h].scoring_left.store(n_scoring, std::memory_order_relaxed);
    heads_[h].reading_left.store(n_reading, std::memory_order_relaxed);
    heads_[h].decided.store(false, std::memory_order_relaxed);
    heads_[h].folded_blocks.store(0, std::memory_order_relaxed);
  }

  std::atomic<bool> out_of_memory{false};
  const auto finish = [&](int kv_head) {
    const SoftmaxState total = scoring_.exact(kv_head);
    for (int part = 0; part < heads_[kv_head].reading_parts; ++part) {
      MergeStates(head_dim, group, parts[static_cast<std::size_t>(kv_head) * n_reading + part], total);
    }
    for (int i = 0; i < group; ++i) {
      const std::int64_t q_head = std::int64_t{kv_head} * group + i;
      WriteHeadOutput(total, i, head_dim, query.params.sinks == nullptr ? nullptr : query.params.sinks + q_head,
                      out + q_head * out_head_stride);
    }
  };
  std::atomic<bool> changed{false};
  const std::int64_t first_reading = std::int64_t{n_scoring} * kv_heads;
  const std::int64_t first_check = first_reading + std::int64_t{n_reading} * kv_heads;
  const std::int64_t n_checks = query.sample ? (plan.n_blocks() + kBlocksPerCheck - 1) / kBlocksPerCheck : 0;
  ParallelForAhead(n_threads, first_check + n_checks, [&](std::int64_t task, std::int64_t next, int) {
    if (task >= first_check) {
      const auto first = static_cast<int>(task - first_check) * kBlocksPerCheck;
      const int end = std::min(first + kBlocksPerCheck, plan.n_blocks());
      if (plan.Changed(*query.kv, *query.sample, first, end)) changed.store(true, std::memory_order_relaxed);
      return;
    }
    if (task < first_reading) {
      const auto kv_head = static_cast<int>(task / n_scoring);
      const bool scores_next = next < first_reading;
      scoring_.Run(kv_head, static_cast<int>(task % n_scoring), static_cast<int>(next / n_scoring),
                   scores_next ? static_cast<int>(next % n_scoring) : -1);
      if (heads_[kv_head].scoring_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        if (!Decide(plan, query, kv_head, taus[kv_head])) out_of_memory.store(true, std::memory_order_relaxed);
        heads_[kv_head].decided.store(true, std::memory_order_release);
      }
      return;
    }
    const auto kv_head = static_cast<int>((task - first_reading) / n_reading);
    const auto part = static_cast<int>((task - first_reading) % n_reading);
    WaitFor(heads_[kv_head].decided);
    if (out_of_memory.load(std::memory_order_relaxed)) return;
    if (const int n_parts = heads_[kv_head].reading_parts; part < n_parts) {
      Read(query, kv_head, part, n_parts, parts.Cleared(static_cast<std::size_t>(task - first_reading)));
    }
    if (heads_[kv_head].reading_left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(kv_head);
  });
  if (changed) return {StatusCode::kFailedPrecondition, std::string()};
  if (out_of_memory) return OutOfMemory();
  Count(plan, query, stats);
  return Status::Ok();
}

// What one sparse call read, for the counters.
void JointOperator::Count(const BlockPlan& plan, const JointQuery& query, LayerStats& stats) const {
  const KvView& kv = *query.kv;
  const Coverage& coverage = scoring_.coverage();
  std::uint64_t exact_rows = 0;
  for (const auto& [first, end] : coverage.exact_runs) exact_rows += CountVisible(query.visible, first, end);
  const std::uint64_t cache_row = RowBytes(kv.k_type, shape_.head_dim) + RowBytes(kv.v_type, shape_.head_dim);
  const std::uint64_t opened_row = plan.OpenedRowBytes(kv);
  const auto group = static_cast<std::uint64_t>(shape_.group());
  const SummaryLayout& layout = plan.layout();
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const std::uint64_t opened_rows = heads_[h].rows.n_rows();
    std::uint64_t scored = coverage.usable_blocks * plan.slots();
    const auto folded = static_cast<std::uint64_t>(heads_[h].folded_blocks.load(std::memory_order_relaxed));
    std::uint64_t summary_bytes = coverage.usable_blocks * (layout.key_bytes() + layout.value_frame_bytes()) +
                                  folded * (layout.value_bytes() - layout.value_frame_bytes());
    if (query.tree != nullptr) {
      const FrontierWalk& walk = *heads_[h].walk;
      scored = walk.scored_nodes() + walk.scored_blocks() * plan.slots();
      summary_bytes = walk.scored_nodes() * 3 * sizeof(float) * shape_.head_dim +
                      walk.scored_blocks() * plan.SummaryBytesPerBlock();
    }
    stats.stat_opened_rows += group * opened_rows;
    stats.stat_exact_rows += group * exact_rows;
    stats.stat_scored += group * scored;
    stats.stat_calls += group;
    const HeadReads reads = {.rows_read = opened_rows + exact_rows,
                             .rows_visible = exact_rows + coverage.usable_rows,
                             .bytes_read = opened_rows * opened_row + exact_rows * cache_row + summary_bytes};
    stats.union_rows += reads.rows_read;
    stats.visible_rows += reads.rows_visible;
    stats.bytes_read += reads.bytes_read;
    if (query.reads != nullptr) query.reads[h].Add(reads);
  }
}

}  // namespace scsa
