// SPDX-License-Identifier: Apache-2.0
#include "plugin/ggml_compat.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>

namespace scsa::plugin {
namespace {

GgmlApi g_api;
std::atomic<bool> g_resolved{false};

const void* ModuleOf(const void* address) {
  Dl_info info;
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

bool InThisLibrary(const void* address) {
  static const void* self = ModuleOf(&g_api);
  return ModuleOf(address) == self;
}

// The already loaded library around an address. Its dependencies are searched with it, also where both were loaded
// privately (RTLD_LOCAL). nullptr for the main program: that one is in the global scope anyway.
void* LibraryOf(const void* address) {
  Dl_info info;
  if (address == nullptr || dladdr(address, &info) == 0 || info.dli_fname == nullptr) return nullptr;
  return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

template <typename F>
bool Find(const void* caller, const char* name, F* function, std::string* missing) {
  *function = reinterpret_cast<F>(FindSymbol(caller, name));
  if (*function == nullptr && missing->empty()) *missing = name;
  return *function != nullptr;
}

}  // namespace

void* FindSymbol(const void* caller, const char* name) {
  if (void* library = LibraryOf(caller)) {
    void* symbol = dlsym(library, name);
    dlclose(library);
    if (symbol != nullptr && !InThisLibrary(symbol)) return symbol;
  }
  for (void* scope : {RTLD_DEFAULT, RTLD_NEXT}) {
    void* symbol = dlsym(scope, name);
    if (symbol != nullptr && !InThisLibrary(symbol)) return symbol;
  }
  return nullptr;
}

const GgmlApi& Ggml() { return g_api; }

std::string ResolveGgml(const void* caller) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (g_resolved.load(std::memory_order_acquire)) {
    // Registering with a second ggml of the same process would mix the two.
    void* other = FindSymbol(caller, "ggml_backend_register");
    if (other != nullptr && other != reinterpret_cast<void*>(g_api.backend_register)) {
      return "this process holds two copies of ggml; only the first one is served";
    }
    return {};
  }
  GgmlApi api;
  std::string missing;
  Find(caller, "ggml_version", &api.version, &missing);
  Find(caller, "ggml_init", &api.init, &missing);
  Find(caller, "ggml_free", &api.free, &missing);
  Find(caller, "ggml_new_graph_custom", &api.new_graph_custom, &missing);
  Find(caller, "ggml_graph_add_node", &api.graph_add_node, &missing);
  Find(caller, "ggml_graph_overhead_custom", &api.graph_overhead_custom, &missing);
  Find(caller, "ggml_graph_n_nodes", &api.graph_n_nodes, &missing);
  Find(caller, "ggml_graph_node", &api.graph_node, &missing);
  Find(caller, "ggml_backend_register", &api.backend_register, &missing);
  Find(caller, "ggml_backend_dev_count", &api.dev_count, &missing);
  Find(caller, "ggml_backend_dev_by_type", &api.dev_by_type, &missing);
  Find(caller, "ggml_backend_dev_init", &api.dev_init, &missing);
  Find(caller, "ggml_backend_dev_memory", &api.dev_memory, &missing);
  Find(caller, "ggml_backend_dev_supports_op", &api.dev_supports_op, &missing);
  Find(caller, "ggml_backend_reg_by_name", &api.reg_by_name, &missing);
  Find(caller, "ggml_backend_reg_get_proc_address", &api.reg_get_proc_address, &missing);
  Find(caller, "ggml_backend_free", &api.backend_free, &missing);
  Find(caller, "ggml_backend_graph_compute", &api.graph_compute, &missing);
  Find(caller, "ggml_backend_cpu_buffer_type", &api.cpu_buffer_type, &missing);
  Find(caller, "ggml_backend_cpu_buffer_from_ptr", &api.cpu_buffer_from_ptr, &missing);
  Find(caller, "ggml_backend_buft_alloc_buffer", &api.buft_alloc_buffer, &missing);
  Find(caller, "ggml_backend_buft_get_alignment", &api.buft_get_alignment, &missing);
  Find(caller, "ggml_backend_buft_is_host", &api.buft_is_host, &missing);
  Find(caller, "ggml_backend_buffer_is_host", &api.buffer_is_host, &missing);
  // The version first: it explains missing functions.
  const std::string running = api.version != nullptr ? api.version() : "unknown";
  if (running != SCSA_GGML_VERSION) {
    return "built for ggml " SCSA_GGML_VERSION ", but this program runs ggml " + running +
           "; use the plugin built from this program's llama.cpp";
  }
  if (!missing.empty()) return "this program's ggml offers no " + missing;
  g_api = api;
  g_resolved.store(true, std::memory_order_release);
  return {};
}

ggml_from_float_t CpuRowEncoder(ggml_type type) {
  // ggml offers the encoders by no interface. They are taken from the very library that the CPU device lives in, since
  // its variants round differently (q8_0: ties to even with AVX2, away from zero in portable code).
  static const auto traits = []() -> decltype(&::ggml_get_type_traits_cpu) {
    ggml_backend_dev_t cpu = g_api.dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == nullptr) return nullptr;
    return reinterpret_cast<decltype(&::ggml_get_type_traits_cpu)>(
        FindSymbol(reinterpret_cast<const void*>(cpu->iface.get_name), "ggml_get_type_traits_cpu"));
  }();
  if (traits == nullptr) return nullptr;
  return traits(type)->from_float;
}

CacheName ParseCacheName(const char* name) {
  // cache_[tag]k_l[layer]; llama.cpp tags the caches of some models.
  constexpr char kPrefix[] = "cache_";
  if (std::strncmp(name, kPrefix, sizeof(kPrefix) - 1) != 0) return {};
  const char* end = name + std::strlen(name);
  const char* digits = end;
  int layer = 0;
  int place = 1;
  while (digits > name && digits[-1] >= '0' && digits[-1] <= '9' && end - digits < 6) {
    --digits;
    layer += place * (*digits - '0');
    place *= 10;
  }
  if (digits == end || digits - name < 9 || digits[-1] != 'l' || digits[-2] != '_') return {};
  if (digits[-3] == 'k') return {CacheName::Kind::kKey, layer};
  if (digits[-3] == 'v') return {CacheName::Kind::kValue, layer};
  return {};
}

bool HasHostData(const ggml_tensor* tensor) {
  const ggml_tensor* root = Root(tensor);
  return tensor->data != nullptr && root->data != nullptr && root->buffer != nullptr &&
         g_api.buffer_is_host(root->buffer);
}

}  // namespace scsa::plugin
