// SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "core/cluster_tree.h"
#include "core/fingerprint.h"
#include "core/kernels.h"
#include "core/parallel.h"
#include "hwy/cache_control.h"

namespace scsa {
namespace {

// Largest magnitude that a packed row can hold: f16's largest finite value, or that value as the scale of 127 steps.
float PackedLimit(PackedFormat format) { return format == PackedFormat::kF16 ? 65504.0f : 65504.0f * 127.0f; }

// Largest |x|, or NaN when one is NaN.
float MaxMagnitude(const float* x, int n) {
  std::uint32_t largest = 0;
  // The bit patterns of non-negative floats are ordered like the floats, with infinity and NaN at the top.
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7FFFFFFFu);
  return std::bit_cast<float>(largest);
}

// What SplitFarthestDirection makes of n rows.
std::size_t CountClusters(std::int64_t n, int cluster_size) {
  return n <= cluster_size ? 1 : CountClusters(n / 2, cluster_size) + CountClusters(n - n / 2, cluster_size);
}

void PackRow(const std::byte* row, DType type, const float* decoded, DType packed_type, int head_dim, std::byte* dst) {
  if (type == packed_type) {
    std::memcpy(dst, row, RowBytes(type, head_dim));
  } else {
    EncodeRow(decoded, packed_type, head_dim, dst);
  }
}

Status BuildBlockOrThrow(const KvView& kv, int kv_head, int head_dim, std::int64_t begin, std::int64_t end,
                         const Config& config, Block* block) {
  const std::int64_t n = end - begin;
  const float limit = PackedLimit(config.packed_format);
  const DType packed_type = PackedType(config.packed_format);
  const std::size_t packed_bytes = RowBytes(packed_type, head_dim);
  const Status unpackable(StatusCode::kUnsupported,
                          "a cached row holds a value that the packed format cannot represent");

  Block out;
  out.begin = begin;
  out.end = end;
  out.fingerprints.resize(n);
  const auto keys = std::make_unique_for_overwrite<float[]>(n * head_dim);
  for (std::int64_t i = 0; i < n; ++i) {
    float* key = keys.get() + i * head_dim;
    DecodeRow(kv.KRow(begin + i, kv_head), kv.k_type, head_dim, key);
    if (!(MaxMagnitude(key, head_dim) <= limit)) return unpackable;
    out.fingerprints[i] = CacheFingerprint(kv, begin + i, kv_head, head_dim);
  }

  out.partition = SplitFarthestDirection(keys.get(), n, head_dim, config.cluster_size);
  out.n_clusters = static_cast<int>(std::ssize(out.partition.offsets)) - 1;
  const std::size_t summary = static_cast<std::size_t>(out.n_clusters) * head_dim;
  out.centroids.resize(summary);
  out.value_means.resize(summary);
  out.directions.resize(summary * config.rank);
  out.residuals.resize(summary);
  out.log_counts.resize(out.n_clusters);
  out.packed_k = std::make_unique_for_overwrite<std::byte[]>(n * packed_bytes);
  out.packed_v = std::make_unique_for_overwrite<std::byte[]>(n * packed_bytes);

  MomentScratch scratch;
  std::vector<float> value(head_dim);
  for (int c = 0; c < out.n_clusters; ++c) {
    const std::int64_t first = out.partition.offsets[c];
    const std::span<const std::int32_t> members(out.partition.members.data() + first, out.RowsOf(c));
    const std::int64_t at = std::int64_t{c} * head_dim;
    ClusterMoments(keys.get(), members, head_dim, config.rank, config.power_iterations, scratch,
                   out.centroids.data() + at, out.directions.data() + at * config.rank, out.residuals.data() + at);
    out.log_counts[c] = std::log(static_cast<float>(members.size()));
    const float inverse = 1.0f / static_cast<float>(members.size());
    float* mean = out.value_means.data() + at;
    for (std::size_t i = 0; i < members.size(); ++i) {
      const std::int64_t row = begin + members[i];
      PackRow(kv.KRow(row, kv_head), kv.k_type, keys.get() + std::int64_t{members[i]} * head_dim, packed_type, head_dim,
              out.packed_k.get() + (first + i) * packed_bytes);
      DecodeRow(kv.VRow(row, kv_head), kv.v_type, head_dim, value.data());
      if (!(MaxMagnitude(value.data(), head_dim) <= limit)) return unpackable;
      PackRow(kv.VRow(row, kv_head), kv.v_type, value.data(), packed_type, head_dim,
              out.packed_v.get() + (first + i) * packed_bytes);
      AddScaled(mean, value.data(), 1.0f, head_dim);
    }
    for (int d = 0; d < head_dim; ++d) mean[d] *= inverse;
  }
  *block = std::move(out);
  return Status::Ok();
}

bool RowUnchanged(const KvView& kv, const Shape& shape, const Region& region, std::int64_t row) {
  for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    if (CacheFingerprint(kv, region.begin + row, kv_head, shape.head_dim) != region.heads[kv_head].fingerprints[row]) {
      return false;
    }
  }
  return true;
}

