// SPDX-License-Identifier: Apache-2.0
//
// Everything that depends on ggml's version: which of its functions the plugin calls, how they are found, and the few
// struct fields that it reads. No other file includes ggml's internal header (or ggml_internal.h in its place).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
// An installed ggml comes without its internal header.
#if __has_include("ggml-backend-impl.h")
#include "ggml-backend-impl.h"
#else
#include "plugin/ggml_internal.h"
#endif

namespace scsa::plugin {

// Functions of the ggml that the program runs. They are looked up by name, so that the library can be preloaded into a
// program without ggml (a shell that starts one with it), and so that it never brings a second ggml into a process.
struct GgmlApi {
  decltype(&::ggml_version) version = nullptr;
  decltype(&::ggml_init) init = nullptr;
  decltype(&::ggml_free) free = nullptr;
  decltype(&::ggml_new_graph_custom) new_graph_custom = nullptr;
  decltype(&::ggml_graph_add_node) graph_add_node = nullptr;
  decltype(&::ggml_graph_overhead_custom) graph_overhead_custom = nullptr;
  decltype(&::ggml_graph_n_nodes) graph_n_nodes = nullptr;
  decltype(&::ggml_graph_node) graph_node = nullptr;
  decltype(&::ggml_backend_register) backend_register = nullptr;
  decltype(&::ggml_backend_dev_count) dev_count = nullptr;
  decltype(&::ggml_backend_dev_by_type) dev_by_type = nullptr;
  decltype(&::ggml_backend_dev_init) dev_init = nullptr;
  decltype(&::ggml_backend_dev_memory) dev_memory = nullptr;
  decltype(&::ggml_backend_dev_supports_op) dev_supports_op = nullptr;
  decltype(&::ggml_backend_reg_by_name) reg_by_name = nullptr;
  decltype(&::ggml_backend_reg_get_proc_address) reg_get_proc_address = nullptr;
  decltype(&::ggml_backend_free) backend_free = nullptr;
  decltype(&::ggml_backend_graph_compute) graph_compute = nullptr;
  decltype(&::ggml_backend_cpu_buffer_type) cpu_buffer_type = nullptr;
  decltype(&::ggml_backend_cpu_buffer_from_ptr) cpu_buffer_from_ptr = nullptr;
  decltype(&::ggml_backend_buft_alloc_buffer) buft_alloc_buffer = nullptr;
  decltype(&::ggml_backend_buft_get_alignment) buft_get_alignment = nullptr;
  decltype(&::ggml_backend_buft_is_host) buft_is_host = nullptr;
  decltype(&::ggml_backend_buffer_is_host) buffer_is_host = nullptr;
};

// The functions, after ResolveGgml succeeded.
const GgmlApi& Ggml();

// Finds the ggml that `caller` (an address in the code that called into this library) uses. Returns an empty string, or
// one line that says why this library cannot work with it: not found, incomplete, or another version.
// Once it has succeeded further calls cost nothing. Thread-safe.
std::string ResolveGgml(const void* caller);

// A function by name, seen from `caller`'s library, but never one of this library. nullptr when there is none.
void* FindSymbol(const void* caller, const char* name);

// ggml-cpu's row encoder of a type (the one of the CPU variant that runs), or nullptr.
ggml_from_float_t CpuRowEncoder(ggml_type type);

// The tensor whose memory `tensor` looks into: itself when it is no view.
inline const ggml_tensor* Root(const ggml_tensor* tensor) { return tensor->view_src ? tensor->view_src : tensor; }

// A part of llama.cpp's KV cache, by the names that it gives them: cache_k_l0, cache_v_l12, ...
struct CacheName {
  enum class Kind : std::uint8_t { kNone, kKey, kValue };
  Kind kind = Kind::kNone;
  int layer = -1;
};
CacheName ParseCacheName(const char* name);

inline bool IsCacheTensor(const ggml_tensor* tensor) {
  return ParseCacheName(tensor->name).kind != CacheName::Kind::kNone;
}

// Memory that the CPU can read. False for tensors without memory (graphs that are only measured).
bool HasHostData(const ggml_tensor* tensor);

inline float OpParamF32(const ggml_tensor* op, int index) {
  float value = 0;
  __builtin_memcpy(&value, reinterpret_cast<const char*>(op->op_params) + index * sizeof(float), sizeof(float));
  return value;
}
struct FlashAttnParams {
  float scale, max_bias, softcap;
};
inline FlashAttnParams FlashAttnParamsOf(const ggml_tensor* op) {
  return {OpParamF32(op, 0), OpParamF32(op, 1), OpParamF32(op, 2)};
}

// Weights may stay where they are: in host memory, mapped from their file.
template <typename Caps>
void SetHostMemoryCaps(Caps* caps) {
  caps->buffer_from_host_ptr = true;
  if constexpr (requires { caps->mmap_support; }) caps->mmap_support = true;  // from 0.20 on
}

// Nodes that the scheduler left in the graph but nobody needs carry no flag.
inline bool MustCompute(const ggml_tensor* node) { return (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0; }

inline bool IsViewOp(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE ||
         op == GGML_OP_TRANSPOSE;
}

}  // namespace scsa::plugin
