// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "capture_file.h"
#include "commands.h"
#include "machine.h"
#include "progress.h"
#include "quality_bench.h"
#include "quality_report.h"
#include "scsa/target.h"
#include "session.h"
#include "shared_options.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

struct CommandOptions {
  std::vector<std::string> captures;
  ResultOptions results;
  QualityOptions bench;
};

// Names the file in a message, for there may be several.
std::vector<QualityResult> Measure(const Capture& capture, const std::string& file, const QualityOptions& options,
                                   Progress& progress) {
  try {
    return MeasureQuality(capture, options, progress);
  } catch (const ToolError& e) {
    throw ToolError(fmt::format("{}: {}", file, e.what()));
  }
}

void Run(CommandOptions options) {
  options.bench.threads = ThreadsOf(options.bench.threads);
  options.results.CheckStreams();
  options.results.CheckFile();
  ConfigureLlamaLog(false);  // the reader's messages are in its errors

  const QualityRunInfo run = {
      .cpu = CpuName(), .simd_target = ActiveTarget(), .date = UtcDate(), .threads = options.bench.threads};
  Progress progress;
  std::vector<Record> records;
  const char* separator = "";
  for (const std::string& file : options.captures) {
    progress.Show(fmt::format("reading {}", file));
    const Capture capture = ReadCapture(file);
    const std::vector<QualityResult> results = Measure(capture, file, options.bench, progress);
    const CaptureInfo info = InfoOf(capture, file);
    if (options.results.PrintsTable()) {
      fmt::print("{}{}", separator, QualityTable(run, info, results));
      std::fflush(stdout);
      separator = "\n";
    }
    for (Record& record : QualityRecords(run, info, results)) records.push_back(std::move(record));
  }
  progress.Clear();
  options.results.Write(records);
}

}  // namespace

void AddBenchQualityCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand(
      "quality", "Rows, bytes and error of the presets and of other methods' selection rules on captured attention");
  app->add_option("--capture", options->captures, "Files that 'scsa capture' wrote")
      ->type_name("FILE...")
      ->required()
      ->expected(1, -1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app->add_option("--tolerance", options->bench.tolerance,
                  "Attention error that calibration aims at (default: each preset's own)")
      ->type_name("X")
      ->check(CLI::Range(1e-6, 1.0).description(""));
  app->add_option(
         "--audit", options->bench.audit,
         "Share of the outputs that the presets' audit takes: how often its interval of the median error holds "
         "the true one (0: not checked)")
      ->type_name("X")
      ->check(CLI::Range(0.0, 1.0).description(""))
      ->capture_default_str();
  AddThreadsOption(*app, &options->bench.threads);
  options->results.AddTo(*app);
  app->footer(
      "Examples:\n"
      "  scsa bench quality --capture model.capture.gguf\n"
      "  scsa bench quality --capture a.gguf b.gguf --tolerance 0.01 --json result.json");
  app->get_formatter()->column_width(34);
  options->bench.threads = 0;
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
