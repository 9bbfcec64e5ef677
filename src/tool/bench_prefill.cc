// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "commands.h"
#include "machine.h"
#include "plugin_client.h"
#include "prefill_bench.h"
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
  int crossover = -1;
  bool verbose = false;
  ResultOptions results;
  PrefillBenchOptions bench;
};

void CheckLengths(const CommandOptions& options, const Model& model, int context, std::size_t text_tokens) {
  const int needed = context + options.bench.steps;
  if (needed > model.n_ctx_train()) {
    throw ToolError(fmt::format("context {} + {} steps needs {} tokens, the model's context holds {}: use a shorter -c",
                                context, options.bench.steps, needed, model.n_ctx_train()));
  }
  if (text_tokens < static_cast<std::size_t>(needed)) {
    throw ToolError(
        fmt::format("the text has {} tokens, {} are needed: use a longer text or a shorter -c", text_tokens, needed));
  }
}

std::vector<Record> RecordsOf(const CommandOptions& options, const Model& model,
                              std::span<const PrefillResult> results) {
  const std::string cpu = CpuName();
  const std::string date = UtcDate();
  std::vector<Record> records;
  for (const PrefillResult& result : results) {
    Record object;
    object["model"] = model.name();
    object["context"] = result.context;
    object["arm"] = ArmName(result.arm);
    object["ttft_s"] = result.ttft_s;
    object["tok_s"] = result.context / result.ttft_s;
    object["speedup_vs_llama"] = result.speedup;
    object["attention_s"] = result.attention_s;
    object["ready_s"] = result.ready_s;
    object["first_step_ms"] = result.first_step_ms;
    object["step_ms_median"] = result.step_ms;
    object["kl_prompt"] = RecordNumber(result.kl_prompt);
    object["steps"] = options.bench.steps;
    object["rounds"] = options.bench.rounds;
    object["threads"] = options.bench.threads;
    object["simd_target"] = ActiveTarget();
    object["cpu"] = cpu;
    object["date"] = date;
    records.push_back(std::move(object));
  }
  return records;
}

std::string Table(std::span<const PrefillResult> results) {
  std::vector<std::vector<std::string>> lines = {{"tokens", "arm", "first token s", "tok/s", "vs llama", "attention s",
                                                  "ready s", "first step ms", "step ms", "KL after prompt"}};
  for (const PrefillResult& result : results) {
    lines.push_back({fmt::format("{}", result.context), std::string(ArmName(result.arm)),
                     fmt::format("{:.2f}", result.ttft_s), fmt::format("{:.0f}", result.context / result.ttft_s),
                     fmt::format("{:.2f} x", result.speedup), fmt::format("{:.2f}", result.attention_s),
                     fmt::format("{:.2f}", result.ready_s), fmt::format("{:.1f}", result.first_step_ms),
                     fmt::format("{:.1f}", result.step_ms), fmt::format("{:.1e}", result.kl_prompt)});
  }
  return AlignedTable(lines, 2);
}

void Run(CommandOptions options) {
  options.results.CheckStreams();
  options.bench.threads = ThreadsOf(options.bench.threads);
  const std::vector<int> contexts = ParseIntList(options.contexts, "-c", 16, 1 << 24);
  const std::string text = ReadFile(options.text, "text");
  ConfigureLlamaLog(options.verbose);
  const PluginClient plugin(options.verbose);
  if (options.crossover >= 0) plugin.Set("crossover", fmt::format("{}", options.crossover));
  const Model model(options.model);
  const std::vector<llama_token> tokens = model.Tokenize(text, true, false);
  CheckLengths(options, model, contexts.back(), tokens.size());
  options.results.CheckFile();

  Progress progress;
  std::vector<PrefillResult> all;
  for (const int context : contexts) {
    const auto results = MeasurePrefill(options.bench, model, tokens, context, plugin, progress);
    all.insert(all.end(), results.begin(), results.end());
  }
  progress.Clear();
  if (options.results.PrintsTable()) {
    fmt::print("{} | {}, {}, {} threads | {}\n{}", model.name(), CpuName(), ActiveTarget(), options.bench.threads,
               UtcDate(), Table(all));
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
  app->add_option("--rounds", options->bench.rounds, "How often each prompt is read")
      ->type_name("N")
      ->check(CLI::Range(1, 1000).description(""))
      ->capture_default_str();
  app->add_option("--crossover", options->crossover, "Cached rows from which the operator is sparse")
      ->type_name("N")
      ->check(CLI::Range(0, 1 << 30).description(""));
  options->bench.threads = 0;
  AddThreadsOption(*app, &options->bench.threads);
  options->results.AddTo(*app);
  AddVerboseFlag(*app, &options->verbose);
  app->footer(
      "Examples:\n"
      "  scsa bench prefill -m model.gguf -f report.txt -c 1000,8000\n"
      "  scsa bench prefill -m model.gguf -f report.txt -c 4000 --rounds 3 --json prefill.json");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
