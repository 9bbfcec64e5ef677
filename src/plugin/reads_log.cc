// SPDX-License-Identifier: Apache-2.0
#include "plugin/reads_log.h"

#include <algorithm>

#include "plugin/immortal.h"

namespace scsa::plugin {

ReadsLog& ReadsLog::Get() { return Immortal<ReadsLog>(); }

void ReadsLog::Add(int layer, std::span<const HeadReads> now, std::span<const HeadReads> before) {
  const std::lock_guard lock(mutex_);
  std::vector<HeadReads>& totals = layers_[layer];
  totals.resize(std::max(totals.size(), now.size()));
  for (std::size_t h = 0; h < now.size(); ++h) {
    totals[h].Add({.rows_read = now[h].rows_read - before[h].rows_read,
                   .rows_visible = now[h].rows_visible - before[h].rows_visible,
                   .bytes_read = now[h].bytes_read - before[h].bytes_read});
  }
}

std::vector<HeadReads> ReadsLog::Totals(int layer) const {
  const std::lock_guard lock(mutex_);
  const auto found = layers_.find(layer);
  return found == layers_.end() ? std::vector<HeadReads>() : found->second;
}

}  // namespace scsa::plugin
