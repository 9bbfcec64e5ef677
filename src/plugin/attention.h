// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plugin/cpu_backend.h"
#include "plugin/ggml_compat.h"
#include "scsa/exact.h"
#include "scsa/plugin.h"

namespace scsa::plugin {

// What one backend instance (one llama.cpp context) keeps between nodes. Used by one thread at a time.
struct BackendState {
  int n_threads = GGML_DEFAULT_N_THREADS;
  Workspace workspace;
  std::vector<std::uint64_t> visible;
  CpuBackend cpu;                   // for nodes that must be left to ggml after all
  std::vector<ggml_tensor*> nodes;  // of a whole graph: those that wait for it
};

// Computes a claimed FLASH_ATTN_EXT node.
ggml_status ComputeAttention(BackendState& state, ggml_tensor* node);

void SetObserver(scsa_plugin_observer_t observer, void* user);

}  // namespace scsa::plugin
