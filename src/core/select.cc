// SPDX-License-Identifier: Apache-2.0
#include "core/select.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace scsa {
namespace {

const std::byte* Bytes(const std::vector<float>& v) { return reinterpret_cast<const std::byte*>(v.data()); }

}  // namespace

void EstimateBlock(const Block& block, int head_dim, int rank, int group, const float* qs, const float* qs_squared,
                   const Estimates& out, float* scratch) {
  const int n = block.n_clusters;
  const std::int64_t row = std::int64_t{head_dim} * static_cast<std::int64_t>(sizeof(float));
  float* along = scratch;                                                  // [group][n * rank]
  float* diagonal = scratch + static_cast<std::size_t>(group) * n * rank;  // [group][n]
  ScoreRows(head_dim, group, qs, Bytes(block.centroids), row, DType::kF32, n, out.log_tail, out.stride);
  if (rank > 0) {
    ScoreRows(head_dim, group, qs, Bytes(block.directions), row, DType::kF32, std::int64_t{n} * rank, along,
              std::int64_t{n} * rank);
  }
  ScoreRows(head_dim, group, qs_squared, Bytes(block.residuals), row, DType::kF32, n, diagonal, n);
  for (int h = 0; h < group; ++h) {
    float* log_tail = out.log_tail + h * out.stride;
    float* priority = out.priority + h * out.stride;
    for (int c = 0; c < n; ++c) {
      float variance = diagonal[std::int64_t{h} * n + c];
      for (int j = 0; j < rank; ++j) {
        const float x = along[(std::int64_t{h} * n + c) * rank + j];
        variance += x * x;
      }
      log_tail[c] += block.log_counts[c];
      priority[c] = log_tail[c] + 0.5f * variance;
    }
  }
}

void OpenBestFirst(const float* priority, const float* log_tail, int n, double log_exact_mass,
                   std::span<const float> taus, std::int32_t* order, double* mass, std::span<std::int32_t> counts) {
  std::iota(order, order + n, 0);
  double gauge = log_exact_mass;
  bool finite = log_exact_mass < std::numeric_limits<double>::infinity();
  for (int c = 0; c < n; ++c) {
    finite = finite && std::isfinite(priority[c]);
    gauge = std::max(gauge, static_cast<double>(priority[c]));
  }
  if (!finite || n == 0) {
    std::ranges::fill(counts, n);
    return;
  }
  double closed = 0;
  for (int c = 0; c < n; ++c) {
    mass[c] = std::exp(priority[c] - gauge);
    closed += mass[c];
  }
  double captured = std::exp(log_exact_mass - gauge);

  // A heap, since a head mostly opens a small part: O(n + opened log n).
  const auto worse = [priority](std::int32_t a, std::int32_t b) {
    return priority[a] != priority[b] ? priority[a] < priority[b] : a > b;
  };
  std::make_heap(order, order + n, worse);
  int opened = 0;
  for (std::size_t t = 0; t < taus.size(); ++t) {
    while (opened < n && !(closed / (closed + captured) < taus[t])) {
      std::pop_heap(order, order + n - opened, worse);
      // The subtraction leaves rounding where nothing is left; a fraction is never negative.
      const std::int32_t c = order[n - opened - 1];
      closed = std::max(0.0, closed - mass[c]);
      captured += std::exp(log_tail[c] - gauge);
      ++opened;
    }
    counts[t] = opened;
  }
  std::reverse(order, order + n);
}

void FoldTail(std::span<const Region> regions, int kv_head, int head_dim, int head, const float* log_tail,
              const HeadSet* opened, const SoftmaxState& state) {
  float gauge = -std::numeric_limits<float>::infinity();
  std::int64_t at = 0;
  for (const Region& region : regions) {
    const Block& block = region.heads[kv_head];
    for (int c = 0; c < block.n_clusters; ++c) {
      if (!opened[at + c].test(head)) gauge = std::max(gauge, log_tail[at + c]);
    }
    at += block.n_clusters;
  }
  if (gauge == -std::numeric_limits<float>::infinity()) return;
  double sum = 0;
  at = 0;
  for (const Region& region : regions) {
    const Block& block = region.heads[kv_head];
    for (int c = 0; c < block.n_clusters; ++c) {
      if (opened[at + c].test(head)) continue;
      const float weight = std::exp(log_tail[at + c] - gauge);
      sum += weight;
      AddScaled(state.num, block.value_means.data() + std::int64_t{c} * head_dim, weight, head_dim);
    }
    at += block.n_clusters;
  }
  state.max[0] = gauge;
  state.sum[0] = static_cast<float>(sum);
}

}  // namespace scsa
