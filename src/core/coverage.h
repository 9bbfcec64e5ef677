// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of a BlockPlan serve a query row, and which rows are left to be attended exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/block_plan.h"

namespace scsa {

// Of one plan, for as long as both live.
struct Coverage {
  // usable[b] is 1 where block b is built and all its rows are visible. Ends with the last usable block.
  std::vector<std::uint8_t> usable;
  std::uint64_t usable_blocks = 0;
  std::uint64_t usable_rows = 0;
  // [first row, end row) of the rest up to n_kv, ascending; starts are multiples of 64. Invisible rows among them are
  // left to the visibility bitmap.
  std::vector<std::pair<std::int64_t, std::int64_t>> exact_runs;

  int n_blocks() const { return static_cast<int>(usable.size()); }

  // visible: bitmap of n_kv rows, nullptr: all of them are. Where neither the plan nor what its blocks see of the
  // bitmap has changed since the last call, as in most steps of decoding, only the end of the exact runs is found anew.
  // Throws std::bad_alloc.
  void Find(const BlockPlan& plan, std::int64_t n_kv, const std::uint64_t* visible);

 private:
  void FindBlocks(const BlockPlan& plan, const std::uint64_t* visible);

  // What the blocks were found by: how many of them are addressable, BlockPlan::changes(), and the bitmap of their
  // rows.
  int addressable_ = 0;
  std::uint64_t changes_ = 0;
  std::vector<std::uint64_t> words_;
  bool sees_all_ = false;       // without a bitmap
  std::size_t inner_runs_ = 0;  // exact runs before the last usable block ends
  bool found_ = false;
};

// Whether the plan has a block that serves the query row: built, with every covered row visible.
bool HasUsableBlock(const BlockPlan& plan, std::int64_t n_kv, const std::uint64_t* visible);

// Visible rows of [first, end), first a multiple of 64.
std::uint64_t CountVisible(const std::uint64_t* visible, std::int64_t first, std::int64_t end);

}  // namespace scsa
