// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "commands.h"
#include "freerun_bench.h"
#include "freerun_report.h"
#include "machine.h"
#include "output_file.h"
#include "plugin_client.h"
#include "progress.h"
#include "report.h"
#include "scsa/target.h"
#include "session.h"
#include "shared_options.h"
#include "state_store.h"
#include "text.h"
#include "tool_error.h"
#include "version.h"

namespace scsa::tool {
namespace {

constexpr int kMinContext = 1000;  // the facts need a text to hide in

struct CommandOptions {
  std::string model;
  std::string text;
  std::string contexts = "2000,8000";
  std::string state_dir;
  std::string trials;
  ResultOptions results;
  bool llama = false;
  bool check = false;
  bool verbose = false;
  FreerunOptions eval;
};

void Run(CommandOptions options) {
  FreerunOptions& eval = options.eval;
  if (options.llama) eval.arms.push_back(Arm::kLlama);
  eval.threads = ThreadsOf(eval.threads);
  options.results.CheckStreams();
  if (eval.starts == 0 && eval.haystacks == 0) {
    throw ToolError("--starts 0 and --seeds 0 leave nothing to measure: raise one of them");
  }
  const std::vector<int> contexts = ParseIntList(options.contexts, "-c", kMinContext, 1 << 24);
  options.results.CheckFile();
  if (!options.trials.empty()) CheckWritable(options.trials, "--trials");
  const std::string text = ReadFile(options.text, "text");

  ConfigureLlamaLog(options.verbose);
  const PluginClient plugin(options.verbose);
  plugin.Set("preset", eval.preset);  // a bad value must not cost a prefill first
  StateStore states(options.state_dir);
  Progress progress;
  progress.Show("loading the model");
  const Model model(options.model);
  if (eval.TokensNeeded(contexts.back()) > model.n_ctx_train()) {
    throw ToolError(
        fmt::format("context {} and what is written after it need {} tokens, the model's context holds {}: "
                    "use a shorter -c or a lower -n",
                    contexts.back(), eval.TokensNeeded(contexts.back()), model.n_ctx_train()));
  }
  progress.Clear();

  const RunInfo info = {.model = model.name(),
                        .cpu = CpuName(),
                        .simd_target = ActiveTarget(),
                        .date = UtcDate(),
                        .llama_cpp_version = LlamaCppVersion(),
                        .preset = eval.preset,
                        .taus = "",
                        .threads = eval.threads};
  if (options.results.PrintsTable()) fmt::print("{}", HeaderLine(info));
  std::vector<Record> records;
  std::vector<Record> trials;
  std::vector<Gate> all;
  for (const int context : contexts) {
    const FreerunResult result = MeasureFreerun(eval, model, text, context, states, plugin, progress);
    const std::vector<Gate> gates = GatesOf(eval, result);
    if (options.results.PrintsTable()) {
      fmt::print("\ncontext {}{}\n{}", context,
                 result.rows_read ? fmt::format(", rows read {:.1f} %", 100.0 * *result.rows_read) : "",
                 GateTable(gates));
      std::fflush(stdout);
    }
    for (Record& record : GateRecords(info, eval, result, gates)) records.push_back(std::move(record));
    for (Record& record : TrialRecords(model, eval, result)) trials.push_back(std::move(record));
    all.insert(all.end(), gates.begin(), gates.end());
  }
  if (options.results.PrintsTable()) fmt::print("\n{}\n", VerdictText(all));
  options.results.Write(records);
  if (!options.trials.empty()) WriteFileAtomically(options.trials, RecordsJson(trials));
  const bool failed =
      std::any_of(all.begin(), all.end(), [](const Gate& gate) { return gate.verdict == Verdict::kFail; });
  if (options.check && failed) {
    throw ToolError(fmt::format("{}: lower --tolerance, or see --trials for what was written", VerdictText(all)));
  }
}

}  // namespace

void AddEvalFreerunCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand(
      "freerun", "Let sparse and dense attention write on their own, and compare loops, likelihood and found facts");
  AddModelOption(*app, &options->model);
  app->add_option("-f,--file", options->text, "Text: continued, and the haystack that facts are hidden in")
      ->type_name("FILE")
      ->required();
  AddContextsOption(*app, &options->contexts);
  app->add_option("-n,--steps", options->eval.steps, "Tokens of a continuation")
      ->type_name("N")
      ->check(CLI::Range(2, 1 << 16).description(""))
      ->capture_default_str();
  app->add_option("--starts", options->eval.starts, "Continuations per length (0: none)")
      ->type_name("N")
      ->check(CLI::Range(0, 40).description(""))
      ->capture_default_str();
  app->add_option("--seeds", options->eval.haystacks,
                  "Haystacks per length, with other facts in other places (0: none)")
      ->type_name("N")
      ->check(CLI::Range(0, 64).description(""))
      ->capture_default_str();
  app->add_option("--seed", options->eval.seed, "Random numbers of the facts and their places")
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--preset", options->eval.preset, "Preset of the sparse operator: fast, seed")
      ->type_name("NAME")
      ->capture_default_str();
  app->add_option("--tolerance", options->eval.tolerance,
                  "Attention error that calibration aims at (default: the preset's)")
      ->type_name("X")
      ->check(CLI::Range(1e-6, 1.0).description(""));
  app->add_option("--calibrate", options->eval.calibrate, "Steps of the calibration window, before the free run")
      ->type_name("N")
      ->check(CLI::Range(1, 256).description(""))
      ->capture_default_str();
  app->add_option("--crossover", options->eval.crossover, "Cached rows from which the scsa arm is sparse (0: always)")
      ->type_name("N")
      ->check(CLI::Range(0, 1 << 30).description(""))
      ->capture_default_str();
  app->add_flag("--llama", options->llama, "Measure llama.cpp's own attention as well");
  app->add_flag("--check", options->check, "Exit with status 1 when a gate fails");
  app->add_option("--trials", options->trials, "Write every continuation and answer as JSON to this file")
      ->type_name("FILE");
  AddThreadsOption(*app, &options->eval.threads);
  AddStateDirOption(*app, &options->state_dir);
  options->results.AddTo(*app);
  AddVerboseFlag(*app, &options->verbose);
  app->footer(
      "Examples:\n"
      "  scsa eval freerun -m model.gguf -f book.txt -c 2000,8000 --state-dir states\n"
      "  scsa eval freerun -m model.gguf -f book.txt -c 8000 --tolerance 0.05 --check --json freerun.json");
  app->get_formatter()->column_width(34);
  options->eval.threads = 0;
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
