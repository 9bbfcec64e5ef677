// SPDX-License-Identifier: Apache-2.0
#include "core/block_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "core/fingerprint.h"
#include "core/kernels.h"
#include "core/parallel.h"
#include "core/plan.h"
#include "hwy/cache_control.h"

namespace scsa {
namespace {

constexpr std::size_t kCacheLine = 64;
// Odd, so that it visits every row of a block of 2^n rows; a prime keeps consecutive samples apart.
constexpr std::int64_t kSampleStride = 157;
constexpr float kNoCluster = -std::numeric_limits<float>::infinity();
// Largest magnitude of a row that the 8-bit summaries and packed rows can hold: an f16 scale of 127 steps.
constexpr float kLargest = 65504.0f * 127.0f;

// False for NaN and infinity too.
bool Representable(const float* x, std::int64_t n) {
  bool fits = true;
  for (std::int64_t i = 0; i < n; ++i) fits &= std::fabs(x[i]) <= kLargest;
  return fits;
}

// Weight of the last call in the average of BlockUse::read.
constexpr float kReadDecay = 1.0f / 32;

}  // namespace

// Memory of one building thread.
struct BlockPlan::BuildScratch {
  std::vector<float> keys, values, centroids, value_means, counts;
  KMeansScratch kmeans;
};

void BlockPlan::Free::operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{kCacheLine}); }

BlockPlan::BlockPlan(const Shape& shape, const Config& config, PlanMemory* memory)
    : shape_(shape),
      config_(config),
      memory_(memory),
      layout_(shape.head_dim, KMeansSlots(config.block_size, config.cluster_size)),
      int8_layout_(shape.head_dim, config.block_size),
      parts_(LayOut()) {}

BlockPlan::~BlockPlan() { DropAll(); }

// Each part begins at a cache line.
BlockPlan::Parts BlockPlan::LayOut() const {
  std::size_t at = 0;
  const auto take = [&](std::size_t bytes) {
    const std::size_t begin = at;
    at += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    return begin;
  };
  const auto rows = static_cast<std::size_t>(config_.block_size);
  Parts parts{};
  parts.keys = take(layout_.key_bytes());
  parts.values = take(layout_.value_bytes());
  parts.fingerprints = take(rows * sizeof(std::uint32_t));
  parts.members = take(rows * sizeof(std::uint16_t));
  parts.offsets = take(static_cast<std::size_t>(slots() + 1) * sizeof(std::uint16_t));
  std::size_t packed_k = 0;
  std::size_t packed_v = 0;
  if (config_.packed_format == PackedFormat::kInt8) {
    packed_k = int8_layout_.bytes();
  } else if (config_.packed_format != PackedFormat::kNone) {
    packed_k = packed_v = rows * RowBytes(PackedType(config_.packed_format), shape_.head_dim);
  }
  parts.packed_k = take(packed_k);
  parts.packed_v = take(packed_v);
  parts.end = at;
  return parts;
}

std::int64_t BlockPlan::FirstRow(int block) const {
  return block == 0 ? config_.sink : std::int64_t{block} * block_rows();
}

std::size_t BlockPlan::Built() const {
  const auto n = std::ranges::count_if(blocks_, [](const Block& block) { return block.data != nullptr; });
  return static_cast<std::size_t>(n);
}

std::size_t BlockPlan::Bytes() const { return Built() * BlockBytes(); }

std::uint64_t BlockPlan::OpenedRowBytes(const KvView& kv) const {
  switch (config_.packed_format) {
    case PackedFormat::kNone:
      break;
    case PackedFormat::kInt8:
      return 2 * int8_layout_.dims();
    case PackedFormat::kQ8_0:
    case PackedFormat::kF16:
      return 2 * RowBytes(PackedType(config_.packed_format), shape_.head_dim);
  }
  return RowBytes(kv.k_type, shape_.head_dim) + RowBytes(kv.v_type, shape_.head_dim);
}

