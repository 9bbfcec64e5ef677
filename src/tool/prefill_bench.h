// SPDX-License-Identifier: Apache-2.0
//
// The prefill measurement: the same prompt read with several kinds of attention, in turn, in one process. docs/tool.md
// describes the protocol.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decode_bench.h"
#include "plugin_client.h"
#include "progress.h"
#include "session.h"

namespace scsa::tool {

struct PrefillBenchOptions {
  int steps = 16;  // decoded after each prompt, at least 2
  int rounds = 1;
  std::vector<double> tolerances = {0.025};  // of sparse prompts, one more arm each
  int quality_steps = 200;                   // decoded after a prompt to judge it
  int threads = 1;
};

// One way to read a prompt.
struct PrefillArm {
  Arm arm = Arm::kLlama;
  double prompt_tolerance = 0.0;  // of the scsa arm; 0: its prompts are exact

  std::string Name() const;  // "sparse" where prompts are
  void Use(const PluginClient& plugin) const;
  bool operator==(const PrefillArm&) const = default;
};
// llama, exact, scsa, and a sparse one for each tolerance.
std::vector<PrefillArm> PrefillArms(const PrefillBenchOptions& options);

struct PrefillResult {
  int context = 0;
  PrefillArm arm;
  double ttft_s = 0.0;       // time to the logits of the prompt's last token, median over the rounds
  double attention_s = 0.0;  // of it, in attention; llama: its ttft_s less what the exact arm spends elsewhere
  double ready_s = 0.0;      // of attention_s, building and calibrating
  double first_step_ms = 0.0;
  double step_ms = 0.0;    // median of the later steps
  double speedup = 0.0;    // ttft_s of llama / ttft_s
  double kl_prompt = 0.0;  // KL from the exact arm's distribution of the first token after the prompt
  // Of sparse prompts: rows read as a share of the visible ones, tile by tile, and the mean error of measured tiles.
  std::optional<double> rows_read, error;
};

// Measures one prompt length with PrefillArms(options): every arm once per round, with a context of its own.
// tokens: at least context + steps.
std::vector<PrefillResult> MeasurePrefill(const PrefillBenchOptions& options, const Model& model,
                                          std::span<const llama_token> tokens, int context, const PluginClient& plugin,
                                          Progress& progress);

}  // namespace scsa::tool
