// SPDX-License-Identifier: Apache-2.0
//
// Small text helpers: lists on the command line, whole files, messages.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace scsa::tool {

// "1000,4000" -> {"1000", "4000"}. Blanks around an item are dropped. ToolError naming `option` for an empty item.
std::vector<std::string> SplitList(std::string_view text, std::string_view option);

// Comma-separated whole numbers, each in [low, high], returned ascending without repeats. ToolError otherwise.
std::vector<int> ParseIntList(std::string_view text, std::string_view option, int low, int high);

// Comma-separated numbers, each in [low, high], in the given order. ToolError otherwise, and for repeated ones.
std::vector<double> ParseNumberList(std::string_view text, std::string_view option, double low, double high);

// Line breaks become "; ", so that a message stays one line.
std::string OneLine(std::string_view text);

// The whole file. ToolError: missing, a folder, unreadable or empty. `what` names it in the message ("text",
// "document").
std::string ReadFile(const std::string& path, std::string_view what);

}  // namespace scsa::tool
