// SPDX-License-Identifier: Apache-2.0
//
// Packed copies of one block's rows for one KV head (PackedFormat::kInt8), in 8 bits relative to the block:
//   k_d = key_mid_d + key_step_d * stored_d,  stored_d in [-127, 127],  key_step_d = (largest - smallest k_d) / 254
// and values in the same way. As with centroids (block_summaries.h), a frame per dimension keeps large channels that
// hardly vary inside a block from coarsening the others, and a query meets it once per block:
//   q . k = q . key_mid + sum_d (q_d key_step_d) stored_d
// so that a row costs integer dot products alone. Values of two neighbouring rows are interleaved, dimension by
// dimension: integer instructions multiply pairs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/kernels.h"

namespace scsa {

template <class Float, class Int8>
struct Int8RowsOf {
  Float* key_mid;           // [dims]
  Float* key_step;          // [dims]
  Float* value_mid;         // [dims]
  Float* value_step;        // [dims]
  Float* largest_key_step;  // [1], the largest of `key_step`, and padding
  Int8* keys;               // [rows][dims]
  Int8* values;             // [rows / 2][dims][2]
};
using Int8Rows = Int8RowsOf<float, std::int8_t>;
using ConstInt8Rows = Int8RowsOf<const float, const std::int8_t>;

// Where the parts of a record lie. head_dim: a multiple of 8. rows: even.
class Int8RowLayout {
 public:
  Int8RowLayout(int head_dim, int rows) : head_dim_(head_dim), rows_(rows) {}

  int head_dim() const { return head_dim_; }
  int rows() const { return rows_; }
  // head_dim rounded up to whole vectors; what is beyond is 0.
  std::size_t dims() const { return (static_cast<std::size_t>(head_dim_) + kVector - 1) / kVector * kVector; }
  std::size_t bytes() const { return KeysAt() + 2 * dims() * static_cast<std::size_t>(rows_); }
  // Pair `pair` of rows: its keys, PairBytes(), from the beginning of the record, and from there its values.
  std::size_t PairAt(int pair) const { return KeysAt() + PairBytes() * static_cast<std::size_t>(pair); }
  std::size_t PairBytes() const { return 2 * dims(); }
  std::size_t ValuesBehindKeys() const { return dims() * static_cast<std::size_t>(rows_); }

  Int8Rows Rows(std::byte* record) const { return RowsOf<float, std::int8_t>(record); }
  ConstInt8Rows Rows(const std::byte* record) const { return RowsOf<const float, const std::int8_t>(record); }

 private:
  static constexpr std::size_t kVector = 32;
  static constexpr std::size_t kPadded = 16;  // floats, so that keys begin at a cache line

  std::size_t KeysAt() const { return (4 * dims() + kPadded) * sizeof(float); }

  template <class Float, class Int8, class Byte>
  Int8RowsOf<Float, Int8> RowsOf(Byte* record) const {
    auto* f = reinterpret_cast<Float*>(record);
    auto* keys = reinterpret_cast<Int8*>(record + KeysAt());
    return {f, f + dims(), f + 2 * dims(), f + 3 * dims(), f + 4 * dims(), keys, keys + ValuesBehindKeys()};
  }

  int head_dim_;
  int rows_;
};

// Stores rows order[0], order[1], ... of keys and values, both [order.size()][head_dim] and finite. At most
// layout.rows() of them; the rest of the record is 0.
void StoreInt8Rows(const Int8RowLayout& layout, const float* keys, const float* values,
                   std::span<const std::uint16_t> order, std::byte* record);

// Pairs of packed rows that n query vectors attend to.
struct Int8RunArgs {
  const Int8RowLayout* layout = nullptr;
  int n = 0;                 // query vectors, >= 1
  const float* q = nullptr;  // [n][head_dim], scaled
  float softcap = 0.0f;      // 0: none

  std::int64_t n_pairs = 0;
  const std::byte* const* records = nullptr;  // [n_pairs], of the pair's block; pairs of a block follow each other
  const std::byte* const* pairs = nullptr;    // [n_pairs], the keys of the pair
  const std::uint8_t* seen = nullptr;         // [n_pairs], bit 0: the first row counts, bit 1: the second one
};

// Up to kFirstRows rows of a run from pair `first` on, as hints for keys and values.
FetchHint Int8Keys(const Int8RunArgs& run, std::int64_t first);
FetchHint Int8Values(const Int8RunArgs& run, std::int64_t first);

// Folds the rows into `state`. Like AttendRun, it works on kFirstRows rows before it comes to those that it has fetched
// itself. Products of a query with a block's steps are rounded to 15 bits of the largest that they could be, weights to
// 15 bits of the largest among the rows of a block that are worked on together (a lighter row counts at the middle of
// the block's values); integer sums are exact. Thread-safe; allocates nothing.
void AttendInt8Rows(const Int8RunArgs& args, const SoftmaxState& state);

}  // namespace scsa
