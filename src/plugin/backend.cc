// SPDX-License-Identifier: Apache-2.0
//
// The tables of functions that make up a ggml backend: one registry entry, one device of type ACCEL in CPU memory, one
// backend instance per context.
#include "plugin/backend.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "plugin/attention.h"
#include "plugin/audit_log.h"
#include "plugin/cache_write.h"
#include "plugin/claims.h"
#include "plugin/cpu_device.h"
#include "plugin/layer_table.h"
#include "plugin/options.h"
#include "plugin/reads_log.h"
#include "plugin/stats.h"
#include "scsa/plugin.h"
#include "scsa/target.h"

namespace scsa::plugin {
namespace {

// Backend instance.

BackendState& StateOf(ggml_backend_t backend) { return *static_cast<BackendState*>(backend->context); }

const char* BackendGetName(ggml_backend_t) { return kBackendName; }

void BackendFree(ggml_backend_t backend) {
  LayerTable::Get().FreeOwner(backend->context);
  delete &StateOf(backend);
  delete backend;
}

ggml_status ComputeGraph(BackendState& state, ggml_cgraph* graph) {
  const int n = Ggml().graph_n_nodes(graph);
  for (int i = 0; i < n; ++i) {
    ggml_tensor* node = Ggml().graph_node(graph, i);
    if (IsViewOp(node->op) || !MustCompute(node)) continue;
    const ggml_status status = ComputeNode(state, node);
    if (status != GGML_STATUS_SUCCESS) return status;
  }
  return GGML_STATUS_SUCCESS;
}

// Out of memory no exception may pass through ggml.
ggml_status Guarded(ggml_status (*compute)(BackendState&, ggml_cgraph*), ggml_backend_t backend, ggml_cgraph* graph) {
  try {
    return compute(StateOf(backend), graph);
  } catch (const std::bad_alloc&) {
    LogOnce({"out of memory when a graph was computed"});
    return GGML_STATUS_ALLOC_FAILED;
  }
}

ggml_status BackendGraphCompute(ggml_backend_t backend, ggml_cgraph* graph) {
  return Guarded(ComputeGraph, backend, graph);
}

ggml_status WholeGraphCompute(ggml_backend_t backend, ggml_cgraph* graph) {
  return Guarded(ComputeWholeGraph, backend, graph);
}

void BackendSetThreads(ggml_backend_t backend, int n_threads) { StateOf(backend).n_threads = n_threads; }

ggml_guid_t BackendGuid() {
  static ggml_guid guid = {0x5c, 0x5a, 0x0e, 0x71, 0x9d, 0x3b, 0x4f, 0x2a,
                           0x8e, 0x16, 0xc4, 0x27, 0xb0, 0x6d, 0xf3, 0x88};
  return &guid;
}

// Device.

const char* DeviceGetName(ggml_backend_dev_t) { return kBackendName; }

const char* DeviceGetDescription(ggml_backend_dev_t) {
  static const auto text = [] {
    std::array<char, 128> line{};
    std::snprintf(line.data(), line.size(), "sparse attention %s (%s)", SCSA_VERSION, ActiveTarget().c_str());
    return line;
  }();
  return text.data();
}

void DeviceGetMemory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
  *free = 0;
  *total = 0;
}

enum ggml_backend_dev_type DeviceGetType(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void DeviceGetProps(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  props->name = DeviceGetName(device);
  props->description = DeviceGetDescription(device);
  props->type = device->iface.get_type(device);
  device->iface.get_memory(device, &props->memory_free, &props->memory_total);
  props->caps = {};
  SetHostMemoryCaps(&props->caps);
}

ggml_backend_t DeviceInitBackend(ggml_backend_dev_t device, const char*) {
  ggml_backend_i iface{};
  iface.get_name = BackendGetName;
  iface.free = BackendFree;
  iface.graph_compute = CurrentOptions().cpu_device ? WholeGraphCompute : BackendGraphCompute;
  try {
    auto state = std::make_unique<BackendState>();
    auto* backend = new ggml_backend{BackendGuid(), iface, device, state.get()};
    state.release();
    return backend;
  } catch (const std::bad_alloc&) {
    LogOnce({"out of memory when a context was created"});
    return nullptr;
  }
}

ggml_backend_buffer_type_t DeviceGetBufferType(ggml_backend_dev_t) { return Ggml().cpu_buffer_type(); }

ggml_backend_buffer_t DeviceBufferFromHostPtr(ggml_backend_dev_t, void* data, std::size_t size, std::size_t) {
  return Ggml().cpu_buffer_from_ptr(data, size);
}

bool DeviceSupportsOp(ggml_backend_dev_t, const ggml_tensor* node) {
  try {
    return ClaimsNode(node);
  } catch (const std::bad_alloc&) {
    LogOnce({"out of memory when a graph was built; leaving nodes to ggml"});
    return false;
  }
}

bool DeviceSupportsBufferType(ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return Ggml().buft_is_host(type); }

// Functions of scsa/plugin.h.

const char* PluginSet(const char* name, const char* value) {
  static thread_local std::string error;
  if (name == nullptr || value == nullptr) return "name and value must not be null";
  try {
    Options options = CurrentOptions();
    error = SetOption(name, value, &options);
    if (!error.empty()) return error.c_str();
    InstallOptions(options);
    LayerTable::Get().SetMaxMem(options.max_mem);
    return nullptr;
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

void PluginGetStats(scsa_plugin_stats* stats) { GetStats(stats); }

// At most size bytes, the terminating 0 included; returns the length of the whole text.
std::size_t CopyText(const std::string& from, char* text, std::size_t size) {
  if (size > 0) {
    const std::size_t n = std::min(from.size(), size - 1);
    std::memcpy(text, from.data(), n);
    text[n] = '\0';
  }
  return from.size();
}

std::size_t PluginGetTaus(char* text, std::size_t size) {
  try {
    const TausFile file = LayerTable::Get().Thresholds();
    std::string json;
    if (file.taus.empty() || !FormatTaus(file, &json).ok()) return 0;
    return CopyText(json, text, size);
  } catch (const std::bad_alloc&) {
    LogOnce({"out of memory when thresholds were asked for"});
    return 0;
  }
}

int PluginGetAudit(int layer, scsa_plugin_audit* audit) {
  scsa_plugin_audit all{};
  if (!AuditLog::Get().Figures(layer, &all)) return 0;
  all.struct_size = audit->struct_size;
  std::memcpy(audit, &all, std::min(audit->struct_size, sizeof(all)));
  return 1;
}

std::size_t PluginGetAuditJson(char* text, std::size_t size) {
  try {
    return CopyText(AuditLog::Get().Json(CurrentOptions().audit), text, size);
  } catch (const std::bad_alloc&) {
    LogOnce({"out of memory when the audit was asked for"});
    return 0;
  }
}

std::size_t PluginGetAuditSamples(scsa_plugin_audit_sample* samples, std::size_t count) {
  return AuditLog::Get().Samples(samples, count);
}

std::size_t PluginGetHeadReads(int layer, scsa_plugin_head_reads* heads, std::size_t count) {
  try {
    const std::vector<HeadReads> totals = ReadsLog::Get().Totals(layer);
    for (std::size_t h = 0; h < std::min(count, totals.size()); ++h) {
      heads[h] = {totals[h].rows_read, totals[h].rows_visible, totals[h].bytes_read};
    }
    return totals.size();
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

void PluginResetAudit() { AuditLog::Get().Reset(); }

void PluginSetObserver(scsa_plugin_observer_t observer, void* user) { SetObserver(observer, user); }

// Registry entry.

const char* RegGetName(ggml_backend_reg_t) { return kBackendName; }

std::size_t RegGetDeviceCount(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t RegGetDevice(ggml_backend_reg_t reg, std::size_t) {
  static ggml_backend_device device = [reg] {
    ggml_backend_device_i iface{};
    iface.get_name = DeviceGetName;
    iface.get_description = DeviceGetDescription;
    iface.get_memory = DeviceGetMemory;
    iface.get_type = DeviceGetType;
    iface.get_props = DeviceGetProps;
    iface.init_backend = DeviceInitBackend;
    iface.get_buffer_type = DeviceGetBufferType;
    iface.buffer_from_host_ptr = DeviceBufferFromHostPtr;
    iface.supports_op = DeviceSupportsOp;
    iface.supports_buft = DeviceSupportsBufferType;
    if (CurrentOptions().cpu_device) MakeCpuDevice(&iface);
    return ggml_backend_device{iface, reg, nullptr};
  }();
  return &device;
}

void* RegGetProcAddress(ggml_backend_reg_t, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) return reinterpret_cast<void*>(BackendSetThreads);
  if (std::strcmp(name, SCSA_PLUGIN_SET) == 0) return reinterpret_cast<void*>(PluginSet);
  if (std::strcmp(name, SCSA_PLUGIN_GET_STATS) == 0) return reinterpret_cast<void*>(PluginGetStats);
  if (std::strcmp(name, SCSA_PLUGIN_GET_TAUS) == 0) return reinterpret_cast<void*>(PluginGetTaus);
  if (std::strcmp(name, SCSA_PLUGIN_GET_AUDIT) == 0) return reinterpret_cast<void*>(PluginGetAudit);
  if (std::strcmp(name, SCSA_PLUGIN_GET_AUDIT_JSON) == 0) return reinterpret_cast<void*>(PluginGetAuditJson);
  if (std::strcmp(name, SCSA_PLUGIN_GET_AUDIT_SAMPLES) == 0) return reinterpret_cast<void*>(PluginGetAuditSamples);
  if (std::strcmp(name, SCSA_PLUGIN_GET_HEAD_READS) == 0) return reinterpret_cast<void*>(PluginGetHeadReads);
  if (std::strcmp(name, SCSA_PLUGIN_RESET_AUDIT) == 0) return reinterpret_cast<void*>(PluginResetAudit);
  if (std::strcmp(name, SCSA_PLUGIN_SET_OBSERVER) == 0) return reinterpret_cast<void*>(PluginSetObserver);
  return nullptr;
}

}  // namespace

ggml_status ComputeNode(BackendState& state, ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_FLASH_ATTN_EXT:
      return ComputeAttention(state, node);
    case GGML_OP_SET_ROWS:
      return ComputeCacheWrite(node, state.n_threads);
    default:
      LogOnce({"ggml asked for an operation that the plugin never offered"});
      return GGML_STATUS_FAILED;
  }
}

ggml_backend_reg_t BackendReg() {
  static ggml_backend_reg reg = {
      GGML_BACKEND_API_VERSION, {RegGetName, RegGetDeviceCount, RegGetDevice, RegGetProcAddress}, nullptr};
  return &reg;
}

}  // namespace scsa::plugin
