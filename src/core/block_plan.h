// SPDX-License-Identifier: Apache-2.0
//
// The plan of preset `fast` for one layer: small blocks at fixed places of the cache, each clustered once per KV head
// and valid for as long as its rows stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/block_summaries.h"
#include "core/int8_rows.h"
#include "core/kmeans.h"
#include "core/plan_memory.h"
#include "scsa/config.h"
#include "scsa/layer.h"
#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// Block b covers the cache rows [b * block_rows, (b + 1) * block_rows), except that the first block leaves out the
// first `sink` rows, which are always read exactly. Each block is one piece of memory, so that blocks come and go one
// by one. Not thread-safe.
class BlockPlan {
 public:
  // memory: what the blocks are counted in; nullptr: nowhere. It outlives the plan.
  BlockPlan(const Shape& shape, const Config& config, PlanMemory* memory = nullptr);
  ~BlockPlan();
  BlockPlan(const BlockPlan&) = delete;
  BlockPlan& operator=(const BlockPlan&) = delete;

  int block_rows() const { return config_.block_size; }
  int slots() const { return layout_.slots(); }  // clusters per block
  const SummaryLayout& layout() const { return layout_; }
  int n_blocks() const { return static_cast<int>(blocks_.size()); }  // blocks 0 ... n_blocks() - 1 may be built
  bool built(int block) const { return block < n_blocks() && data(block) != nullptr; }
  // Different for every block that was ever built, 0 for one that is not built.
  std::uint64_t version(int block) const { return blocks_[static_cast<std::size_t>(block)].version; }
  // How often a block was built or dropped: what follows from the plan stays as it is while this does.
  std::uint64_t changes() const { return changes_; }
  // Blocks before this one are built.
  int first_gap() const { return first_gap_; }

  // The memory of a block, and where the parts of a KV head begin in it.
  const std::byte* data(int block) const { return blocks_[static_cast<std::size_t>(block)].data.get(); }
  std::size_t KeysAt(int kv_head) const { return Head(kv_head) + parts_.keys; }
  std::size_t ValuesAt(int kv_head) const { return Head(kv_head) + parts_.values; }
  const std::byte* key_record(int kv_head, int block) const { return data(block) + KeysAt(kv_head); }
  const std::byte* value_record(int kv_head, int block) const { return data(block) + ValuesAt(kv_head); }
  // [block_rows]: rows by cluster, counted from the block's first row.
  const std::uint16_t* members(int kv_head, int block) const {
    return reinterpret_cast<const std::uint16_t*>(data(block) + Head(kv_head) + parts_.members);
  }
  // [slots + 1] into members.
  const std::uint16_t* offsets(int kv_head, int block) const {
    return reinterpret_cast<const std::uint16_t*>(data(block) + Head(kv_head) + parts_.offsets);
  }
  PackedFormat packed_format() const { return config_.packed_format; }
  // Copies of the rows in the order of `members`: [block_rows] rows of keys and of values (kQ8_0, kF16) ...
  const std::byte* packed_k(int kv_head, int block) const { return data(block) + Head(kv_head) + parts_.packed_k; }
  const std::byte* packed_v(int kv_head, int block) const { return data(block) + Head(kv_head) + parts_.packed_v; }
  // ... or one record (kInt8).
  const Int8RowLayout& int8_layout() const { return int8_layout_; }
  const std::byte* int8_record(int kv_head, int block) const { return packed_k(kv_head, block); }
  // Most members of a cluster.
  int max_cluster_rows() const { return 2 * config_.cluster_size; }
  // What one opened row reads, in bytes.
  std::uint64_t OpenedRowBytes(const KvView& kv) const;

  // Appends the rows of clusters, counted through all blocks. Throws std::bad_alloc.
  void AppendRows(int kv_head, std::span<const std::int32_t> clusters, std::vector<std::int32_t>& rows) const;
  std::int64_t FirstRow(int block) const;  // first covered row
  std::int64_t EndRow(int block) const { return std::int64_t{block + 1} * block_rows(); }
  std::size_t Bytes() const;
  std::size_t SummaryBytesPerBlock() const { return layout_.key_bytes() + layout_.value_bytes(); }  // of one KV head

