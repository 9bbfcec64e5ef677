// SPDX-License-Identifier: Apache-2.0
#include "decode_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>

#include "attention_check.h"
#include "memory_limit.h"
#include "scsa/config.h"
#include "stats.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr int kMinWarmup = 8;
constexpr int kTrialSteps = 17;  // of the plugin, when it measures the crossover
constexpr int kRoundSteps = 8;   // steps of one arm before the next arm's turn
constexpr int kErrorSteps = 2;   // after the timed ones, for the attention error
constexpr int kAuditSteps = 32;  // of an audit window: whole rounds

struct ArmFacts {
  Arm arm;
  std::string_view name;
  const char* mode;  // of the plugin
  CacheType cache;
};
constexpr std::array kArms = {
    ArmFacts{Arm::kLlama, "llama", "off", CacheType::kF16},
    ArmFacts{Arm::kLlamaQ8, "llama-q8", "off", CacheType::kQ8_0},
    ArmFacts{Arm::kExact, "exact", "exact", CacheType::kF16},
    ArmFacts{Arm::kScsa, "scsa", "auto", CacheType::kF16},
    ArmFacts{Arm::kScsaUnchecked, "scsa-unchecked", "auto", CacheType::kF16},
    ArmFacts{Arm::kLimit, "limit", "limit", CacheType::kF16},
};

const ArmFacts& Facts(Arm arm) {
  return *std::find_if(kArms.begin(), kArms.end(), [arm](const ArmFacts& facts) { return facts.arm == arm; });
}

bool UsesPlugin(Arm arm) { return arm == Arm::kExact || IsSparse(arm) || arm == Arm::kLimit; }

// One arm in flight.
struct ArmRun {
  Arm arm = Arm::kLlama;
  double tolerance = 0.0;  // of scsa
  std::unique_ptr<Context> context;
  std::optional<std::uint64_t> crossover;  // of its last trial
  std::vector<double> step_ms;             // of the timed steps
  std::vector<double> all_ms;              // of warm-up and timed steps
  std::vector<bool> calibrated;            // of the same steps: part of the calibration window
  scsa_plugin_stats warmup{};
  scsa_plugin_stats timed{};
  std::vector<std::vector<float>> logits;  // of the present round, one per step
  std::vector<double> agrees;              // per timed step: 1 when the argmax is the exact arm's
  std::vector<double> kl;
  std::vector<double> nll_difference;
  std::vector<AuditSample> audit;  // of the timed steps
  std::size_t audit_done = 0;      // samples that windows hold
  std::vector<AuditWindow> audit_windows;
  std::vector<std::vector<HeadReads>> reads;  // of the timed steps, by layer and KV head
  std::unique_ptr<ReferenceProbe> probe;
};

AuditSummary Summary(std::span<const AuditSample> samples) {
  AuditSummary summary;
  if (!SummarizeAudit(samples, &summary).ok()) throw ToolError("no memory for the figures of the audit");
  return summary;
}

class ContextMeasurement {
 public:
  ContextMeasurement(const DecodeBenchOptions& options, std::span<const llama_token> tokens, int context,
                     const PluginClient& plugin, Progress& progress)
      : options_(options), tokens_(tokens), context_(context), plugin_(plugin), progress_(progress) {
    std::vector<Arm> arms = options.arms;
    if (std::find(arms.begin(), arms.end(), Arm::kExact) == arms.end()) arms.push_back(Arm::kExact);
    for (const Arm arm : arms) {
      const std::vector<double> once = {0.0};
      for (const double tolerance : IsSparse(arm) ? options.Tolerances() : once) {
        ArmRun& run = runs_.emplace_back();
        run.arm = arm;
        run.tolerance = tolerance;
      }
    }
  }

