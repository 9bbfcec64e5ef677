// SPDX-License-Identifier: Apache-2.0
#include "plugin/cpu_backend.h"

#include "plugin/stats.h"

namespace scsa::plugin {

CpuBackend::~CpuBackend() {
  if (backend_ != nullptr) Ggml().backend_free(backend_);
}

ggml_status CpuBackend::Compute(std::span<ggml_tensor* const> nodes, int n_threads) {
  const GgmlApi& ggml = Ggml();
  if (backend_ == nullptr) {
    ggml_backend_dev_t device = ggml.dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device != nullptr) {
      backend_ = ggml.dev_init(device, nullptr);
      set_threads_ = reinterpret_cast<ggml_backend_set_n_threads_t>(
          ggml.reg_get_proc_address(device->reg, "ggml_backend_set_n_threads"));
    }
  }
  const std::size_t bytes = ggml.graph_overhead_custom(nodes.size(), false);
  ggml_context* context = backend_ == nullptr ? nullptr : ggml.init({bytes, nullptr, true});
  if (context == nullptr) {
    LogOnce({"operations could not be handed to ggml's CPU backend"});
    return GGML_STATUS_FAILED;
  }
  if (set_threads_ != nullptr) set_threads_(backend_, n_threads);
  ggml_cgraph* graph = ggml.new_graph_custom(context, nodes.size(), false);
  for (ggml_tensor* node : nodes) ggml.graph_add_node(graph, node);
  const ggml_status status = ggml.graph_compute(backend_, graph);
  ggml.free(context);
  return status;
}

}  // namespace scsa::plugin
