// SPDX-License-Identifier: Apache-2.0
//
// Which nodes the plugin takes. The scheduler asks when it builds a graph, several times per node, and keeps the answer
// while the graph is reused: what changes from step to step is decided when the node is computed.
#pragma once

#include "plugin/ggml_compat.h"

namespace scsa::plugin {

// Cached rows (as the node addresses them, padded) below which ggml's own attention is as fast, so that splitting the
// graph does not pay. docs/plugin.md says how it was measured.
inline constexpr std::int64_t kMinCachedRows = 512;

bool ClaimsNode(const ggml_tensor* node);

}  // namespace scsa::plugin
