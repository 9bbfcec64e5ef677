// SPDX-License-Identifier: Apache-2.0
#include "core/prompt_operator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>

#include "core/joint_select.h"
#include "core/parallel.h"
#include "core/tile_clusters.h"
#include "core/tile_vectors.h"
#include "core/workspace.h"

namespace scsa {
namespace {

// A tile that sees fewer rows of blocks than this is answered exactly: scoring clusters would not pay.
constexpr std::uint64_t kMinCoveredRows = 1024;
// So is one whose threshold opens more than this share of them.
constexpr double kMostOpened = 0.6;

}  // namespace

struct PromptOperator::Scratch {
  Scratch(ScratchLayout layout, int head_dim, int most_vectors, int n_blocks, int slots)
      : vectors(layout, most_vectors),
        tile(layout.Take<std::byte>(TileScratchBytes(head_dim, most_vectors))),
        estimates(layout.Take<std::byte>(TileEstimatesBytes(most_vectors, n_blocks, slots))) {
    const auto n_clusters = static_cast<std::size_t>(n_blocks) * static_cast<std::size_t>(slots);
    shares = layout.Take<float>(n_clusters);
    keys = layout.Take<float>(n_clusters);
    tail_bytes = TileTailBytes(head_dim, most_vectors);
    for (std::byte*& tail : tails) tail = layout.Take<std::byte>(tail_bytes);
    bytes = layout.bytes();
  }
  TileVectors vectors;
  std::byte* tile;
  std::byte* estimates;
  float* shares;
  float* keys;
  std::array<std::byte*, kTauGridSize> tails;  // one per threshold
  std::size_t tail_bytes;
  std::size_t bytes;
};

Status PromptOperator::Attend(const BlockPlan& plan, const PromptQuery& query, PromptThresholds& thresholds,
                              int n_threads, Workspace& workspace, const OutView& out) {
  const int n_tiles = (query.q.n_q + kPromptTileRows - 1) / kPromptTileRows;
  const int vectors = std::min(query.q.n_q, kPromptTileRows) * shape_.group();
  const std::size_t bytes =
      Scratch(ScratchLayout(nullptr), shape_.head_dim, vectors, plan.n_blocks(), plan.slots()).bytes;
  const auto threads = static_cast<std::size_t>(std::max(1, n_threads));
  auto* memory = static_cast<std::byte*>(workspace.impl().Reserve(ScratchUser::kTile, bytes * threads));
  if (memory == nullptr) return {StatusCode::kOutOfMemory, std::string()};
  lists_.resize(std::max(lists_.size(), threads));

  // Measured tiles take longest, so they go first; spread over the call and, from call to call, over its tiles.
  tasks_.clear();
  bool first_measured = false;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const int n_measured = std::min(n_tiles, thresholds.TakeMeasured(h, n_tiles));
    const auto turn = static_cast<std::int64_t>(thresholds.heads()[h].measured);
    first_measured = first_measured || turn == 0;
    for (int i = 0; i < n_measured; ++i) {
      const std::int64_t offset = turn * n_tiles / 3 + h + (2 * i + 1) * std::int64_t{n_tiles} / (2 * n_measured);
      tasks_.push_back({h, static_cast<int>(offset % n_tiles), true});
    }
  }
  const auto n_measured = std::ssize(tasks_);
  for (int tile = 0; tile < n_tiles; ++tile) {
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const auto is_this = [&](const Task& task) { return task.measure && task.kv_head == h && task.tile == tile; };
      if (std::none_of(tasks_.begin(), tasks_.begin() + n_measured, is_this)) tasks_.push_back({h, tile, false});
    }
  }

  const Call call{plan, query, thresholds, out, memory, bytes};
  const std::span<Task> tasks(tasks_);
  const auto learn = [&] {
    for (const Task& task : tasks.first(n_measured)) {
      if (task.measured) thresholds.Add(task.kv_head, task.errors);
    }
  };
  if (first_measured) {
    if (Status status = Run(call, tasks.first(n_measured), n_threads); !status.ok()) return status;
    learn();
    if (Status status = Run(call, tasks.subspan(n_measured), n_threads); !status.ok()) return status;
  } else {
    if (Status status = Run(call, tasks, n_threads); !status.ok()) return status;
    learn();
  }
  for (const Task& task : tasks) {
    PromptHead& head = thresholds.head(task.kv_head);
    ++head.tiles;
    head.sparse += task.sparse ? 1 : 0;
    head.rows_read += task.rows_read;
    head.rows_visible += task.rows_visible;
  }
  return Status::Ok();
}

