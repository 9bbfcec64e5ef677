// SPDX-License-Identifier: Apache-2.0
//
// The sparse decode operator of one attention layer: a plan per KV head over the sealed cache prefix, the calibration
// window and the counters. docs/operator.md holds the mathematics with the same names.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "scsa/audit.h"
#include "scsa/config.h"
#include "scsa/exact.h"
#include "scsa/memory_budget.h"
#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// The 13 thresholds at which the calibration window replays the stop rule, largest first.
inline constexpr int kTauGridSize = 13;
inline constexpr float kTauGrid[kTauGridSize] = {0.5f,   0.4f,  0.3f,   0.25f,  0.2f,   0.15f, 0.1f,
                                                 0.075f, 0.05f, 0.035f, 0.025f, 0.015f, 0.01f};

// The thresholds of preset `fast`: closer together where its calibrated thresholds fall.
inline constexpr float kFastTauGrid[kTauGridSize] = {0.3f,   0.2f,   0.14f, 0.1f,   0.07f,   0.05f, 0.035f,
                                                     0.025f, 0.015f, 0.01f, 0.005f, 0.0025f, 0.001f};
constexpr std::span<const float, kTauGridSize> TauGrid(Preset preset) {
  return preset == Preset::kFast ? std::span<const float, kTauGridSize>(kFastTauGrid) : kTauGrid;
}

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
  std::uint64_t audited_outputs = 0;    // outputs of query heads that the audit compared; rows it reads count nowhere
  std::uint64_t recalibrated_heads = 0;  // thresholds that the audit had calibrated again
  std::uint64_t audit_failures = 0;      // audits and recalibrations given up, for memory was short
  std::uint64_t audit_ns = 0;            // wall time of the audit, its calibration windows not included
  std::uint64_t step_failures = 0;       // calls answered exactly, or not recorded in a window, for memory was short
  std::uint64_t evicted_blocks = 0;      // blocks that the budget took away
  std::uint64_t refused_blocks = 0;  // blocks that the budget had no room for, each once until it is built or dropped
};

// What calls answered sparsely read of one KV head: its part of union_rows, visible_rows and bytes_read.
struct HeadReads {
  std::uint64_t rows_read = 0;
  std::uint64_t rows_visible = 0;
  std::uint64_t bytes_read = 0;

  void Add(const HeadReads& other) {
    rows_read += other.rows_read;
    rows_visible += other.rows_visible;
    bytes_read += other.bytes_read;
  }
};

// Query rows that AttendPrompt answers together.
inline constexpr int kPromptTileRows = 48;

// How AttendPrompt answers. Thresholds of its own, one per KV head, are calibrated while it runs.
struct PromptConfig {
  float tolerance = 0;      // mean relative L2 error of the outputs of a tile; 0: everything is exact
  double share = 1.0 / 32;  // share of tiles, 0 < share <= 1, that are answered exactly and measured
};

// AttendPrompt and one KV head.
struct PromptHead {
  float tau = 0;               // threshold in force; 0: none, before the first measured tile and where none would do
  std::uint64_t tiles = 0;     // answered
  std::uint64_t sparse = 0;    // of them, answered sparsely
  std::uint64_t measured = 0;  // of them, measured
  // Mean errors of measured tiles at the threshold in force by then, chosen without them: how many, and their sum.
  std::uint64_t audited = 0;
  double error_sum = 0;
  std::uint64_t rows_read = 0;     // each row once per tile
  std::uint64_t rows_visible = 0;  // to some query of the tile
};

// How Attend looks for rows that changed behind the caller's back.
enum class Verify : std::uint8_t {
  kNone,  // trust NotifyWrites
  // A few rows of each block, so that a rewritten block is noticed at once and a single row in its turn: with `seed`
  // the first, the last and two more, each row once in (rows / 2) calls; with `fast` one row of one KV head.
  kSample,
  kFull,  // every row of each block
};

// Thread safety: none; one call at a time per layer. Different layers are independent.
class Layer {
 public:
  // Fails with kInvalidArgument as ValidateShape and ValidateConfig say.
  static Status Create(const Shape& shape, const Config& config, std::unique_ptr<Layer>* layer);
  ~Layer();

  // Sparse attention of q over the visible rows of kv. Builds or extends the plan when it is due, so a call may take
  // long once in rebuild_interval steps (seed). Always answers: where no plan applies (nothing sealed yet, n_q > 1
  // (seed), the visible rows are no prefix (seed), softcap > 0, out of memory) the answer is ExactAttention's, and
  // stats() say so. A block is used only while every row that it covers is visible and unchanged. Errors are those of
  // ExactAttention.
  Status Attend(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                Verify verify, int n_threads, Workspace& workspace, const OutView& out);

