// SPDX-License-Identifier: Apache-2.0
//
// What `scsa bench quality` prints: an aligned table, CSV or JSON.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "quality_bench.h"
#include "records.h"

namespace scsa::tool {

// Where the measurement ran.
struct QualityRunInfo {
  std::string cpu;
  std::string simd_target;
  std::string date;
  int threads = 0;
};

// What a capture holds, without its numbers.
struct CaptureInfo {
  std::string file;
  std::string model;
  std::string architecture;
  std::string llama_cpp_version;
  std::int64_t n_kv = 0;
  int steps = 0;
  Shape shape;
  std::vector<int> layers;
};
CaptureInfo InfoOf(const Capture& capture, const std::string& file);

// Two header lines and the table of one capture.
std::string QualityTable(const QualityRunInfo& run, const CaptureInfo& capture, std::span<const QualityResult> results);

// For RecordsJson and RecordsCsv: one record per result.
std::vector<Record> QualityRecords(const QualityRunInfo& run, const CaptureInfo& capture,
                                   std::span<const QualityResult> results);

}  // namespace scsa::tool
