// SPDX-License-Identifier: Apache-2.0
#include "core/exact_tiled.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "core/parallel.h"
#include "core/tile.h"
#include "core/workspace.h"

namespace scsa {
namespace {

// Query vectors per tile: enough to make up for converting the rows once per tile, few enough for the second cache
// level to hold their queries and sums.
constexpr int kTileVectors = 192;
// With fewer tiles per thread, tiles are made smaller.
constexpr int kTilesPerThread = 3;

// Query rows of a tile: whole panels of vectors where possible.
int RowsPerTile(const Shape& shape, int n_q, int n_threads) {
  const int panel = TilePanel();
  const int unit = panel / std::gcd(panel, shape.group());
  int units = std::max(1, kTileVectors / (unit * shape.group()));
  const auto tiles = [&] { return std::int64_t{(n_q + units * unit - 1) / (units * unit)} * shape.kv_heads; };
  while (units > 1 && n_threads > 1 && tiles() < std::int64_t{kTilesPerThread} * n_threads) units = (units + 1) / 2;
  return std::min(n_q, units * unit);
}

// What one thread needs for a tile.
struct Scratch {
  Scratch(void* block, int head_dim, int vectors) {
    const auto n = static_cast<std::size_t>(vectors);
    ScratchLayout layout(block);
    q = layout.Take<const float*>(n);
    out = layout.Take<float*>(n);
    visible = layout.Take<const std::uint64_t*>(n);
    sinks = layout.Take<const float*>(n);
    tile = layout.Take<std::byte>(TileScratchBytes(head_dim, vectors));
    bytes = layout.bytes();
  }
  const float** q;
  float** out;
  const std::uint64_t** visible;
  const float** sinks;
  std::byte* tile;
  std::size_t bytes;
};

}  // namespace

bool TilesPay(const Shape& shape, int n_q) { return n_q * shape.group() >= 2 * TilePanel(); }

Status TiledAttention(const Shape& shape, const QueryView& q, const KvView& kv, const VisibleSets& visible,
                      const LogitParams& params, int n_threads, Workspace& workspace, const OutView& out) {
  const int group = shape.group();
  const int tile_rows = RowsPerTile(shape, q.n_q, n_threads);
  const std::int64_t n_tiles = (q.n_q + tile_rows - 1) / tile_rows;
  const std::int64_t n_tasks = n_tiles * shape.kv_heads;
  const auto team = static_cast<std::size_t>(std::min<std::int64_t>(n_threads, n_tasks));
  const std::size_t bytes = Scratch(nullptr, shape.head_dim, tile_rows * group).bytes;
  auto* memory = static_cast<std::byte*>(workspace.impl().Reserve(ScratchUser::kTile, bytes * team));
  if (memory == nullptr) return NoExactScratch(bytes * team);

  ParallelFor(n_threads, n_tasks, [&](std::int64_t task, int thread) {
    const Scratch scratch(memory + bytes * static_cast<std::size_t>(thread), shape.head_dim, tile_rows * group);
    const int head = static_cast<int>(task / n_tiles);
    const int first_row = static_cast<int>(task % n_tiles) * tile_rows;
    const int rows = std::min(tile_rows, q.n_q - first_row);
    for (int i = 0; i < rows * group; ++i) {
      const std::int64_t row = first_row + i / group;
      const std::int64_t q_head = std::int64_t{head} * group + i % group;
      scratch.q[i] = q.data + row * q.row_stride + q_head * q.head_stride;
      scratch.out[i] = out.data + row * out.row_stride + q_head * out.head_stride;
      if (visible.words != nullptr) scratch.visible[i] = visible.words + row * visible.row_stride;
      if (params.sinks != nullptr) scratch.sinks[i] = params.sinks + q_head;
    }
    TileArgs args;
    args.head_dim = shape.head_dim;
    args.n = rows * group;
    args.q = scratch.q;
    args.params = params;
    args.sinks = params.sinks == nullptr ? nullptr : scratch.sinks;
    args.out = scratch.out;
    TileRows all;
    all.k = kv.KRow(0, head);
    all.v = kv.VRow(0, head);
    all.k_stride = kv.k_row_stride;
    all.v_stride = kv.v_row_stride;
    all.k_type = kv.k_type;
    all.v_type = kv.v_type;
    all.n_rows = kv.n_kv;
    all.visible = visible.words == nullptr ? nullptr : scratch.visible;
    BeginTile(args, scratch.tile);
    AttendTile(args, all, scratch.tile);
    FinishTile(args, scratch.tile);
  });
  return Status::Ok();
}

}  // namespace scsa