  void CreateContexts(const Model& model, const StateStore& states) {
    CheckMemory(model, states);
    plugin_.Set("preset", options_.preset);
    plugin_.Set("calibrate", fmt::format("{}", options_.calibrate));
    plugin_.Set("taus", options_.taus);
    if (!options_.taus.empty()) plugin_.Set("selection", "auto");  // that of the file
    if (options_.audit) plugin_.Set("audit", fmt::format("{}", *options_.audit));
    for (ArmRun& run : runs_) {
      Show(run, "loading the prefilled state");
      const ArmFacts& facts = Facts(run.arm);
      Use(run);
      run.context = std::make_unique<Context>(model, options_.TokensNeeded(context_), facts.cache, options_.threads);
      states.Load(model, tokens_.first(context_), facts.cache, *run.context);
      run.reads.resize(static_cast<std::size_t>(llama_model_n_layer(model.get())));
    }
  }

  // In turns, too: the calibration window of one arm is compared with the same steps of another.
  void WarmUp() {
    const int steps = options_.WarmupSteps();
    const auto turn = [&](ArmRun& run, int begin, int end) {
      const scsa_plugin_stats before = plugin_.Stats();
      for (int step = begin; step < end; ++step) {
        Show(run, fmt::format("warm-up step {}/{}", step + 1, steps));
        Step(run, step);
      }
      AddStats(run.warmup, StatsDifference(plugin_.Stats(), before));
    };
    InTurns(steps, turn, [](int, int) {});
  }

  void TimedRounds() {
    plugin_.ResetAudit();
    const auto turn = [&](ArmRun& run, int begin, int end) {
      run.logits.clear();
      const std::vector<std::vector<HeadReads>> reads_before = Reads(run);
      const scsa_plugin_stats before = plugin_.Stats();
      for (int step = begin; step < end; ++step) {
        Show(run, fmt::format("step {}/{}", step + 1, options_.steps));
        run.step_ms.push_back(Step(run, options_.WarmupSteps() + step));
        const std::span<const float> logits = run.context->Logits();
        run.logits.emplace_back(logits.begin(), logits.end());
      }
      AddStats(run.timed, StatsDifference(plugin_.Stats(), before));
      if (!IsSparse(run.arm)) return;
      AddReads(run, reads_before);
      TakeAudit(run, end);
    };
    InTurns(options_.steps, turn, [&](int begin, int end) { JudgeRound(begin, end - begin); });
  }

  // Relative attention errors of the last steps, kErrorSteps of them.
  void MeasureErrors() {
    for (ArmRun& run : runs_) {
      if (run.arm != Arm::kExact && !IsSparse(run.arm)) continue;
      run.probe = std::make_unique<ReferenceProbe>(options_.threads, run.arm == Arm::kExact);
      const ScopedObserver observer(plugin_, &ReferenceProbe::Observe, run.probe.get());
      Use(run);
      for (int step = 0; step < kErrorSteps; ++step) {
        Show(run, fmt::format("attention error, step {}/{}", step + 1, kErrorSteps));
        run.context->Decode(tokens_.subspan(context_ + options_.WarmupSteps() + options_.steps + step, 1));
      }
    }
  }

  std::vector<ArmResult> Results(const MachineRates& rates) const {
    std::vector<ArmResult> results;
    for (const ArmRun& run : runs_) {
      if (std::find(options_.arms.begin(), options_.arms.end(), run.arm) != options_.arms.end()) {
        results.push_back(Result(run, rates));
      }
    }
    return results;
  }

 private:
  void CheckMemory(const Model& model, const StateStore& states) const {
    const auto available = AvailableMemory();
    if (!available) return;
    double need = 0.0;
    const double growth = static_cast<double>(options_.TokensNeeded(context_)) / context_;
    for (const ArmRun& run : runs_) {
      need += growth * static_cast<double>(states.SizeOf(model, tokens_.first(context_), Facts(run.arm).cache));
    }
    if (need > static_cast<double>(*available)) {
      throw ToolError(
          fmt::format("{} arms at {} tokens need {:.1f} GB for their caches, {:.1f} GB are free: use fewer "
                      "--arms or a shorter context",
                      runs_.size(), context_, need / 1e9, static_cast<double>(*available) / 1e9));
    }
  }

  void Show(const ArmRun& run, const std::string& what) {
    progress_.Show(fmt::format("{} tokens, {}: {}", context_, ArmName(run.arm), what));
  }

