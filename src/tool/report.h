// SPDX-License-Identifier: Apache-2.0
//
// What `scsa bench decode` prints: an aligned table, CSV or JSON.
#pragma once

#include <functional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "decode_bench.h"

namespace scsa::tool {

// What all results of one run share.
struct RunInfo {
  std::string model;
  std::string cpu;
  std::string simd_target;
  std::string date;
  std::string llama_cpp_version;
  std::string preset;
  double tolerance = 0.0;
  std::string taus;  // file of thresholds; empty: none
  int threads = 0;
};

// One line per row, columns padded to the widest cell: the first `left_columns` to the left, the others to the right.
std::string AlignedTable(const std::vector<std::vector<std::string>>& rows, std::size_t left_columns);

std::string HeaderLine(const RunInfo& info);
// The table of one context length.
std::string ResultTable(std::span<const ArmResult> results);
// The exact arm's share of what memory and arithmetic allow; empty without a roofline.
std::string RooflineText(std::span<const ArmResult> results);

// What the calibration window cost beside exact attention; empty where nothing calibrated.
std::string CalibrationText(std::span<const ArmResult> results);

// One JSON array, one object per result; a value that was not measured is null.
std::string ResultsJson(const RunInfo& info, std::span<const ArmResult> results);
// The same fields, one line per result, a header line first; a value that was not measured is empty.
std::string ResultsCsv(const RunInfo& info, std::span<const ArmResult> results);

// Throws ToolError when a file could not be written there (checked before long work).
void CheckWritable(const std::string& path, std::string_view option);
// Writes the whole file or leaves the old one. ToolError on failure. `write` puts the content into the stream; it need
// not check for errors.
void WriteFileAtomically(const std::string& path, const std::function<void(std::ostream&)>& write);
void WriteFileAtomically(const std::string& path, std::string_view content);

}  // namespace scsa::tool
