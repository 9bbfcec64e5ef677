// SPDX-License-Identifier: Apache-2.0
#include "core/block_plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <string>

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

template <class T>
std::size_t HeldBytes(const std::vector<T>& v) {
  return v.capacity() * sizeof(T);
}

}  // namespace

// Memory of one building thread.
struct BlockPlan::BuildScratch {
  std::vector<float> keys, values, centroids, value_means, counts;
  KMeansScratch kmeans;
};

BlockPlan::BlockPlan(const Shape& shape, const Config& config)
    : shape_(shape),
      config_(config),
      layout_(shape.head_dim, KMeansSlots(config.block_size, config.cluster_size)),
      heads_(shape.kv_heads) {}

std::int64_t BlockPlan::FirstRow(int block) const {
  return block == 0 ? config_.sink : std::int64_t{block} * block_rows();
}

std::size_t BlockPlan::Bytes() const {
  std::size_t bytes = HeldBytes(built_);
  for (const HeadSummaries& h : heads_) {
    bytes += HeldBytes(h.keys) + HeldBytes(h.values) + HeldBytes(h.members) + HeldBytes(h.offsets) +
             HeldBytes(h.packed_k) + HeldBytes(h.packed_v) + HeldBytes(h.fingerprints);
  }
  return bytes;
}

void BlockPlan::AppendRows(int kv_head, std::span<const std::int32_t> clusters, bool packed,
                           std::vector<std::int32_t>& rows) const {
  const HeadSummaries& summaries = heads_[kv_head];
  const std::size_t before = rows.size();
  rows.resize(before + clusters.size() * static_cast<std::size_t>(2 * config_.cluster_size));  // at most
  std::int32_t* to = rows.data() + before;
  for (const std::int32_t cluster : clusters) {
    const int block = cluster / slots();
    const std::uint16_t* offsets = summaries.offsets.data() + std::int64_t{block} * (slots() + 1) + cluster % slots();
    const std::int32_t first = block * block_rows();
    const std::uint16_t* members = summaries.members.data() + first;
    for (std::int32_t i = offsets[0]; i < offsets[1]; ++i) *to++ = first + (packed ? i : members[i]);
  }
  rows.resize(static_cast<std::size_t>(to - rows.data()));
}

void BlockPlan::Grow(int n_blocks) {
  const auto n = static_cast<std::size_t>(n_blocks);
  for (HeadSummaries& h : heads_) {
    h.keys.resize(n * layout_.key_bytes());
    h.values.resize(n * layout_.value_bytes());
    h.members.resize(n * config_.block_size);
    h.offsets.resize(n * (slots() + 1));
    h.fingerprints.resize(n * config_.block_size);
    if (config_.packed_format != PackedFormat::kNone) {
      const std::size_t packed_row = RowBytes(PackedType(config_.packed_format), shape_.head_dim);
      h.packed_k.resize(n * config_.block_size * packed_row);
      h.packed_v.resize(n * config_.block_size * packed_row);
    }
  }
  // Last: should memory run out above, the blocks that exist keep their places.
  built_.resize(n, 0);
}

Status BlockPlan::Build(const KvView& kv, std::span<const int> blocks, int n_threads) {
  if (blocks.empty()) return Status::Ok();
  try {
    const int last = *std::ranges::max_element(blocks);
    if (last >= n_blocks()) Grow(last + 1);
    if (kv.k_type != k_type_ || kv.v_type != v_type_) DropAll();
    k_type_ = kv.k_type;
    v_type_ = kv.v_type;
    const std::int64_t n_tasks = std::ssize(blocks) * shape_.kv_heads;
    std::vector<BuildScratch> scratch(std::min<std::int64_t>(std::max(n_threads, 1), n_tasks));
    std::vector<Status> results(n_tasks);
    ParallelFor(n_threads, n_tasks, [&](std::int64_t task, int thread) {
      try {
        results[task] =
            BuildHead(kv, blocks[task / shape_.kv_heads], static_cast<int>(task % shape_.kv_heads), scratch[thread]);
      } catch (const std::bad_alloc&) {
        results[task] = {StatusCode::kOutOfMemory, std::string()};
      }
    });
    Status first_error;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      built_[blocks[i]] = 1;
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const Status& result = results[i * shape_.kv_heads + h];
        if (result.ok()) continue;
        built_[blocks[i]] = 0;
        if (first_error.ok()) first_error = result;
      }
    }
    return first_error;
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, std::string()};
  }
}