  const ArmRun* Find(Arm arm) const {
    const auto run = std::find_if(runs_.begin(), runs_.end(), [arm](const ArmRun& r) { return r.arm == arm; });
    return run == runs_.end() ? nullptr : &*run;
  }

  // Rounds of kRoundSteps steps, in which the arms take turns in rotating order: turn(run, begin, end) for each arm,
  // then finish(begin, end).
  template <typename Turn, typename Finish>
  void InTurns(int steps, Turn turn, Finish finish) {
    const int arms = static_cast<int>(runs_.size());
    for (int begin = 0, round = 0; begin < steps; begin += kRoundSteps, ++round) {
      const int end = std::min(begin + kRoundSteps, steps);
      for (int i = 0; i < arms; ++i) {
        ArmRun& run = runs_[(round + i) % arms];
        Use(run);
        turn(run, begin, end);
      }
      finish(begin, end);
    }
  }

  // Layers take the tolerance when they are made, in the first step that could be sparse.
  void Use(const ArmRun& run) const {
    plugin_.Set("mode", ArmMode(run.arm));
    plugin_.Set("checks", run.arm == Arm::kScsaUnchecked ? "off" : "on");
    if (IsSparse(run.arm)) plugin_.Set("tolerance", fmt::format("{}", run.tolerance));
  }

  std::vector<std::vector<HeadReads>> Reads(const ArmRun& run) const {
    std::vector<std::vector<HeadReads>> reads(run.reads.size());
    for (std::size_t layer = 0; layer < reads.size(); ++layer) reads[layer] = plugin_.ReadsOf(static_cast<int>(layer));
    return reads;
  }

  void AddReads(ArmRun& run, const std::vector<std::vector<HeadReads>>& before) const {
    const std::vector<std::vector<HeadReads>> now = Reads(run);
    for (std::size_t layer = 0; layer < now.size(); ++layer) {
      run.reads[layer].resize(now[layer].size());
      for (std::size_t head = 0; head < now[layer].size(); ++head) {
        const HeadReads old = head < before[layer].size() ? before[layer][head] : HeadReads{};
        run.reads[layer][head].Add({.rows_read = now[layer][head].rows_read - old.rows_read,
                                    .rows_visible = now[layer][head].rows_visible - old.rows_visible,
                                    .bytes_read = now[layer][head].bytes_read - old.bytes_read});
      }
    }
  }

  // The plugin's figures are those of all contexts together, so each turn takes its own.
  void TakeAudit(ArmRun& run, int end) const {
    const std::vector<AuditSample> samples = plugin_.AuditSamples();
    plugin_.ResetAudit();
    run.audit.insert(run.audit.end(), samples.begin(), samples.end());
    if (end % kAuditSteps != 0 && end != options_.steps) return;
    const int begin = run.audit_windows.empty() ? 0 : run.audit_windows.back().end;
    run.audit_windows.push_back({begin, end, Summary(std::span(run.audit).subspan(run.audit_done))});
    run.audit_done = run.audit.size();
  }

  // Decodes the step-th token after the prompt; returns milliseconds.
  double Step(ArmRun& run, int step) {
    using Clock = std::chrono::steady_clock;
    const scsa_plugin_stats before = plugin_.Stats();
    const auto start = Clock::now();
    run.context->Decode(tokens_.subspan(context_ + step, 1));
    run.all_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    const scsa_plugin_stats after = plugin_.Stats();
    run.calibrated.push_back(after.calibration_calls > before.calibration_calls);
    // The plugin knows the last trial alone, which may be that of another arm.
    if (after.crossover_trials != before.crossover_trials) run.crossover = after.crossover;
    return run.all_ms.back();
  }

  // Compares the logits of a round with the exact arm's.
  void JudgeRound(int begin, int steps) {
    const ArmRun& exact = *Find(Arm::kExact);
    for (int i = 0; i < steps; ++i) {
      const std::vector<double> log_exact = LogSoftmax(exact.logits[i]);
      const int best = Argmax(exact.logits[i]);
      const llama_token next = tokens_[context_ + options_.WarmupSteps() + begin + i + 1];
      for (ArmRun& run : runs_) {
        if (run.arm == Arm::kLimit) continue;
        const std::vector<double> log_arm = LogSoftmax(run.logits[i]);
        run.agrees.push_back(Argmax(run.logits[i]) == best ? 1.0 : 0.0);
        run.kl.push_back(KlDivergence(log_exact, log_arm));
        run.nll_difference.push_back(log_exact[next] - log_arm[next]);
      }
    }
  }

