// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/block_plan.h"
#include "core/kernels.h"
#include "scsa/config.h"
#include "scsa/types.h"

namespace scsa {

// The rows of the clusters that a KV head opens, wherever they are read from: packed copies, or the cache itself. Kept
// from call to call, so that its lists keep their memory.
class OpenedRows {
 public:
  // clusters: counted through all blocks, ascending where speed matters. Throws std::bad_alloc. What `plan` and `kv`
  // refer to outlives the use of the rows.
  void Find(const BlockPlan& plan, const KvView& kv, int kv_head, std::span<const std::int32_t> clusters);

  std::uint64_t n_rows() const { return n_rows_; }
  // What they can be divided into: single rows, or pairs.
  std::size_t size() const { return size_; }

  // Query vectors that share the rows.
  struct Queries {
    int n = 0;
    const float* q = nullptr;  // [n][head_dim], scaled
    float softcap = 0.0f;
  };
  // Folds `n` of size() from `first` on into `state`. Thread-safe.
  void Attend(std::size_t first, std::size_t n, const Queries& queries, const SoftmaxState& state) const;
  // What that reads first: keys and values.
  std::pair<FetchHint, FetchHint> FirstReads(std::size_t first, std::size_t n) const;

 private:
  // Rows of a cluster: [begin, end) of its block's member list.
  struct Stretch {
    std::int32_t block;
    std::uint16_t begin;
    std::uint16_t end;
  };

  void FindStretches(const BlockPlan& plan, int kv_head, std::span<const std::int32_t> clusters);
  void FindSingleRows(const BlockPlan& plan, const KvView& kv, int kv_head);
  void FindPairs(const BlockPlan& plan, int kv_head);
  RunArgs Run(std::size_t first, std::size_t n) const;
  Int8RunArgs Int8Run(std::size_t first, std::size_t n) const;

  int head_dim_ = 0;
  DType k_type_ = DType::kF16;
  DType v_type_ = DType::kF16;
  const Int8RowLayout* int8_ = nullptr;  // of pairs; nullptr: single rows
  std::uint64_t n_rows_ = 0;
  std::size_t size_ = 0;  // used of the lists below, which are longer
  std::vector<Stretch> stretches_;
  std::vector<const std::byte*> k_;        // of the row; of the pair of PackedFormat::kInt8
  std::vector<const std::byte*> v_;        // of the row
  std::vector<const std::byte*> records_;  // of the pair, see Int8RunArgs
  std::vector<std::uint8_t> seen_;         // of the pair, see Int8RunArgs
};

}  // namespace scsa
