// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of a BlockPlan serve a query row, and which rows are left to be attended exactly.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/block_plan.h"

namespace scsa {

struct Coverage {
  // usable[b] is 1 where block b is built and all its rows are visible. Ends with the last usable block.
  std::vector<std::uint8_t> usable;
  // [first row, end row) of the rest up to n_kv, ascending; starts are multiples of 64. Invisible rows among them are
  // left to the visibility bitmap.
  std::vector<std::pair<std::int64_t, std::int64_t>> exact_runs;

  int n_blocks() const { return static_cast<int>(usable.size()); }

  // visible: bitmap of n_kv rows. Throws std::bad_alloc.
  void Find(const BlockPlan& plan, std::int64_t n_kv, const std::uint64_t* visible);
};

// Whether the plan has a block that serves the query row: built, with every covered row visible.
bool HasUsableBlock(const BlockPlan& plan, std::int64_t n_kv, const std::uint64_t* visible);

// Visible rows of [first, end), first a multiple of 64.
std::uint64_t CountVisible(const std::uint64_t* visible, std::int64_t first, std::int64_t end);

}  // namespace scsa
