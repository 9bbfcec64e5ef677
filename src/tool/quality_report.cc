// SPDX-License-Identifier: Apache-2.0
#include "quality_report.h"

#include <fmt/format.h>

#include "report.h"

namespace scsa::tool {

CaptureInfo InfoOf(const Capture& capture, const std::string& file) {
  CaptureInfo info = {.file = file,
                      .model = capture.model,
                      .architecture = capture.architecture,
                      .llama_cpp_version = capture.llama_cpp_version,
                      .n_kv = capture.n_kv,
                      .steps = capture.steps,
                      .shape = capture.shape,
                      .layers = {}};
  for (const CapturedLayer& layer : capture.layers) info.layers.push_back(layer.layer);
  return info;
}

std::string QualityTable(const QualityRunInfo& run, const CaptureInfo& capture,
                         std::span<const QualityResult> results) {
  std::vector<std::vector<std::string>> rows = {
      {"method", "budget", "rows read", "bytes read", "MB/step", "error mean", "median", "p90", "p99"}};
  for (const QualityResult& result : results) {
    rows.push_back({result.method, result.budget, fmt::format("{:.1f} %", 100.0 * result.rows_read),
                    fmt::format("{:.1f} %", 100.0 * result.bytes_share),
                    fmt::format("{:.2f}", 1e-6 * result.bytes_read), fmt::format("{:.4f}", result.err_mean),
                    fmt::format("{:.4f}", result.err_median), fmt::format("{:.4f}", result.err_p90),
                    fmt::format("{:.4f}", result.err_p99)});
  }
  std::string audits;
  for (const QualityResult& result : results) {
    if (!result.audit) continue;
    audits += fmt::format("audit of {}: the 95 % interval held the true median error in {} of {} windows\n",
                          result.method, result.audit->held, result.audit->windows);
  }
  return fmt::format(
      "{} | {} cached rows, layers {}, {} query heads, {} KV head{}, head size {}, {} steps after {} of calibration\n"
      "{}, {}, {} thread{} | {}\n{}{}",
      capture.model, capture.n_kv, fmt::join(capture.layers, ","), capture.shape.q_heads, capture.shape.kv_heads,
      capture.shape.kv_heads == 1 ? "" : "s", capture.shape.head_dim, capture.steps - kQualityCalibrationSteps,
      kQualityCalibrationSteps, run.cpu, run.simd_target, run.threads, run.threads == 1 ? "" : "s", run.date,
      AlignedTable(rows, 2), audits);
}

std::vector<Record> QualityRecords(const QualityRunInfo& run, const CaptureInfo& capture,
                                   std::span<const QualityResult> results) {
  std::vector<Record> records;
  for (const QualityResult& result : results) {
    Record record;
    record["capture"] = capture.file;
    record["model"] = capture.model;
    record["architecture"] = capture.architecture;
    record["n_kv"] = capture.n_kv;
    record["layers"] = fmt::format("{}", fmt::join(capture.layers, " "));
    record["q_heads"] = capture.shape.q_heads;
    record["kv_heads"] = capture.shape.kv_heads;
    record["head_dim"] = capture.shape.head_dim;
    record["method"] = result.method;
    record["budget"] = result.budget;
    record["tolerance"] = RecordNumber(result.tolerance);
    record["rows_read"] = result.rows_read;
    record["bytes_read"] = result.bytes_read;
    record["bytes_share"] = result.bytes_share;
    record["err_mean"] = RecordNumber(result.err_mean);
    record["err_median"] = RecordNumber(result.err_median);
    record["err_p90"] = RecordNumber(result.err_p90);
    record["err_p99"] = RecordNumber(result.err_p99);
    record["audit_windows"] = result.audit ? Record(result.audit->windows) : Record(nullptr);
    record["audit_held"] = result.audit ? Record(result.audit->held) : Record(nullptr);
    record["calibration_steps"] = kQualityCalibrationSteps;
    record["steps"] = capture.steps - kQualityCalibrationSteps;
    record["threads"] = run.threads;
    record["simd_target"] = run.simd_target;
    record["cpu"] = run.cpu;
    record["llama_cpp"] = capture.llama_cpp_version;
    record["date"] = run.date;
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace scsa::tool
