// SPDX-License-Identifier: Apache-2.0
#include "core/coverage.h"

#include <algorithm>
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

// Those of the first addressable_ blocks that are usable, and the exact runs before the last of them ends.
void Coverage::FindBlocks(const BlockPlan& plan, const std::uint64_t* visible) {
  usable.assign(static_cast<std::size_t>(addressable_), 0);
  usable_blocks = 0;
  usable_rows = 0;
  exact_runs.clear();
  std::int64_t covered = 0;  // end of the last usable block
  int last = 0;
  for (int b = 0; b < addressable_; ++b) {
    if (!plan.built(b) || (visible != nullptr && !AllVisible(plan, b, visible))) continue;
    // The first block begins behind rows that are always exact.
    if (covered < plan.FirstRow(b)) exact_runs.emplace_back(covered, plan.FirstRow(b));
    usable[static_cast<std::size_t>(b)] = 1;
    ++usable_blocks;
    usable_rows += static_cast<std::uint64_t>(plan.EndRow(b) - plan.FirstRow(b));
    covered = plan.EndRow(b);
    last = b + 1;
  }
  usable.resize(static_cast<std::size_t>(last));
}

void Coverage::Find(const BlockPlan& plan, std::int64_t n_kv, const std::uint64_t* visible) {
  const auto addressable = static_cast<int>(std::min<std::int64_t>(n_kv / plan.block_rows(), plan.n_blocks()));
  const bool sees_all = visible == nullptr;
  if (found_ && addressable == addressable_ && plan.changes() == changes_ && sees_all == sees_all_ &&
      (sees_all || std::equal(words_.begin(), words_.end(), visible))) {
    exact_runs.resize(inner_runs_);
  } else {
    found_ = false;
    addressable_ = addressable;
    changes_ = plan.changes();
    sees_all_ = sees_all;
    words_.assign(visible, sees_all ? visible : visible + std::int64_t{addressable} * plan.block_rows() / 64);
    FindBlocks(plan, visible);
    inner_runs_ = exact_runs.size();
    found_ = true;
  }
  const std::int64_t covered = std::int64_t{n_blocks()} * plan.block_rows();
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
