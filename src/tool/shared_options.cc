// SPDX-License-Identifier: Apache-2.0
#include "shared_options.h"

#include <fmt/format.h>

#include "machine.h"
#include "output_file.h"
#include "tool_error.h"

namespace scsa::tool {

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
