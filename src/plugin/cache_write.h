// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plugin/ggml_compat.h"

namespace scsa::plugin {

// Computes a claimed SET_ROWS node: the same bits as ggml-cpu writes. Layers learn which cells change.
// `rows` is scratch memory, kept by the caller.
ggml_status ComputeCacheWrite(const ggml_tensor* node, int n_threads, std::vector<std::int64_t>& rows);

}  // namespace scsa::plugin
