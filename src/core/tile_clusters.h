// SPDX-License-Identifier: Apache-2.0
//
// A tile of query vectors (tile.h) against the clusters of preset `fast` (joint_operator.h has the formulas): which of
// them matter to the tile, and what the closed ones contribute. A cluster is scored like a row, its centroid being the
// key, and its value mean weighed like a value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/joint_kernels.h"
#include "core/tile.h"

namespace scsa {

// `estimates`: memory of TileEstimatesBytes for the clusters of n_blocks blocks of `slots` clusters. `tail`: memory of
// TileTailBytes. Both are aligned to kScratchAlignment. All functions are thread-safe and allocate nothing.
std::size_t TileEstimatesBytes(int n, int n_blocks, int slots);
std::size_t TileTailBytes(int head_dim, int n);

// Weighs every cluster of the range's usable blocks against all vectors of the tile, whose state holds what is always
// read exactly by then. shares[c]: mean over the vectors of the cluster's estimated mass, of all mass; keys[c] =
// shares[c] / members, -1 where c has no members or its block is not usable. Where an estimate overflows, all shares
// are 1.
void EstimateTile(const TileArgs& args, const BlockRange& range, float tail_shrink, void* scratch, void* estimates,
                  float* shares, float* keys);

// An empty tail, and the contributions of clusters to it.
void ClearTail(const TileArgs& args, void* estimates, void* tail);
void FoldTail(const TileArgs& args, const BlockRange& range, const std::int32_t* clusters, std::int64_t n_clusters,
              void* estimates, void* scratch, void* tail);
// Takes the tail into the state of the tile.
void AddTail(const TileArgs& args, void* tail, void* scratch);

// Replaces the tail by the outputs of the tile with this tail.
void OutputWithTail(const TileArgs& args, void* scratch, void* tail);
// Mean relative L2 error, over the vectors of the tile, of such outputs against the tile's state.
float MeanTileError(const TileArgs& args, void* outputs, void* scratch);

}  // namespace scsa
