// SPDX-License-Identifier: Apache-2.0
//
// The audit of one layer: which heads are due, their errors, and recalibration of heads that drift.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/calibration.h"
#include "core/method.h"
#include "scsa/audit.h"
#include "scsa/config.h"
#include "scsa/layer.h"

namespace scsa {

// Which of a sequence of slots, numbered from 0 on, are due: one in each stretch of 1 / share slots, at a place that
// looks random, so that no pattern of the caller's meets the choice. Depends on share and seed alone.
class AuditSchedule {
 public:
  AuditSchedule(double share, std::uint64_t seed);
  // Consumes slots up to `end`: the next one that is due, or nullopt when there is none before it.
  std::optional<std::uint64_t> TakeDue(std::uint64_t end);

 private:
  void ChooseNext();

  double period_;
  std::uint64_t seed_;
  std::uint64_t stretch_ = 0;
  std::uint64_t next_ = 0;
};

// All memory is taken when it is made, but for that of a calibration window.
class Audit {
 public:
  // n_taus: thresholds of the layer, one per KV head or one per query head. Throws std::bad_alloc.
  Audit(const Shape& shape, const Config& layer_config, const AuditConfig& config, std::size_t n_taus);

  // Compares the heads that are due in a call just answered sparsely with the exact kernel. calibrated_tolerance: of
  // the layer's last calibration window, 0 where there was none. Opens a window for heads whose error has drifted.
  // Failures (no memory) cost samples and are counted.
  void Check(const LayerCall& call, const OutView& out, float calibrated_tolerance, std::span<const float> taus,
             LayerStats* stats);

  // Calibration of drifted heads. While the window is open the layer answers exactly and records into it. `recorded`:
  // whether that went well; the window is given up otherwise.
  CalibrationWindow& window() { return window_; }
  void AfterWindowStep(bool recorded, float tau_default, std::span<float> taus, LayerStats* stats);

  // The thresholds of these heads changed: earlier errors say nothing about them. An open window is given up.
  void ForgetHead(std::size_t head);
  void ForgetHeads();

  // Oldest first.
  std::span<const AuditSample> samples() const;

 private:
  struct HeadErrors {
    std::vector<float> recent;  // the last kMaxDriftSpan, oldest first
    bool drifted = false;       // recalibrated by the open window
  };

  bool CheckHead(const LayerCall& call, const OutView& out, int row, int kv_head);
  void AddSample(const AuditSample& sample);
  void TestHeads(int kv_head, float tolerance, std::span<const float> taus);
  void CloseWindow();

  Shape shape_;
  CalibrationStatistic statistic_;
  AuditConfig config_;
  AuditSchedule schedule_;
  std::uint64_t calls_ = 0;
  std::uint64_t slots_ = 0;        // (query row, KV head) pairs so far
  std::vector<AuditSample> ring_;  // every sample twice, `capacity` apart, so that the last ones lie in one piece
  std::size_t n_samples_ = 0;
  std::size_t next_ = 0;
  std::vector<HeadErrors> heads_;   // one per threshold
  std::vector<float> exact_;        // [group][head_dim]
  std::vector<float> errors_;       // [group]
  std::vector<float> window_taus_;  // what the window chose, of all heads
  CalibrationWindow window_;
};

}  // namespace scsa
