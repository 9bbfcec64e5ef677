// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "chat.h"
#include "commands.h"
#include "machine.h"
#include "plugin_client.h"
#include "progress.h"
#include "session.h"
#include "shared_options.h"
#include "stats.h"
#include "taus.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

using Clock = std::chrono::steady_clock;

struct CommandOptions {
  std::string model;
  std::string document;
  std::string question;
  int tokens = 256;
  int threads = 0;
  int context = 0;
  std::string preset;                      // otherwise the plugin's
  std::optional<double> tolerance;         // otherwise the preset's
  std::optional<double> prompt_tolerance;  // otherwise the plugin's
  std::string taus;
  std::string mode = "auto";
  std::optional<double> audit;  // otherwise the plugin's share
  bool json = false;
  bool verbose = false;
};

struct Figures {
  int prompt_tokens = 0;
  double prefill_seconds = 0.0;
  int answer_tokens = 0;
  double decode_seconds = 0.0;
  std::optional<double> rows_read;         // over the sparse steps
  std::optional<std::uint64_t> crossover;  // set, or measured by the plugin
  bool crossover_measured = false;
  scsa_plugin_audit audit{};   // the error, measured by the plugin
  double audit_seconds = 0.0;  // spent on measuring it, part of decode_seconds
  double plan_build_seconds = 0.0;
  double prompt_seconds = 0.0;    // of prefill_seconds: building and calibrating
  std::uint64_t prompt_rows = 0;  // rows of the prompt that were calibrated on
  // Milliseconds of single steps, by how they were answered.
  std::vector<double> calibration_ms;
  std::vector<double> sparse_ms;
  std::vector<double> exact_ms;

  scsa_plugin_stats prompt_stats{};  // of the prompt

  double TokensPerSecond() const { return decode_seconds > 0.0 ? answer_tokens / decode_seconds : 0.0; }
};

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int ContextSize(const CommandOptions& options, const Model& model, std::size_t prompt) {
  const auto needed = static_cast<int>(prompt) + options.tokens;
  const std::string parts =
      fmt::format("document and question have {} tokens, with -n {} that is {}", prompt, options.tokens, needed);
  if (needed > model.n_ctx_train()) {
    throw ToolError(fmt::format("{}, but the model's context holds {}: shorten the document or lower -n", parts,
                                model.n_ctx_train()));
  }
  if (options.context == 0) return needed;
  if (needed > options.context) throw ToolError(fmt::format("{}, but -c is {}: raise -c", parts, options.context));
  if (options.context > model.n_ctx_train()) {
    throw ToolError(
        fmt::format("-c {} is beyond the model's context of {}: lower it", options.context, model.n_ctx_train()));
  }
  return options.context;
}

// What sparse prompts read; empty where the prompt is exact.
std::string PromptReadsText(const Figures& figures) {
  const auto rows_read = PromptRowsRead(figures.prompt_stats);
  return rows_read ? fmt::format(", rows read {:.1f} %", 100.0 * *rows_read) : "";
}

void Prefill(const PluginClient& plugin, Context& context, std::span<const llama_token> prompt, Figures& figures) {
  Progress progress;
  const auto start = Clock::now();
  const int total = static_cast<int>(prompt.size());
  const scsa_plugin_stats before = plugin.Stats();
  context.Decode(prompt, [&](int done) {
    figures.prompt_stats = StatsDifference(plugin.Stats(), before);
    progress.Show("reading: " + RateText(done, total, SecondsSince(start)) + PromptReadsText(figures));
  });
  figures.prompt_tokens = total;
  figures.prefill_seconds = SecondsSince(start);
}

// Decodes greedily until the end of the answer or options.tokens; returns the text, streams it unless JSON is wanted.
std::string Generate(const CommandOptions& options, const Model& model, const PluginClient& plugin, Context& context,
                     Figures& figures) {
  std::string answer;
  scsa_plugin_stats sparse{};
  const scsa_plugin_stats first = plugin.Stats();
  scsa_plugin_stats before = first;
  const auto start = Clock::now();
  while (figures.answer_tokens < options.tokens) {
    const llama_token token = Argmax(context.Logits());
    if (llama_vocab_is_eog(model.vocab(), token)) break;
    const std::string piece = model.Piece(token);
    answer += piece;
    if (!options.json) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    }
    const auto step_start = Clock::now();
    context.Decode({&token, 1});
    const double step_ms = 1e3 * SecondsSince(step_start);
    ++figures.answer_tokens;
    const scsa_plugin_stats now = plugin.Stats();
    const scsa_plugin_stats step = StatsDifference(now, before);
    // By most of its layers: one whose heads are recalibrated makes no step of the calibration window.
    (step.calibration_calls > step.sparse_calls ? figures.calibration_ms
     : step.sparse_calls > 0                    ? figures.sparse_ms
                                                : figures.exact_ms)
        .push_back(step_ms);
    if (step.sparse_calls > 0) AddStats(sparse, step);
    before = now;
  }
  figures.decode_seconds = SecondsSince(start);
  figures.audit = plugin.Audit();
  figures.audit_seconds = static_cast<double>(before.audit_ns - first.audit_ns) * 1e-9;
  figures.plan_build_seconds = static_cast<double>(before.plan_build_ns) * 1e-9;
  figures.prompt_rows = before.prompt_rows / static_cast<std::uint64_t>(std::max(1, llama_model_n_layer(model.get())));
  figures.prompt_seconds = static_cast<double>(before.prompt_ns) * 1e-9;
  if (before.crossover != UINT64_MAX) figures.crossover = before.crossover;
  figures.crossover_measured = before.crossover_trials > 0;
  if (sparse.rows_visible > 0) {
    figures.rows_read = static_cast<double>(sparse.rows_read) / static_cast<double>(sparse.rows_visible);
  }
  if (!options.json) {
    fmt::print("\n");
    std::fflush(stdout);  // before the figures on stderr
  }
  return answer;
}

