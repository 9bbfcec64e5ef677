// SPDX-License-Identifier: Apache-2.0
//
// What a prompt's attention does to what follows: the same haystack read with several kinds of attention, then decoded
// exactly each time. docs/tool.md describes the protocol.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "plugin_client.h"
#include "prefill_bench.h"
#include "progress.h"
#include "session.h"

namespace scsa::tool {

struct PrefillQuality {
  PrefillArm arm;
  double perplexity = 0.0;  // of the prompt's tokens
  // Mean relative error of attention outputs against double precision, over the prompt's last rows, and ggml's own on
  // the same tensors, for the exact arm.
  double attention_error = 0.0;
  std::optional<double> ggml_attention_error;
  double kl_mean = 0.0;    // of the tokens after it, from the distributions after an exact prompt
  double nll_delta = 0.0;  // of the same tokens, mean, against an exact prompt
  int found = 0;           // hidden numbers that the answers hold
  int hidden = 0;
};

// For the exact arm, which the others are compared with, and for the sparse ones. A prompt of `context` tokens with
// hidden facts, then options.quality_steps tokens of the text that follows it, teacher-forced, then questions about the
// facts, each right after the prompt. ToolError when the text is too short, or for a model whose cache cannot be
// rewound.
std::vector<PrefillQuality> MeasurePrefillQuality(const PrefillBenchOptions& options, const Model& model,
                                                  std::string_view text, int context, const PluginClient& plugin,
                                                  Progress& progress);

}  // namespace scsa::tool
