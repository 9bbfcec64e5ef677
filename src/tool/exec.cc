// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "commands.h"
#include "plugin_path.h"
#include "taus.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

struct CommandOptions {
  std::string mode;
  std::string preset;
  std::string tolerance;
  std::string calibrate;
  std::string crossover;
  std::string taus;
  std::string audit;
  bool stats = false;
  std::vector<std::string> program;
};

void SetEnvironment(const char* name, const std::string& value) {
  if (!value.empty()) setenv(name, value.c_str(), 1);
}

void Run(CommandOptions options) {
  if (options.program.empty()) throw ToolError("exec: give a program after --, as in: scsa exec -- llama-server -m M");
  if (!options.taus.empty()) ReadTaus(options.taus, "--taus");  // the program would only warn and go on
  const std::string plugin = FindPlugin().string();
  if (plugin.find_first_of(" :") != std::string::npos) {
    throw ToolError(fmt::format("exec: the path {} holds a blank or a colon, which LD_PRELOAD cannot express", plugin));
  }
  SetEnvironment("GGML_BACKEND_PATH", plugin);
  // The plugin registers itself once, whichever of the two ways the program takes.
  // What the user preloads stays in front: a sanitizer's runtime has to be the first library.
  const char* preload = std::getenv("LD_PRELOAD");
  SetEnvironment("LD_PRELOAD", preload != nullptr && *preload != '\0' ? preload + (":" + plugin) : plugin);
  SetEnvironment("SCSA_MODE", options.mode);
  SetEnvironment("SCSA_PRESET", options.preset);
  SetEnvironment("SCSA_TOLERANCE", options.tolerance);
  SetEnvironment("SCSA_CALIBRATE", options.calibrate);
  SetEnvironment("SCSA_CROSSOVER", options.crossover);
  SetEnvironment("SCSA_TAUS", options.taus);
  SetEnvironment("SCSA_AUDIT", options.audit);
  if (options.stats) SetEnvironment("SCSA_STATS", "1");

  std::vector<char*> argv;
  for (std::string& argument : options.program) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  throw ToolError(errno == ENOENT ? fmt::format("exec: program {} not found: check its path", argv[0])
                                  : fmt::format("exec: cannot start {} ({})", argv[0], std::strerror(errno)));
}

}  // namespace

void AddExecCommand(CLI::App& parent, std::vector<std::string> program) {
  auto options = std::make_shared<CommandOptions>();
  options->program = std::move(program);
  CLI::App* app = parent.add_subcommand(
      "exec", "Start a llama.cpp program with the plugin loaded: scsa exec [OPTIONS] -- PROGRAM [ARGUMENTS]");
  app->add_option("--mode", options->mode, "auto (sparse when long), exact, off")
      ->type_name("NAME")
      ->check(CLI::IsMember({"auto", "exact", "off", "limit"}).description(""));
  app->add_option("--preset", options->preset, "Preset of the sparse operator")->type_name("NAME");
  app->add_option("--tolerance", options->tolerance, "Attention error that calibration aims at, 0 ... 1")
      ->type_name("X")
      ->check(CLI::Range(0.0, 1.0).description(""));
  app->add_option("--calibrate", options->calibrate, "Steps of the calibration window")
      ->type_name("N")
      ->check(CLI::Validator(CLI::NonNegativeNumber).description(""));
  app->add_option("--crossover", options->crossover, "Cached rows from which attention is sparse, or auto: measured")
      ->type_name("N")
      ->check(CLI::Validator(CLI::NonNegativeNumber).description(""));
  app->add_option("--taus", options->taus, "Thresholds of scsa calibrate, in place of a calibration window")
      ->type_name("FILE");
  app->add_option("--audit", options->audit, "Share of the attention outputs whose error is measured, 0 ... 1")
      ->type_name("X")
      ->check(CLI::Range(0.0, 1.0).description(""));
  app->add_flag("--stats", options->stats, "Print a summary when the program ends");
  app->footer(
      "Examples:\n"
      "  scsa exec -- llama-server -m model.gguf -c 16384\n"
      "  scsa exec --tolerance 0.015 --stats -- llama-completion -m model.gguf -f prompt.txt -n 200\n"
      "An option that is not given keeps the value of its environment variable (docs/plugin.md).");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
