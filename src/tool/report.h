// SPDX-License-Identifier: Apache-2.0
//
// What `scsa bench decode` prints: an aligned table, CSV or JSON.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "decode_bench.h"
#include "records.h"

namespace scsa::tool {

// What all results of one run share.
struct RunInfo {
  std::string model;
  std::string cpu;
  std::string simd_target;
  std::string date;
  std::string llama_cpp_version;
  std::string preset;
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
std::string CrossoverText(std::span<const ArmResult> results);

// One object per result, of one run.
std::vector<Record> ResultRecords(const RunInfo& info, std::span<const ArmResult> results);

}  // namespace scsa::tool
