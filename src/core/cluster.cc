// SPDX-License-Identifier: Apache-2.0
#include "core/cluster.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/kernels.h"

namespace scsa {
namespace {

// State of one recursive split. Sets are ranges of `members`, always ascending inside, which keeps the passes over the
// keys in memory order and makes every sum independent of how the standard library orders a partial sort.
class Splitter {
 public:
  Splitter(const float* keys, std::int64_t n, int head_dim, int cluster_size, Partition* out)
      : keys_(keys),
        head_dim_(head_dim),
        cluster_size_(cluster_size),
        out_(out),
        mean_(head_dim),
        direction_(head_dim) {
    out_->members.resize(n);
    std::iota(out_->members.begin(), out_->members.end(), 0);
    order_.resize(n);
    sorted_.resize(n);
    upper_.resize(n);
    out_->offsets.push_back(0);
  }

  void Split(std::int64_t begin, std::int64_t end) {
    const std::int64_t m = end - begin;
    if (m <= cluster_size_) {
      out_->offsets.push_back(static_cast<std::int32_t>(end));
      return;
    }
    const std::int64_t half = m / 2;
    Halve(out_->members.data() + begin, m, half);
    Split(begin, begin + half);
    Split(begin + half, end);
  }

 private:
  using Ranked = std::pair<float, std::int32_t>;  // projection, row

  const float* Key(std::int32_t row) const { return keys_ + std::int64_t{row} * head_dim_; }

  void Halve(std::int32_t* members, std::int64_t m, std::int64_t half) {
    std::fill(mean_.begin(), mean_.end(), 0.0f);
    for (std::int64_t i = 0; i < m; ++i) AddScaled(mean_.data(), Key(members[i]), 1.0f, head_dim_);
    for (float& x : mean_) x /= static_cast<float>(m);

    std::int32_t farthest = members[0];
    float longest = -1.0f;
    for (std::int64_t i = 0; i < m; ++i) {
      const float distance = SquaredDistance(Key(members[i]), mean_.data(), head_dim_);
      if (distance > longest) {
        longest = distance;
        farthest = members[i];
      }
    }
    for (int d = 0; d < head_dim_; ++d) direction_[d] = Key(farthest)[d] - mean_[d];

    for (std::int64_t i = 0; i < m; ++i) {
      order_[i] = {Dot(direction_.data(), Key(members[i]), head_dim_), members[i]};
    }
    std::copy(order_.begin(), order_.begin() + m, sorted_.begin());
    std::nth_element(sorted_.begin(), sorted_.begin() + half, sorted_.begin() + m);
    const Ranked pivot = sorted_[half];
    std::int64_t lower = 0;
    std::int64_t upper = 0;
    for (std::int64_t i = 0; i < m; ++i) {
      if (order_[i] < pivot) {
        members[lower++] = order_[i].second;
      } else {
        upper_[upper++] = order_[i].second;
      }
    }
    std::copy(upper_.begin(), upper_.begin() + upper, members + lower);
  }

