// SPDX-License-Identifier: Apache-2.0
//
// The page that `scsa report` writes.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "records.h"

namespace scsa::tool {

// A drawn plot.
struct Figure {
  std::string title;
  std::string caption;
  std::string svg;
};

// Characters that HTML gives a meaning to are replaced.
std::string HtmlText(std::string_view text);

// Whether a record is one of those that the page shows: of bench decode, bench prefill or eval freerun.
bool IsReportable(const Record& record);

// One self-contained HTML page: what was run, the gates of eval freerun, the results of bench decode
// and bench prefill as tables, the figures. It refers to nothing outside itself.
std::string ReportPage(std::span<const Record> records, std::span<const Figure> figures);

}  // namespace scsa::tool
