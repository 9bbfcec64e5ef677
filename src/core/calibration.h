// SPDX-License-Identifier: Apache-2.0
//
// The calibration window: replaying the stop rule at every threshold of kTauGrid beside exact outputs, and choosing a
// threshold per head from the errors.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/kernels.h"
#include "scsa/layer.h"

namespace scsa {

// One query head of one step, with everything that the replay may combine. Nothing is owned.
struct ReplayInputs {
  int head_dim = 0;
  int n_clusters = 0;
  const std::int32_t* order = nullptr;   // OpenBestFirst at kTauGrid
  const std::int32_t* counts = nullptr;  // [kTauGridSize]
  // The head's state over the rows that are always exact (a state of one vector), and its attention-sink logit (-inf:
  // none).
  SoftmaxState exact_rows;
  float sink = 0;
  // States of the clusters that some threshold opens: cluster c at max[c * opened_stride], sum[...] and num[c *
  // opened_stride * head_dim].
  SoftmaxState opened;
  std::int64_t opened_stride = 1;
  // Tail of cluster c: weight exp(log_tail[c]) at value_means[c].
  const float* log_tail = nullptr;
  const float* const* value_means = nullptr;
  const float* exact_output = nullptr;  // [head_dim]
};

// errors[g] = |o_g - o| / |o|: o_g the output of stopping at kTauGrid[g] (counts[g] clusters opened, the others in the
// tail), o the exact output. One pass over the clusters in opening order, each swapped from the tail to its opened
// state; sums in double. 0 / 0 counts as 0, anything that is not a number as infinity. Thread-safe.
void ReplayStops(const ReplayInputs& in, float errors[kTauGridSize]);

// The largest threshold of `grid` whose error, errors[g] at grid[g], is within the tolerance; the smallest one when
// none is. interpolate: it moves on towards the next larger grid value, to where the error, taken as linear in log tau
// between the two, meets the tolerance.
float ThresholdWithin(std::span<const float, kTauGridSize> grid, std::span<const float, kTauGridSize> errors,
                      float tolerance, bool interpolate);

// Recorded errors of one layer.
class CalibrationWindow {
 public:
  CalibrationWindow(int q_heads, std::span<const float, kTauGridSize> grid) : grid_(grid), errors_(q_heads) {}

  void Start(float tolerance);
  // Closes the window without choosing anything.
  void Cancel() { open_ = false; }
  bool open() const { return open_; }
  float tolerance() const { return tolerance_; }  // of the present or last window
  int steps() const { return steps_; }
  std::span<const float, kTauGridSize> grid() const { return grid_; }
  std::span<const float> Errors(int q_head, int grid_index) const { return errors_[q_head][grid_index]; }

  // Makes room for one more step of every head; then Record (thread-safe between heads) fills it. Throws std::bad_alloc
  // and is unchanged then.
  void BeginStep();
  void Record(int q_head, const float errors[kTauGridSize]);

  // How many thresholds, from the largest on, are worth replaying for `n_heads` query heads that share one: at the last
  // of them the mean of the errors recorded so far is within half the tolerance, or more than half of the errors are
  // (kMedian), so a smaller one will hardly be chosen. All of them for the first steps.
  int ThresholdsInPlay(CalibrationStatistic statistic, std::size_t first_head, std::size_t n_heads) const;

  // Closes the window. taus holds one threshold per query head, or one per KV head, which then pools the errors of its
  // query heads: ThresholdWithin of the statistic of the errors, interpolated with kMean; tau_default when nothing was
  // recorded. Throws std::bad_alloc; then the window stays open and taus are as before.
  void Finish(CalibrationStatistic statistic, float tau_default, std::span<float> taus);

 private:
  float Statistic(CalibrationStatistic statistic, std::size_t first_head, std::size_t n_heads, int grid_index) const;

  std::span<const float, kTauGridSize> grid_;
  std::vector<std::array<std::vector<float>, kTauGridSize>> errors_;  // [q_head][grid][step]
  float tolerance_ = 0;
  int steps_ = 0;
  bool open_ = false;
};

// Median; of an even number of values the mean of the two middle ones. values is not empty.
float Median(std::span<const float> values);

}  // namespace scsa
