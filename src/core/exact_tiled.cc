// SPDX-License-Identifier: Apache-2.0
#include "core/exact_tiled.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "core/parallel.h"
#include "core/tile.h"
#include "core/tile_vectors.h"
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
  Scratch(ScratchLayout layout, int head_dim, int most_vectors)
      : vectors(layout, most_vectors),
        tile(layout.Take<std::byte>(TileScratchBytes(head_dim, most_vectors))),
        bytes(layout.bytes()) {}
  TileVectors vectors;
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
  const std::size_t bytes = Scratch(ScratchLayout(nullptr), shape.head_dim, tile_rows * group).bytes;
  auto* memory = static_cast<std::byte*>(workspace.impl().Reserve(ScratchUser::kTile, bytes * team));
  if (memory == nullptr) return NoExactScratch(bytes * team);

  ParallelFor(n_threads, n_tasks, [&](std::int64_t task, int thread) {
    const Scratch scratch(ScratchLayout(memory + bytes * static_cast<std::size_t>(thread)), shape.head_dim,
                          tile_rows * group);
    const int head = static_cast<int>(task / n_tiles);
    const int first_row = static_cast<int>(task % n_tiles) * tile_rows;
    const int rows = std::min(tile_rows, q.n_q - first_row);
    const TileArgs args = scratch.vectors.Fill(shape, q, visible, params, out, head, first_row, rows);
    TileRows all = RowsOf(kv, head, 0, kv.n_kv);
    if (visible.words != nullptr) all.visible = scratch.vectors.visible();
    BeginTile(args, scratch.tile);
    AttendTile(args, all, scratch.tile);
    FinishTile(args, scratch.tile);
  });
  return Status::Ok();
}

}  // namespace scsa
