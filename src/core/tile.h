// SPDX-License-Identifier: Apache-2.0
//
// Attention of many query vectors at once: the kernels behind prefill. Where decoding reads memory, prefill multiplies
// matrices: a tile of query vectors that share a KV head passes over the cached rows once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scsa/types.h"

namespace scsa {

// Query vectors are worked on in panels of this many, a few SIMD vectors of the target in force. A tile of whole panels
// wastes nothing.
int TilePanel();

// The n query vectors of a tile, all of one KV head. A vector's result does not depend on the others.
struct TileArgs {
  int head_dim = 0;
  int n = 0;
  const float* const* q = nullptr;      // [n] vectors of head_dim
  LogitParams params;                   // the sinks are not read here
  const float* const* sinks = nullptr;  // nullptr, or [n] pointers to a logit
  float* const* out = nullptr;          // [n] vectors of head_dim
};

// Rows for a tile.
struct TileRows {
  const std::byte* k = nullptr;  // row r at k + r * k_stride
  const std::byte* v = nullptr;
  std::int64_t k_stride = 0;
  std::int64_t v_stride = 0;
  DType k_type = DType::kF16;
  DType v_type = DType::kF16;
  std::int64_t n_rows = 0;
  // nullptr: the rows follow each other. Otherwise n_rows places: row r is at k + rows[r] * k_stride (v likewise), and
  // `visible` must be nullptr.
  const std::int32_t* rows = nullptr;
  // nullptr: every vector sees every row. Otherwise n bitmaps; bit first_bit + r, first_bit a multiple of 64, says
  // whether a vector sees row r. Rows that no vector of the tile sees are not read.
  const std::uint64_t* const* visible = nullptr;
  std::int64_t first_bit = 0;
};

// A tile takes in its rows piece by piece; its softmax state lives in `scratch`, memory of TileScratchBytes that is
// aligned to kScratchAlignment, and so do its queries. All of these are thread-safe and allocate nothing.
std::size_t TileScratchBytes(int head_dim, int n);
void BeginTile(const TileArgs& args, void* scratch);
void AttendTile(const TileArgs& args, const TileRows& rows, void* scratch);
// out[i] = sum_r exp(x_ir) v_r / (sum_r exp(x_ir) + exp(sink_i)) over all rows taken in, in f32.
void FinishTile(const TileArgs& args, void* scratch);

}  // namespace scsa
