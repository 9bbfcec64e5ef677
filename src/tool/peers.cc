// SPDX-License-Identifier: Apache-2.0
#include "peers.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "scsa/types.h"

namespace scsa::tool {
namespace {

float Dot(const float* a, const float* b, int n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Indices of the `count` largest scores, the lower index first among equals; ascending.
std::vector<std::int64_t> Largest(std::span<const float> scores, std::int64_t count) {
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  if (count < static_cast<std::int64_t>(order.size())) {
    std::nth_element(order.begin(), order.begin() + count, order.end(), [&](std::int64_t a, std::int64_t b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    });
    order.resize(count);
    std::sort(order.begin(), order.end());
  }
  return order;
}

std::int64_t RowsFor(std::int64_t budget, int head_dim, std::int64_t n) {
  return std::clamp<std::int64_t>(budget / RowBytesOf(head_dim), 1, n);
}

}  // namespace

std::int64_t RowBytesOf(int head_dim) { return 2 * static_cast<std::int64_t>(RowBytes(DType::kF16, head_dim)); }

Selection SelectStreaming(std::int64_t n, int head_dim, std::int64_t budget) {
  const std::int64_t count = RowsFor(budget, head_dim, n);
  // The step's own row is the most recent one: it comes before the sinks where the budget is that small.
  const std::int64_t sinks = std::min<std::int64_t>(kStreamingSinks, count - 1);
  Selection selection;
  for (std::int64_t r = 0; r < sinks; ++r) selection.rows.push_back(r);
  for (std::int64_t r = n - (count - sinks); r < n; ++r) selection.rows.push_back(r);
  selection.bytes = count * RowBytesOf(head_dim);
  return selection;
}

Selection SelectTopK(std::span<const float> weights, std::int64_t n, int head_dim, std::int64_t budget) {
  std::vector<float> sums(weights.begin(), weights.begin() + n);
  for (std::size_t begin = n; begin < weights.size(); begin += n) {
    for (std::int64_t r = 0; r < n; ++r) sums[r] += weights[begin + r];
  }
  Selection selection;
  selection.rows = Largest(sums, RowsFor(budget, head_dim, n));
  selection.bytes = static_cast<std::int64_t>(selection.rows.size()) * RowBytesOf(head_dim);
  return selection;
}

std::vector<float> SoftmaxWeights(std::span<const float> q, std::span<const float> k, int head_dim, float scale) {
  const std::size_t n = k.size() / head_dim;
  std::vector<float> weights(q.size() / head_dim * n);
  for (std::size_t begin = 0, head = 0; begin < weights.size(); begin += n, ++head) {
    const auto row = weights.begin() + static_cast<std::ptrdiff_t>(begin);
    for (std::size_t r = 0; r < n; ++r) {
      row[r] = scale * Dot(q.data() + head * head_dim, k.data() + r * head_dim, head_dim);
    }
    const float max = *std::max_element(row, row + n);
    double sum = 0.0;
    for (std::size_t r = 0; r < n; ++r) sum += row[r] = std::exp(row[r] - max);
    for (std::size_t r = 0; r < n; ++r) row[r] = static_cast<float>(row[r] / sum);
  }
  return weights;
}

QuestPages::QuestPages(std::span<const float> k, int head_dim) : head_dim_(head_dim) {
  const std::size_t page_values = static_cast<std::size_t>(kPageRows) * head_dim;
  const std::size_t pages = k.size() / page_values;  // an incomplete one is always the last: read without a score
  min_.resize(pages * head_dim);
  max_.resize(pages * head_dim);
  for (std::size_t page = 0; page < pages; ++page) {
    for (int d = 0; d < head_dim; ++d) {
      float low = k[page * page_values + d];
      float high = low;
      for (int r = 1; r < kPageRows; ++r) {
        const float value = k[page * page_values + r * head_dim + d];
        low = std::min(low, value);
        high = std::max(high, value);
      }
      min_[page * head_dim + d] = low;
      max_[page * head_dim + d] = high;
    }
  }
}

float QuestPages::UpperBound(const float* q, std::int64_t page) const {
  const float* low = min_.data() + page * head_dim_;
  const float* high = max_.data() + page * head_dim_;
  float bound = 0.0f;
#pragma omp simd reduction(+ : bound)
  for (int d = 0; d < head_dim_; ++d) bound += std::max(q[d] * low[d], q[d] * high[d]);
  return bound;
}

Selection QuestPages::Select(std::span<const float> q, std::int64_t n, std::int64_t budget) const {
  const std::int64_t last = (n - 1) / kPageRows;
  const std::int64_t scored = std::max<std::int64_t>(last - 1, 0);  // pages 1 ... last - 1
  const std::int64_t row_bytes = RowBytesOf(head_dim_);
  const std::int64_t page_bytes = kPageRows * row_bytes;
  const std::int64_t summary_bytes = 2 * static_cast<std::int64_t>(RowBytes(DType::kF16, head_dim_));
  const std::int64_t fixed_bytes =
      scored * summary_bytes + (last > 0 ? page_bytes : 0) + (n - last * kPageRows) * row_bytes;
  const std::int64_t count = std::clamp<std::int64_t>((budget - fixed_bytes) / page_bytes, 0, scored);

  std::vector<float> scores(scored);
  for (std::int64_t i = 0; i < scored; ++i) {
    for (std::size_t begin = 0; begin < q.size(); begin += head_dim_) scores[i] += UpperBound(q.data() + begin, i + 1);
  }
  Selection selection;
  const auto add_rows = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) selection.rows.push_back(r);
  };
  if (last > 0) add_rows(0, kPageRows);
  for (const std::int64_t i : Largest(scores, count)) add_rows((i + 1) * kPageRows, (i + 2) * kPageRows);
  add_rows(last * kPageRows, n);
  selection.bytes = fixed_bytes + count * page_bytes;
  return selection;
}

}  // namespace scsa::tool
