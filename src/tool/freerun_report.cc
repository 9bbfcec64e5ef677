// SPDX-License-Identifier: Apache-2.0
#include "freerun_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace scsa::tool {
namespace {

constexpr double kLoopLimit = 0.10;
constexpr double kNllLimit = 0.15;
constexpr double kPasskeyLimit = 8.0 / 9.0;
constexpr double kOtherTasksLimit = 0.80;
constexpr double kRetainedLimit = 0.95;

std::optional<std::size_t> IndexOf(const FreerunOptions& options, Arm arm) {
  const auto found = std::find(options.arms.begin(), options.arms.end(), arm);
  if (found == options.arms.end()) return std::nullopt;
  return static_cast<std::size_t>(found - options.arms.begin());
}

// Arms as indices into what a trial holds.
struct ArmIndices {
  std::size_t dense;
  std::size_t scsa;
  std::optional<std::size_t> llama;
};

// Newcombe's interval of the difference of two proportions.
Interval DifferenceInterval(int a, int b, int trials) {
  const double p = static_cast<double>(a) / trials;
  const double q = static_cast<double>(b) / trials;
  const Interval of_a = WilsonInterval(a, trials);
  const Interval of_b = WilsonInterval(b, trials);
  return {.low = p - q - std::hypot(p - of_a.low, of_b.high - q),
          .high = p - q + std::hypot(of_a.high - p, q - of_b.low)};
}

void Decide(Gate& gate) {
  // Shares of counts are rounded: 0.8 + 0.1 is not 0.9.
  constexpr double kRounding = 1e-9;
  const bool kept = gate.at_most ? gate.figure <= gate.limit + kRounding : gate.figure >= gate.limit - kRounding;
  gate.verdict = kept ? Verdict::kPass : Verdict::kFail;
}

Gate LoopGate(const FreerunResult& result, const ArmIndices& arms) {
  const auto count = [&](std::size_t arm) {
    return static_cast<int>(std::count_if(result.continuations.begin(), result.continuations.end(),
                                          [&](const auto& trial) { return trial[arm].loop >= kLoopTokens; }));
  };
  Gate gate = {.name = "loops", .trials = static_cast<int>(result.continuations.size())};
  const auto rate = [&](std::size_t arm) { return static_cast<double>(count(arm)) / gate.trials; };
  gate.dense = rate(arms.dense);
  gate.scsa = rate(arms.scsa);
  if (arms.llama) gate.llama = rate(*arms.llama);
  gate.figure = gate.scsa - gate.dense;
  gate.range = DifferenceInterval(count(arms.scsa), count(arms.dense), gate.trials);
  gate.limit = kLoopLimit;
  gate.at_most = true;
  Decide(gate);
  return gate;
}

Gate NllGate(const FreerunResult& result, const ArmIndices& arms) {
  const auto mean = [&](std::size_t arm) {
    std::vector<double> values;
    for (const auto& trial : result.continuations) values.push_back(trial[arm].nll);
    return Mean(values);
  };
  Gate gate = {.name = "nll", .trials = static_cast<int>(result.continuations.size())};
  gate.dense = mean(arms.dense);
  gate.scsa = mean(arms.scsa);
  if (arms.llama) gate.llama = mean(*arms.llama);
  gate.figure = gate.scsa - gate.dense;
  gate.limit = kNllLimit;
  gate.at_most = true;
  Decide(gate);
  return gate;
}

// Of things that an arm gets or does not get: those that dense gets and scsa keeps.
class KeptCounter {
 public:
  explicit KeptCounter(const ArmIndices& arms) : arms_(arms) {}

  // gets(arm) says whether that arm gets this one.
  template <typename Gets>
  void Add(Gets gets) {
    ++trials_;
    dense_ += gets(arms_.dense);
    scsa_ += gets(arms_.scsa);
    both_ += gets(arms_.dense) && gets(arms_.scsa);
    if (arms_.llama) llama_ += gets(*arms_.llama);
  }