// What calibration cost: on rows of the prompt, or in decode steps, beside the steps after them or before them.
std::string CalibrationText(const Figures& figures) {
  std::string text;
  if (figures.prompt_rows > 0) {
    text = fmt::format(", {} prompt rows calibrated on (with the build {:.2f} s)", figures.prompt_rows,
                       figures.prompt_seconds);
  }
  if (figures.calibration_ms.empty()) return text;
  text += fmt::format(", calibration {} steps of {:.1f} ms", figures.calibration_ms.size(),
                      Quantile(figures.calibration_ms, 0.5));
  if (!figures.exact_ms.empty()) text += fmt::format(" (exact {:.1f} ms)", Quantile(figures.exact_ms, 0.5));
  if (!figures.sparse_ms.empty()) text += fmt::format(" (sparse {:.1f} ms)", Quantile(figures.sparse_ms, 0.5));
  return text;
}

// The error that the audit measured.
std::string ErrorText(const scsa_plugin_audit& audit) {
  if (audit.samples == 0) return "";
  std::string text = fmt::format(", measured error {:.4f} (median {:.4f}", audit.mean, audit.median);
  if (audit.observations >= SCSA_AUDIT_INTERVAL_FROM)
    text += fmt::format(", 95 %: {:.4f} to {:.4f}", audit.median_low, audit.median_high);
  text += fmt::format(", p99 {:.4f}, {} outputs)", audit.p99, audit.samples);
  if (audit.recalibrated_heads > 0) text += fmt::format(", {} heads recalibrated", audit.recalibrated_heads);
  return text;
}

std::string FiguresLine(const CommandOptions& options, const Figures& figures) {
  const auto prompt_error = PromptError(figures.prompt_stats);
  std::string line =
      fmt::format("{} tokens at {:.1f} tok/s (prompt: {} tokens at {:.1f} tok/s{}{})", figures.answer_tokens,
                  figures.TokensPerSecond(), figures.prompt_tokens, figures.prompt_tokens / figures.prefill_seconds,
                  PromptReadsText(figures), prompt_error ? fmt::format(", measured error {:.4f}", *prompt_error) : "");
  if (!figures.rows_read) {
    return line + (options.mode == "off" ? ", llama.cpp's attention" : ", exact attention") + CalibrationText(figures);
  }
  line += fmt::format(", rows read {:.1f} %", 100.0 * *figures.rows_read);
  line += ErrorText(figures.audit);
  line += fmt::format(", plan build {:.2f} s", figures.plan_build_seconds) + CalibrationText(figures);
  if (figures.crossover_measured) line += fmt::format(", crossover {} cells (measured)", *figures.crossover);
  return line;
}

std::string FiguresJson(const CommandOptions& options, const Model& model, const Figures& figures, int threads,
                        const std::string& answer) {
  nlohmann::ordered_json object;
  const scsa_plugin_audit& audit = figures.audit;
  const auto error = [&](double value) {
    return audit.samples == 0 || !std::isfinite(value) ? nlohmann::ordered_json(nullptr)
                                                       : nlohmann::ordered_json(value);
  };
  const auto median = [](const std::vector<double>& values) {
    return values.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(Quantile(values, 0.5));
  };
  const auto number = [](const std::optional<double>& value) {
    return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
  };
  object["model"] = model.name();
  object["mode"] = options.mode;
  object["answer"] = answer;
  object["prompt_tokens"] = figures.prompt_tokens;
  object["prefill_tok_s"] = figures.prompt_tokens / figures.prefill_seconds;
  object["prompt_rows_read"] = number(PromptRowsRead(figures.prompt_stats));
  object["prompt_error_mean"] = number(PromptError(figures.prompt_stats));
  object["answer_tokens"] = figures.answer_tokens;
  object["tok_s"] = figures.TokensPerSecond();
  object["rows_read"] = number(figures.rows_read);
  object["error_mean"] = error(audit.mean);
  object["error_median"] = error(audit.median);
  object["error_median_low"] = error(audit.observations < SCSA_AUDIT_INTERVAL_FROM ? NAN : audit.median_low);
  object["error_median_high"] = error(audit.median_high);
  object["error_p90"] = error(audit.p90);
  object["error_p99"] = error(audit.p99);
  object["error_samples"] = audit.samples;
  object["error_seconds"] = figures.audit_seconds;
  object["recalibrated_heads"] = audit.recalibrated_heads;
  object["crossover"] =
      figures.crossover ? nlohmann::ordered_json(*figures.crossover) : nlohmann::ordered_json(nullptr);
  object["crossover_measured"] = figures.crossover_measured;
  object["plan_build_ms"] = figures.plan_build_seconds * 1e3;
  object["prompt_calibration_rows"] = figures.prompt_rows;
  object["prompt_ready_ms"] = figures.prompt_seconds * 1e3;
  object["calibration_steps"] = figures.calibration_ms.size();
  object["calibration_ms_median"] = median(figures.calibration_ms);
  object["exact_ms_median"] = median(figures.exact_ms);
  object["sparse_ms_median"] = median(figures.sparse_ms);
  object["taus"] = options.taus.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(options.taus);
  object["threads"] = threads;
  return object.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
}

