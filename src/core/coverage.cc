// SPDX-License-Identifier: Apache-2.0
#include "core/coverage.h"

#include <bit>

namespace scsa {
namespace {

bool AllVisible(const BlockPlan& plan, int block, const std::uint64_t* visible) {
  const int words_per_block = plan.block_rows() / 64;
  const std::int64_t begin = std::int64_t{block} * plan.block_rows();
  std::uint64_t all = ~std::uint64_t{0};
  for (int w = 0; w < words_per_block; ++w) {
    std::uint64_t word = visible[std::int64_t{block} * words_per_block + w];
    // The first block does not cover the first rows.
    const std::int64_t uncovered = plan.FirstRow(block) - (begin + std::int64_t{w} * 64);
    if (uncovered >= 64) {
      word = ~std::uint64_t{0};
    } else if (uncovered > 0) {
      word |= (std::uint64_t{1} << uncovered) - 1;
    }
    all &= word;
  }
  return all == ~std::uint64_t{0};
}

bool IsUsable(const BlockPlan& plan, int block, std::int64_t n_kv, const std::uint64_t* visible) {
  return plan.built(block) && plan.EndRow(block) <= n_kv && AllVisible(plan, block, visible);
}

}  // namespace

void Coverage::Find(const BlockPlan& plan, std::int64_t n_kv, const std::uint64_t* visible) {
  usable.assign(plan.n_blocks(), 0);
  int last = 0;
  for (int b = 0; b < plan.n_blocks(); ++b) {
    if (!IsUsable(plan, b, n_kv, visible)) continue;
    usable[b] = 1;
    last = b + 1;
  }
  usable.resize(last);

  exact_runs.clear();
  if (last > 0 && usable[0] != 0 && plan.FirstRow(0) > 0) exact_runs.emplace_back(0, plan.FirstRow(0));
  for (int b = 0; b < last;) {
    if (usable[b] != 0) {
      ++b;
      continue;
    }
    int end = b;
    while (end < last && usable[end] == 0) ++end;
    exact_runs.emplace_back(std::int64_t{b} * plan.block_rows(), std::int64_t{end} * plan.block_rows());
    b = end;
  }
  const std::int64_t covered = std::int64_t{last} * plan.block_rows();
  if (covered < n_kv) exact_runs.emplace_back(covered, n_kv);
}

bool HasUsableBlock(const BlockPlan& plan, std::int64_t n_kv, const std::uint64_t* visible) {
  for (int b = 0; b < plan.n_blocks(); ++b) {
    if (IsUsable(plan, b, n_kv, visible)) return true;
  }
  return false;
}

std::uint64_t CountVisible(const std::uint64_t* visible, std::int64_t first, std::int64_t end) {
  std::uint64_t count = 0;
  for (std::int64_t at = first; at < end; at += 64) {
    const std::int64_t n = end - at;
    const std::uint64_t mask = n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
    count += std::popcount(visible[at / 64] & mask);
  }
  return count;
}

}  // namespace scsa
