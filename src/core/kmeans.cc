// SPDX-License-Identifier: Apache-2.0
#include "core/kmeans.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

#include "core/kernels.h"

namespace scsa {
namespace {

const std::byte* Bytes(const float* rows) { return reinterpret_cast<const std::byte*>(rows); }

class Splitter {
 public:
  Splitter(int head_dim, const KMeansParams& params, KMeansScratch& s)
      : head_dim_(head_dim), row_bytes_(std::int64_t{4} * head_dim), params_(params), s_(s) {}

  // Cuts rows [lo, hi) of s_.rows into `slots` runs and appends their ends to s_.bounds.
  void Split(int lo, int hi, int slots) {
    if (slots <= 1) {
      s_.bounds.push_back(hi);
      return;
    }
    const int left = slots / 2;
    const int mid = lo + static_cast<int>(static_cast<std::int64_t>(hi - lo) * left / slots);
    OrderByPrincipalDirection(lo, hi);
    Split(lo, mid, left);
    Split(mid, hi, slots - left);
  }

 private:
  float* Row(int i) { return s_.rows.data() + static_cast<std::size_t>(i) * head_dim_; }

  // weights[i] = direction . row i, for rows [lo, hi)
  void Project(int lo, int n, const float* direction) {
    ScoreRows(head_dim_, 1, direction, Bytes(Row(lo)), row_bytes_, DType::kF32, n, s_.weights.data(), n);
  }
  void WeightedSum(int lo, int n, float* sum) {
    std::fill_n(sum, head_dim_, 0.0f);
    AccumulateRows(head_dim_, 1, s_.weights.data(), n, Bytes(Row(lo)), row_bytes_, DType::kF32, n, sum);
  }

  void OrderByPrincipalDirection(int lo, int hi) {
    const int n = hi - lo;
    float* mean = s_.mean.data();
    float* direction = s_.direction.data();
    std::fill_n(s_.weights.data(), n, 1.0f / static_cast<float>(n));
    WeightedSum(lo, n, mean);

    Project(lo, n, mean);
    int farthest = 0;
    float longest = -1.0f;
    for (int i = 0; i < n; ++i) {
      const float distance = s_.norms[s_.order[lo + i]] - 2.0f * s_.weights[i];
      if (distance > longest || i == 0) {
        longest = distance;
        farthest = i;
      }
    }
    for (int d = 0; d < head_dim_; ++d) direction[d] = Row(lo + farthest)[d] - mean[d];

    for (int iteration = 0; iteration < params_.power_iterations; ++iteration) {
      Normalise(direction);
      Project(lo, n, direction);
      const float offset = Dot(mean, direction, head_dim_);
      float sum = 0.0f;
      for (int i = 0; i < n; ++i) {
        s_.weights[i] -= offset;
        sum += s_.weights[i];
      }
      WeightedSum(lo, n, direction);
      AddScaled(direction, mean, -sum, head_dim_);
    }
    Project(lo, n, direction);

    std::iota(s_.ranking.begin(), s_.ranking.begin() + n, std::uint16_t{0});
    std::sort(s_.ranking.begin(), s_.ranking.begin() + n, [&](std::uint16_t a, std::uint16_t b) {
      return s_.weights[a] != s_.weights[b] ? s_.weights[a] < s_.weights[b] : s_.order[lo + a] < s_.order[lo + b];
    });
    for (int i = 0; i < n; ++i) {
      std::copy_n(Row(lo + s_.ranking[i]), head_dim_, s_.swap.data() + static_cast<std::size_t>(i) * head_dim_);
      s_.order_swap[i] = s_.order[lo + s_.ranking[i]];
    }
    std::copy_n(s_.swap.data(), static_cast<std::size_t>(n) * head_dim_, Row(lo));
    std::copy_n(s_.order_swap.data(), n, s_.order.data() + lo);
  }

  void Normalise(float* direction) {
    const float norm = std::sqrt(Dot(direction, direction, head_dim_));
    if (norm <= 0.0f) return;
    for (int d = 0; d < head_dim_; ++d) direction[d] /= norm;
  }