// The sampled rows lie far apart in memory: asking for all of them first overlaps what would be one miss after the
// other.
void PrefetchSample(const KvView& kv, const Shape& shape, std::span<const Region> regions, std::uint64_t call) {
  constexpr std::size_t kLine = 64;
  const auto prefetch = [](const std::byte* row, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += kLine) hwy::Prefetch(row + at);
  };
  for (const Region& region : regions) {
    for (const std::int64_t row : SampledRows(region.end - region.begin, call)) {
      for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        prefetch(kv.KRow(region.begin + row, kv_head), RowBytes(kv.k_type, shape.head_dim));
        prefetch(kv.VRow(region.begin + row, kv_head), RowBytes(kv.v_type, shape.head_dim));
        hwy::Prefetch(&region.heads[kv_head].fingerprints[row]);
      }
    }
  }
}

}  // namespace

std::size_t Block::SummaryBytes() const {
  return sizeof(float) *
         (centroids.size() + value_means.size() + directions.size() + residuals.size() + log_counts.size());
}

Status BuildBlock(const KvView& kv, int kv_head, int head_dim, std::int64_t begin, std::int64_t end,
                  const Config& config, Block* block) {
  try {
    return BuildBlockOrThrow(kv, kv_head, head_dim, begin, end, config, block);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, std::string()};
  }
}

std::size_t Plan::RegionBytes(std::int64_t n_rows) const {
  const auto rows = static_cast<std::size_t>(n_rows);
  const std::size_t clusters = CountClusters(n_rows, config_.cluster_size);
  const std::size_t packed_row = RowBytes(PackedType(config_.packed_format), shape_.head_dim);
  const std::size_t floats = static_cast<std::size_t>(shape_.head_dim) * (3 + config_.rank) + 1;
  const std::size_t block = rows * (sizeof(std::int32_t) + sizeof(std::uint32_t) + 2 * packed_row) +
                            (clusters + 1) * sizeof(std::int32_t) + clusters * floats * sizeof(float);
  return sizeof(Region) + static_cast<std::size_t>(shape_.kv_heads) * (sizeof(Block) + block) +
         (tree_ ? NodeBytes(n_rows) : 0);
}

std::size_t Plan::NodeBytes(std::int64_t n_rows) const {
  const auto clusters = static_cast<int>(CountClusters(n_rows, config_.cluster_size));
  return sizeof(float) * NodeFloats(shape_.kv_heads, clusters, shape_.head_dim);
}

std::size_t Plan::Bytes() const {
  std::size_t bytes = 0;
  for (const Region& region : regions_) bytes += RegionBytes(region.end - region.begin);
  return bytes;
}