  Gate Result(std::string name, double limit) const {
    Gate gate = {.name = std::move(name), .trials = trials_};
    gate.limit = limit;
    gate.dense = static_cast<double>(dense_) / trials_;
    gate.scsa = static_cast<double>(scsa_) / trials_;
    if (arms_.llama) gate.llama = static_cast<double>(llama_) / trials_;
    if (dense_ == 0) return gate;
    gate.figure = static_cast<double>(both_) / dense_;
    gate.range = WilsonInterval(both_, dense_);
    Decide(gate);
    return gate;
  }

 private:
  ArmIndices arms_;
  int trials_ = 0;
  int dense_ = 0;
  int scsa_ = 0;
  int both_ = 0;
  int llama_ = 0;
};

std::string Share(double value) { return fmt::format("{:.1f} %", 100.0 * value); }
std::string Points(double value) { return fmt::format("{:+.1f} pp", 100.0 * value); }

// A value, and a figure or limit of a gate, in the gate's unit.
std::string ValueText(const Gate& gate, double value) {
  return gate.name == "nll" ? fmt::format("{:.3f}", value) : Share(value);
}
std::string FigureText(const Gate& gate, double value) {
  if (gate.name == "nll") return fmt::format("{:+.3f}", value);
  return gate.name == "loops" ? Points(value) : Share(value);
}

const char* VerdictName(Verdict verdict) {
  return verdict == Verdict::kPass ? "PASS" : verdict == Verdict::kFail ? "FAIL" : "dense fails: no verdict";
}

Record Texts(std::span<const std::string> texts) {
  Record array = Record::array();
  for (const std::string& text : texts) array.push_back(text);
  return array;
}

}  // namespace

std::vector<Gate> GatesOf(const FreerunOptions& options, const FreerunResult& result) {
  const ArmIndices arms = {.dense = *IndexOf(options, Arm::kExact),
                           .scsa = *IndexOf(options, Arm::kScsa),
                           .llama = IndexOf(options, Arm::kLlama)};
  std::vector<Gate> gates;
  if (!result.continuations.empty()) gates = {LoopGate(result, arms), NllGate(result, arms)};
  if (result.questions.empty()) return gates;
  KeptCounter all(arms);
  for (const RetrievalTask task : {RetrievalTask::kPasskey, RetrievalTask::kMultiNeedle, RetrievalTask::kVariables}) {
    KeptCounter counter(arms);
    for (std::size_t i = 0; i < result.questions.size(); ++i) {
      if (result.questions[i].task != task) continue;
      const std::vector<Answer>& answers = result.answers[i];
      for (std::size_t n = 0; n < result.questions[i].expected.size(); ++n) {
        counter.Add([&](std::size_t arm) { return answers[arm].found[n]; });
      }
      all.Add([&](std::size_t arm) {
        return std::find(answers[arm].found.begin(), answers[arm].found.end(), false) == answers[arm].found.end();
      });
    }
    gates.push_back(counter.Result(std::string(TaskName(task)),
                                   task == RetrievalTask::kPasskey ? kPasskeyLimit : kOtherTasksLimit));
  }
  gates.push_back(all.Result("retained", kRetainedLimit));
  return gates;
}

std::string GateTable(std::span<const Gate> gates) {
  const bool with_llama = !gates.empty() && gates.front().llama.has_value();
  std::vector<std::vector<std::string>> rows = {{"gate", "trials", "dense", "scsa"}};
  if (with_llama) rows[0].emplace_back("llama");
  rows[0].insert(rows[0].end(), {"figure", "95 %", "limit", "verdict"});
  for (const Gate& gate : gates) {
    std::vector<std::string>& row = rows.emplace_back();
    row = {gate.name, fmt::format("{}", gate.trials), ValueText(gate, gate.dense), ValueText(gate, gate.scsa)};
    if (with_llama) row.push_back(ValueText(gate, gate.llama.value_or(0.0)));
    row.push_back(gate.verdict == Verdict::kNone ? "-" : FigureText(gate, gate.figure));
    row.push_back(!gate.range
                      ? "-"
                      : fmt::format("{} to {}", FigureText(gate, gate.range->low), FigureText(gate, gate.range->high)));
    row.push_back(fmt::format("{} {}", gate.at_most ? "<=" : ">=", FigureText(gate, gate.limit)));
    row.emplace_back(VerdictName(gate.verdict));
  }
  return AlignedTable(rows, 1);
}