  // Memory of one block, with its part of the tree over the blocks (block_tree.h) where that is counted.
  std::size_t BlockBytes() const { return Head(shape_.kv_heads) + tree_bytes_; }
  // Whether a tree over the blocks is counted with them, at first it is not. False: there is no room for it.
  bool CountTree(bool counted);

  struct BuildResult {
    Status status;  // the first error
    int built = 0;
    int refused = 0;  // there was no room for them
  };
  // Clusters, summarises and (where the format asks for it) packs the given blocks, in parallel over (block, KV head).
  // kUnsupported when a row holds a value that is not finite or too large for the summaries; kOutOfMemory. A block that
  // fails, or that there is no room for, stays unbuilt; the others are built.
  BuildResult Build(const KvView& kv, std::span<const int> blocks, int n_threads);

  // Each returns the number of built blocks that were dropped.
  int DropAll();
  int DropWritten(std::span<const std::int64_t> rows);
  int DropChanged(const KvView& kv, Verify verify, int n_threads);

  // One row of each built block, another one every time. Verify::kSample compares it with its fingerprint.
  struct Sample {
    std::uint64_t call;
  };
  Sample NextSample() { return {sample_++}; }
  // Whether a row of the blocks [first, end) has changed. Thread-safe.
  bool Changed(const KvView& kv, Sample sample, int first, int end) const;
  int DropChanged(const KvView& kv, Sample sample);

  // How useful blocks are, for EvictablePlan.
  void NoteUse(int block, std::uint64_t call) { blocks_[static_cast<std::size_t>(block)].use.last = call; }
  void NoteRead(int block, float share);  // of its rows, by a call that used it
  EvictablePlan::Candidate LeastUseful() const;
  std::uint64_t Evict(int block, std::uint64_t not_before);
  bool MayBuild(int block) const {
    return block >= n_blocks() || blocks_[static_cast<std::size_t>(block)].not_before <= Now();
  }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  using Data = std::unique_ptr<std::byte, Free>;
  struct Block {
    Data data{};  // nullptr: not built
    std::uint64_t version = 0;
    BlockUse use{};
    std::uint64_t not_before = 0;
    bool refused = false;  // and counted
    bool changed = false;  // of DropChanged
  };
  // Where the parts of a KV head begin.
  struct Parts {
    std::size_t keys, values, fingerprints, members, offsets, packed_k, packed_v, end;
  };
  struct BuildScratch;

  std::size_t Head(int kv_head) const { return static_cast<std::size_t>(kv_head) * parts_.end; }
  std::uint64_t Now() const { return memory_ == nullptr ? 0 : memory_->now(); }
  Parts LayOut() const;
  std::size_t Built() const;  // how many blocks are
  Data TakeBlock(Status* status, bool* refused);
  void NoteGone(int block);
  void Drop(int block);
  Status BuildHead(const KvView& kv, int block, int kv_head, std::byte* data, BuildScratch& scratch) const;
  std::int64_t SampledRow(Sample sample, int block) const;
  int SampledHead(Sample sample) const;
  bool RowUnchanged(const KvView& kv, std::int64_t row, int kv_head) const;
  bool Unchanged(const KvView& kv, int block) const;

  Shape shape_;
  Config config_;
  PlanMemory* memory_;
  SummaryLayout layout_;
  Int8RowLayout int8_layout_;
  Parts parts_;
  std::size_t tree_bytes_ = 0;
  DType k_type_ = DType::kF16;  // row formats of the cache that the blocks were built from
  DType v_type_ = DType::kF16;
  std::vector<Block> blocks_;
  std::uint64_t changes_ = 0;
  int first_gap_ = 0;
  std::uint64_t sample_ = 0;  // rotates the rows that Verify::kSample looks at
};

}  // namespace scsa
