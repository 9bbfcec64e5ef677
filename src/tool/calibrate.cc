// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>

#include "commands.h"
#include "machine.h"
#include "output_file.h"
#include "plugin_client.h"
#include "progress.h"
#include "session.h"
#include "shared_options.h"
#include "state_store.h"
#include "stats.h"
#include "taus.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr int kDefaultContext = 8000;
// The plugin leaves shorter caches to ggml, and a plan needs rows behind which it lies.
constexpr int kMinContext = 600;

struct CommandOptions {
  std::string model;
  std::string text;
  std::string out;
  int context = 0;
  int steps = 32;
  int threads = 0;
  std::string preset = "fast";
  std::optional<double> tolerance;
  std::string state_dir;
  bool verbose = false;
};

std::string ReadText(const CommandOptions& options) {
  if (!options.text.empty() && options.text != "-") return ReadFile(options.text, "text");
  if (options.text.empty() && isatty(STDIN_FILENO) != 0) {
    throw ToolError("give a text: -f FILE, or one on standard input");
  }
  return {std::istreambuf_iterator<char>(std::cin), {}};
}

// Tokens before the window: what was asked for, or as many as text and model hold, up to the default.
int ContextLength(const CommandOptions& options, const Model& model, int text_tokens) {
  const int most = std::min(text_tokens, model.n_ctx_train()) - options.steps;
  if (options.context == 0 && most >= kMinContext) return std::min(most, kDefaultContext);
  const int wanted = options.context == 0 ? kMinContext : options.context;
  if (text_tokens - options.steps < wanted) {
    throw ToolError(
        fmt::format("the text has {} tokens, {} are needed (context {} + {} steps): use a longer text or a "
                    "shorter -c (at least {})",
                    text_tokens, wanted + options.steps, wanted, options.steps, kMinContext));
  }
  if (most < wanted) {
    throw ToolError(fmt::format("context {} + {} steps are beyond the model's context of {}: use a shorter -c", wanted,
                                options.steps, model.n_ctx_train()));
  }
  return wanted;
}

// Dimensions of the layers that calibrate; 0 where they are not the same in all of them.
class ShapeProbe {
 public:
  static void Observe(void* user, const scsa_attention_call* call) {
    constexpr int kCalibration = 2;
    if (call->path != kCalibration) return;
    auto& probe = *static_cast<ShapeProbe*>(user);
    probe.q_heads_.insert(call->q_heads);
    probe.kv_heads_.insert(call->kv_heads);
    probe.head_dims_.insert(call->head_dim);
  }
  void Describe(ModelIdentity& model) const {
    model.q_heads = Only(q_heads_);
    model.kv_heads = Only(kv_heads_);
    model.head_dim = Only(head_dims_);
  }

 private:
  static int Only(const std::set<int>& values) { return values.size() == 1 ? *values.begin() : 0; }

  std::set<int> q_heads_, kv_heads_, head_dims_;
};

// The file for the thresholds that the plugin holds now.
std::string TausText(const PluginClient& plugin, const Model& model, const ShapeProbe& shapes, std::size_t* layers) {
  TausFile file;
  const std::string taus = plugin.Taus();
  if (taus.empty()) {
    throw ToolError(
        "no layer was calibrated: this model's attention is not one that the plugin answers sparsely "
        "(docs/plugin.md lists what it takes)");
  }
  Status status = ParseTaus(taus, &file);
  file.model = IdentityOf(model);
  shapes.Describe(*file.model);
  std::string text;
  if (status.ok()) status = FormatTaus(file, &text);
  // What is written must be readable.
  if (status.ok()) status = ParseTaus(text, &file);
  if (!status.ok()) throw ToolError(fmt::format("the thresholds cannot be written: {}", status.message()));
  std::set<int> indices;
  for (const TauEntry& entry : file.taus) indices.insert(entry.layer);
  *layers = indices.size();
  return text;
}

