// SPDX-License-Identifier: Apache-2.0
//
// Exact attention of many query vectors at once: the kernel behind prefill. Where decoding reads memory, prefill
// multiplies matrices: a tile of query vectors that share a KV head passes over the cached rows once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scsa/types.h"

namespace scsa {

// Query vectors are worked on in panels of this many, a few SIMD vectors of the target in force. A tile of whole panels
// wastes nothing.
int TilePanel();

// One tile: n query vectors of a KV head over the rows [0, n_kv). A vector's result does not depend on the others.
struct TileArgs {
  int head_dim = 0;
  int n = 0;
  const float* const* q = nullptr;      // [n] vectors of head_dim
  LogitParams params;                   // the sinks are not read here
  const float* const* sinks = nullptr;  // nullptr, or [n] pointers to a logit

  const std::byte* k = nullptr;  // row r at k + r * k_stride
  const std::byte* v = nullptr;
  std::int64_t k_stride = 0;
  std::int64_t v_stride = 0;
  DType k_type = DType::kF16;
  DType v_type = DType::kF16;
  std::int64_t n_kv = 0;
  // nullptr: every vector sees every row. Otherwise n bitmaps as VisibleSets has them. Rows that no vector of the tile
  // sees are not read.
  const std::uint64_t* const* visible = nullptr;

  float* const* out = nullptr;  // [n] vectors of head_dim
};

// Scratch memory of a tile, to be aligned to kScratchAlignment.
std::size_t TileScratchBytes(int head_dim, int n);

// out[i] = sum_r exp(x_ir) v_r / (sum_r exp(x_ir) + exp(sink_i)) in f32. Thread-safe; allocates nothing.
void AttendTile(const TileArgs& args, void* scratch);

}  // namespace scsa
