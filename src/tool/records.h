// SPDX-License-Identifier: Apache-2.0
//
// Measured results as JSON and CSV: one object per result, all with the same keys. What is no single value is a cell of
// JSON in CSV.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

namespace scsa::tool {

using Record = nlohmann::ordered_json;  // an object; a value that was not measured is null

// null also for a value that is not finite, which JSON does not have: it says that nothing could be measured against.
Record RecordNumber(const std::optional<double>& value);

// One JSON array.
std::string RecordsJson(std::span<const Record> records);
// One line per record, a line with the keys first; null is empty.
std::string RecordsCsv(std::span<const Record> records);

}  // namespace scsa::tool