  // Attention of the rows of a prompt, in tiles of kPromptTileRows consecutive query rows: one opened set for a tile
  // and all query heads of a KV head, read from the cache itself; the closed clusters contribute their moments.
  // Diagonal and recent rows and whatever no block covers are exact. Builds blocks as Attend does. Exact are:
  // everything without a PromptConfig, preset `seed`, and what Attend answers exactly; tiles that are measured, that
  // see few rows of blocks, or whose threshold opens most of them; and KV heads without a threshold, before the first
  // measured tile (the first call with blocks has two) and where none keeps the tolerance. Neither the calibration
  // window nor the audit is involved. Outputs do not depend on n_threads. Errors are those of ExactAttention.
  Status AttendPrompt(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                      Verify verify, int n_threads, Workspace& workspace, const OutView& out);
  // Forgets the thresholds of AttendPrompt. kInvalidArgument.
  Status SetPrompt(const PromptConfig& config);
  // One per KV head, valid as long as the layer, since SetPrompt.
  std::span<const PromptHead> prompt_heads() const;

  // Rows that were (or are about to be) overwritten. Blocks that cover one of them are dropped; later ones too, where
  // they would leave a gap.
  void NotifyWrites(std::span<const std::int64_t> rows);
  // Forgets every block. Calibration and counters stay.
  void DropPlans();

  // Tells that the rows [0, end_row) of kv hold what they are going to hold: preset `fast` builds every block inside
  // them that is not built yet, so that decoding starts with a finished plan. `seed` builds when a query needs it.
  // kUnsupported (a row that is not finite) or kOutOfMemory: the blocks that failed stay unbuilt. kInvalidArgument for
  // a view or a thread count that Attend refuses.
  Status Seal(const KvView& kv, std::int64_t end_row, int n_threads);

  // Counts the plan in a budget (scsa/memory_budget.h), or in none where `budget` is nullptr; blocks built before are
  // dropped. kOutOfMemory: it is counted in none.
  Status SetBudget(std::shared_ptr<MemoryBudget> budget);

  // Opens a calibration window: until FinishCalibration the layer answers exactly and records, per query head, the
  // error that each threshold of tau_grid() would have produced. tolerance > 0: relative L2 error of a head's output.
  Status StartCalibration(float tolerance);
  // Freezes, per threshold, the largest value of tau_grid() at which the median (seed), or the mean over all query
  // heads of the KV head (fast; interpolated between grid values), of the recorded errors is within the tolerance; the
  // smallest one when none is; tau_default where nothing was recorded. kFailedPrecondition outside a window;
  // kOutOfMemory: the window stays open.
  Status FinishCalibration();
  bool calibrating() const;
  // Steps recorded in the present or last window.
  int calibration_steps() const;
  std::span<const float, kTauGridSize> tau_grid() const;
  // Recorded errors of one query head at tau_grid()[grid_index], one per recorded step. From the fifth step on,
  // thresholds too small to be chosen are not replayed: the error of the smallest one that is stands in for theirs.
  // Empty before a window.
  std::span<const float> CalibrationErrors(int q_head, int grid_index) const;

  // Thresholds, one per query head (seed) or per KV head (fast): opening stops once the estimated attention mass of the
  // closed clusters falls below this fraction of the estimated mass of all clusters plus the exact mass of everything
  // else (first, unsealed and uncovered rows, attention sink).
  std::span<const float> taus() const;
  Status SetTau(int head, float tau);  // tau in [0, 1]; 0 opens every cluster

  // How the layer finds clusters now, and what its thresholds are for: kFlat or kHierarchical.
  Selection selection() const;
  // With Config::selection kAutomatic: what thresholds that SetTau takes from elsewhere are for. Stays until the next
  // calibration window. kInvalidArgument for another selection than that of a Config that is not automatic;
  // kOutOfMemory: the budget has no room for the summaries of blocks, and the layer goes on as before.
  Status SetSelection(Selection selection);

  // Starts an audit (scsa/audit.h), or ends it where config.share is 0; earlier samples are dropped either way. Outputs
  // are the same bits with it. Heads that drift are recalibrated: for config.window steps the layer answers exactly
  // (counted in calibration_steps; calibrating() stays false), then these heads, and no others, have new thresholds.
  // StartCalibration and SetTau give such a window up. kInvalidArgument; kOutOfMemory: the audit is as before.
  Status SetAudit(const AuditConfig& config);
  // The last config.capacity samples, oldest first; valid until the next call that is not const. SummarizeAudit makes
  // figures of them.
  std::span<const AuditSample> AuditSamples() const;

  // Runs the per-head work on the calling thread (diagnosis). Results are the same bits.
  void set_serial(bool serial);

  const Shape& shape() const;
  const Config& config() const;
  LayerStats stats() const;
  // One per KV head; valid as long as the layer, and changed by the same calls as stats().
  std::span<const HeadReads> head_reads() const;
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
