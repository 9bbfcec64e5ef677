// SPDX-License-Identifier: Apache-2.0
//
// The plots of `scsa report`, drawn from the JSON of `scsa bench decode` and `scsa bench prefill`.
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
// and step time over context; time to the first token and attention time over the prompt's length; per model and
// preset, agreement and error over tolerance where there are several; rows and bytes per layer and KV head of the
// longest context; the audit over time of the longest run.
std::vector<Plot> PlotsOf(std::span<const Record> records);

// A field as a number, or as text ("" where there is none).
std::optional<double> NumberIn(const Record& record, const char* field);
std::string TextIn(const Record& record, const char* field);
// Whether a record is one of bench prefill, or of bench decode.
bool IsPrefill(const Record& record);
bool IsDecode(const Record& record);
// "scsa fast 0.015" for the sparse arm of decoding, "sparse 0.025" for that of prompts, else the arm's name.
std::string ArmLabel(const Record& record);

}  // namespace scsa::tool
