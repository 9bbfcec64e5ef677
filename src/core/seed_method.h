// SPDX-License-Identifier: Apache-2.0
//
// Preset `seed`: a Plan of growing and frozen regions, selection per query head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/method.h"
#include "core/plan.h"
#include "core/plan_memory.h"
#include "core/step.h"

namespace scsa {

class SeedMethod final : public SparseMethod {
 public:
  SeedMethod(const Shape& shape, const Config& config, PlanMemory& memory)
      : shape_(shape), config_(config), memory_(memory), plan_(shape, config, &memory) {}

  const Plan& plan() const { return plan_; }

  bool Prepare(const LayerCall& call, LayerStats* stats) override;
  Status Attend(const LayerCall& call, std::span<const float> taus, const OutView& out, LayerStats* stats) override;
  Status Record(const LayerCall& call, const OutView& exact_output, CalibrationWindow* window) override;
  Selection selection() const override { return plan_.has_tree() ? Selection::kHierarchical : Selection::kFlat; }
  bool SetSelection(Selection selection) override { return plan_.SetTree(selection == Selection::kHierarchical); }
  void ChooseSelection(const LayerCall& call) override;
  Status AttendPrompt(const LayerCall&, PromptThresholds*, const OutView&) override {
    return {StatusCode::kUnsupported, std::string()};
  }
  // The tail region is split again as it grows: sealing rows before a query needs them would only repeat the work.
  Status Seal(const KvView&, std::int64_t, int, LayerStats*) override { return Status::Ok(); }
  int DropWritten(std::span<const std::int64_t> rows) override { return plan_.DropWritten(rows); }
  int DropAll() override { return plan_.DropAll(); }
  std::size_t PlanBytes() const override { return plan_.Bytes(); }
  std::int64_t sealed_end() const override { return plan_.sealed_end(); }
  // All regions serve each query, and only the last one can go without a gap.
  Candidate LeastUseful() const override {
    return {.block = static_cast<int>(plan_.regions().size()) - 1, .use = {.last = last_use_}};
  }
  std::uint64_t Evict(int, std::uint64_t) override { return plan_.EvictLast(); }

 private:
  int DropOutdated(const LayerCall& call, std::int64_t n_prefix, LayerStats* stats);
  void Extend(const LayerCall& call, std::int64_t n_prefix, LayerStats* stats);
  StepArgs Step(const LayerCall& call) const;

  Shape shape_;
  Config config_;
  PlanMemory& memory_;
  Plan plan_;
  std::uint64_t last_use_ = 0;  // PlanMemory::now() of the last call that the plan served
  std::vector<CacheRun> exact_runs_;
  std::int64_t exact_rows_ = 0;
};

}  // namespace scsa