  static double TokensPerSecond(const ArmRun& run) { return 1e3 / Mean(run.step_ms); }

  ArmResult Result(const ArmRun& run, const MachineRates& rates) const {
    ArmResult result;
    result.context = context_;
    result.arm = run.arm;
    result.stats = run.timed;
    result.warmup_steps = options_.WarmupSteps();
    result.steps = options_.steps;
    result.tok_s = TokensPerSecond(run);
    result.ms_median = Quantile(run.step_ms, 0.5);
    result.ms_p99 = Quantile(run.step_ms, 0.99);
    if (const ArmRun* llama = Find(Arm::kLlama)) result.speedup_vs_llama = result.tok_s / TokensPerSecond(*llama);
    if (run.arm != Arm::kLimit) {
      result.agreement = Mean(run.agrees);
      result.kl_mean = Mean(run.kl);
      result.nll_delta = Mean(run.nll_difference);
    }
    if (UsesPlugin(run.arm)) {
      FillFromPlugin(run, result);
    } else {
      FillDense(run, result);
    }
    FillErrors(run, result);
    if (IsSparse(run.arm)) {
      result.tolerance = run.tolerance;
      result.calibration = Calibration(run);
      result.crossover_measured = run.crossover.has_value();
      result.crossover = run.crossover;
      // Without any trial, there is one if it was set.
      const scsa_plugin_stats stats = plugin_.Stats();
      if (stats.crossover_trials == 0 && stats.crossover != UINT64_MAX) result.crossover = stats.crossover;
      result.audit = Summary(run.audit);
      result.audit_windows = run.audit_windows;
      result.head_reads = run.reads;
    }
    if (run.arm == Arm::kExact && run.timed.attn_calls > 0 && rates.bandwidth > 0.0) {
      result.roofline = Roofline{
          .bytes = *result.bytes_read,
          .multiply_adds = run.probe->multiply_adds() / kErrorSteps,
          .bandwidth = rates.bandwidth,
          .multiply_add_rate = rates.multiply_add_rate,
          .attention_ms = static_cast<double>(run.timed.attn_ns) * 1e-6 / options_.steps,
      };
    }
    return result;
  }

  void FillFromPlugin(const ArmRun& run, ArmResult& result) const {
    result.plan_build_ms = static_cast<double>(run.warmup.plan_build_ns + run.timed.plan_build_ns) * 1e-6;
    result.plan_bytes = IsSparse(run.arm) ? run.timed.plan_bytes : 0;
    if (run.timed.attn_calls == 0) {  // too short for the plugin: ggml computed everything
      result.rows_read = 1.0;
      return;
    }
    const double steps = options_.steps;
    result.attn_ms = static_cast<double>(run.timed.attn_ns + run.timed.set_rows_ns) * 1e-6 / steps;
    result.attn_ms_source = "plugin";
    result.bytes_read = static_cast<double>(run.timed.bytes_read) / steps;
    if (run.timed.rows_visible > 0) {
      result.rows_read = static_cast<double>(run.timed.rows_read) / static_cast<double>(run.timed.rows_visible);
    }
  }

  // llama.cpp's own attention reports nothing; it reads every visible row.
  void FillDense(const ArmRun& run, ArmResult& result) const {
    result.rows_read = 1.0;
    const ArmRun& exact = *Find(Arm::kExact);
    if (exact.timed.attn_calls > 0) {
      const double f16_bytes = static_cast<double>(exact.timed.bytes_read) / options_.steps;
      result.bytes_read =
          Facts(run.arm).cache == CacheType::kF16 ? f16_bytes : f16_bytes * kQ8BlockBytes / (2 * kQ8BlockSize);
    }
    if (const ArmRun* limit = Find(Arm::kLimit)) {
      result.attn_ms = result.ms_median - Quantile(limit->step_ms, 0.5);
      result.attn_ms_source = "step-limit";
    }
  }