  const float* keys_;
  const int head_dim_;
  const int cluster_size_;
  Partition* out_;
  std::vector<float> mean_;
  std::vector<float> direction_;
  std::vector<Ranked> order_;
  std::vector<Ranked> sorted_;
  std::vector<std::int32_t> upper_;
};

using Units = std::vector<std::vector<float>>;

void ProjectOut(const Units& units, int head_dim, float* x) {
  for (const std::vector<float>& u : units) AddScaled(x, u.data(), -Dot(x, u.data(), head_dim), head_dim);
}

// Scales x to unit length; false where it has none.
bool Normalise(float* x, int head_dim) {
  const float squared = Dot(x, x, head_dim);
  if (!(squared > 0)) return false;
  const float factor = 1.0f / std::sqrt(squared);
  if (!std::isfinite(factor)) return false;
  for (int d = 0; d < head_dim; ++d) x[d] *= factor;
  return true;
}

// The unit vector along the part of x that is orthogonal to `units`; false where nothing is left. Projected twice:
// where little is left, the rounding of the first projection is not orthogonal.
bool UnitInComplement(const Units& units, int head_dim, float* x) {
  for (int pass = 0; pass < 2; ++pass) {
    ProjectOut(units, head_dim, x);
    if (!Normalise(x, head_dim)) return false;
  }
  return true;
}

// Squared length, relative to that of the longest deviation, below which what deflation leaves is rounding in f32 (and
// its share of the variance nothing that a priority could feel).
constexpr float kVanished = 1e-5f;

}  // namespace

Partition SplitFarthestDirection(const float* keys, std::int64_t n, int head_dim, int cluster_size) {
  Partition out;
  Splitter(keys, n, head_dim, cluster_size, &out).Split(0, n);
  return out;
}

void ClusterMoments(const float* keys, std::span<const std::int32_t> members, int head_dim, int rank,
                    int power_iterations, MomentScratch& scratch, float* centroid, float* directions, float* residual) {
  const std::int64_t m = std::ssize(members);
  const float inverse = 1.0f / static_cast<float>(m);
  std::fill(centroid, centroid + head_dim, 0.0f);
  for (const std::int32_t row : members) AddScaled(centroid, keys + std::int64_t{row} * head_dim, 1.0f, head_dim);
  for (int d = 0; d < head_dim; ++d) centroid[d] *= inverse;

  scratch.centred.resize(m * head_dim);
  scratch.projections.resize(m);
  std::fill(residual, residual + head_dim, 0.0f);
  for (std::int64_t i = 0; i < m; ++i) {
    const float* key = keys + std::int64_t{members[i]} * head_dim;
    float* x = scratch.centred.data() + i * head_dim;
    for (int d = 0; d < head_dim; ++d) {
      x[d] = key[d] - centroid[d];
      residual[d] += x[d] * x[d];
    }
  }
  for (int d = 0; d < head_dim; ++d) residual[d] *= inverse;

  scratch.vector.resize(std::size_t{2} * head_dim);
  float* unit = scratch.vector.data();
  float* image = unit + head_dim;
  Units units;
  float longest_of_all = 0;
  std::fill(directions, directions + std::int64_t{rank} * head_dim, 0.0f);
  for (int j = 0; j < rank; ++j) {
    float longest = -1.0f;
    for (std::int64_t i = 0; i < m; ++i) {
      const float* x = scratch.centred.data() + i * head_dim;
      float squared = Dot(x, x, head_dim);
      for (const std::vector<float>& u : units) {
        const float along = Dot(x, u.data(), head_dim);
        squared -= along * along;
      }
      if (squared > longest) {
        longest = squared;
        std::copy(x, x + head_dim, unit);
      }
    }
    if (j == 0) longest_of_all = longest;
    if (!(longest > kVanished * longest_of_all) || !UnitInComplement(units, head_dim, unit)) break;
    float lambda = 0.0f;
    for (int step = 0; step <= power_iterations; ++step) {
      for (std::int64_t i = 0; i < m; ++i) {
        scratch.projections[i] = Dot(scratch.centred.data() + i * head_dim, unit, head_dim);
      }
      // Rayleigh quotient u^T C u of the present unit vector; after the last iteration nothing else is needed.
      lambda = Dot(scratch.projections.data(), scratch.projections.data(), m) * inverse;
      if (step == power_iterations) break;
      std::fill(image, image + head_dim, 0.0f);
      for (std::int64_t i = 0; i < m; ++i) {
        AddScaled(image, scratch.centred.data() + i * head_dim, scratch.projections[i] * inverse, head_dim);
      }
      if (!UnitInComplement(units, head_dim, image)) break;
      std::copy(image, image + head_dim, unit);
    }
    const float length = std::sqrt(lambda);
    for (int d = 0; d < head_dim; ++d) {
      directions[std::int64_t{j} * head_dim + d] = length * unit[d];
      residual[d] = residual[d] - lambda * unit[d] * unit[d];
    }
    units.emplace_back(unit, unit + head_dim);
  }
  // Clamped once at the end: a later pair may not use up what an earlier one overshot.
  for (int d = 0; d < head_dim; ++d) residual[d] = std::max(0.0f, residual[d]);
}

}  // namespace scsa
