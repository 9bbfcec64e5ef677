// SPDX-License-Identifier: Apache-2.0
//
// The decode measurement: several ways to compute attention ("arms") decode the same tokens from the same saved cache,
// in turn, in one process. docs/tool.md describes the protocol.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "machine.h"
#include "plugin_client.h"
#include "progress.h"
#include "scsa/audit.h"
#include "scsa/layer.h"
#include "session.h"
#include "state_store.h"

namespace scsa::tool {

enum class Arm {
  kLlama,          // llama.cpp's dense attention, f16 cache
  kLlamaQ8,        // the same with a q8_0 cache
  kExact,          // our exact kernel
  kScsa,           // the sparse operator, with the plugin's crossover
  kScsaUnchecked,  // the same without its checks for changed cache rows
  kLimit,          // attention that costs nothing: the floor
};

std::string_view ArmName(Arm arm);
constexpr bool IsSparse(Arm arm) { return arm == Arm::kScsa || arm == Arm::kScsaUnchecked; }
// The plugin's mode for it.
const char* ArmMode(Arm arm);
// The tolerance that a preset comes with; 0 for a preset that there is not.
double PresetTolerance(const std::string& preset);
// "llama,scsa" -> arms in the given order. ToolError for an unknown or a repeated one.
std::vector<Arm> ParseArms(std::string_view text);

struct DecodeBenchOptions {
  std::vector<Arm> arms;
  int steps = 96;      // timed
  int calibrate = 32;  // steps of the plugin's calibration window
  std::string preset = "fast";
  std::vector<double> tolerances;  // of the scsa arm, which runs once for each; empty: the preset's
  std::string taus;                // file of thresholds in place of the window; empty: none
  std::string crossover;           // overrides the plugin's where it is given
  std::optional<double> audit;     // overrides the plugin's share
  int threads = 1;

  std::vector<double> Tolerances() const;  // the chosen ones or the preset's
  // Untimed steps first: the calibration window, at least 8, and the trial by which the plugin chooses the crossover.
  int WarmupSteps() const;
  int TokensNeeded(int context) const;  // tokens of text (and cells of cache) that one context takes
};

// The calibration window of the scsa arm.
struct CalibrationCost {
  int steps = 0;
  double ms_median = 0.0;
  double exact_ms_median = 0.0;  // of the exact arm in the same steps

  double Ratio() const { return ms_median / exact_ms_median; }
};

// The share that exact attention reaches of what the machine allows.
struct Roofline {
  double bytes = 0.0;              // of cached rows, per step
  double multiply_adds = 0.0;      // per step
  double bandwidth = 0.0;          // measured, bytes/s
  double multiply_add_rate = 0.0;  // measured, 1/s
  double attention_ms = 0.0;       // measured inside attention, per step

  double MemoryMs() const { return 1e3 * bytes / bandwidth; }
  double ComputeMs() const { return 1e3 * multiply_adds / multiply_add_rate; }
  double LimitMs() const;  // the larger of the two
  double Share() const { return LimitMs() / attention_ms; }
};

// What the audit found in a stretch of the timed steps.
struct AuditWindow {
  int begin = 0;
  int end = 0;  // past the last one
  AuditSummary summary;
};

struct ArmResult {
  int context = 0;
  Arm arm = Arm::kLlama;
  std::optional<double> tolerance;  // scsa alone
  double tok_s = 0.0;
  double ms_median = 0.0;
  double ms_p99 = 0.0;
  std::optional<double> attn_ms;           // per step
  std::string attn_ms_source;              // "plugin", or "step-limit": median step minus the limit's
  std::optional<double> speedup_vs_llama;  // ratio of tok_s; nothing without that arm
  std::optional<double> agreement;         // nothing for the limit
  std::optional<double> kl_mean;
  std::optional<double> nll_delta;
  std::optional<double> rows_read;
  std::optional<double> bytes_read;  // per step
  double plan_build_ms = 0.0;        // warm-up and timed steps together
  std::uint64_t plan_bytes = 0;
  std::optional<double> attn_err_mean;
  std::optional<double> attn_err_p99;
  std::optional<Roofline> roofline;
  std::optional<CalibrationCost> calibration;  // scsa alone, when it calibrated
  std::optional<std::uint64_t> crossover;      // scsa alone: visible cells, when it was given or a trial is over
  bool crossover_measured = false;
  scsa_plugin_stats stats{};               // of the timed steps
  std::optional<AuditSummary> audit;       // scsa alone, of the timed steps
  std::vector<AuditWindow> audit_windows;  // the same steps, one after another
  // scsa alone, of the timed steps: [layer][kv_head]; empty for a layer that was never sparse.
  std::vector<std::vector<HeadReads>> head_reads;
  int warmup_steps = 0;
  int steps = 0;
};

// The cache types whose states the arms need.
std::vector<CacheType> CacheTypesOf(std::span<const Arm> arms);

// Measures one context length. States must be saved already. The results follow options.arms; the exact arm, which
// judges the others, is always run. The scsa arm has a result for each tolerance.
std::vector<ArmResult> MeasureContext(const DecodeBenchOptions& options, const Model& model,
                                      std::span<const llama_token> tokens, int context, const StateStore& states,
                                      const PluginClient& plugin, const MachineRates& rates, Progress& progress);

}  // namespace scsa::tool
