// SPDX-License-Identifier: Apache-2.0
//
// The gates of `scsa eval freerun` and how results are shown.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "freerun_bench.h"
#include "records.h"
#include "report.h"
#include "stats.h"

namespace scsa::tool {

enum class Verdict { kPass, kFail, kNone };  // kNone: dense attention fails, so there is nothing to keep

// One figure of the sparse operator beside that of dense attention (the exact arm), and the limit that it must keep.
struct Gate {
  std::string name;  // "loops", "nll", "passkey", "multi-needle", "variables", "retained"
  int trials = 0;
  double dense = 0.0;
  double scsa = 0.0;
  std::optional<double> llama = std::nullopt;    // where that arm ran
  double figure = 0.0;                           // what the limit holds for
  std::optional<Interval> range = std::nullopt;  // 95 % confidence interval of `figure`; nothing for means
  double limit = 0.0;
  bool at_most = false;  // otherwise at least
  Verdict verdict = Verdict::kNone;
};

// loops: share of continuations that loop; the figure is the difference to dense, at most 0.1.
// nll: mean negative log-likelihood of the continuations under dense attention; the difference is at most 0.15.
// passkey, multi-needle, variables: share of the numbers that are found; the figure is the share of those that dense
// finds that scsa finds, too, at least 8/9, 0.8 and 0.8.
// retained: share of all questions answered in full; the figure is the share of those that dense answers in full that
// scsa does, too, at least 0.95.
// Without continuations, or without questions, their gates are left out.
std::vector<Gate> GatesOf(const FreerunOptions& options, const FreerunResult& result);

// The gates of one context length.
std::string GateTable(std::span<const Gate> gates);
// How many of the gates pass, fail and have no verdict.
std::string VerdictText(std::span<const Gate> gates);

std::vector<Record> GateRecords(const RunInfo& info, const FreerunOptions& options, const FreerunResult& result,
                                std::span<const Gate> gates);
// Every answer and continuation.
std::vector<Record> TrialRecords(const Model& model, const FreerunOptions& options, const FreerunResult& result);

}  // namespace scsa::tool
