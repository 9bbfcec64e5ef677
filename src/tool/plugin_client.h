// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "scsa/audit.h"
#include "scsa/layer.h"
#include "scsa/plugin.h"

namespace scsa::tool {

// The plugin in this process. It is one registry entry for the whole process, so options set here hold for every
// llama_context. Load it before the first context is created.
class PluginClient {
 public:
  // Finds the plugin where it is already registered (preloaded), or loads it from FindPlugin(). What it says at start
  // is shown only when `verbose`, unless it is a warning. ToolError with the plugin's own message when it refuses to
  // load.
  explicit PluginClient(bool verbose);

  // ToolError with the plugin's message when it rejects the value.
  void Set(const char* name, const std::string& value) const;
  scsa_plugin_stats Stats() const;
  // Figures of the audit of all layers since load or ResetAudit. ToolError when memory runs out.
  scsa_plugin_audit Audit() const;
  // The errors that these figures are taken from, those of the last outputs of each layer. `call` is not filled in.
  std::vector<AuditSample> AuditSamples() const;
  void ResetAudit() const;
  // What sparse answers read of each KV head of a layer since load; empty for a layer that none was given by.
  std::vector<HeadReads> ReadsOf(int layer) const;
  // Thresholds that are frozen now, as JSON; empty when there are none.
  std::string Taus() const;
  void SetObserver(scsa_plugin_observer_t observer, void* user) const;

 private:
  scsa_plugin_set_t set_ = nullptr;
  scsa_plugin_get_stats_t get_stats_ = nullptr;
  scsa_plugin_get_audit_t get_audit_ = nullptr;
  scsa_plugin_get_audit_samples_t get_audit_samples_ = nullptr;
  scsa_plugin_reset_audit_t reset_audit_ = nullptr;
  scsa_plugin_get_head_reads_t get_head_reads_ = nullptr;
  scsa_plugin_get_taus_t get_taus_ = nullptr;
  scsa_plugin_set_observer_t set_observer_ = nullptr;
};

// Installs an observer for as long as it lives.
class ScopedObserver {
 public:
  ScopedObserver(const PluginClient& plugin, scsa_plugin_observer_t observer, void* user) : plugin_(plugin) {
    plugin_.SetObserver(observer, user);
  }
  ~ScopedObserver() { plugin_.SetObserver(nullptr, nullptr); }
  ScopedObserver(const ScopedObserver&) = delete;
  ScopedObserver& operator=(const ScopedObserver&) = delete;

 private:
  const PluginClient& plugin_;
};

// What happened between two snapshots. `plan_bytes`, `max_mem`, `crossover` and `calibrated_layers` are no totals: the
// later value stands.
scsa_plugin_stats StatsDifference(const scsa_plugin_stats& later, const scsa_plugin_stats& earlier);
// Adds the totals of `part` to `sum`; of the others the value of `part` stands.
void AddStats(scsa_plugin_stats& sum, const scsa_plugin_stats& part);
// Of sparse prompts: rows read as a share of the visible ones, tile by tile, and the mean error of measured tiles.
// Empty where there were none.
std::optional<double> PromptRowsRead(const scsa_plugin_stats& stats);
std::optional<double> PromptError(const scsa_plugin_stats& stats);

}  // namespace scsa::tool
