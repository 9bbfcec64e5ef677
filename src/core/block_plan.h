// SPDX-License-Identifier: Apache-2.0
//
// The plan of preset `fast` for one layer: small blocks at fixed places of the cache, each clustered once per KV head
// and valid for as long as its rows stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/block_summaries.h"
#include "core/kmeans.h"
#include "scsa/config.h"
#include "scsa/layer.h"
#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// What is kept of one KV head, block after block.
struct HeadSummaries {
  std::vector<std::byte> keys;         // key records (block_summaries.h)
  std::vector<std::byte> values;       // value records
  std::vector<std::uint16_t> members;  // [block][block_rows]: rows by cluster, counted from the block's first row
  std::vector<std::uint16_t> offsets;  // [block][slots + 1] into members
  std::vector<std::byte> packed_k;  // [block][block_rows] rows in the order of `members`; empty for PackedFormat::kNone
  std::vector<std::byte> packed_v;
  std::vector<std::uint32_t> fingerprints;  // [block][block_rows], of the cache rows in row order
};

// Block b covers the cache rows [b * block_rows, (b + 1) * block_rows), except that the first block leaves out the
// first `sink` rows, which are always read exactly. Not thread-safe.
class BlockPlan {
 public:
  BlockPlan(const Shape& shape, const Config& config);

  int block_rows() const { return config_.block_size; }
  int slots() const { return layout_.slots(); }  // clusters per block
  const SummaryLayout& layout() const { return layout_; }
  int n_blocks() const { return static_cast<int>(built_.size()); }  // blocks 0 ... n_blocks() - 1 may be built
  bool built(int block) const { return block < n_blocks() && built_[block] != 0; }
  const HeadSummaries& head(int kv_head) const { return heads_[kv_head]; }
  const std::byte* key_record(int kv_head, int block) const {
    return heads_[kv_head].keys.data() + static_cast<std::size_t>(block) * layout_.key_bytes();
  }
  const std::byte* value_record(int kv_head, int block) const {
    return heads_[kv_head].values.data() + static_cast<std::size_t>(block) * layout_.value_bytes();
  }
  // Appends the rows of clusters, counted through all blocks: their places in the cache or in the packed copies. Throws
  // std::bad_alloc.
  void AppendRows(int kv_head, std::span<const std::int32_t> clusters, bool packed,
                  std::vector<std::int32_t>& rows) const;
  std::int64_t FirstRow(int block) const;  // first covered row
  std::int64_t EndRow(int block) const { return std::int64_t{block + 1} * block_rows(); }
  std::size_t Bytes() const;
  std::size_t SummaryBytesPerBlock() const { return layout_.key_bytes() + layout_.value_bytes(); }  // of one KV head

  // Clusters, summarises and (where the format asks for it) packs the given blocks, in parallel over (block, KV head).
  // kUnsupported when a row holds a value that is not finite or too large for the summaries; kOutOfMemory. A block that
  // fails stays unbuilt and is reported by the first error; the others are built.
  Status Build(const KvView& kv, std::span<const int> blocks, int n_threads);

  // Each returns the number of built blocks that were dropped.
  int DropAll();
  int DropWritten(std::span<const std::int64_t> rows);
  int DropChanged(const KvView& kv, Verify verify, int n_threads);

 private:
  void Grow(int n_blocks);
  struct BuildScratch;
  Status BuildHead(const KvView& kv, int block, int kv_head, BuildScratch& scratch);
  bool RowUnchanged(const KvView& kv, std::int64_t row, int kv_head) const;
  bool Unchanged(const KvView& kv, int block) const;

  Shape shape_;
  Config config_;
  SummaryLayout layout_;
  DType k_type_ = DType::kF16;  // row formats of the cache that the blocks were built from
  DType v_type_ = DType::kF16;
  std::vector<std::uint8_t> built_;
  std::vector<HeadSummaries> heads_;
  std::uint64_t sample_ = 0;  // rotates the rows that Verify::kSample looks at
};

}  // namespace scsa
