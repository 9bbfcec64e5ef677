// SPDX-License-Identifier: Apache-2.0
//
// What sparse answers read of each layer and KV head of a model, kept beyond the contexts that they belong to.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "scsa/layer.h"

namespace scsa::plugin {

// Thread-safe.
class ReadsLog {
 public:
  // Never destroyed: threads of the program may still compute while it exits.
  static ReadsLog& Get();

  // Adds `now` less `before`, the totals of one operator, one per KV head. layer: of the model, -1 where that is not
  // known. Throws std::bad_alloc.
  void Add(int layer, std::span<const HeadReads> now, std::span<const HeadReads> before);
  // Totals per KV head since load; empty for a layer that has none. Throws std::bad_alloc.
  std::vector<HeadReads> Totals(int layer) const;

 private:
  mutable std::mutex mutex_;
  std::map<int, std::vector<HeadReads>> layers_;
};

}  // namespace scsa::plugin