  int head_dim_;
  std::int64_t row_bytes_;
  const KMeansParams& params_;
  KMeansScratch& s_;
};

// One round of Lloyd's algorithm: members and offsets in, members and offsets out.
void Reassign(const float* keys, int n, int head_dim, int slots, int max_cluster_size, KMeansScratch& s,
              std::uint16_t* members, std::uint16_t* offsets) {
  const std::int64_t row_bytes = std::int64_t{4} * head_dim;
  for (int c = 0; c < slots; ++c) {
    float* centroid = s.centroids.data() + static_cast<std::size_t>(c) * head_dim;
    std::fill_n(centroid, head_dim, 0.0f);
    const int count = offsets[c + 1] - offsets[c];
    for (int i = offsets[c]; i < offsets[c + 1]; ++i) {
      AddScaled(centroid, keys + static_cast<std::size_t>(members[i]) * head_dim, 1.0f / static_cast<float>(count),
                head_dim);
    }
    // An empty cluster attracts nobody.
    s.centroid_norms[c] = count > 0 ? Dot(centroid, centroid, head_dim) : std::numeric_limits<float>::infinity();
    s.fill[c] = 0;
  }
  ScoreRows(head_dim, slots, s.centroids.data(), Bytes(keys), row_bytes, DType::kF32, n, s.dots.data(), n);

  // Distances less the row's own norm. The slot loop is outside so that rows are the vector dimension.
  std::fill_n(s.best.data(), n, std::numeric_limits<float>::infinity());
  std::fill_n(s.slot_of.data(), n, std::uint16_t{0});
  for (int c = 0; c < slots; ++c) {
    const float norm = s.centroid_norms[c];
    float* dots = s.dots.data() + static_cast<std::size_t>(c) * n;
    for (int i = 0; i < n; ++i) {
      dots[i] = norm - 2.0f * dots[i];
      const bool nearer = dots[i] < s.best[i];
      s.best[i] = nearer ? dots[i] : s.best[i];
      s.slot_of[i] = nearer ? static_cast<std::uint16_t>(c) : s.slot_of[i];
    }
  }
  for (int i = 0; i < n; ++i) {
    if (s.fill[s.slot_of[i]] == max_cluster_size) {
      float nearest = std::numeric_limits<float>::infinity();
      for (int c = 0; c < slots; ++c) {
        const float distance = s.dots[static_cast<std::size_t>(c) * n + i];
        if (s.fill[c] < max_cluster_size && distance < nearest) {
          nearest = distance;
          s.slot_of[i] = static_cast<std::uint16_t>(c);
        }
      }
    }
    ++s.fill[s.slot_of[i]];
  }
  offsets[0] = 0;
  for (int c = 0; c < slots; ++c) offsets[c + 1] = static_cast<std::uint16_t>(offsets[c] + s.fill[c]);
  std::copy_n(offsets, slots, s.fill.data());
  for (int i = 0; i < n; ++i) members[s.fill[s.slot_of[i]]++] = static_cast<std::uint16_t>(i);
}

void Reserve(int n, int head_dim, int slots, KMeansScratch& s) {
  const std::size_t values = static_cast<std::size_t>(n) * head_dim;
  s.rows.resize(values);
  s.swap.resize(values);
  s.norms.resize(n);
  s.weights.resize(n);
  s.order.resize(n);
  s.order_swap.resize(n);
  s.ranking.resize(n);
  s.mean.resize(head_dim);
  s.direction.resize(head_dim);
  s.centroids.resize(static_cast<std::size_t>(slots) * head_dim);
  s.centroid_norms.resize(slots);
  s.dots.resize(static_cast<std::size_t>(slots) * n);
  s.best.resize(n);
  s.slot_of.resize(n);
  s.fill.resize(slots);
  s.bounds.clear();
}

}  // namespace

void PrincipalKMeans(const float* keys, int n, int head_dim, const KMeansParams& params, KMeansScratch& scratch,
                     std::uint16_t* members, std::uint16_t* offsets) {
  const int slots = KMeansSlots(n, params.cluster_size);
  Reserve(n, head_dim, slots, scratch);
  std::copy_n(keys, static_cast<std::size_t>(n) * head_dim, scratch.rows.data());
  std::iota(scratch.order.begin(), scratch.order.end(), std::uint16_t{0});
  for (int i = 0; i < n; ++i) {
    const float* key = keys + static_cast<std::size_t>(i) * head_dim;
    scratch.norms[i] = Dot(key, key, head_dim);
  }
  Splitter(head_dim, params, scratch).Split(0, n, slots);
  offsets[0] = 0;
  for (int c = 0; c < slots; ++c) {
    offsets[c + 1] = static_cast<std::uint16_t>(scratch.bounds[c]);
    std::sort(scratch.order.begin() + offsets[c], scratch.order.begin() + offsets[c + 1]);
  }
  std::copy_n(scratch.order.data(), n, members);
  for (int round = 0; round < params.rounds; ++round) {
    Reassign(keys, n, head_dim, slots, params.max_cluster_size, scratch, members, offsets);
  }
}

}  // namespace scsa
