// SPDX-License-Identifier: Apache-2.0
//
// The two ways into a process.
//
// 1. GGML_BACKEND_PATH: ggml itself opens the library and calls ggml_backend_score and ggml_backend_init.
// 2. LD_PRELOAD: the library stands before ggml in the symbol search order, so that calls of ggml_backend_dev_count,
//    which every program makes before it creates a context, arrive here first. The first one registers the backend.
//    There is no constructor: in a program without ggml (a shell, env) nothing of the library ever runs, and a program
//    that opens its ggml late (Python) is served as well.
//
// Both at once register it once: ggml ignores an entry that it knows.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

#include "plugin/backend.h"
#include "plugin/ggml_compat.h"
#include "plugin/layer_table.h"
#include "plugin/options.h"
#include "plugin/stats.h"
#include "scsa/target.h"

#define SCSA_EXPORT extern "C" __attribute__((visibility("default")))

namespace scsa::plugin {
namespace {

void PrintSummaryAtExit() {
  try {
    if (CurrentOptions().stats) std::fputs(StatsSummary().c_str(), stderr);
  } catch (const std::bad_alloc&) {
    Log({"out of memory at exit; no summary"});
  }
}

// Reads the environment and says what was loaded. Empty: ready. Otherwise the reason to stay inactive.
std::string SetUp(const void* caller) {
  std::string error = ResolveGgml(caller);
  if (!error.empty()) return error;
  Options options;
  error = OptionsFromEnvironment(&options);
  if (!error.empty()) return error;
  // Another copy of this library, at another path, got here first.
  if (Ggml().reg_by_name(kBackendName) != nullptr) return "another copy of the plugin is loaded already";
  const std::string no_taus = TausFromEnvironment(&options);
  if (!no_taus.empty()) Log({no_taus, "; calibrating instead"});
  InstallOptions(options);
  LayerTable::Get().SetMaxMem(options.max_mem);
  char line[256];
  std::snprintf(line, sizeof(line), "scsa %s: %s, mode %s, preset %s, tolerance %g", SCSA_VERSION,
                ActiveTarget().c_str(), ModeName(options.mode), PresetName(options.config.preset),
                static_cast<double>(options.tolerance));
  const char* device = options.cpu_device ? ", a device for whole graphs" : "";
  const std::string taus = options.taus == nullptr ? "" : ", thresholds from " + options.taus->path;
  std::fprintf(stderr, "%s%s%s\n", line, device, taus.c_str());
  std::atexit(PrintSummaryAtExit);
  return {};
}

// True when the backend may be registered with the ggml that `caller` uses. The first call decides; a refusal is
// reported once.
bool Ready(const void* caller) noexcept {
  try {
    static const bool ready = [caller] {
      const std::string error = SetUp(caller);
      if (!error.empty()) Log({error, "; the plugin stays inactive"});
      return error.empty();
    }();
    if (!ready) return false;
    const std::string error = ResolveGgml(caller);
    if (!error.empty()) LogOnce({error});
    return error.empty();
  } catch (const std::bad_alloc&) {
    LogOnce({"out of memory at load"});
    return false;
  }
}

}  // namespace
}  // namespace scsa::plugin

SCSA_EXPORT int ggml_backend_score(void) { return scsa::plugin::Ready(__builtin_return_address(0)) ? 1 : 0; }

SCSA_EXPORT ggml_backend_reg_t ggml_backend_init(void) {
  return scsa::plugin::Ready(__builtin_return_address(0)) ? scsa::plugin::BackendReg() : nullptr;
}

SCSA_EXPORT std::size_t ggml_backend_dev_count(void) {
  const void* caller = __builtin_return_address(0);
  // Registering makes ggml count its devices: those inner calls pass through.
  static thread_local bool inside = false;
  if (!inside) {
    inside = true;
    static const bool registered = [caller] {
      const bool ready = scsa::plugin::Ready(caller);
      if (ready) scsa::plugin::Ggml().backend_register(scsa::plugin::BackendReg());
      return ready;
    }();
    static_cast<void>(registered);
    inside = false;
  }
  // Looked up anew for each caller: a process may hold several copies of ggml.
  const auto real =
      reinterpret_cast<decltype(&ggml_backend_dev_count)>(scsa::plugin::FindSymbol(caller, "ggml_backend_dev_count"));
  return real == nullptr ? 0 : real();
}
