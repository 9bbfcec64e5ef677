// SPDX-License-Identifier: Apache-2.0
//
// The sparse decode operator of one attention layer: a plan per KV head over the sealed cache prefix, the calibration
// window and the counters. docs/operator.md holds the mathematics with the same names.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "scsa/config.h"
#include "scsa/exact.h"
#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// The 13 thresholds at which the calibration window replays the stop rule, largest first.
inline constexpr int kTauGridSize = 13;
inline constexpr float kTauGrid[kTauGridSize] = {0.5f,   0.4f,  0.3f,   0.25f,  0.2f,   0.15f, 0.1f,
                                                 0.075f, 0.05f, 0.035f, 0.025f, 0.015f, 0.01f};

// What happened so far in one layer. Rows are counted per KV head: a row that several query heads of a group read
// counts once in `union_rows` and once per query head in `stat_opened_rows`. A block or region counts once, not per KV
// head: all KV heads seal the same rows.
struct LayerStats {
  std::uint64_t rebuild_count = 0;      // regions clustered (first builds and rebuilds of the tail region)
  std::uint64_t stat_opened_rows = 0;   // rows of opened clusters, summed over query heads
  std::uint64_t stat_exact_rows = 0;    // sinks and unsealed rows read from the cache, summed over query heads
  std::uint64_t stat_scored = 0;        // cluster estimates computed, summed over query heads
  std::uint64_t stat_calls = 0;         // (query row, query head) attentions answered by the sparse operator
  std::uint64_t union_rows = 0;         // rows read, each once per KV head: opened by any head of the group, or exact
  std::uint64_t visible_rows = 0;       // rows visible in those calls, each once per KV head: the 100 % of union_rows
  std::uint64_t bytes_read = 0;         // bytes of rows and summaries in those calls, each once per KV head
  std::uint64_t sparse_steps = 0;       // Attend calls answered sparsely
  std::uint64_t calibration_steps = 0;  // Attend calls answered exactly and recorded in a calibration window
  std::uint64_t exact_steps = 0;        // Attend calls answered exactly because no plan applied (short, n_q > 1, holes)
  std::uint64_t build_failures = 0;     // plan builds that failed (out of memory, rows that cannot be packed)
  std::uint64_t dropped_blocks = 0;     // blocks dropped since their rows changed or left the visible set
  std::uint64_t build_ns = 0;           // wall time of clustering and packing
  std::uint64_t plan_bytes = 0;         // memory that the plans hold now
};

// How Attend looks for rows that changed behind the caller's back.
enum class Verify : std::uint8_t {
  kNone,    // trust NotifyWrites
  kSample,  // the first, the last and two more rows of each block, so that each has its turn in (rows / 2) calls
  kFull,    // every row of each block
};

// Thread safety: none; one call at a time per layer. Different layers are independent.
class Layer {
 public:
  // Fails with kInvalidArgument as ValidateShape and ValidateConfig say.
  static Status Create(const Shape& shape, const Config& config, std::unique_ptr<Layer>* layer);
  ~Layer();

  // Sparse attention of q over the visible rows of kv. Builds or extends the plan when it is due, so a call may take
  // long once in rebuild_interval steps. Always answers: where no plan applies (nothing sealed yet, n_q > 1, the
  // visible rows are no prefix, softcap > 0, out of memory) the answer is ExactAttention's, and stats() say so. A block
  // is used only while every row that it covers is visible and unchanged. Errors are those of ExactAttention.
  Status Attend(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                Verify verify, int n_threads, Workspace& workspace, const OutView& out);

  // Rows that were (or are about to be) overwritten. Blocks that cover one of them are dropped; later ones too, where
  // they would leave a gap.
  void NotifyWrites(std::span<const std::int64_t> rows);
  // Forgets every block. Calibration and counters stay.
  void DropPlans();

  // Opens a calibration window: until FinishCalibration the layer answers exactly and records, per query head, the
  // error that each threshold of kTauGrid would have produced. tolerance > 0: relative L2 error of a head's output.
  Status StartCalibration(float tolerance);
  // Freezes, per query head, the largest threshold of kTauGrid whose median recorded error is within the tolerance (the
  // smallest one when none is; tau_default where nothing was recorded). kFailedPrecondition outside a window.
  Status FinishCalibration();
  bool calibrating() const;
  // Steps recorded in the present or last window.
  int calibration_steps() const;
  // Recorded errors of one query head at kTauGrid[grid_index], one per recorded step. Empty before a window.
  std::span<const float> CalibrationErrors(int q_head, int grid_index) const;

  // Threshold per query head: opening stops once the estimated attention mass of the closed clusters falls below this
  // fraction of the estimated mass of all clusters plus the exact mass of everything else (first, unsealed and
  // uncovered rows, attention sink).
  std::span<const float> taus() const;
  Status SetTau(int q_head, float tau);  // tau in [0, 1]; 0 opens every cluster

  // Runs the per-head work on the calling thread (diagnosis). Results are the same bits.
  void set_serial(bool serial);

  const Shape& shape() const;
  const Config& config() const;
  LayerStats stats() const;
  void ResetStats();
  // Rows [config.sink, sealed_end()) are covered by blocks.
  std::int64_t sealed_end() const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit Layer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace scsa