bool Plan::SetTree(bool wanted) {
  if (wanted == tree_) return true;
  const auto bytes = [&] {
    std::size_t sum = 0;
    for (const Region& region : regions_) sum += NodeBytes(region.end - region.begin);
    return sum;
  };
  if (!wanted) {
    if (memory_ != nullptr) memory_->Give(bytes());
    for (Region& region : regions_) region.nodes.reset();
    tree_ = false;
    return true;
  }
  const std::size_t taken = bytes();
  if (memory_ != nullptr && !memory_->Take(taken)) return false;
  std::vector<std::unique_ptr<float[]>> nodes;
  try {
    for (const Region& region : regions_) {
      nodes.push_back(std::make_unique<float[]>(NodeFloats(shape_.kv_heads, region.n_clusters(), shape_.head_dim)));
    }
  } catch (const std::bad_alloc&) {
    if (memory_ != nullptr) memory_->Give(taken);
    return false;
  }
  // Making room may have taken regions of this very plan.
  if (memory_ != nullptr) memory_->Give(taken - bytes());
  tree_ = true;
  for (std::size_t r = 0; r < regions_.size(); ++r) {
    regions_[r].nodes = std::move(nodes[r]);
    for (int h = 0; h < shape_.kv_heads; ++h) FillNodes(regions_[r], h, shape_.head_dim, config_.rank);
  }
  Link();
  return true;
}

void Plan::Link() {
  std::int32_t clusters = 0;
  for (Region& region : regions_) {
    region.first_cluster = clusters;
    clusters += region.n_clusters();
  }
  if (tree_) FillNodesAbove(regions_, shape_.head_dim, config_.rank);
}

std::uint64_t Plan::EvictLast() {
  const std::size_t bytes = RegionBytes(regions_.back().end - regions_.back().begin);
  regions_.pop_back();
  Link();
  retry_at_ = 0;
  return bytes;
}

int Plan::DropFrom(std::size_t index) {
  if (index == regions_.size()) return 0;
  const int dropped = static_cast<int>(regions_.size() - index);
  retry_at_ = 0;
  const std::size_t before = Bytes();
  regions_.erase(regions_.begin() + static_cast<std::ptrdiff_t>(index), regions_.end());
  if (memory_ != nullptr) memory_->Give(before - Bytes());
  Link();
  return dropped;
}

int Plan::DropAll() {
  retry_at_ = 0;
  return DropFrom(0);
}

int Plan::DropBeyond(std::int64_t n_prefix) {
  std::size_t keep = regions_.size();
  while (keep > 0 && regions_[keep - 1].end > n_prefix) --keep;
  return DropFrom(keep);
}

int Plan::DropWritten(std::span<const std::int64_t> rows) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t row : rows) {
    if (row >= config_.sink) first = std::min(first, row);
  }
  return DropBeyond(first);
}

int Plan::DropChanged(const KvView& kv, Verify verify, int n_threads) {
  if (regions_.empty()) return 0;
  // Other row formats are another cache: nothing of the plan describes it, and fingerprints are not comparable.
  if (kv.k_type != k_type_ || kv.v_type != v_type_) return DropAll();
  if (verify == Verify::kNone) return 0;
  if (verify == Verify::kSample) {
    const std::uint64_t call = sample_++;
    PrefetchSample(kv, shape_, regions_, call);
    for (std::size_t r = 0; r < regions_.size(); ++r) {
      const Region& region = regions_[r];
      const auto unchanged = [&](std::int64_t row) { return RowUnchanged(kv, shape_, region, row); };
      if (!std::ranges::all_of(SampledRows(region.end - region.begin, call), unchanged)) return DropFrom(r);
    }
    return 0;
  }
  // All heads of a row together, row by row: the order in which a cache usually lies in memory.
  constexpr std::int64_t kChunkRows = 256;
  const std::int64_t chunks = (config_.block_size + kChunkRows - 1) / kChunkRows;
  std::atomic<std::size_t> first_changed{regions_.size()};
  ParallelFor(n_threads, std::ssize(regions_) * chunks, [&](std::int64_t task, int) {
    const std::size_t r = static_cast<std::size_t>(task / chunks);
    const Region& region = regions_[r];
    const std::int64_t end = std::min((task % chunks + 1) * kChunkRows, region.end - region.begin);
    for (std::int64_t row = task % chunks * kChunkRows; row < end; ++row) {
      if (RowUnchanged(kv, shape_, region, row)) continue;
      std::size_t seen = first_changed.load();
      while (r < seen && !first_changed.compare_exchange_weak(seen, r)) {
      }
      return;
    }
  });
  return DropFrom(first_changed.load());
}

