// SPDX-License-Identifier: Apache-2.0
//
// What reading, writing and comparing thresholds share: the parameters that belong to a file of them.
#pragma once

#include "scsa/config.h"

namespace scsa {

// Absent in a file whose thresholds are for flat selection, as all were once.
inline constexpr const char* kSelectionKey = "selection";

// Visits the members of `config` (a Config, const or not) on which thresholds of its preset depend, as
// visitor(name, member). This is the list: a parameter that changes what a threshold means belongs here, and
// kTausVersion is raised with it.
template <typename ConfigType, typename Visitor>
void VisitTausConfig(ConfigType& config, Visitor visitor) {
  visitor("cluster_size", config.cluster_size);
  visitor("block_size", config.block_size);
  visitor("sink", config.sink);
  visitor("recent", config.recent);
  visitor("packed_format", config.packed_format);
  visitor("power_iterations", config.power_iterations);
  visitor("statistic", config.statistic);
  if (config.preset == Preset::kFast) {
    visitor("kmeans_rounds", config.kmeans_rounds);
    visitor("tail_shrink", config.tail_shrink);
  } else {
    visitor("rebuild_interval", config.rebuild_interval);
    visitor("rank", config.rank);
  }
  visitor(kSelectionKey, config.selection);
}

// Values of the enumerations among them, in the order of their enumerators. Thresholds are for flat or for hierarchical
// selection, never for an automatic one.
inline constexpr const char* kPackedFormatNames[] = {"q8_0", "f16", "none", "int8"};
inline constexpr const char* kStatisticNames[] = {"median", "mean"};
inline constexpr const char* kSelectionNames[] = {"flat", "hierarchical", "automatic"};

}  // namespace scsa
