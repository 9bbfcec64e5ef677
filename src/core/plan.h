// SPDX-License-Identifier: Apache-2.0
//
// The plan of one layer: the sealed cache prefix [sink, sealed_end), cut into regions, each of which holds one block
// (clusters, summaries, packed rows, fingerprints) per KV head.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/cluster.h"
#include "core/plan_memory.h"
#include "scsa/config.h"
#include "scsa/layer.h"
#include "scsa/types.h"

namespace scsa {

// Row format of the packed copies.
constexpr DType PackedType(PackedFormat format) { return format == PackedFormat::kQ8_0 ? DType::kQ8_0 : DType::kF16; }

// Rows [begin, end) of one KV head. Immutable once built. Clusters are laid out in the order of the recursive splitting
// (cluster.h); everything of one kind is contiguous over the clusters, so that scoring streams it.
// Keys are k, values v, as decoded to f32 from the cache; moments are taken before packing.
struct Block {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  int n_clusters = 0;
  Partition partition;                    // packed row i is cache row begin + partition.members[i]
  std::vector<float> centroids;           // [n_clusters][head_dim]
  std::vector<float> value_means;         // [n_clusters][head_dim]
  std::vector<float> directions;          // [n_clusters][rank][head_dim], see ClusterMoments
  std::vector<float> residuals;           // [n_clusters][head_dim]
  std::vector<float> log_counts;          // [n_clusters], log m
  std::unique_ptr<std::byte[]> packed_k;  // [end - begin] rows of PackedType, RowBytes apart
  std::unique_ptr<std::byte[]> packed_v;
  std::vector<std::uint32_t> fingerprints;  // [end - begin], of cache row begin + i

  std::int64_t n_rows() const { return end - begin; }
  std::int64_t RowsOf(int cluster) const { return partition.offsets[cluster + 1] - partition.offsets[cluster]; }
  std::size_t SummaryBytes() const;
};

// Clusters, summarises and packs rows [begin, end) of one KV head. kUnsupported when a row holds a value that is not
// finite or does not fit the packed format; kOutOfMemory. `block` is untouched then. Thread-safe.
Status BuildBlock(const KvView& kv, int kv_head, int head_dim, std::int64_t begin, std::int64_t end,
                  const Config& config, Block* block);

// A sealed range of rows. Frozen regions have exactly block_size rows; only the last region may be growing.
struct Region {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<Block> heads;        // one per KV head; all have the same number of clusters, of the same numbers of rows
  std::int32_t first_cluster = 0;  // of one KV head, counted through the regions of the plan
  // Of a plan with a tree (cluster_tree.h), [kv_heads][n_clusters][mean, variance, value mean][head_dim]: place c of a
  // KV head is the node that divides its clusters before cluster c.
  std::unique_ptr<float[]> nodes;

  int n_clusters() const { return heads.front().n_clusters; }
};

// Maintenance: nothing is sealed until rebuild_interval rows are due. Then everything up to n_prefix - recent is
// sealed: the growing region is split again together with the new rows; whole multiples of block_size, counted from
// `sink`, become frozen regions, the remainder the new growing region. So a row is clustered at most block_size /
// rebuild_interval + 1 times.
class Plan {
 public:
  // memory: what the regions are counted in; nullptr: nowhere. It outlives the plan.
  Plan(const Shape& shape, const Config& config, PlanMemory* memory = nullptr)
      : shape_(shape), config_(config), memory_(memory), tree_(config.selection == Selection::kHierarchical) {}
  ~Plan() { DropAll(); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  std::span<const Region> regions() const { return regions_; }
  // Rows [sink, sealed_end()) are covered by the regions, without gaps. `sink` when there is none.
  std::int64_t sealed_end() const { return regions_.empty() ? config_.sink : regions_.back().end; }
  std::size_t Bytes() const;
  // Memory of a region of n_rows rows.
  std::size_t RegionBytes(std::int64_t n_rows) const;
  // Whether the regions have the nodes of a tree (cluster_tree.h), now and later.
  bool has_tree() const { return tree_; }
  // False: there is no memory for the nodes of the present regions. Then nothing has changed, but for regions that went
  // to make room.
  bool SetTree(bool wanted);
  // Frees the last region, and returns how much that was.
  std::uint64_t EvictLast();

  // Each of these drops the first region that does not qualify and all later ones; returns how many were dropped.
  int DropAll();
  int DropBeyond(std::int64_t n_prefix);                            // regions that end after row n_prefix
  int DropWritten(std::span<const std::int64_t> rows);              // regions that cover one of the rows
  int DropChanged(const KvView& kv, Verify verify, int n_threads);  // regions with a row that differs from its build

  // Whether Extend would build something for a query that sees the rows [0, n_prefix).
  bool Due(std::int64_t n_prefix) const;
  // Seals [sealed_end(), n_prefix - recent), in parallel over (region, KV head). Returns the number of regions built,
  // or the first error; then the plan is as before and not due again until rebuild_interval more rows are there.
  // kOutOfMemory with *refused set: `memory` has no room.
  Status Extend(const KvView& kv, std::int64_t n_prefix, int n_threads, int* built, bool* refused = nullptr);

 private:
  int DropFrom(std::size_t index);
  std::size_t NodeBytes(std::int64_t n_rows) const;
  // Whatever regions come or go: numbers the clusters and fills the nodes above the regions.
  void Link();

  Shape shape_;
  Config config_;
  PlanMemory* memory_;
  bool tree_;
  DType k_type_ = DType::kF16;  // row formats of the cache at the first build
  DType v_type_ = DType::kF16;
  std::vector<Region> regions_;
  std::int64_t retry_at_ = 0;  // after a failed build: rows that must be sealable before the next try
  std::uint64_t sample_ = 0;   // rotates the rows that Verify::kSample looks at
};

// Rows of a block of n_rows that call number `call` of Verify::kSample looks at: the first, the last, and
// kRotatingSamples others, so that every row has its turn within ceil(n_rows / kRotatingSamples) consecutive calls.
inline constexpr int kRotatingSamples = 2;
std::array<std::int64_t, 2 + kRotatingSamples> SampledRows(std::int64_t n_rows, std::uint64_t call);

}  // namespace scsa