bool BlockPlan::CountTree(bool counted) {
  // A node of three vectors for the block, and half of one more: levels above are a seventh, and more where blocks lie
  // scattered.
  const std::size_t node = std::size_t{3} * sizeof(float) * static_cast<std::size_t>(shape_.kv_heads) * shape_.head_dim;
  const std::size_t wanted = counted ? node + node / 2 : 0;
  if (wanted == tree_bytes_) return true;
  if (memory_ != nullptr) {
    const std::uint64_t n = Built();
    if (!counted) memory_->Give(n * tree_bytes_);
    if (counted && !memory_->Take(n * wanted)) return false;
    // Making room may have taken blocks of this very plan.
    if (counted) memory_->Give((n - Built()) * wanted);
  }
  tree_bytes_ = wanted;
  return true;
}

void BlockPlan::AppendRows(int kv_head, std::span<const std::int32_t> clusters, std::vector<std::int32_t>& rows) const {
  const std::size_t before = rows.size();
  rows.resize(before + clusters.size() * static_cast<std::size_t>(max_cluster_rows()));  // at most
  std::int32_t* to = rows.data() + before;
  for (const std::int32_t cluster : clusters) {
    const int block = cluster / slots();
    const std::uint16_t* at = offsets(kv_head, block) + cluster % slots();
    const std::int32_t first = block * block_rows();
    const std::uint16_t* rows_of = members(kv_head, block);
    for (std::int32_t i = at[0]; i < at[1]; ++i) *to++ = first + rows_of[i];
  }
  rows.resize(static_cast<std::size_t>(to - rows.data()));
}

BlockPlan::Data BlockPlan::TakeBlock(Status* status, bool* refused) {
  *refused = memory_ != nullptr && !memory_->Take(BlockBytes());
  if (*refused) return nullptr;
  Data data(
      static_cast<std::byte*>(::operator new (Head(shape_.kv_heads), std::align_val_t{kCacheLine}, std::nothrow)));
  if (data == nullptr) {
    if (memory_ != nullptr) memory_->Give(BlockBytes());
    *status = {StatusCode::kOutOfMemory, std::string()};
  }
  return data;
}

BlockPlan::BuildResult BlockPlan::Build(const KvView& kv, std::span<const int> blocks, int n_threads) {
  BuildResult result;
  if (blocks.empty()) return result;
  if (kv.k_type != k_type_ || kv.v_type != v_type_) DropAll();
  k_type_ = kv.k_type;
  v_type_ = kv.v_type;
  try {
    const int last = *std::ranges::max_element(blocks);
    if (last >= n_blocks()) blocks_.resize(static_cast<std::size_t>(last) + 1);
    // A block is part of the plan once all of it is built.
    std::vector<Data> fresh(blocks.size());
    std::vector<Status> statuses(blocks.size() * static_cast<std::size_t>(shape_.kv_heads));
    std::vector<BuildScratch> scratch(
        std::min<std::int64_t>(std::max(n_threads, 1), std::ssize(blocks) * shape_.kv_heads));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      bool refused = false;
      fresh[i] = TakeBlock(&result.status, &refused);
      if (!refused) continue;
      Block& block = blocks_[static_cast<std::size_t>(blocks[i])];
      result.refused += block.refused ? 0 : 1;
      block.refused = true;
    }
    ParallelFor(n_threads, std::ssize(statuses), [&](std::int64_t task, int thread) {
      const std::int64_t i = task / shape_.kv_heads;
      if (fresh[i] == nullptr) return;
      try {
        statuses[task] =
            BuildHead(kv, blocks[i], static_cast<int>(task % shape_.kv_heads), fresh[i].get(), scratch[thread]);
      } catch (const std::bad_alloc&) {
        statuses[task] = {StatusCode::kOutOfMemory, std::string()};
      }
    });
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (fresh[i] == nullptr) continue;
      const auto first = statuses.begin() + static_cast<std::ptrdiff_t>(i) * shape_.kv_heads;
      const auto failed = std::find_if(first, first + shape_.kv_heads, [](const Status& s) { return !s.ok(); });
      if (failed != first + shape_.kv_heads) {
        if (result.status.ok()) result.status = std::move(*failed);
        if (memory_ != nullptr) memory_->Give(BlockBytes());
        continue;
      }
      blocks_[static_cast<std::size_t>(blocks[i])] = {
          .data = std::move(fresh[i]), .version = ++changes_, .use = {.last = Now()}};
      ++result.built;
    }
    while (built(first_gap_)) ++first_gap_;
  } catch (const std::bad_alloc&) {
    result.status = {StatusCode::kOutOfMemory, std::string()};
  }
  return result;
}