std::string VerdictText(std::span<const Gate> gates) {
  const auto count = [&](Verdict verdict) {
    return std::count_if(gates.begin(), gates.end(), [&](const Gate& gate) { return gate.verdict == verdict; });
  };
  return fmt::format("{} gates pass, {} fail, {} without a verdict", count(Verdict::kPass), count(Verdict::kFail),
                     count(Verdict::kNone));
}

std::vector<Record> GateRecords(const RunInfo& info, const FreerunOptions& options, const FreerunResult& result,
                                std::span<const Gate> gates) {
  std::vector<Record> records;
  for (const Gate& gate : gates) {
    const bool decided = gate.verdict != Verdict::kNone;
    Record& record = records.emplace_back();
    record["model"] = info.model;
    record["context"] = result.context;
    record["gate"] = gate.name;
    record["trials"] = gate.trials;
    record["dense"] = gate.dense;
    record["scsa"] = gate.scsa;
    record["llama"] = RecordNumber(gate.llama);
    record["figure"] = decided ? Record(gate.figure) : Record(nullptr);
    record["figure_low"] = gate.range ? Record(gate.range->low) : Record(nullptr);
    record["figure_high"] = gate.range ? Record(gate.range->high) : Record(nullptr);
    record["limit"] = gate.limit;
    record["limit_kind"] = gate.at_most ? "at most" : "at least";
    record["verdict"] = !decided ? "none" : gate.verdict == Verdict::kPass ? "pass" : "fail";
    record["rows_read"] = RecordNumber(result.rows_read);
    record["preset"] = info.preset;
    record["tolerance"] = options.Tolerance();
    record["crossover"] = options.crossover;
    record["calibrate"] = options.calibrate;
    record["starts"] = options.starts;
    record["steps"] = options.steps;
    record["haystacks"] = options.haystacks;
    record["seed"] = options.seed;
    record["threads"] = info.threads;
    record["simd_target"] = info.simd_target;
    record["cpu"] = info.cpu;
    record["llama_cpp"] = info.llama_cpp_version;
    record["date"] = info.date;
  }
  return records;
}

std::vector<Record> TrialRecords(const Model& model, const FreerunOptions& options, const FreerunResult& result) {
  std::vector<Record> records;
  for (std::size_t trial = 0; trial < result.continuations.size(); ++trial) {
    for (std::size_t arm = 0; arm < options.arms.size(); ++arm) {
      const Continuation& continuation = result.continuations[trial][arm];
      std::string text;
      for (const llama_token token : continuation.tokens) text += model.Piece(token);
      records.push_back({{"context", result.context},
                         {"task", "continuation"},
                         {"trial", trial},
                         {"arm", ArmName(options.arms[arm])},
                         {"text", text},
                         {"loop", continuation.loop},
                         {"nll", continuation.nll}});
    }
  }
  for (std::size_t trial = 0; trial < result.questions.size(); ++trial) {
    const RetrievalQuestion& question = result.questions[trial];
    for (std::size_t arm = 0; arm < options.arms.size(); ++arm) {
      const Answer& answer = result.answers[trial][arm];
      records.push_back({{"context", result.context},
                         {"task", TaskName(question.task)},
                         {"trial", trial},
                         {"arm", ArmName(options.arms[arm])},
                         {"haystack", question.haystack},
                         {"depth", question.depth},
                         {"question", question.question},
                         {"expected", Texts(question.expected)},
                         {"text", question.answer_start + answer.text},
                         {"found", std::count(answer.found.begin(), answer.found.end(), true)}});
    }
  }
  return records;
}

}  // namespace scsa::tool
