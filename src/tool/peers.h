// SPDX-License-Identifier: Apache-2.0
//
// The selection rules of other methods, for comparison at equal bytes: which cached rows of one KV head a decode step
// reads. Rows that a rule leaves out count for nothing. docs/quality.md says what each rule is.
//
// Common to all: rows are f16 (a key row and a value row cost RowBytesOf(head_dim) together), the query heads of the KV
// head share one set of rows, `budget` is in bytes, and at least one row is read. Selected rows are ascending.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace scsa::tool {

struct Selection {
  std::vector<std::int64_t> rows;
  std::int64_t bytes = 0;  // of the rows and of what was read to find them
};

// Bytes of one cached row: f16 key and value.
std::int64_t RowBytesOf(int head_dim);

// StreamingLLM: the first `kStreamingSinks` of the n rows and the most recent ones, as many as the budget pays for.
inline constexpr int kStreamingSinks = 4;
Selection SelectStreaming(std::int64_t n, int head_dim, std::int64_t budget);

// The best that dropping rows can do with the number of rows that the budget pays for, by an oracle that knows the
// softmax weights: the rows with the largest sum of weights over the query heads. Finding them costs no bytes.
// weights: [group][n].
Selection SelectTopK(std::span<const float> weights, std::int64_t n, int head_dim, std::int64_t budget);

// softmax(scale * q k^T) of each query head. q: [group][head_dim], k: [n][head_dim]. Returns [group][n].
std::vector<float> SoftmaxWeights(std::span<const float> q, std::span<const float> k, int head_dim, float scale);

// Quest: pages of 16 rows, each with the minimum and the maximum of its keys per channel, in f16.
class QuestPages {
 public:
  static constexpr int kPageRows = 16;

  // k: [rows][head_dim], all rows that will ever be cached.
  QuestPages(std::span<const float> k, int head_dim);

  // Of the first n rows: the first page, which holds the attention sinks, the last page, which may be incomplete, and
  // of the others those with the highest upper bound sum_d max(q_d min_d, q_d max_d) of a logit, summed over the query
  // heads, lower page first among equals: as many as the budget pays for once the minima and maxima of all pages in
  // between are read. q: [group][head_dim].
  Selection Select(std::span<const float> q, std::int64_t n, std::int64_t budget) const;

 private:
  float UpperBound(const float* q, std::int64_t page) const;

  int head_dim_;
  std::vector<float> min_;  // [pages][head_dim]
  std::vector<float> max_;
};

}  // namespace scsa::tool
