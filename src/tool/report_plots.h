// SPDX-License-Identifier: Apache-2.0
//
// The plots of `scsa report`, drawn from the JSON of `scsa bench decode`.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "records.h"

namespace scsa::tool {

struct Plot {
  std::string title;
  std::string caption;
  std::string script;  // for DrawSvg
};

// Of records that may come from several runs; fields that are missing or of another type leave their plot out. Speed
// and step time over context; per model and preset, agreement and error over tolerance where there are several; rows
// and bytes per layer and KV head of the longest context; the audit over time of the longest run.
std::vector<Plot> PlotsOf(std::span<const Record> records);

// A field as a number, or as text ("" where there is none).
std::optional<double> NumberIn(const Record& record, const char* field);
std::string TextIn(const Record& record, const char* field);
// "scsa fast 0.015" for the sparse arm, else its name.
std::string ArmLabel(const Record& record);

}  // namespace scsa::tool