Status BlockPlan::BuildHead(const KvView& kv, int block, int kv_head, std::byte* data, BuildScratch& s) const {
  const int head_dim = shape_.head_dim;
  const std::int64_t first = FirstRow(block);
  const auto n = static_cast<int>(EndRow(block) - first);
  const std::int64_t block_begin = std::int64_t{block} * block_rows();
  const auto skipped = static_cast<int>(first - block_begin);
  std::byte* head = data + Head(kv_head);
  auto* fingerprints = reinterpret_cast<std::uint32_t*>(head + parts_.fingerprints);
  auto* members = reinterpret_cast<std::uint16_t*>(head + parts_.members);
  auto* offsets = reinterpret_cast<std::uint16_t*>(head + parts_.offsets);
  s.keys.resize(static_cast<std::size_t>(n) * head_dim);
  s.values.resize(static_cast<std::size_t>(n) * head_dim);
  s.centroids.assign(static_cast<std::size_t>(slots()) * head_dim, 0.0f);
  s.value_means.assign(static_cast<std::size_t>(slots()) * head_dim, 0.0f);
  s.counts.assign(slots(), 0.0f);
  for (int i = 0; i < n; ++i) {
    DecodeRow(kv.KRow(first + i, kv_head), kv.k_type, head_dim, s.keys.data() + std::int64_t{i} * head_dim);
    DecodeRow(kv.VRow(first + i, kv_head), kv.v_type, head_dim, s.values.data() + std::int64_t{i} * head_dim);
    fingerprints[skipped + i] = CacheFingerprint(kv, first + i, kv_head, head_dim);
  }
  if (!Representable(s.keys.data(), std::ssize(s.keys)) || !Representable(s.values.data(), std::ssize(s.values))) {
    return {StatusCode::kUnsupported, "a cached row holds a value that the plan cannot represent"};
  }

  const KMeansParams params{.cluster_size = config_.cluster_size,
                            .max_cluster_size = max_cluster_rows(),
                            .rounds = config_.kmeans_rounds,
                            .power_iterations = config_.power_iterations};
  PrincipalKMeans(s.keys.data(), n, head_dim, params, s.kmeans, members, offsets);
  const int used_slots = KMeansSlots(n, config_.cluster_size);
  for (int c = used_slots; c < slots(); ++c) offsets[c + 1] = offsets[used_slots];

  const KeyRecord keys = layout_.Keys(head + parts_.keys);
  std::fill_n(keys.shape, head_dim, 0.0f);
  for (int c = 0; c < slots(); ++c) {
    const int count = offsets[c + 1] - offsets[c];
    s.counts[c] = keys.counts[c] = static_cast<float>(count);
    keys.log_counts[c] = count > 0 ? std::log(static_cast<float>(count)) : kNoCluster;
    float* centroid = s.centroids.data() + std::int64_t{c} * head_dim;
    float* value_mean = s.value_means.data() + std::int64_t{c} * head_dim;
    const float inverse = count > 0 ? 1.0f / static_cast<float>(count) : 0.0f;
    for (int i = offsets[c]; i < offsets[c + 1]; ++i) {
      AddScaled(centroid, s.keys.data() + std::int64_t{members[i]} * head_dim, inverse, head_dim);
      AddScaled(value_mean, s.values.data() + std::int64_t{members[i]} * head_dim, inverse, head_dim);
    }
    float trace = 0.0f;
    for (int i = offsets[c]; i < offsets[c + 1]; ++i) {
      const float* key = s.keys.data() + std::int64_t{members[i]} * head_dim;
      for (int d = 0; d < head_dim; ++d) {
        const float deviation = key[d] - centroid[d];
        keys.shape[d] += deviation * deviation;
        trace += deviation * deviation;
      }
    }
    keys.half_traces[c] = 0.5f * inverse * trace;
  }
  float total = 0.0f;
  for (int d = 0; d < head_dim; ++d) total += keys.shape[d];
  for (int d = 0; d < head_dim; ++d) keys.shape[d] = total > 0.0f ? keys.shape[d] / total : 0.0f;
  StoreCentroids(layout_, s.centroids.data(), s.counts, keys);
  StoreValueMeans(layout_, s.value_means.data(), s.counts, layout_.Values(head + parts_.values));

  if (config_.packed_format == PackedFormat::kInt8) {
    StoreInt8Rows(int8_layout_, s.keys.data(), s.values.data(), {members, static_cast<std::size_t>(n)},
                  head + parts_.packed_k);
  } else if (config_.packed_format != PackedFormat::kNone) {
    const DType type = PackedType(config_.packed_format);
    const std::size_t packed_row = RowBytes(type, head_dim);
    for (int i = 0; i < n; ++i) {
      const std::size_t at = i * packed_row;
      EncodeRow(s.keys.data() + std::int64_t{members[i]} * head_dim, type, head_dim, head + parts_.packed_k + at);
      EncodeRow(s.values.data() + std::int64_t{members[i]} * head_dim, type, head_dim, head + parts_.packed_v + at);
    }
  }
  for (int i = 0; i < n; ++i) members[i] = static_cast<std::uint16_t>(members[i] + skipped);
  return Status::Ok();
}

