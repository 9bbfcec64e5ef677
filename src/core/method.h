// SPDX-License-Identifier: Apache-2.0
//
// What differs between the presets of a Layer: the plan, and how a query is answered from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/calibration.h"
#include "core/plan_memory.h"
#include "core/prompt_thresholds.h"
#include "scsa/config.h"
#include "scsa/exact.h"
#include "scsa/layer.h"
#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// The arguments of Layer::Attend, checked.
struct LayerCall {
  const QueryView& q;
  const KvView& kv;
  const VisibleSets& visible;
  const LogitParams& params;
  Verify verify;
  int n_threads;
  Workspace& workspace;
  bool attends;      // Attend answers the call, where a plan serves it
  HeadReads* reads;  // [kv_heads]; Attend adds to them what it adds to the row and byte counters
};

class SparseMethod : public EvictablePlan {
 public:
  // Brings the plan in line with the call: drops what changed, builds what is due, and counts both. Whether the plan
  // then serves the call; if not, the call is answered exactly.
  virtual bool Prepare(const LayerCall& call, LayerStats* stats) = 0;
  // Both follow a Prepare of the same call that returned true. After an error the caller answers exactly.
  virtual Status Attend(const LayerCall& call, std::span<const float> taus, const OutView& out, LayerStats* stats) = 0;
  virtual Status Record(const LayerCall& call, const OutView& exact_output, CalibrationWindow* window) = 0;
  // How clusters are found: never Selection::kAutomatic.
  virtual Selection selection() const { return Selection::kFlat; }
  // Of the two, the one that thresholds are for from now on. False: there is no memory for it.
  virtual bool SetSelection(Selection selection) { return selection == Selection::kFlat; }
  // A calibration window begins with this call, of which Prepare returned true: decides Selection::kAutomatic.
  virtual void ChooseSelection(const LayerCall& /*call*/) {}
  // See Layer::AttendPrompt. Follows a Prepare of the same call that returned true; after an error the caller answers
  // exactly.
  virtual Status AttendPrompt(const LayerCall& call, PromptThresholds* thresholds, const OutView& out) = 0;

  // See Layer::Seal.
  virtual Status Seal(const KvView& kv, std::int64_t end_row, int n_threads, LayerStats* stats) = 0;
  // Return the number of blocks dropped.
  virtual int DropWritten(std::span<const std::int64_t> rows) = 0;
  virtual int DropAll() = 0;

  virtual std::size_t PlanBytes() const = 0;
  virtual std::int64_t sealed_end() const = 0;
};

// Throws std::bad_alloc.
std::unique_ptr<SparseMethod> MakeFastMethod(const Shape& shape, const Config& config, PlanMemory& memory);

}  // namespace scsa
