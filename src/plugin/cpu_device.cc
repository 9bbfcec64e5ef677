// SPDX-License-Identifier: Apache-2.0
#include "plugin/cpu_device.h"

#include <atomic>
#include <cstdio>

#include "plugin/attention.h"
#include "plugin/backend.h"
#include "plugin/claims.h"
#include "plugin/layer_table.h"
#include "plugin/options.h"
#include "plugin/stats.h"

namespace scsa::plugin {
namespace {

ggml_backend_dev_t Cpu() { return Ggml().dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

// Memory: that of ggml's CPU backend. But rpc-server keeps one backend instance for all of its clients, so plans cannot
// wait for that one's end: they go with the memory of the cache that they belong to.

using FreeFunction = void (*)(ggml_backend_buffer_t);
std::atomic<FreeFunction> g_free_cpu_buffer{nullptr};  // the same one for all buffers

// rpc-server ends by a signal, never by itself. So the summary comes when a client gives its memory back.
void PrintSummaryOfClient() {
  static std::atomic<std::uint64_t> reported{0};
  const std::uint64_t calls = GlobalCounters().attn_calls.load(std::memory_order_relaxed);
  if (reported.exchange(calls) != calls && CurrentOptions().stats) std::fputs(StatsSummary().c_str(), stderr);
}

void FreeBuffer(ggml_backend_buffer_t buffer) {
  PrintSummaryOfClient();
  LayerTable::Get().FreeBuffer(buffer);
  g_free_cpu_buffer.load()(buffer);
}

const char* TypeGetName(ggml_backend_buffer_type_t) { return kBackendName; }

ggml_backend_buffer_t TypeAllocBuffer(ggml_backend_buffer_type_t, std::size_t size) {
  ggml_backend_buffer_t buffer = Ggml().buft_alloc_buffer(Ggml().cpu_buffer_type(), size);
  if (buffer == nullptr) return nullptr;
  g_free_cpu_buffer.store(buffer->iface.free_buffer);
  buffer->iface.free_buffer = FreeBuffer;
  return buffer;
}

std::size_t TypeGetAlignment(ggml_backend_buffer_type_t) { return Ggml().buft_get_alignment(Ggml().cpu_buffer_type()); }

bool TypeIsHost(ggml_backend_buffer_type_t) { return true; }

// Device.

void GetMemory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) { Ggml().dev_memory(Cpu(), free, total); }

// A kind that rpc-server offers without being asked for it by name, and that llama.cpp prefers to nothing but the CPU.
enum ggml_backend_dev_type GetType(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_IGPU; }

ggml_backend_buffer_type_t GetBufferType(ggml_backend_dev_t device) {
  static ggml_backend_buffer_type type = [device] {
    ggml_backend_buffer_type_i iface{};
    iface.get_name = TypeGetName;
    iface.alloc_buffer = TypeAllocBuffer;
    iface.get_alignment = TypeGetAlignment;
    iface.is_host = TypeIsHost;
    return ggml_backend_buffer_type{iface, device, nullptr};
  }();
  return &type;
}

bool SupportsOp(ggml_backend_dev_t, const ggml_tensor* node) { return Ggml().dev_supports_op(Cpu(), node); }

}  // namespace

void MakeCpuDevice(ggml_backend_device_i* iface) {
  iface->get_memory = GetMemory;
  iface->get_type = GetType;
  iface->get_buffer_type = GetBufferType;
  iface->supports_op = SupportsOp;
}

ggml_status ComputeWholeGraph(BackendState& state, ggml_cgraph* graph) {
  const auto compute_waiting = [&state] {
    if (state.nodes.empty()) return GGML_STATUS_SUCCESS;
    const ggml_status status = state.cpu.Compute(state.nodes, state.n_threads);
    state.nodes.clear();
    return status;
  };
  state.nodes.clear();
  const int n = Ggml().graph_n_nodes(graph);
  for (int i = 0; i < n; ++i) {
    ggml_tensor* node = Ggml().graph_node(graph, i);
    if (IsViewOp(node->op) || !MustCompute(node)) continue;
    if (!ClaimsNode(node)) {
      state.nodes.push_back(node);
      continue;
    }
    ggml_status status = compute_waiting();
    if (status == GGML_STATUS_SUCCESS) status = ComputeNode(state, node);
    if (status != GGML_STATUS_SUCCESS) return status;
  }
  return compute_waiting();
}

}  // namespace scsa::plugin
