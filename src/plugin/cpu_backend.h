// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "plugin/ggml_compat.h"

namespace scsa::plugin {

// ggml's CPU backend, for nodes that the plugin does not compute itself. Made when it is first needed; used by one
// thread at a time.
class CpuBackend {
 public:
  CpuBackend() = default;
  CpuBackend(const CpuBackend&) = delete;
  CpuBackend& operator=(const CpuBackend&) = delete;
  ~CpuBackend();

  // Computes nodes of a graph, in their order.
  ggml_status Compute(std::span<ggml_tensor* const> nodes, int n_threads);

 private:
  ggml_backend_t backend_ = nullptr;
  ggml_backend_set_n_threads_t set_threads_ = nullptr;
};

}  // namespace scsa::plugin
