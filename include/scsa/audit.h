// SPDX-License-Identifier: Apache-2.0
//
// The audit: while sparse attention runs, the exact output of a small share of the heads is computed beside it and the
// error recorded. docs/operator.md holds the formulas.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "scsa/status.h"

namespace scsa {

inline constexpr double kMinAuditShare = 1e-9;
inline constexpr int kMaxAuditCapacity = 1 << 20;
inline constexpr int kMaxAuditWindow = 65536;

struct AuditConfig {
  // Part of the (query row, KV head) pairs answered sparsely that is audited, spread evenly. 0: no audit.
  // Otherwise kMinAuditShare ... 1.
  double share = 0;
  // Which pairs, together with a counter: no clock and no random device. Give each layer another value, so that their
  // audits fall into different steps.
  std::uint64_t seed = 0;
  // Errors kept, those of the last outputs audited; 1 ... kMaxAuditCapacity. 32 bytes each.
  int capacity = 256;
  // The error that thresholds are to keep to. 0: that of the last calibration window, and where there was none, heads
  // are not tested.
  float tolerance = 0;
  // A head has drifted once its error is significantly above tolerance * drift_factor; at least 1.
  float drift_factor = 2.0f;
  // Steps of the calibration window that a drifted head gets; 1 ... kMaxAuditWindow. The whole layer answers exactly
  // meanwhile.
  int window = 32;
};

// The error of one audited output: of a query head at one query row.
struct AuditSample {
  std::uint64_t call = 0;  // calls answered sparsely before this one, since the audit was set
  float error = 0;         // |o - o*| / |o*|, o* the exact output; infinity where that is no number
  std::int16_t q_head = 0;
  std::int16_t together = 1;  // outputs audited with it: the query heads of its KV head
};

// Figures over audited outputs. All errors are relative L2 errors; 0 (median_high: infinity) where there is none.
struct AuditSummary {
  std::uint64_t outputs = 0;  // query heads
  // Independent observations: the query heads of a KV head, audited together, count as one.
  std::uint64_t observations = 0;
  double mean = 0;
  double median = 0;
  // 95 % confidence interval of the median of all outputs of the time span that the samples come from. Below six
  // observations there is none: 0 and infinity.
  double median_low = 0;
  double median_high = std::numeric_limits<double>::infinity();
  double p90 = 0;
  double p99 = 0;
};

// Figures over any samples, of one layer or of several together. Order does not matter. Thread-safe.
// kOutOfMemory: *summary is unchanged.
Status SummarizeAudit(std::span<const AuditSample> samples, AuditSummary* summary);

Status ValidateAuditConfig(const AuditConfig& config);

}  // namespace scsa