void Run(CommandOptions options) {
  const std::string document = options.document.empty() ? "" : ReadFile(options.document, "document");
  const int threads = ThreadsOf(options.threads);
  std::optional<TausChoice> taus;
  if (!options.taus.empty()) {
    taus = ChooseTaus(options.taus, options.preset, options.tolerance);
    options.preset = taus->preset;
    options.tolerance = taus->tolerance;
  }
  ConfigureLlamaLog(options.verbose);
  const PluginClient plugin(options.verbose);
  plugin.Set("mode", options.mode);
  if (!options.preset.empty()) plugin.Set("preset", options.preset);
  if (options.tolerance) plugin.Set("tolerance", fmt::format("{}", *options.tolerance));
  if (taus) {
    plugin.Set("taus", options.taus);
    plugin.Set("selection", "auto");  // that of the file
  }
  if (options.prompt_tolerance) plugin.Set("prompt_tolerance", fmt::format("{}", *options.prompt_tolerance));
  if (options.audit) plugin.Set("audit", fmt::format("{}", *options.audit));
  const Model model(options.model);
  if (taus) CheckTausFit(options.taus, taus->file, model);
  const std::vector<llama_token> prompt = ChatPrompt(model, document, options.question);
  Context context(model, ContextSize(options, model, prompt.size()), CacheType::kF16, threads);

  Figures figures;
  Prefill(plugin, context, prompt, figures);
  plugin.ResetAudit();  // the answer's error, not that of the prompt's rows
  const std::string answer = Generate(options, model, plugin, context, figures);
  if (options.json) {
    fmt::print("{}", FiguresJson(options, model, figures, threads, answer));
  } else {
    fmt::print(stderr, "scsa: {}\n", FiguresLine(options, figures));
  }
}

}  // namespace

void AddRunCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand("run", "Answer a question about a long document");
  AddModelOption(*app, &options->model);
  app->add_option("-f,--file", options->document, "Document that the question is about")->type_name("FILE");
  app->add_option("-p,--prompt", options->question, "Question")->type_name("TEXT")->required();
  app->add_option("-n,--tokens", options->tokens, "Longest answer in tokens")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->capture_default_str();
  AddThreadsOption(*app, &options->threads);
  app->add_option("-c,--context", options->context, "Context in tokens (default: what document and answer need)")
      ->type_name("N")
      ->check(CLI::Range(16, 1 << 24).description(""));
  app->add_option("--preset", options->preset, "Preset of the sparse operator: fast, seed")->type_name("NAME");
  app->add_option("--tolerance", options->tolerance, "Attention error that calibration aims at (default: the preset's)")
      ->type_name("X")
      ->check(CLI::Range(1e-6, 1.0).description(""));
  app->add_option("--prompt-tolerance", options->prompt_tolerance,
                  "Attention error that a sparse prompt is calibrated to (default: the prompt is exact)")
      ->type_name("X")
      ->check(CLI::Range(0.0, 1.0).description(""));
  app->add_option("--taus", options->taus, "Thresholds of scsa calibrate, in place of a calibration window")
      ->type_name("FILE");
  app->add_option("--mode", options->mode, "auto (sparse when long), exact, off (llama.cpp's own attention)")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "exact", "off"}).description(""))
      ->capture_default_str();
  app->add_option("--audit", options->audit, "Share of the attention outputs whose error is measured (0: none)")
      ->type_name("X")
      ->check(CLI::Range(0.0, 1.0).description(""));
  app->add_flag("--json", options->json, "Print answer and figures as JSON when done, in place of streaming");
  AddVerboseFlag(*app, &options->verbose);
  app->footer(
      "Examples:\n"
      "  scsa run -m model.gguf -f report.txt -p \"What does the report recommend?\" -n 200\n"
      "  scsa run -m model.gguf -f code.txt -p \"Where is the cache written?\" --tolerance 0.015");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