bool Plan::Due(std::int64_t n_prefix) const {
  const std::int64_t sealable = n_prefix - config_.recent;
  return sealable - sealed_end() >= config_.rebuild_interval && sealable >= retry_at_;
}

Status Plan::Extend(const KvView& kv, std::int64_t n_prefix, int n_threads, int* built, bool* refused) {
  *built = 0;
  if (!Due(n_prefix)) return Status::Ok();
  const std::int64_t sealable = n_prefix - config_.recent;
  std::size_t taken = 0;
  const auto give_up = [&](Status status) {
    if (memory_ != nullptr) memory_->Give(taken);
    retry_at_ = sealable + config_.rebuild_interval;
    return status;
  };
  try {
    std::size_t kept = regions_.size();
    if (kept > 0 && regions_.back().end - regions_.back().begin < config_.block_size) --kept;
    const std::int64_t first = kept > 0 ? regions_[kept - 1].end : config_.sink;
    std::vector<Region> fresh;
    for (std::int64_t begin = first; begin < sealable; begin += config_.block_size) {
      Region& region = fresh.emplace_back();
      region.begin = begin;
      region.end = std::min<std::int64_t>(begin + config_.block_size, sealable);
      region.heads.resize(shape_.kv_heads);
      if (!tree_) continue;
      const auto clusters = static_cast<int>(CountClusters(region.end - region.begin, config_.cluster_size));
      region.nodes = std::make_unique<float[]>(NodeFloats(shape_.kv_heads, clusters, shape_.head_dim));
    }
    std::size_t needed = 0;
    for (const Region& region : fresh) needed += RegionBytes(region.end - region.begin);
    if (memory_ != nullptr && !memory_->Take(needed)) {
      if (refused != nullptr) *refused = true;
      return give_up({StatusCode::kOutOfMemory, std::string()});
    }
    taken = needed;
    std::vector<Status> results(fresh.size() * shape_.kv_heads);
    ParallelFor(n_threads, std::ssize(results), [&](std::int64_t task, int) {
      Region& region = fresh[task / shape_.kv_heads];
      const int kv_head = static_cast<int>(task % shape_.kv_heads);
      results[task] =
          BuildBlock(kv, kv_head, shape_.head_dim, region.begin, region.end, config_, &region.heads[kv_head]);
    });
    for (Status& result : results) {
      if (!result.ok()) return give_up(std::move(result));
    }
    if (tree_) {
      ParallelFor(n_threads, std::ssize(results), [&](std::int64_t task, int) {
        FillNodes(fresh[task / shape_.kv_heads], static_cast<int>(task % shape_.kv_heads), shape_.head_dim,
                  config_.rank);
      });
    }
    regions_.reserve(kept + fresh.size());
    DropFrom(kept);
    std::ranges::move(fresh, std::back_inserter(regions_));
    Link();
    k_type_ = kv.k_type;
    v_type_ = kv.v_type;
    *built = static_cast<int>(fresh.size());
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return give_up({StatusCode::kOutOfMemory, std::string()});
  }
}

std::array<std::int64_t, 2 + kRotatingSamples> SampledRows(std::int64_t n_rows, std::uint64_t call) {
  // A stride near the golden section, made coprime to n_rows, spreads consecutive samples and still visits every row.
  std::int64_t stride = std::max<std::int64_t>(1, static_cast<std::int64_t>(0.618 * static_cast<double>(n_rows)));
  while (std::gcd(stride, n_rows) != 1) ++stride;
  std::array<std::int64_t, 2 + kRotatingSamples> rows = {0, n_rows - 1};
  for (int i = 0; i < kRotatingSamples; ++i) {
    const std::uint64_t turn = (call * kRotatingSamples + i) % static_cast<std::uint64_t>(n_rows);
    rows[2 + i] = static_cast<std::int64_t>(turn) * stride % n_rows;
  }
  return rows;
}

}  // namespace scsa