  std::optional<CalibrationCost> Calibration(const ArmRun& run) const {
    const ArmRun& exact = *Find(Arm::kExact);
    std::vector<double> ms;
    std::vector<double> exact_ms;
    for (std::size_t step = 0; step < run.all_ms.size(); ++step) {
      if (!run.calibrated[step]) continue;
      ms.push_back(run.all_ms[step]);
      exact_ms.push_back(exact.all_ms[step]);
    }
    if (ms.empty()) return std::nullopt;
    return CalibrationCost{.steps = static_cast<int>(ms.size()),
                           .ms_median = Quantile(ms, 0.5),
                           .exact_ms_median = Quantile(exact_ms, 0.5)};
  }

  void FillErrors(const ArmRun& run, ArmResult& result) const {
    std::span<const double> errors;
    if (run.arm == Arm::kLlama) {
      errors = Find(Arm::kExact)->probe->ggml_errors();
    } else if (run.probe != nullptr) {
      errors = run.probe->errors();
    }
    if (errors.empty()) return;
    result.attn_err_mean = Mean(errors);
    result.attn_err_p99 = Quantile(errors, 0.99);
  }

  const DecodeBenchOptions& options_;
  std::span<const llama_token> tokens_;
  int context_;
  const PluginClient& plugin_;
  Progress& progress_;
  std::vector<ArmRun> runs_;
};

}  // namespace

std::string_view ArmName(Arm arm) { return Facts(arm).name; }
const char* ArmMode(Arm arm) { return Facts(arm).mode; }

std::vector<Arm> ParseArms(std::string_view text) {
  std::vector<Arm> arms;
  for (const std::string& item : SplitList(text, "--arms")) {
    const auto facts = std::find_if(kArms.begin(), kArms.end(), [&](const ArmFacts& f) { return f.name == item; });
    if (facts == kArms.end()) {
      throw ToolError(
          fmt::format("--arms: unknown arm \"{}\": choose from llama, llama-q8, exact, scsa, "
                      "scsa-unchecked, limit",
                      item));
    }
    if (std::find(arms.begin(), arms.end(), facts->arm) != arms.end()) {
      throw ToolError(fmt::format("--arms: \"{}\" is given twice", item));
    }
    arms.push_back(facts->arm);
  }
  return arms;
}

double PresetTolerance(const std::string& preset) {
  Preset known;
  // Through text: 0.015f is 0.0149999997 as a double.
  return ParsePreset(preset, &known) ? std::stod(fmt::format("{}", DefaultTolerance(known))) : 0.0;
}

std::vector<double> DecodeBenchOptions::Tolerances() const {
  if (!tolerances.empty()) return tolerances;
  return {PresetTolerance(preset)};
}

int DecodeBenchOptions::WarmupSteps() const {
  const bool measured = crossover.empty() || crossover == "auto";
  return std::max(calibrate, kMinWarmup) + (measured ? kTrialSteps : 0);
}

int DecodeBenchOptions::TokensNeeded(int context) const { return context + WarmupSteps() + steps + kErrorSteps; }

double Roofline::LimitMs() const { return std::max(MemoryMs(), ComputeMs()); }

std::vector<CacheType> CacheTypesOf(std::span<const Arm> arms) {
  // f16 always: the exact arm judges the others.
  std::vector<CacheType> types = {CacheType::kF16};
  if (std::find(arms.begin(), arms.end(), Arm::kLlamaQ8) != arms.end()) types.push_back(CacheType::kQ8_0);
  return types;
}

std::vector<ArmResult> MeasureContext(const DecodeBenchOptions& options, const Model& model,
                                      std::span<const llama_token> tokens, int context, const StateStore& states,
                                      const PluginClient& plugin, const MachineRates& rates, Progress& progress) {
  ContextMeasurement measurement(options, tokens, context, plugin, progress);
  measurement.CreateContexts(model, states);
  measurement.WarmUp();
  measurement.TimedRounds();
  measurement.MeasureErrors();
  progress.Clear();
  return measurement.Results(rates);
}

}  // namespace scsa::tool
