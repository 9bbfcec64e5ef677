// SPDX-License-Identifier: Apache-2.0
#include "synthetic_cache.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/kernels.h"
#include "core/parallel.h"

namespace scsa::tool {
namespace {

constexpr std::size_t kNoiseTable = std::size_t{1} << 20;
// Rows that one random stream makes: the unit of parallel work, independent of the thread count.
constexpr std::int64_t kChunkRows = 4096;

// splitmix64 (Steele, Lea, Flood 2014): one 64-bit state, every seed is good.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [0, bound); bound is far below 2^32, so the bias of the multiplication does not matter.
  std::uint32_t Below(std::uint32_t bound) { return static_cast<std::uint32_t>(((Next() >> 32) * bound) >> 32); }
  double Uniform() { return static_cast<double>((Next() >> 11) + 1) * 0x1p-53; }  // (0, 1]

 private:
  std::uint64_t state_;
};

// A seed of its own for each use of the object's seed.
std::uint64_t Derive(std::uint64_t seed, std::uint64_t purpose, std::uint64_t index) {
  return Random(Random(Random(seed).Next() + purpose).Next() + index).Next();
}

enum Purpose : std::uint64_t { kNoisePurpose, kCentrePurpose, kRowPurpose, kQueryPurpose };

// Standard normal numbers by Box and Muller's transform.
std::vector<float> NormalNumbers(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> numbers(count + count % 2);
  for (std::size_t i = 0; i < numbers.size(); i += 2) {
    const double radius = std::sqrt(-2.0 * std::log(random.Uniform()));
    const double angle = 2.0 * std::numbers::pi * random.Uniform();
    numbers[i] = static_cast<float>(radius * std::cos(angle));
    numbers[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  numbers.resize(count);
  return numbers;
}

}  // namespace

SyntheticCache::SyntheticCache(const Shape& shape, std::int64_t n_rows, std::uint64_t seed, int n_threads)
    : shape_(shape),
      n_rows_(n_rows),
      seed_(seed),
      noise_(NormalNumbers(kNoiseTable, Derive(seed, kNoisePurpose, 0))),
      centres_(
          NormalNumbers(std::size_t{2} * kCentres * shape.kv_heads * shape.head_dim, Derive(seed, kCentrePurpose, 0))),
      labels_(static_cast<std::size_t>(n_rows) * shape.kv_heads),
      k_(std::make_unique_for_overwrite<std::byte[]>(labels_.size() * RowBytes(DType::kF16, shape.head_dim))),
      v_(std::make_unique_for_overwrite<std::byte[]>(labels_.size() * RowBytes(DType::kF16, shape.head_dim))) {
  const std::int64_t chunks = (n_rows + kChunkRows - 1) / kChunkRows;
  ParallelFor(n_threads, chunks, [&](std::int64_t chunk, int) {
    const std::int64_t first = chunk * kChunkRows;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      FillRows(first, std::min(n_rows_, first + kChunkRows), h,
               Derive(seed, kRowPurpose, static_cast<std::uint64_t>(chunk * shape_.kv_heads + h)));
    }
  });
}

void SyntheticCache::FillRows(std::int64_t first, std::int64_t end, int kv_head, std::uint64_t seed) {
  Random random(seed);
  const int head_dim = shape_.head_dim;
  const std::size_t row_bytes = RowBytes(DType::kF16, head_dim);
  const auto places = static_cast<std::uint32_t>(kNoiseTable) - static_cast<std::uint32_t>(head_dim);
  float row[kMaxHeadDim];
  int label = static_cast<int>(random.Below(kCentres));
  for (std::int64_t r = first; r < end; ++r) {
    if (random.Below(kMeanRun) == 0) label = static_cast<int>(random.Below(kCentres));
    const std::int64_t at = r * shape_.kv_heads + kv_head;
    labels_[at] = static_cast<std::uint8_t>(label);
    const auto make = [&](const float* centre, float scale, std::byte* to) {
      const float* noise = noise_.data() + random.Below(places);
      for (int d = 0; d < head_dim; ++d) row[d] = centre[d] + scale * noise[d];
      EncodeRow(row, DType::kF16, head_dim, to);
    };
    make(KeyCentre(kv_head, label), kKeyNoise, k_.get() + static_cast<std::size_t>(at) * row_bytes);
    make(ValueCentre(kv_head, label), kValueNoise, v_.get() + static_cast<std::size_t>(at) * row_bytes);
  }
}

KvView SyntheticCache::View(std::int64_t n_kv) const {
  KvView kv;
  kv.k = k_.get();
  kv.v = v_.get();
  kv.k_type = kv.v_type = DType::kF16;
  kv.k_head_stride = kv.v_head_stride = static_cast<std::int64_t>(RowBytes(DType::kF16, shape_.head_dim));
  kv.k_row_stride = kv.v_row_stride = kv.k_head_stride * shape_.kv_heads;
  kv.n_kv = std::min(n_kv, n_rows_);
  return kv;
}

int SyntheticCache::CentreOfQuery(std::uint64_t index, int q_head) const {
  return static_cast<int>(Random(Derive(seed_, kQueryPurpose, index * kMaxQHeads + q_head)).Below(kCentres));
}

std::vector<float> SyntheticCache::Query(std::uint64_t index) const {
  const auto places = static_cast<std::uint32_t>(kNoiseTable) - static_cast<std::uint32_t>(shape_.head_dim);
  std::vector<float> q(static_cast<std::size_t>(shape_.q_heads) * shape_.head_dim);
  for (int h = 0; h < shape_.q_heads; ++h) {
    Random random(Derive(seed_, kQueryPurpose, index * kMaxQHeads + h));
    const float* centre = KeyCentre(h / shape_.group(), static_cast<int>(random.Below(kCentres)));
    const float* noise = noise_.data() + random.Below(places);
    float* to = q.data() + std::int64_t{h} * shape_.head_dim;
    for (int d = 0; d < shape_.head_dim; ++d) to[d] = Sharpness(h) * centre[d] + kQueryNoise * noise[d];
  }
  return q;
}

const float* SyntheticCache::KeyCentre(int kv_head, int centre) const {
  return centres_.data() + (std::int64_t{2} * kv_head * kCentres + centre) * shape_.head_dim;
}

const float* SyntheticCache::ValueCentre(int kv_head, int centre) const {
  return centres_.data() + ((std::int64_t{2} * kv_head + 1) * kCentres + centre) * shape_.head_dim;
}

float SyntheticCache::Sharpness(int q_head) const {
  const int group = shape_.group();
  const int place = group > 1 ? q_head % group : q_head;
  const int count = group > 1 ? group : shape_.q_heads;
  if (count == 1) return kMaxSharpness;
  return kMinSharpness + (kMaxSharpness - kMinSharpness) * static_cast<float>(place) / static_cast<float>(count - 1);
}

std::uint64_t SyntheticCache::Bytes(const Shape& shape, std::int64_t n_rows) {
  return static_cast<std::uint64_t>(n_rows) * shape.kv_heads * (2 * RowBytes(DType::kF16, shape.head_dim) + 1);
}

}  // namespace scsa::tool
