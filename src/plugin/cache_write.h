// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "plugin/ggml_compat.h"

namespace scsa::plugin {

// Computes a claimed SET_ROWS node: the same bits as ggml-cpu writes. Layers learn which cells change. Takes no memory.
ggml_status ComputeCacheWrite(const ggml_tensor* node, int n_threads);

}  // namespace scsa::plugin
