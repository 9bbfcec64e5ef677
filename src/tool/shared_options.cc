// SPDX-License-Identifier: Apache-2.0
#include "shared_options.h"

#include <fmt/format.h>

#include "machine.h"
#include "output_file.h"
#include "tool_error.h"

namespace scsa::tool {

void AddModelOption(CLI::App& app, std::string* model) {
  app.add_option("-m,--model", *model, "GGUF model")->type_name("FILE")->required();
}

void AddTextOption(CLI::App& app, std::string* text) {
  app.add_option("-f,--file", *text, "Text: the prompt and the tokens that follow it")->type_name("FILE")->required();
}

void AddContextsOption(CLI::App& app, std::string* contexts) {
  app.add_option("-c,--contexts", *contexts, "Prompt lengths in tokens, separated by commas")
      ->type_name("LIST")
      ->capture_default_str();
}

void AddStateDirOption(CLI::App& app, std::string* folder) {
  app.add_option("--state-dir", *folder, "Folder that keeps prefilled states for the next run")->type_name("FOLDER");
}

void AddVerboseFlag(CLI::App& app, bool* verbose) { app.add_flag("--verbose", *verbose, "Show llama.cpp's messages"); }

void AddThreadsOption(CLI::App& app, int* threads) {
  app.add_option("-t,--threads", *threads, "Threads (default: usable physical cores)")
      ->type_name("N")
      ->check(CLI::Range(1, 1024).description(""));
}

int ThreadsOf(int option) { return option > 0 ? option : UsableCores(); }

void ResultOptions::AddTo(CLI::App& app) {
  app.add_option("--json", json, "Write the results as JSON to this file (-: to stdout, without the table)")
      ->type_name("FILE");
  app.add_flag("--csv", csv, "Print CSV in place of the table");
}

void ResultOptions::CheckStreams() const {
  if (csv && json == "-") throw ToolError("--csv and --json - both write to stdout: give one of them");
}

void ResultOptions::CheckFile() const {
  if (!json.empty() && json != "-") CheckWritable(json, "--json");
}

void ResultOptions::Write(std::span<const Record> records) const {
  if (csv) fmt::print("{}", RecordsCsv(records));
  if (json == "-") {
    fmt::print("{}", RecordsJson(records));
  } else if (!json.empty()) {
    WriteFileAtomically(json, RecordsJson(records));
  }
}

}  // namespace scsa::tool
