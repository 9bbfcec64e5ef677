// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include "commands.h"
#include "decode_bench.h"
#include "machine.h"
#include "plugin_client.h"
#include "report.h"
#include "scsa/target.h"
#include "session.h"
#include "shared_options.h"
#include "state_store.h"
#include "taus.h"
#include "text.h"
#include "tool_error.h"
#include "version.h"

namespace scsa::tool {
namespace {

struct CommandOptions {
  std::string model;
  std::string text;
  std::string contexts = "8000";
  std::string arms = "llama,llama-q8,exact,scsa,limit";
  std::string tolerances;  // empty: the preset's
  std::string state_dir;
  ResultOptions results;
  bool preset_given = false;
  bool verbose = false;
  DecodeBenchOptions bench;
};

void CheckLengths(const CommandOptions& options, const Model& model, std::span<const int> contexts,
                  std::size_t text_tokens) {
  const int needed = options.bench.TokensNeeded(contexts.back());
  const std::string parts = fmt::format("context {} + {} warm-up + {} timed + 2 error steps", contexts.back(),
                                        options.bench.WarmupSteps(), options.bench.steps);
  if (needed > model.n_ctx_train()) {
    throw ToolError(fmt::format("{} needs {} tokens, the model's context holds {}: use a shorter -c", parts, needed,
                                model.n_ctx_train()));
  }
  if (text_tokens < static_cast<std::size_t>(needed)) {
    throw ToolError(fmt::format("the text has {} tokens, {} are needed ({}): use a longer text or a shorter -c",
                                text_tokens, needed, parts));
  }
}

void Run(CommandOptions options) {
  DecodeBenchOptions& bench = options.bench;
  bench.arms = ParseArms(options.arms);
  bench.threads = ThreadsOf(bench.threads);
  if (!options.tolerances.empty()) {
    bench.tolerances = ParseNumberList(options.tolerances, "--tolerance", 1e-6, 1.0);
  }
  options.results.CheckStreams();
  const std::vector<int> contexts = ParseIntList(options.contexts, "-c", 16, 1 << 24);
  options.results.CheckFile();
  const std::string text = ReadFile(options.text, "text");
  std::optional<TausChoice> taus;
  if (!bench.taus.empty()) {
    if (bench.tolerances.size() > 1) throw ToolError("--taus holds for one tolerance: give at most one --tolerance");
    const std::optional<double> tolerance =
        bench.tolerances.empty() ? std::nullopt : std::optional<double>(bench.tolerances.front());
    taus = ChooseTaus(bench.taus, options.preset_given ? bench.preset : "", tolerance);
    if (!taus->preset.empty()) bench.preset = taus->preset;
    bench.tolerances.clear();
    if (taus->tolerance) bench.tolerances = {*taus->tolerance};
  }

  ConfigureLlamaLog(options.verbose);
  const PluginClient plugin(options.verbose);
  plugin.Set("preset", bench.preset);  // a bad value must not cost a prefill first
  if (!bench.crossover.empty()) plugin.Set("crossover", bench.crossover);
  StateStore states(options.state_dir);
  Progress progress;
  progress.Show("loading the model");
  const Model model(options.model);
  if (taus) CheckTausFit(bench.taus, taus->file, model);
  const std::vector<llama_token> tokens = model.Tokenize(text, true, false);
  CheckLengths(options, model, contexts, tokens.size());

  plugin.Set("mode", "exact");
  for (const CacheType type : CacheTypesOf(bench.arms)) {
    states.Prefill(model, tokens, contexts, type, bench.threads, progress);
  }
  progress.Show("measuring memory bandwidth and arithmetic");
  const MachineRates rates = MeasureMachineRates(bench.threads);
  progress.Clear();

  const RunInfo info = {.model = model.name(),
                        .cpu = CpuName(),
                        .simd_target = ActiveTarget(),
                        .date = UtcDate(),
                        .llama_cpp_version = LlamaCppVersion(),
                        .preset = bench.preset,
                        .taus = bench.taus,
                        .threads = bench.threads};
  if (options.results.PrintsTable()) fmt::print("{}", HeaderLine(info));
  std::vector<ArmResult> all;
  for (const int context : contexts) {
    const auto results = MeasureContext(bench, model, tokens, context, states, plugin, rates, progress);
    if (options.results.PrintsTable()) {
      fmt::print("\ncontext {}\n{}{}", context, ResultTable(results),
                 RooflineText(results) + CalibrationText(results) + CrossoverText(results));
      std::fflush(stdout);
    }
    all.insert(all.end(), results.begin(), results.end());
  }
  options.results.Write(ResultRecords(info, all));
}

}  // namespace

void AddBenchDecodeCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand(
      "decode", "Decode the same tokens of a text through several kinds of attention, and compare speed and quality");
  AddModelOption(*app, &options->model);
  AddTextOption(*app, &options->text);
  AddContextsOption(*app, &options->contexts);
  app->add_option("-n,--steps", options->bench.steps, "Timed decode steps")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->capture_default_str();
  app->add_option("--arms", options->arms, "What to compare: llama, llama-q8, exact, scsa, scsa-unchecked, limit")
      ->type_name("LIST")
      ->capture_default_str();
  const CLI::Option* preset = app->add_option("--preset", options->bench.preset, "Preset of the sparse operator")
                                  ->type_name("NAME")
                                  ->capture_default_str();
  app->add_option("--tolerance", options->tolerances,
                  "Attention errors that calibration aims at, separated by commas: the scsa arm runs once for each "
                  "(default: the preset's)")
      ->type_name("LIST");
  app->add_option("--calibrate", options->bench.calibrate, "Steps of the calibration window, before the timed ones")
      ->type_name("N")
      ->check(CLI::Range(0, 1 << 20).description(""))
      ->capture_default_str();
  app->add_option("--taus", options->bench.taus,
                  "Thresholds of scsa calibrate for the scsa arm, in place of a calibration window")
      ->type_name("FILE");
  app->add_option(
         "--crossover", options->bench.crossover,
         "Cached rows from which the scsa arm is sparse (0: always), or auto: measured (default: the plugin's)")
      ->type_name("N");
  app->add_option("--audit", options->bench.audit,
                  "Share of the scsa arm's attention outputs whose error is measured (0: none; default: the plugin's)")
      ->type_name("X")
      ->check(CLI::Range(0.0, 1.0).description(""));
  AddThreadsOption(*app, &options->bench.threads);
  AddStateDirOption(*app, &options->state_dir);
  options->results.AddTo(*app);
  AddVerboseFlag(*app, &options->verbose);
  app->footer(
      "Examples:\n"
      "  scsa bench decode -m model.gguf -f book.txt -c 1000,4000,8000 --state-dir states\n"
      "  scsa bench decode -m model.gguf -f book.txt -c 8000 --arms llama,scsa --json result.json\n"
      "  scsa bench decode -m model.gguf -f book.txt -c 8000 --arms scsa,scsa-unchecked   # what the checks cost");
  app->get_formatter()->column_width(34);
  options->bench.threads = 0;
  app->callback([options, preset] {
    options->preset_given = preset->count() > 0;
    Run(*options);
  });
}

}  // namespace scsa::tool
