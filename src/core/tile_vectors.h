// SPDX-License-Identifier: Apache-2.0
//
// From the arguments of an attention call to those of a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tile.h"
#include "core/workspace.h"
#include "scsa/exact.h"
#include "scsa/types.h"

namespace scsa {

// Rows [first, first + n_rows) of a KV head, which every vector sees.
inline TileRows RowsOf(const KvView& kv, int kv_head, std::int64_t first, std::int64_t n_rows) {
  TileRows rows;
  rows.k = kv.KRow(first, kv_head);
  rows.v = kv.VRow(first, kv_head);
  rows.k_stride = kv.k_row_stride;
  rows.v_stride = kv.v_row_stride;
  rows.k_type = kv.k_type;
  rows.v_type = kv.v_type;
  rows.n_rows = n_rows;
  return rows;
}

// The pointers of a tile's TileArgs, in scratch memory of one thread. Vectors are numbered query row by query row.
class TileVectors {
 public:
  TileVectors(ScratchLayout& layout, int most_vectors)
      : q_(layout.Take<const float*>(static_cast<std::size_t>(most_vectors))),
        out_(layout.Take<float*>(static_cast<std::size_t>(most_vectors))),
        visible_(layout.Take<const std::uint64_t*>(static_cast<std::size_t>(most_vectors))),
        sinks_(layout.Take<const float*>(static_cast<std::size_t>(most_vectors))) {}

  // Those of the query rows [first_row, first_row + n_rows) and the query heads of a KV head, until the next call.
  TileArgs Fill(const Shape& shape, const QueryView& q, const VisibleSets& visible, const LogitParams& params,
                const OutView& out, int kv_head, int first_row, int n_rows) const {
    const int group = shape.group();
    TileArgs args;
    args.head_dim = shape.head_dim;
    args.n = n_rows * group;
    for (int i = 0; i < args.n; ++i) {
      const std::int64_t row = first_row + i / group;
      const std::int64_t q_head = std::int64_t{kv_head} * group + i % group;
      q_[i] = q.data + row * q.row_stride + q_head * q.head_stride;
      out_[i] = out.data + row * out.row_stride + q_head * out.head_stride;
      if (visible.words != nullptr) visible_[i] = visible.words + row * visible.row_stride;
      if (params.sinks != nullptr) sinks_[i] = params.sinks + q_head;
    }
    args.q = q_;
    args.params = params;
    args.sinks = params.sinks == nullptr ? nullptr : sinks_;
    args.out = out_;
    return args;
  }
  // Bitmaps of the vectors, for TileRows; not to be used where the call has none.
  const std::uint64_t* const* visible() const { return visible_; }

 private:
  const float** q_;
  float** out_;
  const std::uint64_t** visible_;
  const float** sinks_;
};

}  // namespace scsa
