// SPDX-License-Identifier: Apache-2.0
#include "scsa/exact.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "core/exact_tiled.h"
#include "core/kernels.h"
#include "core/parallel.h"
#include "core/softmax_state.h"
#include "core/validate.h"
#include "core/workspace.h"

namespace scsa {
namespace {

// Rows are worked on in blocks, a word of the visible sets each: all KV heads of a block before the next block, since
// in the usual cache layout the heads of a row are neighbours in memory and blocks are then read in sequence.
constexpr std::int64_t kBlockRows = 64;
// Blocks are grouped into at most this many pieces, whatever the thread count.
constexpr std::int64_t kMaxPieces = 64;
// A piece fetches each block while it works on the one before, all but its first: short pieces wait for memory too
// often. But short contexts are cut into kFewPieces while pieces have at least kMinPieceBlocks.
constexpr std::int64_t kFewPieces = 8;
constexpr std::int64_t kMinPieceBlocks = 2;
constexpr std::int64_t kGoodPieceBlocks = 8;
// Below this many pieces per thread, tasks take one KV head of a piece each, so that every thread has work.
constexpr int kPiecesPerThread = 4;

std::int64_t DivCeil(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// How one call is cut up. Depends on n_kv alone, so the order of additions and with it every output bit does not depend
// on the thread count.
struct Split {
  explicit Split(std::int64_t n_kv) {
    const std::int64_t blocks = std::max<std::int64_t>(1, DivCeil(n_kv, kBlockRows));
    const std::int64_t piece_blocks = std::clamp(blocks / kFewPieces, kMinPieceBlocks, kGoodPieceBlocks);
    piece_rows = std::max(piece_blocks, DivCeil(blocks, kMaxPieces)) * kBlockRows;
    n_pieces = DivCeil(blocks * kBlockRows, piece_rows);
  }
  std::int64_t piece_rows;
  std::int64_t n_pieces;
};

// The first block at or after `row` in which some query row sees something; end_row or more when there is none.
std::int64_t NextBlock(const VisibleSets& visible, int n_q, std::int64_t row, std::int64_t end_row) {
  if (visible.words == nullptr) return row;
  for (; row < end_row; row += kBlockRows) {
    for (int i = 0; i < n_q; ++i) {
      if (visible.words[i * visible.row_stride + row / kBlockRows] != 0) return row;
    }
  }
  return row;
}

// What to fetch ahead of the next block of rows while part `part` of `parts` (the task's KV heads) of this one is
// worked on. All heads of a row, neighbours in memory: that share of the block as a whole, so that memory is fetched in
// sequence. Otherwise the rows of that head.
FetchHint PartOfBlock(const std::byte* block, std::int64_t rows, std::int64_t row_bytes, std::int64_t row_stride,
                      std::int64_t head_stride, std::int64_t part, std::int64_t parts) {
  if (rows <= 0) return {};
  if (row_stride < head_stride || parts * head_stride < row_stride) {
    return {block + part * head_stride, row_bytes, row_stride, rows};
  }
  const std::int64_t bytes = rows * row_stride / parts;
  return {block + part * bytes, bytes, 0, 1};
}

// Scratch arrays of one call. Query vectors of a KV head are numbered row by row: vector i is query row i / group,
// query head i % group of the group.
struct Scratch {
  Scratch(void* block, const Shape& shape, int n_q, const Split& split, bool with_visible) {
    ScratchLayout layout(block);
    const std::size_t kv_heads = static_cast<std::size_t>(shape.kv_heads);
    const std::size_t vectors = static_cast<std::size_t>(n_q) * static_cast<std::size_t>(shape.group());
    const std::size_t pieces = static_cast<std::size_t>(split.n_pieces) * kv_heads;
    const std::size_t dims = static_cast<std::size_t>(shape.head_dim);
    q = layout.Take<float>(kv_heads * vectors * dims);
    max = layout.Take<float>(pieces * vectors);
    sum = layout.Take<float>(pieces * vectors);
    num = layout.Take<float>(pieces * vectors * dims);
    visible = layout.Take<const std::uint64_t*>(with_visible ? vectors : 0);
    done = layout.Take<std::atomic<std::int64_t>>(kv_heads);
    bytes = layout.bytes();
  }

  float* q;                         // [kv_heads][vectors][head_dim], multiplied by the scale
  float* max;                       // [kv_heads][pieces][vectors]
  float* sum;                       // the same
  float* num;                       // [kv_heads][pieces][vectors][head_dim]
  const std::uint64_t** visible;    // [vectors]
  std::atomic<std::int64_t>* done;  // [kv_heads], finished pieces
  std::size_t bytes;
};

}  // namespace

Workspace::Workspace() : impl_(std::make_unique<Impl>()) {}
Workspace::~Workspace() = default;
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;

Status ExactAttention(const Shape& shape, const QueryView& q, const KvView& kv, const VisibleSets& visible,
                      const LogitParams& params, int n_threads, Workspace& workspace, const OutView& out) {
  if (Status status = ValidateShape(shape); !status.ok()) return status;
  if (Status status = ValidateCall(q, kv, visible, params, n_threads, out); !status.ok()) return status;
  if (TilesPay(shape, q.n_q)) return TiledAttention(shape, q, kv, visible, params, n_threads, workspace, out);

  const Split split(kv.n_kv);
  const bool with_visible = visible.words != nullptr;
  const std::size_t bytes = Scratch(nullptr, shape, q.n_q, split, with_visible).bytes;
  void* block = workspace.impl().Reserve(ScratchUser::kExact, bytes);
  if (block == nullptr) return NoExactScratch(bytes);
  const Scratch scratch(block, shape, q.n_q, split, with_visible);

  const int group = shape.group();
  const std::size_t vectors = static_cast<std::size_t>(q.n_q) * static_cast<std::size_t>(group);
  const std::size_t dims = static_cast<std::size_t>(shape.head_dim);
  for (int h = 0; h < shape.kv_heads; ++h) {
    new (scratch.done + h) std::atomic<std::int64_t>(0);
    for (std::size_t i = 0; i < vectors; ++i) {
      const std::int64_t row = static_cast<std::int64_t>(i) / group;
      const std::int64_t head = h * group + static_cast<std::int64_t>(i) % group;
      const float* from = q.data + row * q.row_stride + head * q.head_stride;
      float* to = scratch.q + (static_cast<std::size_t>(h) * vectors + i) * dims;
      for (std::size_t j = 0; j < dims; ++j) to[j] = from[j] * params.scale;
    }
  }
  if (with_visible) {
    for (std::size_t i = 0; i < vectors; ++i) {
      scratch.visible[i] = visible.words + static_cast<std::int64_t>(i) / group * visible.row_stride;
    }
  }

  const auto state_of = [&](std::int64_t head, std::int64_t piece) {
    const std::size_t first = static_cast<std::size_t>(head * split.n_pieces + piece) * vectors;
    return SoftmaxState{scratch.max + first, scratch.sum + first, scratch.num + first * dims};
  };

  // Merges the pieces of a KV head in ascending order, whoever finished last.
  const auto finish_head = [&](std::int64_t head) {
    const SoftmaxState total = state_of(head, 0);
    for (std::int64_t piece = 1; piece < split.n_pieces; ++piece) {
      MergeStates(shape.head_dim, static_cast<int>(vectors), state_of(head, piece), total);
    }
    for (std::size_t i = 0; i < vectors; ++i) {
      const std::int64_t row = static_cast<std::int64_t>(i) / group;
      const std::int64_t q_head = head * group + static_cast<std::int64_t>(i) % group;
      float* to = out.data + row * out.row_stride + q_head * out.head_stride;
      WriteHeadOutput(total, static_cast<std::int64_t>(i), shape.head_dim,
                      params.sinks == nullptr ? nullptr : params.sinks + q_head, to);
    }
  };

  // One task may take all heads of a piece or a single one: that changes no bit, since a head's states are its own.
  const bool single_heads = split.n_pieces < std::int64_t{kPiecesPerThread} * n_threads;
  const std::int64_t heads_per_task = single_heads ? 1 : shape.kv_heads;
  const std::int64_t tasks_per_piece = shape.kv_heads / heads_per_task;

  const std::int64_t n_tasks = split.n_pieces * tasks_per_piece;
  const auto k_bytes = static_cast<std::int64_t>(RowBytes(kv.k_type, shape.head_dim));
  const auto v_bytes = static_cast<std::int64_t>(RowBytes(kv.v_type, shape.head_dim));

  ParallelForAhead(n_threads, n_tasks, [&](std::int64_t task, std::int64_t next_task, int /*thread*/) {
    const std::int64_t piece = task / tasks_per_piece;
    const std::int64_t first_head = task % tasks_per_piece * heads_per_task;
    const std::int64_t end_head = first_head + heads_per_task;
    const std::int64_t end_row = std::min((piece + 1) * split.piece_rows, kv.n_kv);
    for (std::int64_t head = first_head; head < end_head; ++head) {
      ClearStates(state_of(head, piece), static_cast<std::int64_t>(vectors), shape.head_dim);
    }

    RunArgs args;
    args.head_dim = shape.head_dim;
    args.n = static_cast<int>(vectors);
    args.softcap = params.softcap;
    args.k_stride = kv.k_row_stride;
    args.v_stride = kv.v_row_stride;
    args.k_type = kv.k_type;
    args.v_type = kv.v_type;
    args.visible = with_visible ? scratch.visible : nullptr;
    std::int64_t row = NextBlock(visible, q.n_q, piece * split.piece_rows, end_row);
    while (row < end_row) {
      const std::int64_t next = NextBlock(visible, q.n_q, row + kBlockRows, end_row);
      args.n_rows = std::min(kBlockRows, end_row - row);
      args.first_bit = row;
      // The block to fetch meanwhile: the next one of this task, else the first of the task that follows.
      std::int64_t fetch = next;
      int fetch_head = static_cast<int>(first_head);
      if (next >= end_row && next_task < n_tasks) {
        fetch = NextBlock(visible, q.n_q, next_task / tasks_per_piece * split.piece_rows, kv.n_kv);
        fetch_head = static_cast<int>(next_task % tasks_per_piece * heads_per_task);
      }
      const std::int64_t n_fetch = std::clamp<std::int64_t>(kv.n_kv - fetch, 0, kBlockRows);
      for (std::int64_t head = first_head; head < end_head; ++head) {
        args.q = scratch.q + static_cast<std::size_t>(head) * vectors * dims;
        args.k = kv.KRow(row, static_cast<int>(head));
        args.v = kv.VRow(row, static_cast<int>(head));
        const std::int64_t part = head - first_head;
        args.next_k = PartOfBlock(kv.KRow(fetch, fetch_head), n_fetch, k_bytes, kv.k_row_stride, kv.k_head_stride, part,
                                  heads_per_task);
        args.next_v = PartOfBlock(kv.VRow(fetch, fetch_head), n_fetch, v_bytes, kv.v_row_stride, kv.v_head_stride, part,
                                  heads_per_task);
        AttendRun(args, state_of(head, piece));
      }
      row = next;
    }

    for (std::int64_t head = first_head; head < end_head; ++head) {
      if (scratch.done[head].fetch_add(1, std::memory_order_acq_rel) + 1 == split.n_pieces) finish_head(head);
    }
  });
  return Status::Ok();
}

}  // namespace scsa
