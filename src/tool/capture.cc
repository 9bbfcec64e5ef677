// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "capture_file.h"
#include "capture_recorder.h"
#include "commands.h"
#include "machine.h"
#include "output_file.h"
#include "plugin_client.h"
#include "session.h"
#include "shared_options.h"
#include "state_store.h"
#include "text.h"
#include "tool_error.h"
#include "version.h"

namespace scsa::tool {
namespace {

constexpr int kMinContext = 512;  // the plugin leaves shorter caches to llama.cpp
constexpr int kMaxLayer = 4095;

struct CommandOptions {
  std::string model;
  std::string text;
  std::string output;
  std::string layers;
  std::string state_dir;
  int context = 8000;
  int steps = 128;
  int threads = 0;
  bool force = false;
  bool verbose = false;
};

void CheckOutput(const CommandOptions& options) {
  CheckWritable(options.output, "-o");
  std::error_code error;
  if (!options.force && std::filesystem::exists(options.output, error)) {
    throw ToolError(fmt::format("-o: {} exists: give --force to replace it", options.output));
  }
}

void CheckLengths(const CommandOptions& options, const Model& model, std::size_t text_tokens) {
  const int needed = options.context + options.steps;
  if (needed > model.n_ctx_train()) {
    throw ToolError(fmt::format("{} + {} steps need {} tokens, the model's context holds {}: use a shorter -c",
                                options.context, options.steps, needed, model.n_ctx_train()));
  }
  if (text_tokens < static_cast<std::size_t>(needed)) {
    throw ToolError(
        fmt::format("the text has {} tokens, {} are needed ({} + {} steps): use a longer text or a shorter "
                    "-c",
                    text_tokens, needed, options.context, options.steps));
  }
}

void Run(CommandOptions options) {
  options.threads = ThreadsOf(options.threads);
  std::vector<int> layers;
  if (!options.layers.empty()) layers = ParseIntList(options.layers, "--layers", 0, kMaxLayer);
  CheckOutput(options);
  const std::string text = ReadFile(options.text, "text");

  ConfigureLlamaLog(options.verbose);
  const PluginClient plugin(options.verbose);
  StateStore states(options.state_dir);
  Progress progress;
  progress.Show("loading the model");
  const Model model(options.model);
  const std::vector<llama_token> all_tokens = model.Tokenize(text, true, false);
  CheckLengths(options, model, all_tokens.size());
  const std::span<const llama_token> tokens(all_tokens);

  plugin.Set("mode", "exact");
  const int lengths[] = {options.context};
  states.Prefill(model, tokens, lengths, CacheType::kF16, options.threads, progress);
  Context context(model, options.context + options.steps, CacheType::kF16, options.threads);
  states.Load(model, tokens.first(options.context), CacheType::kF16, context);

  CaptureRecorder recorder(layers, options.context + 1, options.steps);
  {
    const ScopedObserver observer(plugin, &CaptureRecorder::Observe, &recorder);
    for (int step = 0; step < options.steps; ++step) {
      progress.Show(fmt::format("step {}/{}", step + 1, options.steps));
      context.Decode(tokens.subspan(options.context + step, 1));
      recorder.EndStep();
    }
  }
  progress.Clear();
  Capture capture = recorder.Take();
  capture.model = model.name();
  capture.architecture = model.MetadataText("general.architecture");
  capture.llama_cpp_version = LlamaCppVersion();
  capture.date = UtcDate();
  WriteCapture(options.output, capture);

  std::vector<int> numbers;
  for (const CapturedLayer& layer : capture.layers) numbers.push_back(layer.layer);
  fmt::print("{}: layers {}, {} steps from {} cached rows on, {:.1f} MB\n", options.output, fmt::join(numbers, ","),
             capture.steps, capture.n_kv, static_cast<double>(std::filesystem::file_size(options.output)) * 1e-6);
}

}  // namespace

void AddCaptureCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand(
      "capture", "Record keys, values and decode queries of some layers from a real run into a GGUF file");
  AddModelOption(*app, &options->model);
  AddTextOption(*app, &options->text);
  app->add_option("-o,--output", options->output, "Capture file to write")->type_name("FILE")->required();
  app->add_option("-c,--context", options->context, "Prompt length in tokens")
      ->type_name("N")
      ->check(CLI::Range(kMinContext, 1 << 24).description(""))
      ->capture_default_str();
  app->add_option("-n,--steps", options->steps, "Decode steps to record")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->capture_default_str();
  app->add_option("--layers", options->layers,
                  "Layers, separated by commas (default: every sixth that sees the whole context)")
      ->type_name("LIST");
  AddThreadsOption(*app, &options->threads);
  AddStateDirOption(*app, &options->state_dir);
  app->add_flag("--force", options->force, "Replace the capture file if it exists");
  AddVerboseFlag(*app, &options->verbose);
  app->footer(
      "Examples:\n"
      "  scsa capture -m model.gguf -f book.txt -c 8000 -n 128 -o model.capture.gguf --state-dir states\n"
      "  scsa capture -m model.gguf -f book.txt -c 8000 --layers 2,7,12 -o model.capture.gguf");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