Status PromptOperator::Run(const Call& call, std::span<Task> tasks, int n_threads) {
  std::atomic<bool> out_of_memory{false};
  const int vectors = std::min(call.query.q.n_q, kPromptTileRows) * shape_.group();
  ParallelFor(n_threads, std::ssize(tasks), [&](std::int64_t i, int thread) {
    try {
      const Scratch scratch(ScratchLayout(call.memory + call.bytes * static_cast<std::size_t>(thread)), shape_.head_dim,
                            vectors, call.plan.n_blocks(), call.plan.slots());
      RunTile(call, tasks[static_cast<std::size_t>(i)], lists_[static_cast<std::size_t>(thread)], scratch);
    } catch (const std::bad_alloc&) {
      out_of_memory.store(true, std::memory_order_relaxed);
    }
  });
  if (out_of_memory) return {StatusCode::kOutOfMemory, std::string()};
  return Status::Ok();
}

void PromptOperator::RunTile(const Call& call, Task& task, Lists& lists, const Scratch& scratch) const {
  const PromptQuery& query = call.query;
  const int h = task.kv_head;
  const int first_row = task.tile * kPromptTileRows;
  const int n_rows = std::min(kPromptTileRows, query.q.n_q - first_row);
  const std::int64_t words = (query.kv.n_kv + 63) / 64;
  lists.seen_by_all.assign(static_cast<std::size_t>(words), ~std::uint64_t{0});
  lists.seen_by_any.assign(static_cast<std::size_t>(words), 0);
  for (int i = 0; i < n_rows; ++i) {
    const std::uint64_t* seen = query.visible.words + (first_row + i) * query.visible.row_stride;
    for (std::int64_t w = 0; w < words; ++w) {
      lists.seen_by_all[static_cast<std::size_t>(w)] &= seen[w];
      lists.seen_by_any[static_cast<std::size_t>(w)] |= seen[w];
    }
  }
  const TileArgs args =
      scratch.vectors.Fill(shape_, query.q, query.visible, query.params, call.out, h, first_row, n_rows);
  task.rows_visible = CountVisible(lists.seen_by_any.data(), 0, query.kv.n_kv);
  task.rows_read = task.rows_visible;

  lists.coverage.Find(call.plan, query.kv.n_kv, lists.seen_by_all.data());
  const Coverage& coverage = lists.coverage;
  const std::uint64_t covered = coverage.usable_rows;
  const bool pays = covered >= kMinCoveredRows && (task.measure || call.thresholds.heads()[h].tau > 0.0f);
  BeginTile(args, scratch.tile);
  const auto attend_exactly = [&](std::int64_t first, std::int64_t end) {
    TileRows rows = RowsOf(query.kv, h, first, end - first);
    rows.visible = scratch.vectors.visible();
    rows.first_bit = first;
    AttendTile(args, rows, scratch.tile);
  };
  if (!pays) {
    attend_exactly(0, query.kv.n_kv);
    FinishTile(args, scratch.tile);
    return;
  }
  for (const auto& [first, end] : coverage.exact_runs) attend_exactly(first, end);
  lists.blocks.clear();
  for (int b = 0; b < coverage.n_blocks(); ++b) {
    lists.blocks.push_back(coverage.usable[b] != 0 ? call.plan.data(b) : nullptr);
  }
  BlockRange range;
  range.layout = &call.plan.layout();
  range.blocks = lists.blocks.data();
  range.keys_at = call.plan.KeysAt(h);
  range.values_at = call.plan.ValuesAt(h);
  range.n_blocks = coverage.n_blocks();
  EstimateTile(args, range, config_.tail_shrink, scratch.tile, scratch.estimates, scratch.shares, scratch.keys);
  if (task.measure) {
    Measure(call, task, lists, scratch, args, range);
  } else {
    AnswerSparsely(call, task, lists, scratch, args, range, covered);
  }
  FinishTile(args, scratch.tile);
}

