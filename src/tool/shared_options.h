// SPDX-License-Identifier: Apache-2.0
//
// Command line options that commands share.
#pragma once

#include <CLI/CLI.hpp>
#include <span>
#include <string>

#include "records.h"

namespace scsa::tool {

// -m, --model.
void AddModelOption(CLI::App& app, std::string* model);
// -f, --file of a command that decodes a text.
void AddTextOption(CLI::App& app, std::string* text);
// -c, --contexts of a command that measures several lengths.
void AddContextsOption(CLI::App& app, std::string* contexts);
void AddStateDirOption(CLI::App& app, std::string* folder);
void AddVerboseFlag(CLI::App& app, bool* verbose);
// -t, --threads: 0, for the usable physical cores, unless given.
void AddThreadsOption(CLI::App& app, int* threads);
// The given number of threads, or what 0 stands for.
int ThreadsOf(int option);

// --json and --csv: where the results of a benchmark go.
struct ResultOptions {
  std::string json;
  bool csv = false;

  void AddTo(CLI::App& app);
  // Throws ToolError where both go to stdout.
  void CheckStreams() const;
  // Throws ToolError where the JSON file could not be written (checked before long work).
  void CheckFile() const;
  // Whether stdout is left for a table.
  bool PrintsTable() const { return !csv && json != "-"; }
  void Write(std::span<const Record> records) const;
};

}  // namespace scsa::tool
