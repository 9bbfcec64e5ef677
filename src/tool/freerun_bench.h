// SPDX-License-Identifier: Apache-2.0
//
// The measuring protocol of `scsa eval freerun`: the sparse operator and dense attention write on their own, from the
// same cached rows and after the same calibration window. docs/tool.md describes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "decode_bench.h"
#include "freerun_tasks.h"
#include "plugin_client.h"
#include "progress.h"
#include "session.h"
#include "state_store.h"

namespace scsa::tool {

struct FreerunOptions {
  std::vector<Arm> arms = {Arm::kExact, Arm::kScsa};  // the exact arm, which judges, first
  int starts = 32;                                    // continuations per context
  int steps = 128;                                    // tokens of a continuation
  int haystacks = 3;                                  // per context, five questions each
  std::uint64_t seed = 1;                             // of the facts
  int calibrate = 32;                                 // steps of the window
  std::string preset = "fast";
  std::optional<double> tolerance;  // otherwise the preset's
  int crossover = 0;
  int threads = 1;

  double Tolerance() const;             // the chosen one or the preset's
  int TokensNeeded(int context) const;  // of the model's context
};

// What one arm wrote after one start.
struct Continuation {
  std::vector<llama_token> tokens;
  int loop = 0;      // length of its longest periodic run
  double nll = 0.0;  // mean per token, judged by the exact arm, in nats
};

struct Answer {
  std::string text;
  std::vector<bool> found;  // for each expected number
};

struct FreerunResult {
  int context = 0;
  // Both by [trial][arm], arms as in the options.
  std::vector<std::vector<Continuation>> continuations;
  std::vector<std::vector<Answer>> answers;
  std::vector<RetrievalQuestion> questions;
  std::optional<double> rows_read;  // of the scsa arm's sparse steps, as a share of the visible rows
};

// ToolError when the text is too short. The states of the prompts are kept in `states`.
FreerunResult MeasureFreerun(const FreerunOptions& options, const Model& model, std::string_view text, int context,
                             StateStore& states, const PluginClient& plugin, Progress& progress);

}  // namespace scsa::tool
