// SPDX-License-Identifier: Apache-2.0
//
// One decode step (n_q == 1) over a plan whose regions are all usable for the query. Work is cut into pieces whose
// boundaries depend on the visible rows and the opened set alone, and the pieces' states are merged in a fixed order,
// so that the result has the same bits for any number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/calibration.h"
#include "core/plan.h"
#include "core/select.h"
#include "scsa/exact.h"
#include "scsa/layer.h"

namespace scsa {

// Rows of the cache that are attended exactly: [begin, begin + n_rows), of which only the visible ones when `masked`
// (then begin is a multiple of 64).
struct CacheRun {
  std::int64_t begin = 0;
  std::int64_t n_rows = 0;
  bool masked = false;
};

// Number of leading visible rows of query row 0.
std::int64_t VisiblePrefix(const VisibleSets& visible, std::int64_t n_kv);

// Replaces `runs` by pieces of bounded length that cover every visible row outside [sink, sealed_end), each once, in
// ascending order. The rows [0, n_prefix) are visible, and sealed_end <= n_prefix. Returns the number of visible rows
// in them. Throws std::bad_alloc.
std::int64_t ListExactRuns(const VisibleSets& visible, std::int64_t n_kv, std::int64_t n_prefix, std::int64_t sink,
                           std::int64_t sealed_end, std::vector<CacheRun>* runs);

struct StepArgs {
  const Shape& shape;
  const Config& config;
  std::span<const Region> regions;  // at least one
  const QueryView& q;
  const KvView& kv;
  const VisibleSets& visible;
  const LogitParams& params;  // softcap == 0
  std::span<const CacheRun> exact_runs;
  std::int64_t exact_rows = 0;  // visible rows in them
  int n_threads = 1;
  Workspace& workspace;
  HeadReads* reads = nullptr;  // [kv_heads], counted up; nullptr: not counted
  bool hierarchical = false;   // clusters are found by a walk (cluster_walk.h): the regions have the nodes of a tree
};

// Sparse attention at threshold taus[h] for query head h. Adds what it read to `stats`. kOutOfMemory leaves `out` and
// `stats` untouched.
Status AttendSparse(const StepArgs& args, std::span<const float> taus, const OutView& out, LayerStats* stats);

// Replays the stop rule beside the exact output of the same step and records the errors of every head. kOutOfMemory
// records nothing.
Status RecordStep(const StepArgs& args, const OutView& exact_output, CalibrationWindow* window);

}  // namespace scsa
