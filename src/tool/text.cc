// SPDX-License-Identifier: Apache-2.0
#include "text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tool_error.h"

namespace scsa::tool {
namespace {

// The number that the whole item is, from low to high. False when it is none.
template <typename Number>
bool ParseWhole(std::string_view item, Number low, Number high, Number* value) {
  const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), *value);
  return error == std::errc() && end == item.data() + item.size() && *value >= low && *value <= high;
}

}  // namespace

std::vector<std::string> SplitList(std::string_view text, std::string_view option) {
  std::vector<std::string> items;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::string_view item = text.substr(begin, end - begin);
    while (!item.empty() && item.front() == ' ') item.remove_prefix(1);
    while (!item.empty() && item.back() == ' ') item.remove_suffix(1);
    if (item.empty()) {
      throw ToolError(fmt::format("{}: empty item in \"{}\": give values separated by single commas", option, text));
    }
    items.emplace_back(item);
    begin = end + 1;
  }
  return items;
}

std::vector<int> ParseIntList(std::string_view text, std::string_view option, int low, int high) {
  std::vector<int> values;
  for (const std::string& item : SplitList(text, option)) {
    int value = 0;
    if (!ParseWhole(item, low, high, &value)) {
      throw ToolError(fmt::format("{}: \"{}\" is not a whole number from {} to {}", option, item, low, high));
    }
    values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

std::vector<double> ParseNumberList(std::string_view text, std::string_view option, double low, double high) {
  std::vector<double> values;
  for (const std::string& item : SplitList(text, option)) {
    double value = 0.0;
    if (!ParseWhole(item, low, high, &value)) {
      throw ToolError(fmt::format("{}: \"{}\" is not a number from {} to {}", option, item, low, high));
    }
    if (std::find(values.begin(), values.end(), value) != values.end()) {
      throw ToolError(fmt::format("{}: {} is given twice", option, item));
    }
    values.push_back(value);
  }
  return values;
}

std::string OneLine(std::string_view text) {
  std::string line;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    if (end > begin) {
      if (!line.empty()) line += "; ";
      line += text.substr(begin, end - begin);
    }
    begin = end + 1;
  }
  return line;
}

std::string ReadFile(const std::string& path, std::string_view what) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    throw ToolError(fmt::format("{} file not found: {}", what, path));
  }
  if (std::filesystem::is_directory(path, error)) {
    throw ToolError(fmt::format("{} file {} is a folder: give a text file", what, path));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) {
    throw ToolError(fmt::format("{} file {} is empty or cannot be read", what, path));
  }
  return std::move(content).str();
}

}  // namespace scsa::tool
