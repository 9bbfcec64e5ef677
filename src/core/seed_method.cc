// SPDX-License-Identifier: Apache-2.0
#include "core/seed_method.h"

#include <chrono>
#include <new>

namespace scsa {

bool SeedMethod::Prepare(const LayerCall& call, LayerStats* stats) {
  const bool served = call.q.n_q == 1 && call.params.softcap <= 0;
  const std::int64_t n_prefix = served ? VisiblePrefix(call.visible, call.kv.n_kv) : call.kv.n_kv;
  // Whatever the query: the next call need not ask for the same check.
  const int changed = DropOutdated(call, n_prefix, stats);
  if (!served) return false;
  // Rows that were just found to have changed may still be changing: this call attends to them exactly.
  if (changed == 0) Extend(call, n_prefix, stats);
  if (plan_.regions().empty()) return false;
  try {
    exact_rows_ = ListExactRuns(call.visible, call.kv.n_kv, n_prefix, config_.sink, plan_.sealed_end(), &exact_runs_);
  } catch (const std::bad_alloc&) {
    ++stats->step_failures;
    return false;
  }
  last_use_ = memory_.now();
  return true;
}

Status SeedMethod::Attend(const LayerCall& call, std::span<const float> taus, const OutView& out, LayerStats* stats) {
  return AttendSparse(Step(call), taus, out, stats);
}

Status SeedMethod::Record(const LayerCall& call, const OutView& exact_output, CalibrationWindow* window) {
  return RecordStep(Step(call), exact_output, window);
}

void SeedMethod::ChooseSelection(const LayerCall& /*call*/) {
  if (config_.selection != Selection::kAutomatic) return;
  const bool is_long = plan_.sealed_end() - config_.sink >= kHierarchicalRows;
  // Without room for a tree the selection stays flat.
  if (!plan_.SetTree(is_long)) plan_.SetTree(false);
}

// Returns the number of regions whose rows have changed.
int SeedMethod::DropOutdated(const LayerCall& call, std::int64_t n_prefix, LayerStats* stats) {
  stats->dropped_blocks += plan_.DropBeyond(n_prefix);
  const int changed = plan_.DropChanged(call.kv, call.verify, call.n_threads);
  stats->dropped_blocks += changed;
  return changed;
}

void SeedMethod::Extend(const LayerCall& call, std::int64_t n_prefix, LayerStats* stats) {
  if (!plan_.Due(n_prefix)) return;
  // In use: what the new regions follow must not give way to them.
  last_use_ = memory_.now();
  const auto start = std::chrono::steady_clock::now();
  int built = 0;
  bool refused = false;
  const bool extended = plan_.Extend(call.kv, n_prefix, call.n_threads, &built, &refused).ok();
  if (refused) {
    memory_.CountRefused(1);
  } else if (!extended) {
    ++stats->build_failures;
  }
  stats->rebuild_count += built;
  stats->build_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

StepArgs SeedMethod::Step(const LayerCall& call) const {
  return {shape_,      config_,     plan_.regions(), call.q,         call.kv,    call.visible,    call.params,
          exact_runs_, exact_rows_, call.n_threads,  call.workspace, call.reads, plan_.has_tree()};
}

}  // namespace scsa
