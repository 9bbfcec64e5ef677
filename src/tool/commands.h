// SPDX-License-Identifier: Apache-2.0
//
// The subcommands. Each function adds one to `parent`; CLI11 calls it when it was chosen. They throw ToolError.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace scsa::tool {

void AddRunCommand(CLI::App& parent);
void AddCalibrateCommand(CLI::App& parent);
void AddCaptureCommand(CLI::App& parent);
void AddBenchDecodeCommand(CLI::App& parent);
void AddBenchKernelsCommand(CLI::App& parent);
void AddBenchPrefillCommand(CLI::App& parent);
void AddBenchQualityCommand(CLI::App& parent);
void AddBenchScalingCommand(CLI::App& parent);
void AddEvalFreerunCommand(CLI::App& parent);
void AddReportCommand(CLI::App& parent);
// `program`: what followed "--" on the command line. CLI11 never sees it, so its options cannot be taken for ours.
void AddExecCommand(CLI::App& parent, std::vector<std::string> program);

}  // namespace scsa::tool
