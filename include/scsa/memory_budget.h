// SPDX-License-Identifier: Apache-2.0
//
// A limit on the memory of plans, shared by any number of layers.
#pragma once

#include <cstdint>
#include <memory>

#include "scsa/status.h"

namespace scsa {

// Counts the blocks of its layers: clusters, summaries, packed rows and fingerprints. What does not fit is not built,
// and its rows are read exactly. Room is made by taking blocks away that are of little use:
//   1. blocks that no query has used for a while, the ones used longest ago first: of sequences that rest or are gone;
//   2. blocks most of whose rows are read anyway, since the operator opens their clusters (preset `fast`).
// Other blocks stay until their rows change: taking one away for another of equal use would only cost its building.
//
// Thread-safe. Layers that share a budget may be used by different threads at the same time.
class MemoryBudget {
 public:
  // kOutOfMemory.
  static Status Create(std::uint64_t limit, std::shared_ptr<MemoryBudget>* budget);
  ~MemoryBudget();
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  std::uint64_t limit() const;           // bytes
  std::uint64_t used() const;            // bytes, at most the limit
  std::uint64_t evicted_blocks() const;  // taken away, since it was made
  std::uint64_t refused_blocks() const;  // not built for lack of room, each once until it is built or dropped

  // The largest number is no limit: which blocks are of use is not noted then. Blocks beyond a lower limit are taken
  // away at once; where their layers are at work, with a later call of any layer.
  void SetLimit(std::uint64_t limit);

  class Impl;
  Impl& impl() { return *impl_; }

 private:
  explicit MemoryBudget(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace scsa