Status BlockPlan::BuildHead(const KvView& kv, int block, int kv_head, BuildScratch& s) {
  const int head_dim = shape_.head_dim;
  const std::int64_t first = FirstRow(block);
  const auto n = static_cast<int>(EndRow(block) - first);
  const std::int64_t block_begin = std::int64_t{block} * block_rows();
  const auto skipped = static_cast<int>(first - block_begin);
  HeadSummaries& h = heads_[kv_head];
  s.keys.resize(static_cast<std::size_t>(n) * head_dim);
  s.values.resize(static_cast<std::size_t>(n) * head_dim);
  s.centroids.assign(static_cast<std::size_t>(slots()) * head_dim, 0.0f);
  s.value_means.assign(static_cast<std::size_t>(slots()) * head_dim, 0.0f);
  s.counts.assign(slots(), 0.0f);
  for (int i = 0; i < n; ++i) {
    DecodeRow(kv.KRow(first + i, kv_head), kv.k_type, head_dim, s.keys.data() + std::int64_t{i} * head_dim);
    DecodeRow(kv.VRow(first + i, kv_head), kv.v_type, head_dim, s.values.data() + std::int64_t{i} * head_dim);
    h.fingerprints[block_begin + skipped + i] = CacheFingerprint(kv, first + i, kv_head, head_dim);
  }
  if (!Representable(s.keys.data(), std::ssize(s.keys)) || !Representable(s.values.data(), std::ssize(s.values))) {
    return {StatusCode::kUnsupported, "a cached row holds a value that the plan cannot represent"};
  }

  std::uint16_t* members = h.members.data() + block_begin;
  std::uint16_t* offsets = h.offsets.data() + static_cast<std::size_t>(block) * (slots() + 1);
  const KMeansParams params{.cluster_size = config_.cluster_size,
                            .max_cluster_size = 2 * config_.cluster_size,
                            .rounds = config_.kmeans_rounds,
                            .power_iterations = config_.power_iterations};
  PrincipalKMeans(s.keys.data(), n, head_dim, params, s.kmeans, members, offsets);
  const int used_slots = KMeansSlots(n, config_.cluster_size);
  for (int c = used_slots; c < slots(); ++c) offsets[c + 1] = offsets[used_slots];

  const KeyRecord keys = layout_.Keys(h.keys.data() + static_cast<std::size_t>(block) * layout_.key_bytes());
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
  StoreValueMeans(layout_, s.value_means.data(), s.counts,
                  layout_.Values(h.values.data() + static_cast<std::size_t>(block) * layout_.value_bytes()));

  if (config_.packed_format != PackedFormat::kNone) {
    const DType type = PackedType(config_.packed_format);
    const std::size_t packed_row = RowBytes(type, head_dim);
    for (int i = 0; i < n; ++i) {
      const std::size_t at = (block_begin + i) * packed_row;
      EncodeRow(s.keys.data() + std::int64_t{members[i]} * head_dim, type, head_dim, h.packed_k.data() + at);
      EncodeRow(s.values.data() + std::int64_t{members[i]} * head_dim, type, head_dim, h.packed_v.data() + at);
    }
  }
  for (int i = 0; i < n; ++i) members[i] = static_cast<std::uint16_t>(members[i] + skipped);
  return Status::Ok();
}

int BlockPlan::DropAll() {
  int dropped = 0;
  for (std::uint8_t& built : built_) {
    dropped += built;
    built = 0;
  }
  return dropped;
}

int BlockPlan::DropWritten(std::span<const std::int64_t> rows) {
  int dropped = 0;
  for (const std::int64_t row : rows) {
    const std::int64_t block = row / block_rows();
    if (row < config_.sink || block >= n_blocks()) continue;
    dropped += built_[block];
    built_[block] = 0;
  }
  return dropped;
}

bool BlockPlan::RowUnchanged(const KvView& kv, std::int64_t row, int kv_head) const {
  return CacheFingerprint(kv, row, kv_head, shape_.head_dim) == heads_[kv_head].fingerprints[row];
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
    built_[block] = 0;
    ++dropped;
  };
  for (int block = 0; block < n_blocks(); ++block) drop_if(block, built(block) && EndRow(block) > kv.n_kv);
  if (verify == Verify::kFull) {
    // Takes no memory: a check that could fail would leave changed blocks in use.
    std::atomic<int> changed{0};
    ParallelFor(n_threads, n_blocks(), [&](std::int64_t task, int) {
      const auto block = static_cast<int>(task);
      if (!built(block) || Unchanged(kv, block)) return;
      built_[block] = 0;
      changed.fetch_add(1, std::memory_order_relaxed);
    });
    dropped += changed.load(std::memory_order_relaxed);
  } else if (verify == Verify::kSample) {
    // Rows first, then KV heads: whatever rewrites a cell rewrites all its heads, so another row says more.
    const std::uint64_t call = sample_++;
    const auto kv_head = static_cast<int>(call / static_cast<std::uint64_t>(block_rows()) % shape_.kv_heads);
    const auto sampled_row = [&](int block) {
      const std::int64_t n = EndRow(block) - FirstRow(block);
      return FirstRow(block) +
             static_cast<std::int64_t>(call % static_cast<std::uint64_t>(block_rows())) * kSampleStride % n;
    };
    // The rows lie far apart: asking for all of them first overlaps what would be one miss after the other.
    for (int block = 0; block < n_blocks(); ++block) {
      if (!built(block)) continue;
      const std::int64_t row = sampled_row(block);
      for (std::size_t at = 0; at < RowBytes(kv.k_type, shape_.head_dim); at += kCacheLine) {
        hwy::Prefetch(kv.KRow(row, kv_head) + at);
      }
      for (std::size_t at = 0; at < RowBytes(kv.v_type, shape_.head_dim); at += kCacheLine) {
        hwy::Prefetch(kv.VRow(row, kv_head) + at);
      }
    }
    for (int block = 0; block < n_blocks(); ++block) {
      drop_if(block, built(block) && !RowUnchanged(kv, sampled_row(block), kv_head));
    }
  }
  return dropped;
}

}  // namespace scsa
