// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plugin/ggml_compat.h"
#include "scsa/exact.h"
#include "scsa/plugin.h"

namespace scsa::plugin {

// What one backend instance (one llama.cpp context) keeps between nodes. Used by one thread at a time.
struct BackendState {
  BackendState() = default;
  BackendState(const BackendState&) = delete;
  BackendState& operator=(const BackendState&) = delete;
  ~BackendState();

  int n_threads = GGML_DEFAULT_N_THREADS;
  Workspace workspace;
  std::vector<std::uint64_t> visible;
  ggml_backend_t cpu = nullptr;  // made when a node must be left to ggml after all
};

// Computes a claimed FLASH_ATTN_EXT node.
ggml_status ComputeAttention(BackendState& state, ggml_tensor* node);

void SetObserver(scsa_plugin_observer_t observer, void* user);

}  // namespace scsa::plugin
