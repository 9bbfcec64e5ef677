// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <type_traits>

#include "commands.h"
#include "machine.h"
#include "plugin_client.h"
#include "prefill_bench.h"
#include "prefill_quality.h"
#include "report.h"
#include "scsa/target.h"
#include "session.h"
#include "shared_options.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

struct CommandOptions {
  std::string model;
  std::string text;
  std::string contexts = "2000,8000";
  std::string tolerances = "0.025";
  std::string crossover;  // empty: the plugin's
  bool quality = false;
  bool verbose = false;
  ResultOptions results;
  PrefillBenchOptions bench;
};

void CheckLengths(const CommandOptions& options, const Model& model, int context, std::size_t text_tokens) {
  const int needed = context + std::max(options.bench.steps, options.quality ? options.bench.quality_steps : 0);
  if (needed > model.n_ctx_train()) {
    throw ToolError(fmt::format("context {} + {} steps needs {} tokens, the model's context holds {}: use a shorter -c",
                                context, needed - context, needed, model.n_ctx_train()));
  }
  if (text_tokens < static_cast<std::size_t>(needed)) {
    throw ToolError(
        fmt::format("the text has {} tokens, {} are needed: use a longer text or a shorter -c", text_tokens, needed));
  }
}

// One context's results; either is empty where it was not asked for.
struct Measured {
  int context = 0;
  std::vector<PrefillResult> times;
  std::vector<PrefillQuality> quality;
};

// The result of an arm; nullptr where it has none.
template <class Result>
const Result* OfArm(const std::vector<Result>& results, const PrefillArm& arm) {
  for (const Result& result : results) {
    if (result.arm == arm) return &result;
  }
  return nullptr;
}

// A field of a result, null without one.
template <class Result, class Value>
Record Field(const Result* result, Value Result::*field) {
  if (result == nullptr) return nullptr;
  if constexpr (std::is_integral_v<Value>) {
    return result->*field;
  } else {
    return RecordNumber(result->*field);
  }
}

Record RecordOf(const CommandOptions& options, int context, const PrefillArm& arm, const PrefillResult* times,
                const PrefillQuality* quality) {
  Record object;
  object["context"] = context;
  object["arm"] = arm.Name();
  object["prompt_tolerance"] = arm.prompt_tolerance;
  object["ttft_s"] = Field(times, &PrefillResult::ttft_s);
  object["tok_s"] = times == nullptr ? Record(nullptr) : Record(context / times->ttft_s);
  object["speedup_vs_llama"] = Field(times, &PrefillResult::speedup);
  object["attention_s"] = Field(times, &PrefillResult::attention_s);
  object["ready_s"] = Field(times, &PrefillResult::ready_s);
  object["first_step_ms"] = Field(times, &PrefillResult::first_step_ms);
  object["step_ms_median"] = Field(times, &PrefillResult::step_ms);
  object["kl_prompt"] = Field(times, &PrefillResult::kl_prompt);
  object["rows_read"] = Field(times, &PrefillResult::rows_read);
  object["error_mean"] = Field(times, &PrefillResult::error);
  object["perplexity"] = Field(quality, &PrefillQuality::perplexity);
  object["attention_error"] = Field(quality, &PrefillQuality::attention_error);
  object["ggml_attention_error"] = Field(quality, &PrefillQuality::ggml_attention_error);
  object["kl_mean"] = Field(quality, &PrefillQuality::kl_mean);
  object["nll_delta"] = Field(quality, &PrefillQuality::nll_delta);
  object["found"] = Field(quality, &PrefillQuality::found);
  object["hidden"] = Field(quality, &PrefillQuality::hidden);
  object["quality_steps"] = quality == nullptr ? Record(nullptr) : Record(options.bench.quality_steps);
  object["steps"] = options.bench.steps;
  object["rounds"] = options.bench.rounds;
  object["threads"] = options.bench.threads;
  return object;
}

std::vector<Record> RecordsOf(const CommandOptions& options, const Model& model, std::span<const Measured> contexts) {
  std::vector<Record> records;
  for (const Measured& measured : contexts) {
    for (const PrefillArm& arm : PrefillArms(options.bench)) {
      const PrefillResult* times = OfArm(measured.times, arm);
      const PrefillQuality* quality = OfArm(measured.quality, arm);
      if (times == nullptr && quality == nullptr) continue;
      Record object = {{"model", model.name()}};
      object.update(RecordOf(options, measured.context, arm, times, quality));
      object["simd_target"] = ActiveTarget();
      object["cpu"] = CpuName();
      object["date"] = UtcDate();
      records.push_back(std::move(object));
    }
  }
  return records;
}

std::string Share(const std::optional<double>& share) { return share ? fmt::format("{:.1f} %", 100.0 * *share) : "-"; }

std::string TimeTable(std::span<const Measured> contexts) {
  std::vector<std::vector<std::string>> lines = {{"tokens", "arm", "tolerance", "first token s", "tok/s", "vs llama",
                                                  "attention s", "ready s", "first step ms", "step ms", "rows read",
                                                  "error", "KL after prompt"}};
  for (const Measured& measured : contexts) {
    for (const PrefillResult& result : measured.times) {
      const double tolerance = result.arm.prompt_tolerance;
      lines.push_back({fmt::format("{}", result.context), result.arm.Name(),
                       tolerance > 0.0 ? fmt::format("{}", tolerance) : "-", fmt::format("{:.2f}", result.ttft_s),
                       fmt::format("{:.0f}", result.context / result.ttft_s), fmt::format("{:.2f} x", result.speedup),
                       fmt::format("{:.2f}", result.attention_s), fmt::format("{:.2f}", result.ready_s),
                       fmt::format("{:.1f}", result.first_step_ms), fmt::format("{:.1f}", result.step_ms),
                       Share(result.rows_read), result.error ? fmt::format("{:.4f}", *result.error) : "-",
                       fmt::format("{:.1e}", result.kl_prompt)});
    }
  }
  return AlignedTable(lines, 3);
}