void BlockPlan::NoteGone(int block) {
  ++changes_;
  first_gap_ = std::min(first_gap_, block);
}

void BlockPlan::Drop(int block) {
  NoteGone(block);
  blocks_[static_cast<std::size_t>(block)] = {};
  if (memory_ != nullptr) memory_->Give(BlockBytes());
}

int BlockPlan::DropAll() {
  int dropped = 0;
  for (int block = 0; block < n_blocks(); ++block) {
    if (!built(block)) continue;
    Drop(block);
    ++dropped;
  }
  return dropped;
}

int BlockPlan::DropWritten(std::span<const std::int64_t> rows) {
  int dropped = 0;
  for (const std::int64_t row : rows) {
    const std::int64_t block = row / block_rows();
    if (row < config_.sink || block >= n_blocks() || !built(static_cast<int>(block))) continue;
    Drop(static_cast<int>(block));
    ++dropped;
  }
  return dropped;
}

void BlockPlan::NoteRead(int block, float share) {
  float& read = blocks_[static_cast<std::size_t>(block)].use.read;
  read += (share - read) * kReadDecay;
}

EvictablePlan::Candidate BlockPlan::LeastUseful() const {
  EvictablePlan::Candidate least;
  for (int block = 0; block < n_blocks(); ++block) {
    if (!built(block)) continue;
    const BlockUse& use = blocks_[static_cast<std::size_t>(block)].use;
    // Used longest ago; of those used in the same round, the one that is read most.
    if (least.block >= 0 && (use.last > least.use.last || (use.last == least.use.last && use.read <= least.use.read))) {
      continue;
    }
    least = {block, use};
  }
  return least;
}

std::uint64_t BlockPlan::Evict(int block, std::uint64_t not_before) {
  NoteGone(block);
  blocks_[static_cast<std::size_t>(block)] = {.not_before = not_before};
  return BlockBytes();
}

