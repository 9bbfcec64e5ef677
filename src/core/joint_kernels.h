// SPDX-License-Identifier: Apache-2.0
//
// Cluster estimates of preset `fast` (joint_operator.h has the formulas), dispatched like kernels.h.
#pragma once

#include <cstdint>

namespace scsa {

// Clusters of n_blocks consecutive blocks, `slots` each (a multiple of 8), for one query head.
struct EstimateArgs {
  int n_blocks = 0;
  int slots = 0;
  const std::uint8_t* usable = nullptr;  // [n_blocks]; the clusters of other blocks weigh nothing
  const float* spreads = nullptr;        // [n_blocks]: sum_d w_d qs_d^2
  const float* log_counts = nullptr;     // [n_blocks * slots], -inf for an empty slot
  const float* half_traces = nullptr;    // [n_blocks * slots]
  float tail_shrink = 0.0f;
};

struct EstimateSums {
  float gauge;  // weights below are relative to exp(gauge); -inf when no cluster counts
  float sum;    // of the estimates
};

// In: estimates holds the logits a. Out: estimates = m exp(a + s - gauge), tails = m exp(a - gauge) (1 + tail_shrink
// s). The gauge is the largest exponent log m + a + s. Both arrays: [n_blocks * slots]. Thread-safe.
EstimateSums EstimateClusters(const EstimateArgs& args, float* estimates, float* tails);

}  // namespace scsa
