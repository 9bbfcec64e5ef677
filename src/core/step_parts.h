// SPDX-License-Identifier: Apache-2.0
//
// What the two ways of finding clusters share in a decode step of preset `seed`: step.cc and step_walk.cc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "core/cluster_walk.h"
#include "core/kernels.h"
#include "core/plan.h"
#include "core/select.h"
#include "core/step.h"
#include "core/workspace.h"

namespace scsa::step_parts {

inline constexpr float kNoMass = -std::numeric_limits<float>::infinity();

// States of many vectors, vector i of which is at max[i], sum[i], num[i * head_dim].
inline SoftmaxState TakeStates(ScratchLayout& layout, std::int64_t vectors, int head_dim) {
  return {layout.Take<float>(vectors), layout.Take<float>(vectors), layout.Take<float>(vectors * head_dim)};
}

inline SoftmaxState At(const SoftmaxState& states, std::int64_t vector, int head_dim) {
  return {states.max + vector, states.sum + vector, states.num + vector * head_dim};
}

// A stretch of adjacent opened clusters of one block that are opened by the same heads: packed rows [begin, end).
struct PackedRun {
  const Block* block = nullptr;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  HeadSet heads;

  std::int64_t n_rows() const { return end - begin; }
};

// Per-thread copies of what the heads of a set need when they are not neighbours in the group.
struct Gathered {
  float* q = nullptr;
  QuantizedQuery* quantized = nullptr;
  SoftmaxState state;
};

// What a step derives from its arguments before anything is selected. All arrays are scratch memory.
struct Prepared {
  int group = 0;
  int head_dim = 0;
  int n_clusters = 0;                   // of one KV head; the split makes it the same for all
  float* qs = nullptr;                  // [q_heads][head_dim], scale * q
  float* qs_squared = nullptr;          // [q_heads][head_dim]
  QuantizedQuery* quantized = nullptr;  // [q_heads], or nullptr when keys are packed as f16
  Estimates estimates;                  // [q_heads][n_clusters]; not with hierarchical selection
  SoftmaxState exact;                   // [q_heads], over the rows that are always exact
  double* log_exact_mass = nullptr;     // [q_heads], attention sinks included
};

// The opened set of every KV head as runs, and the folded tails. Scratch memory.
struct Selected {
  PackedRun* runs = nullptr;               // [kv_heads][n_clusters]
  std::int64_t* n_runs = nullptr;          // [kv_heads]
  std::int64_t* union_rows = nullptr;      // [kv_heads], rows in the runs
  std::int64_t* opened_rows = nullptr;     // [kv_heads], the same counted once per head
  std::int64_t* scored = nullptr;          // [kv_heads], clusters and nodes, counted once per head
  std::uint64_t* summary_bytes = nullptr;  // [kv_heads], of what was scored
  SoftmaxState tail;                       // [q_heads]
  Gathered* gathered = nullptr;            // [n_threads]
};

inline float SinkLogit(const LogitParams& params, int q_head) {
  return params.sinks == nullptr ? kNoMass : params.sinks[q_head];
}

inline Status OutOfMemory() {
  return Status::OutOfMemory("no memory for the scratch space of a sparse attention step");
}

inline void* Reserve(const StepArgs& args, ScratchUser user, std::size_t bytes) {
  // Never zero bytes, for which there would be no block to point to: nothing to read is not a lack of memory.
  return args.workspace.impl().Reserve(user, std::max<std::size_t>(bytes, 1));
}

// Queries in every form that the step needs, exact rows and, with flat selection, estimates of all clusters.
Status Prepare(const StepArgs& args, Prepared* out);

// Attends packed rows [begin, end) of a block by neighbouring heads: `first` of the group on, as many as state holds.
void AttendPacked(const StepArgs& args, int head_dim, int n, const float* q, const QuantizedQuery* quantized,
                  const Block& block, std::int64_t begin, std::int64_t end, const SoftmaxState& state);

// Adds cluster c of `block`, opened by `heads`, behind the runs and to the rows of a KV head. Clusters come in
// ascending order.
void AddOpened(const Prepared& p, int kv_head, const Block& block, int c, const HeadSet& heads, const Selected& out);

// out = (exact numerator + tail numerator) / (exact mass + tail mass).
void WriteOutput(const SoftmaxState& state, float sink, int head_dim, float* out);

// Hierarchical selection (cluster_walk.h). `walks`: ClusterWalk::Take for all query heads. Fills all but `gathered`.
void SelectByWalk(const StepArgs& args, const Prepared& p, std::span<const float> taus,
                  const ClusterWalk::Scratch& walks, const Selected& out);

// Begins a step of the window. in_play, [q_heads]: how many thresholds each query head replays. False: no memory.
bool BeginRecording(const StepArgs& args, CalibrationWindow* window, std::int32_t* in_play);

// RecordStep with hierarchical selection.
Status RecordWalk(const StepArgs& args, const OutView& exact_output, CalibrationWindow* window);

}  // namespace scsa::step_parts