bool BlockPlan::RowUnchanged(const KvView& kv, std::int64_t row, int kv_head) const {
  const auto block = static_cast<int>(row / block_rows());
  const auto* fingerprints = reinterpret_cast<const std::uint32_t*>(data(block) + Head(kv_head) + parts_.fingerprints);
  return CacheFingerprint(kv, row, kv_head, shape_.head_dim) == fingerprints[row % block_rows()];
}

bool BlockPlan::Unchanged(const KvView& kv, int block) const {
  for (std::int64_t row = FirstRow(block); row < EndRow(block); ++row) {
    for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
      if (!RowUnchanged(kv, row, kv_head)) return false;
    }
  }
  return true;
}

int BlockPlan::DropChanged(const KvView& kv, Verify verify, int n_threads) {
  if (kv.k_type != k_type_ || kv.v_type != v_type_) return DropAll();
  int dropped = 0;
  const auto drop_if = [&](int block, bool changed) {
    if (!changed) return;
    Drop(block);
    ++dropped;
  };
  for (auto block = static_cast<int>(std::min<std::int64_t>(kv.n_kv / block_rows(), n_blocks())); block < n_blocks();
       ++block) {
    drop_if(block, built(block));  // it ends behind n_kv
  }
  if (verify == Verify::kFull) {
    // Takes no memory: a check that could fail would leave changed blocks in use.
    ParallelFor(n_threads, n_blocks(), [&](std::int64_t task, int) {
      const auto block = static_cast<int>(task);
      blocks_[static_cast<std::size_t>(block)].changed = built(block) && !Unchanged(kv, block);
    });
    for (int block = 0; block < n_blocks(); ++block) {
      drop_if(block, blocks_[static_cast<std::size_t>(block)].changed);
    }
  } else if (verify == Verify::kSample) {
    dropped += DropChanged(kv, NextSample());
  }
  return dropped;
}

// Rows first, then KV heads: whatever rewrites a cell rewrites all its heads, so another row says more.
int BlockPlan::SampledHead(Sample sample) const {
  return static_cast<int>(sample.call / static_cast<std::uint64_t>(block_rows()) % shape_.kv_heads);
}

std::int64_t BlockPlan::SampledRow(Sample sample, int block) const {
  const std::int64_t n = EndRow(block) - FirstRow(block);
  return FirstRow(block) +
         static_cast<std::int64_t>(sample.call % static_cast<std::uint64_t>(block_rows())) * kSampleStride % n;
}

bool BlockPlan::Changed(const KvView& kv, Sample sample, int first, int end) const {
  const int kv_head = SampledHead(sample);
  // The rows lie far apart: asking for all of them first overlaps what would be one miss after the other.
  for (int block = first; block < end; ++block) {
    if (!built(block)) continue;
    const std::int64_t row = SampledRow(sample, block);
    for (std::size_t at = 0; at < RowBytes(kv.k_type, shape_.head_dim); at += kCacheLine) {
      hwy::Prefetch(kv.KRow(row, kv_head) + at);
    }
    for (std::size_t at = 0; at < RowBytes(kv.v_type, shape_.head_dim); at += kCacheLine) {
      hwy::Prefetch(kv.VRow(row, kv_head) + at);
    }
  }
  for (int block = first; block < end; ++block) {
    if (built(block) && !RowUnchanged(kv, SampledRow(sample, block), kv_head)) return true;
  }
  return false;
}

int BlockPlan::DropChanged(const KvView& kv, Sample sample) {
  if (!Changed(kv, sample, 0, n_blocks())) return 0;
  int dropped = 0;
  for (int block = 0; block < n_blocks(); ++block) {
    if (!built(block) || RowUnchanged(kv, SampledRow(sample, block), SampledHead(sample))) continue;
    Drop(block);
    ++dropped;
  }
  return dropped;
}

}  // namespace scsa
