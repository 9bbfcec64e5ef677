// SPDX-License-Identifier: Apache-2.0
//
// Records attention calls of a decoding run into a capture.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "capture_file.h"
#include "scsa/plugin.h"

namespace scsa::tool {

// Which layers a recorder takes when none are named: from 2, 8, 14, ... on the next one that can be recorded. The first
// two layers of a model attend unlike the others.
inline constexpr int kFirstLayer = 2;
inline constexpr int kLayerInterval = 6;

class CaptureRecorder {
 public:
  // layers: numbers in the model, ascending; empty: the default choice. Step s is expected to see rows [0, n_kv + s).
  CaptureRecorder(std::vector<int> layers, std::int64_t n_kv, int steps);

  // The plugin's observer; `user` is the recorder. Takes the first call of each chosen layer in a step.
  static void Observe(void* user, const scsa_attention_call* call);

  // Ends a decode step. ToolError when a chosen layer did not take part in it or cannot be recorded: rows that are not
  // f16, rows that it does not see (a sliding window), a softcap, attention sinks, or another shape than the others.
  void EndStep();

  // The recorded layers with shape, scale, n_kv and steps; after the last step, once.
  Capture Take();

 private:
  void Record(const scsa_attention_call& call);
  void Choose(const scsa_attention_call& call);
  std::string ProblemOf(const scsa_attention_call& call) const;
  bool SeesAllRows(const scsa_attention_call& call) const;

  bool default_choice_;
  std::vector<int> wanted_;
  std::set<int> seen_;      // attention layers of the first step
  std::set<int> done_;      // layers recorded in the present step
  int next_ = kFirstLayer;  // the default choice takes the next layer from here on
  int step_ = 0;
  std::string problem_;   // of the present step
  std::string rejected_;  // default choice: why a layer was passed over
  Capture capture_;
};

}  // namespace scsa::tool