void Run(const CommandOptions& options) {
  using Clock = std::chrono::steady_clock;
  CheckWritable(options.out, "-o");
  const std::string text = ReadText(options);
  const int threads = ThreadsOf(options.threads);
  ConfigureLlamaLog(options.verbose);
  const PluginClient plugin(options.verbose);
  plugin.Set("preset", options.preset);  // a bad value must not cost a prefill first
  Preset preset;
  if (!options.tolerance && ParsePreset(options.preset, &preset)) {
    plugin.Set("tolerance", fmt::format("{}", DefaultTolerance(preset)));
  } else if (options.tolerance) {
    plugin.Set("tolerance", fmt::format("{}", *options.tolerance));
  }
  plugin.Set("taus", "");
  plugin.Set("calibrate", fmt::format("{}", options.steps));
  StateStore states(options.state_dir);
  Progress progress;
  progress.Show("loading the model");
  const Model model(options.model);
  const std::vector<llama_token> tokens = model.Tokenize(text, true, false);
  const int context_length = ContextLength(options, model, static_cast<int>(tokens.size()));
  const std::span<const llama_token> all(tokens);

  plugin.Set("mode", "exact");
  states.Prefill(model, all, {&context_length, 1}, CacheType::kF16, threads, progress);
  plugin.Set("mode", "auto");
  // Layers that see a window only are never long enough for the sparse operator, and not calibrated for it.
  plugin.Set("crossover", fmt::format("{}", context_length));
  Context context(model, context_length + options.steps, CacheType::kF16, threads);
  states.Load(model, all.first(static_cast<std::size_t>(context_length)), CacheType::kF16, context);

  ShapeProbe shapes;
  const ScopedObserver observer(plugin, &ShapeProbe::Observe, &shapes);
  std::vector<double> step_ms;
  for (int step = 0; step < options.steps; ++step) {
    progress.Show(fmt::format("calibration step {}/{}", step + 1, options.steps));
    const auto start = Clock::now();
    context.Decode(all.subspan(static_cast<std::size_t>(context_length + step), 1));
    step_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::size_t layers = 0;
  WriteFileAtomically(options.out, TausText(plugin, model, shapes, &layers));
  progress.Clear();
  fmt::print(stderr, "scsa: {} of {} layers calibrated on {} steps after {} tokens (median {:.1f} ms), written to {}\n",
             layers, llama_model_n_layer(model.get()), options.steps, context_length, Quantile(step_ms, 0.5),
             options.out);
}

}  // namespace

void AddCalibrateCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app =
      parent.add_subcommand("calibrate", "Calibrate a model's thresholds on a text and write them to a file");
  AddModelOption(*app, &options->model);
  app->add_option("-f,--file", options->text, "Text (-, or left out: standard input)")->type_name("FILE");
  app->add_option("-o,--out", options->out, "File to write")->type_name("FILE")->required();
  app->add_option("-c,--context", options->context,
                  "Tokens of the text before the window (default: what text and model hold, up to 8000)")
      ->type_name("N")
      ->check(CLI::Range(kMinContext, 1 << 24).description(""));
  app->add_option("-n,--steps", options->steps, "Steps of the calibration window")
      ->type_name("N")
      ->check(CLI::Range(1, 65536).description(""))
      ->capture_default_str();
  app->add_option("--preset", options->preset, "Preset of the sparse operator: fast, seed")
      ->type_name("NAME")
      ->capture_default_str();
  app->add_option("--tolerance", options->tolerance, "Attention error to aim at (default: the preset's)")
      ->type_name("X")
      ->check(CLI::Range(1e-6, 1.0).description(""));
  AddThreadsOption(*app, &options->threads);
  AddStateDirOption(*app, &options->state_dir);
  AddVerboseFlag(*app, &options->verbose);
  app->footer(
      "Examples:\n"
      "  scsa calibrate -m model.gguf -f book.txt -o taus.json\n"
      "  scsa run -m model.gguf --taus taus.json -f report.txt -p \"What does the report recommend?\"");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
