// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "records.h"

namespace scsa::tool {
namespace {

std::string Cell(const std::optional<double>& value, const char* format, double factor = 1.0) {
  if (!value) return "-";
  return fmt::format(fmt::runtime(format), *value * factor);
}

// [layer][kv_head], or null for an arm that is not sparse.
template <typename Value>
Record HeadTable(const ArmResult& result, Value value) {
  if (!IsSparse(result.arm)) return nullptr;
  Record layers = Record::array();
  for (const std::vector<HeadReads>& layer : result.head_reads) {
    Record& heads = layers.emplace_back(Record::array());
    for (const HeadReads& head : layer) heads.push_back(value(head));
  }
  return layers;
}

Record AuditWindows(const ArmResult& result) {
  if (!IsSparse(result.arm)) return nullptr;
  Record windows = Record::array();
  for (const AuditWindow& window : result.audit_windows) {
    const AuditSummary& summary = window.summary;
    const auto error = [&](double value, std::uint64_t from = 1) {
      return summary.observations >= from ? RecordNumber(value) : Record(nullptr);
    };
    windows.push_back({{"begin", window.begin},
                       {"end", window.end},
                       {"outputs", summary.outputs},
                       {"mean", error(summary.mean)},
                       {"median", error(summary.median)},
                       {"median_low", error(summary.median_low, SCSA_AUDIT_INTERVAL_FROM)},
                       {"median_high", error(summary.median_high, SCSA_AUDIT_INTERVAL_FROM)},
                       {"p90", error(summary.p90)},
                       {"p99", error(summary.p99)}});
  }
  return windows;
}

Record ResultObject(const RunInfo& info, const ArmResult& result) {
  Record object;
  object["model"] = info.model;
  object["context"] = result.context;
  object["arm"] = ArmName(result.arm);
  object["preset"] = IsSparse(result.arm) ? Record(info.preset) : Record(nullptr);
  object["tolerance"] = RecordNumber(result.tolerance);
  object["tok_s"] = result.tok_s;
  object["ms_median"] = result.ms_median;
  object["ms_p99"] = result.ms_p99;
  object["attn_ms"] = RecordNumber(result.attn_ms);
  object["attn_ms_source"] = result.attn_ms ? Record(result.attn_ms_source) : Record(nullptr);
  object["speedup_vs_llama"] = RecordNumber(result.speedup_vs_llama);
  object["agreement"] = RecordNumber(result.agreement);
  object["kl_mean"] = RecordNumber(result.kl_mean);
  object["nll_delta"] = RecordNumber(result.nll_delta);
  object["attn_err_mean"] = RecordNumber(result.attn_err_mean);
  object["attn_err_p99"] = RecordNumber(result.attn_err_p99);
  object["rows_read"] = RecordNumber(result.rows_read);
  object["bytes_read"] = RecordNumber(result.bytes_read);
  object["plan_build_ms"] = result.plan_build_ms;
  object["plan_bytes"] = result.plan_bytes;
  const auto calibration = [&](double CalibrationCost::*value) {
    return result.calibration ? Record((*result.calibration).*value) : Record(nullptr);
  };
  object["calibration_steps"] = result.calibration ? result.calibration->steps : 0;
  object["calibration_ms_median"] = calibration(&CalibrationCost::ms_median);
  object["calibration_exact_ms_median"] = calibration(&CalibrationCost::exact_ms_median);
  object["crossover"] = result.crossover ? Record(*result.crossover) : Record(nullptr);
  object["crossover_measured"] = result.crossover_measured;
  object["sparse_calls"] = result.stats.sparse_calls;
  object["exact_calls"] = result.stats.exact_calls;
  object["rebuild_count"] = result.stats.rebuild_count;
  object["dropped_blocks"] = result.stats.dropped_blocks;
  object["failures"] = result.stats.failures;
  object["evicted_blocks"] = result.stats.evicted_blocks;
  object["refused_blocks"] = result.stats.refused_blocks;
  const auto audit = [&](double AuditSummary::*value) {
    return result.audit && result.audit->outputs > 0 ? RecordNumber((*result.audit).*value) : Record(nullptr);
  };
  object["audit_outputs"] = result.stats.audited_outputs;
  object["audit_ms"] = static_cast<double>(result.stats.audit_ns) * 1e-6;
  object["audit_err_mean"] = audit(&AuditSummary::mean);
  object["audit_err_median"] = audit(&AuditSummary::median);
  const bool interval = result.audit && result.audit->observations >= SCSA_AUDIT_INTERVAL_FROM;
  object["audit_err_median_low"] = interval ? audit(&AuditSummary::median_low) : Record(nullptr);
  object["audit_err_median_high"] = interval ? audit(&AuditSummary::median_high) : Record(nullptr);
  object["audit_err_p90"] = audit(&AuditSummary::p90);
  object["audit_err_p99"] = audit(&AuditSummary::p99);
  object["recalibrated_heads"] = result.stats.recalibrated_heads;
  const auto roofline = [&](double (Roofline::*value)() const) {
    return result.roofline ? RecordNumber((*result.roofline.*value)()) : Record(nullptr);
  };
  object["roofline_ms"] = roofline(&Roofline::LimitMs);
  object["roofline_share"] = roofline(&Roofline::Share);
  object["multiply_adds"] = result.roofline ? Record(result.roofline->multiply_adds) : Record(nullptr);
  object["read_bandwidth"] = result.roofline ? Record(result.roofline->bandwidth) : Record(nullptr);
  object["multiply_add_rate"] = result.roofline ? Record(result.roofline->multiply_add_rate) : Record(nullptr);
  object["head_rows_read"] = HeadTable(result, [](const HeadReads& head) {
    return head.rows_visible == 0
               ? Record(nullptr)
               : Record(static_cast<double>(head.rows_read) / static_cast<double>(head.rows_visible));
  });
  object["head_bytes_read"] = HeadTable(
      result, [&](const HeadReads& head) { return Record(static_cast<double>(head.bytes_read) / result.steps); });
  object["audit_windows"] = AuditWindows(result);
  object["taus"] = IsSparse(result.arm) && !info.taus.empty() ? Record(info.taus) : Record(nullptr);
  object["warmup_steps"] = result.warmup_steps;
  object["steps"] = result.steps;
  object["threads"] = info.threads;
  object["simd_target"] = info.simd_target;
  object["cpu"] = info.cpu;
  object["llama_cpp"] = info.llama_cpp_version;
  object["date"] = info.date;
  return object;
}

}  // namespace

std::string AlignedTable(const std::vector<std::vector<std::string>>& rows, std::size_t left_columns) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (i > 0) line += "  ";
      line += i < left_columns ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string HeaderLine(const RunInfo& info) {
  return fmt::format("{} | {}, {}, {} thread{} | llama.cpp {} | {}\n", info.model, info.cpu, info.simd_target,
                     info.threads, info.threads == 1 ? "" : "s", info.llama_cpp_version, info.date);
}

std::string ResultTable(std::span<const ArmResult> results) {
  std::vector<std::vector<std::string>> rows = {{"arm", "tok/s", "median ms", "p99 ms", "vs llama", "attn ms",
                                                 "rows read", "agreement", "KL", "NLL diff", "attn error"}};
  const auto scsa_arms =
      std::count_if(results.begin(), results.end(), [](const ArmResult& result) { return IsSparse(result.arm); });
  for (const ArmResult& result : results) {
    const bool one_of_several = IsSparse(result.arm) && scsa_arms > 1;
    rows.push_back({one_of_several ? fmt::format("{} {}", ArmName(result.arm), result.tolerance.value_or(0.0))
                                   : std::string(ArmName(result.arm)),
                    fmt::format("{:.2f}", result.tok_s), fmt::format("{:.1f}", result.ms_median),
                    fmt::format("{:.1f}", result.ms_p99), Cell(result.speedup_vs_llama, "{:.2f} x"),
                    Cell(result.attn_ms, "{:.1f}"), Cell(result.rows_read, "{:.1f} %", 100.0),
                    Cell(result.agreement, "{:.1f} %", 100.0), Cell(result.kl_mean, "{:.5f}"),
                    Cell(result.nll_delta, "{:+.4f}"), Cell(result.attn_err_mean, "{:.2g}")});
  }
  return AlignedTable(rows, 1);
}

std::string RooflineText(std::span<const ArmResult> results) {
  for (const ArmResult& result : results) {
    if (!result.roofline) continue;
    const Roofline& roofline = *result.roofline;
    return fmt::format(
        "roofline of exact attention, per step: {:.1f} MB at {:.1f} GB/s = {:.2f} ms, {:.1f} M multiply-adds at {:.1f} "
        "G/s = {:.2f} ms; measured {:.2f} ms = {:.0f} % of what the machine allows\n",
        roofline.bytes * 1e-6, roofline.bandwidth * 1e-9, roofline.MemoryMs(), roofline.multiply_adds * 1e-6,
        roofline.multiply_add_rate * 1e-9, roofline.ComputeMs(), roofline.attention_ms, 100.0 * roofline.Share());
  }
  return "";
}

std::string CalibrationText(std::span<const ArmResult> results) {
  for (const ArmResult& result : results) {
    if (!result.calibration) continue;
    const CalibrationCost& cost = *result.calibration;
    return fmt::format("calibration window: {} steps, median {:.1f} ms = {:.2f} x the exact arm's {:.1f} ms\n",
                       cost.steps, cost.ms_median, cost.Ratio(), cost.exact_ms_median);
  }
  return "";
}

std::string CrossoverText(std::span<const ArmResult> results) {
  std::string text;
  for (const ArmResult& result : results) {
    if (!result.crossover_measured) continue;
    text += fmt::format("crossover of {}: {} visible cells (measured)\n", ArmName(result.arm), *result.crossover);
  }
  return text;
}

std::vector<Record> ResultRecords(const RunInfo& info, std::span<const ArmResult> results) {
  std::vector<Record> records;
  for (const ArmResult& result : results) records.push_back(ResultObject(info, result));
  return records;
}

}  // namespace scsa::tool