void PromptOperator::AttendClusters(const Call& call, int kv_head, std::span<const std::int32_t> clusters, Lists& lists,
                                    const TileArgs& args, const Scratch& scratch) const {
  lists.rows.clear();
  call.plan.AppendRows(kv_head, clusters, lists.rows);
  TileRows rows = RowsOf(call.query.kv, kv_head, 0, std::ssize(lists.rows));
  rows.rows = lists.rows.data();
  AttendTile(args, rows, scratch.tile);
}

void PromptOperator::AnswerSparsely(const Call& call, Task& task, Lists& lists, const Scratch& scratch,
                                    const TileArgs& args, const BlockRange& range, std::uint64_t covered) const {
  const auto n = static_cast<std::size_t>(range.n_blocks) * static_cast<std::size_t>(call.plan.slots());
  const std::span<const float> keys(scratch.keys, n);
  JointSelector().Select({scratch.shares, n}, keys, call.thresholds.heads()[task.kv_head].tau, lists.opened);
  lists.rows.clear();
  call.plan.AppendRows(task.kv_head, lists.opened, lists.rows);
  const auto opened_rows = static_cast<std::uint64_t>(lists.rows.size());
  lists.closed.clear();
  // Opened clusters come in ascending order.
  std::size_t next = 0;
  for (std::int32_t c = 0; c < static_cast<std::int32_t>(n); ++c) {
    if (next < lists.opened.size() && lists.opened[next] == c) {
      ++next;
    } else if (keys[static_cast<std::size_t>(c)] >= 0.0f) {
      lists.closed.push_back(c);
    }
  }
  AttendClusters(call, task.kv_head, lists.opened, lists, args, scratch);
  if (static_cast<double>(opened_rows) > kMostOpened * static_cast<double>(covered)) {
    AttendClusters(call, task.kv_head, lists.closed, lists, args, scratch);
    return;
  }
  ClearTail(args, scratch.estimates, scratch.tails[0]);
  FoldTail(args, range, lists.closed.data(), std::ssize(lists.closed), scratch.estimates, scratch.tile,
           scratch.tails[0]);
  AddTail(args, scratch.tails[0], scratch.tile);
  task.sparse = true;
  task.rows_read -= covered - opened_rows;
}

void PromptOperator::Measure(const Call& call, Task& task, Lists& lists, const Scratch& scratch, const TileArgs& args,
                             const BlockRange& range) const {
  const auto n = static_cast<std::size_t>(range.n_blocks) * static_cast<std::size_t>(call.plan.slots());
  lists.counts.resize(kTauGridSize);
  JointSelector().Order({scratch.shares, n}, {scratch.keys, n}, call.thresholds.grid(), lists.opened, lists.counts);
  const std::span<const std::int32_t> order(lists.opened);
  const auto between = [&](std::int32_t begin, std::int32_t end) { return order.subspan(begin, end - begin); };
  for (int t = kTauGridSize; t-- > 0;) {
    const bool last = t + 1 == kTauGridSize;
    if (last) {
      ClearTail(args, scratch.estimates, scratch.tails[t]);
    } else {
      std::memcpy(scratch.tails[t], scratch.tails[t + 1], scratch.tail_bytes);
    }
    const auto closed = between(lists.counts[t], last ? static_cast<std::int32_t>(order.size()) : lists.counts[t + 1]);
    FoldTail(args, range, closed.data(), std::ssize(closed), scratch.estimates, scratch.tile, scratch.tails[t]);
  }
  std::int32_t opened = 0;
  for (int t = 0; t < kTauGridSize; ++t) {
    AttendClusters(call, task.kv_head, between(opened, lists.counts[t]), lists, args, scratch);
    opened = lists.counts[t];
    OutputWithTail(args, scratch.tile, scratch.tails[t]);
  }
  AttendClusters(call, task.kv_head, between(opened, static_cast<std::int32_t>(order.size())), lists, args, scratch);
  for (int t = 0; t < kTauGridSize; ++t) task.errors[t] = MeanTileError(args, scratch.tails[t], scratch.tile);
  task.measured = true;
}

}  // namespace scsa
