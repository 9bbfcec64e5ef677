// SPDX-License-Identifier: Apache-2.0
#include "records.h"

#include <cmath>

namespace scsa::tool {
namespace {

std::string CsvCell(const Record& value) {
  if (value.is_null()) return "";
  if (value.is_primitive() && !value.is_string()) return value.dump();
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

}  // namespace

Record RecordNumber(const std::optional<double>& value) {
  if (!value || !std::isfinite(*value)) return nullptr;
  return *value;
}

std::string RecordsJson(std::span<const Record> records) {
  Record array = Record::array();
  for (const Record& record : records) array.push_back(record);
  return array.dump(2, ' ', false, Record::error_handler_t::replace) + '\n';
}

std::string RecordsCsv(std::span<const Record> records) {
  std::string text;
  for (const Record& record : records) {
    std::string header;
    std::string line;
    for (const auto& [key, value] : record.items()) {
      const char* separator = header.empty() ? "" : ",";
      header += separator + key;
      line += separator + CsvCell(value);
    }
    if (text.empty()) text = header + '\n';
    text += line + '\n';
  }
  return text;
}

}  // namespace scsa::tool