std::string QualityTable(std::span<const Measured> contexts) {
  std::vector<std::vector<std::string>> lines = {
      {"tokens", "arm", "tolerance", "perplexity", "attn error", "ggml's", "KL", "NLL difference", "numbers found"}};
  for (const Measured& measured : contexts) {
    for (const PrefillQuality& quality : measured.quality) {
      const double tolerance = quality.arm.prompt_tolerance;
      lines.push_back({fmt::format("{}", measured.context), quality.arm.Name(),
                       tolerance > 0.0 ? fmt::format("{}", tolerance) : "-", fmt::format("{:.3f}", quality.perplexity),
                       fmt::format("{:.2g}", quality.attention_error),
                       quality.ggml_attention_error ? fmt::format("{:.2g}", *quality.ggml_attention_error) : "-",
                       fmt::format("{:.4f}", quality.kl_mean), fmt::format("{:+.4f}", quality.nll_delta),
                       fmt::format("{}/{}", quality.found, quality.hidden)});
    }
  }
  return AlignedTable(lines, 3);
}

void Run(CommandOptions options) {
  options.results.CheckStreams();
  options.bench.threads = ThreadsOf(options.bench.threads);
  options.bench.tolerances.clear();
  if (!options.tolerances.empty()) {
    options.bench.tolerances = ParseNumberList(options.tolerances, "--prompt-tolerance", 1e-6, 1.0);
  }
  if (options.bench.rounds == 0 && !options.quality) {
    throw ToolError("--rounds 0 without --quality measures nothing: add --quality or raise --rounds");
  }
  const std::vector<int> contexts = ParseIntList(options.contexts, "-c", 16, 1 << 24);
  const std::string text = ReadFile(options.text, "text");
  ConfigureLlamaLog(options.verbose);
  const PluginClient plugin(options.verbose);
  if (!options.crossover.empty()) plugin.Set("crossover", options.crossover);
  const Model model(options.model);
  const std::vector<llama_token> tokens = model.Tokenize(text, true, false);
  CheckLengths(options, model, contexts.back(), tokens.size());
  options.results.CheckFile();

  Progress progress;
  std::vector<Measured> all;
  for (const int context : contexts) {
    Measured measured;
    measured.context = context;
    if (options.bench.rounds > 0) {
      measured.times = MeasurePrefill(options.bench, model, tokens, context, plugin, progress);
    }
    if (options.quality) {
      measured.quality = MeasurePrefillQuality(options.bench, model, text, context, plugin, progress);
    }
    all.push_back(std::move(measured));
  }
  progress.Clear();
  if (options.results.PrintsTable()) {
    fmt::print("{} | {}, {}, {} threads | {}\n{}", model.name(), CpuName(), ActiveTarget(), options.bench.threads,
               UtcDate(), options.bench.rounds > 0 ? TimeTable(all) : "");
    if (options.quality) {
      fmt::print("\nAfter each prompt, decoded exactly: {} steps, and questions about hidden numbers\n{}",
                 options.bench.quality_steps, QualityTable(all));
    }
  }
  options.results.Write(RecordsOf(options, model, all));
}

}  // namespace

void AddBenchPrefillCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand(
      "prefill", "Read the same prompt with llama.cpp's attention and with ours: time to the first token");
  AddModelOption(*app, &options->model);
  AddTextOption(*app, &options->text);
  AddContextsOption(*app, &options->contexts);
  app->add_option("-n,--steps", options->bench.steps, "Tokens decoded after each prompt")
      ->type_name("N")
      ->check(CLI::Range(2, 1 << 16).description(""))
      ->capture_default_str();
  app->add_option("--rounds", options->bench.rounds, "How often each prompt is read (0: not timed, with --quality)")
      ->type_name("N")
      ->check(CLI::Range(0, 1000).description(""))
      ->capture_default_str();
  app->add_option("--crossover", options->crossover, "Cached rows from which the operator is sparse, or auto: measured")
      ->type_name("N");
  app->add_option("--prompt-tolerance", options->tolerances,
                  "Errors that sparse prompts are calibrated to, one arm each; empty: none")
      ->type_name("LIST")
      ->capture_default_str();
  app->add_flag("--quality", options->quality,
                "Judge what follows a prompt with hidden numbers: perplexity, KL, NLL, answers");
  app->add_option("--quality-steps", options->bench.quality_steps, "Tokens decoded for --quality")
      ->type_name("N")
      ->check(CLI::Range(2, 1 << 16).description(""))
      ->capture_default_str();
  options->bench.threads = 0;
  AddThreadsOption(*app, &options->bench.threads);
  options->results.AddTo(*app);
  AddVerboseFlag(*app, &options->verbose);
  app->footer(
      "Examples:\n"
      "  scsa bench prefill -m model.gguf -f report.txt -c 1000,8000\n"
      "  scsa bench prefill -m model.gguf -f report.txt -c 4000 --rounds 3 --json prefill.json\n"
      "  scsa bench prefill -m model.gguf -f report.txt -c 8000 --prompt-tolerance 0.025,0.05 --quality");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
