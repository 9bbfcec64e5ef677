// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "commands.h"
#include "completion.h"
#include "manual.h"
#include "text.h"
#include "tool_error.h"
#include "version.h"

namespace {

constexpr int kUsageError = 2;

int Main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  std::vector<std::string> program;
  if (!args.empty() && args.front() == "exec") {
    const auto separator = std::find(args.begin(), args.end(), "--");
    if (separator != args.end()) {
      program.assign(separator + 1, args.end());
      args.erase(separator, args.end());
    }
  }

  CLI::App app{"Self-calibrating subquadratic attention for llama.cpp on CPUs", "scsa"};
  app.set_version_flag("--version", scsa::tool::VersionText());
  app.require_subcommand(1);
  // A script's own options come first, so that those given to the script override them. Inherited by the subcommands.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(34);
  app.footer(
      "Examples:\n"
      "  scsa run -m model.gguf -f report.txt -p \"What does the report recommend?\" -n 200\n"
      "  scsa bench decode -m model.gguf -f report.txt -c 1000,8000\n"
      "  scsa capture -m model.gguf -f report.txt -o model.capture.gguf\n"
      "  scsa bench quality --capture model.capture.gguf\n"
      "  scsa exec --stats -- llama-server -m model.gguf\n"
      "'scsa COMMAND --help' explains a command.");
  scsa::tool::AddRunCommand(app);
  scsa::tool::AddCalibrateCommand(app);
  CLI::App* bench = app.add_subcommand("bench", "Measure speed and quality");
  bench->require_subcommand(1);
  scsa::tool::AddBenchDecodeCommand(*bench);
  scsa::tool::AddBenchKernelsCommand(*bench);
  scsa::tool::AddBenchPrefillCommand(*bench);
  scsa::tool::AddBenchQualityCommand(*bench);
  scsa::tool::AddBenchScalingCommand(*bench);
  CLI::App* eval = app.add_subcommand("eval", "Judge what a model writes with sparse attention");
  eval->require_subcommand(1);
  scsa::tool::AddEvalFreerunCommand(*eval);
  scsa::tool::AddReportCommand(app);
  scsa::tool::AddCaptureCommand(app);
  scsa::tool::AddExecCommand(app, std::move(program));

  // For the build of this project, hence in no help text.
  if (args.size() == 2 && args.front() == "--generate") {
    if (args.back() == "man") return fmt::print("{}", scsa::tool::ManualPage(app)), 0;
    if (args.back() == "bash-completion") return fmt::print("{}", scsa::tool::BashCompletion(app)), 0;
  }

  try {
    std::reverse(args.begin(), args.end());  // CLI11 takes a vector of arguments last first
    app.parse(std::move(args));
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    fmt::print(stderr, "scsa: {} (see 'scsa --help')\n", scsa::tool::OneLine(e.what()));
    return kUsageError;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Main(argc, argv);
  } catch (const scsa::tool::ToolError& e) {
    fmt::print(stderr, "scsa: {}\n", e.what());
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "scsa: out of memory: use a shorter context or fewer arms\n");
  } catch (const std::exception& e) {
    fmt::print(stderr, "scsa: internal error: {}\n", scsa::tool::OneLine(e.what()));
  }
  return 1;
}
