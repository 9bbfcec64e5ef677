// SPDX-License-Identifier: Apache-2.0
#include "scsa/layer.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "core/layer_impl.h"
#include "core/seed_method.h"
#include "core/validate.h"

namespace scsa {
namespace {

std::unique_ptr<SparseMethod> MakeMethod(const Shape& shape, const Config& config, PlanMemory& memory) {
  if (config.preset == Preset::kFast) return MakeFastMethod(shape, config, memory);
  return std::make_unique<SeedMethod>(shape, config, memory);
}

Status Exact(const Shape& shape, const LayerCall& call, const OutView& out) {
  return ExactAttention(shape, call.q, call.kv, call.visible, call.params, call.n_threads, call.workspace, out);
}

}  // namespace

Status Layer::Impl::AnswerExactly(const LayerCall& call, const OutView& out) {
  Status status = Exact(shape, call, out);
  if (status.ok()) ++stats.exact_steps;
  return status;
}

Layer::Impl::Impl(const Shape& layer_shape, const Config& layer_config)
    : shape(layer_shape),
      config(layer_config),
      method(MakeMethod(layer_shape, layer_config, memory)),
      window(layer_shape.q_heads, TauGrid(layer_config.preset)),
      prompt(layer_shape.kv_heads, TauGrid(layer_config.preset)),
      taus(layer_config.preset == Preset::kFast ? layer_shape.kv_heads : layer_shape.q_heads, layer_config.tau_default),
      reads(layer_shape.kv_heads) {}

Layer::Layer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Layer::~Layer() = default;

Status Layer::Create(const Shape& shape, const Config& config, std::unique_ptr<Layer>* layer) {
  if (Status status = ValidateShape(shape); !status.ok()) return status;
  if (Status status = ValidateConfig(config); !status.ok()) return status;
  try {
    layer->reset(new Layer(std::make_unique<Impl>(shape, config)));
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory for an attention layer");
  }
  return Status::Ok();
}

Status Layer::Attend(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                     Verify verify, int n_threads, Workspace& workspace, const OutView& out) {
  if (Status status = ValidateCall(q, kv, visible, params, n_threads, out); !status.ok()) return status;
  Impl& layer = *impl_;
  const std::lock_guard lock(layer.memory.mutex());
  layer.memory.StartCall();
  if (layer.serial) n_threads = 1;
  const bool recalibrating = layer.audit != nullptr && layer.audit->window().open();
  const bool records = layer.window.open() || recalibrating;
  const LayerCall call{q, kv, visible, params, verify, n_threads, workspace, !records, layer.reads.data()};
  if (!layer.method->Prepare(call, &layer.stats)) return layer.AnswerExactly(call, out);
  if (records) {
    if (Status status = Exact(layer.shape, call, out); !status.ok()) return status;
    if (layer.window.open() && layer.window.steps() == 0) layer.method->ChooseSelection(call);
    const bool recorded = layer.method->Record(call, out, recalibrating ? &layer.audit->window() : &layer.window).ok();
    ++(recorded ? layer.stats.calibration_steps : layer.stats.exact_steps);
    if (!recorded) ++layer.stats.step_failures;
    if (recalibrating) layer.audit->AfterWindowStep(recorded, layer.config.tau_default, layer.taus, &layer.stats);
    return Status::Ok();
  }
  if (const Status status = layer.method->Attend(call, layer.taus, out, &layer.stats); !status.ok()) {
    if (status.code() == StatusCode::kOutOfMemory) ++layer.stats.step_failures;
    return layer.AnswerExactly(call, out);
  }
  if (layer.audit != nullptr) layer.audit->Check(call, out, layer.tolerance, layer.taus, &layer.stats);
  return Status::Ok();
}

Status Layer::AttendPrompt(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                           Verify verify, int n_threads, Workspace& workspace, const OutView& out) {
  if (Status status = ValidateCall(q, kv, visible, params, n_threads, out); !status.ok()) return status;
  Impl& layer = *impl_;
  const std::lock_guard lock(layer.memory.mutex());
  layer.memory.StartCall();
  if (layer.serial) n_threads = 1;
  const LayerCall call{q, kv, visible, params, verify, n_threads, workspace, false, layer.reads.data()};
  if (layer.prompt.config().tolerance > 0 && layer.method->Prepare(call, &layer.stats)) {
    const Status status = layer.method->AttendPrompt(call, &layer.prompt, out);
    if (status.ok()) return status;
    if (status.code() == StatusCode::kOutOfMemory) ++layer.stats.step_failures;
  }
  return layer.AnswerExactly(call, out);
}

Status Layer::SetPrompt(const PromptConfig& config) {
  if (!(config.tolerance >= 0.0f && std::isfinite(config.tolerance))) {
    return Status::Invalid("the prompt's tolerance is " + std::to_string(config.tolerance) +
                           ", must be finite and not below 0");
  }
  if (!(config.share > 0.0 && config.share <= 1.0)) {
    return Status::Invalid("the share of measured tiles is " + std::to_string(config.share) +
                           ", must be above 0 and at most 1");
  }
  impl_->prompt.Set(config);
  return Status::Ok();
}

std::span<const PromptHead> Layer::prompt_heads() const { return impl_->prompt.heads(); }

Status Layer::Seal(const KvView& kv, std::int64_t end_row, int n_threads) {
  if (Status status = ValidateKv(kv); !status.ok()) return status;
  if (Status status = ValidateThreads(n_threads); !status.ok()) return status;
  const std::lock_guard lock(impl_->memory.mutex());
  impl_->memory.StartCall();
  return impl_->method->Seal(kv, end_row, impl_->serial ? 1 : n_threads, &impl_->stats);
}

void Layer::NotifyWrites(std::span<const std::int64_t> rows) {
  const std::lock_guard lock(impl_->memory.mutex());
  impl_->stats.dropped_blocks += impl_->method->DropWritten(rows);
}

void Layer::DropPlans() {
  const std::lock_guard lock(impl_->memory.mutex());
  impl_->stats.dropped_blocks += impl_->method->DropAll();
}

Status Layer::SetBudget(std::shared_ptr<MemoryBudget> budget) {
  DropPlans();
  try {
    impl_->memory.Join(std::move(budget), impl_->method.get());
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory to join a memory budget");
  }
  return Status::Ok();
}

Status Layer::StartCalibration(float tolerance) {
  if (!(tolerance > 0.0f && std::isfinite(tolerance))) {
    return Status::Invalid("tolerance is " + std::to_string(tolerance) + ", must be finite and above 0");
  }
  impl_->window.Start(tolerance);
  if (impl_->audit != nullptr) impl_->audit->ForgetHeads();
  return Status::Ok();
}

Status Layer::FinishCalibration() {
  if (!impl_->window.open()) {
    return {StatusCode::kFailedPrecondition, "no calibration window is open: call StartCalibration first"};
  }
  try {
    impl_->window.Finish(impl_->config.statistic, impl_->config.tau_default, impl_->taus);
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory to evaluate the calibration window");
  }
  impl_->tolerance = impl_->window.tolerance();
  return Status::Ok();
}

bool Layer::calibrating() const { return impl_->window.open(); }
int Layer::calibration_steps() const { return impl_->window.steps(); }

std::span<const float> Layer::CalibrationErrors(int q_head, int grid_index) const {
  if (q_head < 0 || q_head >= impl_->shape.q_heads || grid_index < 0 || grid_index >= kTauGridSize) return {};
  return impl_->window.Errors(q_head, grid_index);
}

std::span<const float> Layer::taus() const { return impl_->taus; }

std::span<const float, kTauGridSize> Layer::tau_grid() const { return impl_->window.grid(); }

Status Layer::SetTau(int head, float tau) {
  if (head < 0 || head >= std::ssize(impl_->taus)) {
    return Status::Invalid("head " + std::to_string(head) + " has no threshold, there are " +
                           std::to_string(impl_->taus.size()));
  }
  if (!(tau >= 0.0f && tau <= 1.0f)) return Status::Invalid("tau is " + std::to_string(tau) + ", must be in [0, 1]");
  impl_->taus[head] = tau;
  if (impl_->audit != nullptr) impl_->audit->ForgetHead(static_cast<std::size_t>(head));
  return Status::Ok();
}

Selection Layer::selection() const { return impl_->method->selection(); }

Status Layer::SetSelection(Selection selection) {
  const bool automatic = impl_->config.selection == Selection::kAutomatic && selection <= Selection::kHierarchical;
  if (selection != impl_->config.selection && !automatic) {
    return Status::Invalid("the layer was not made for this selection");
  }
  if (selection == Selection::kAutomatic) return Status::Ok();
  const std::lock_guard lock(impl_->memory.mutex());
  if (impl_->method->SetSelection(selection)) return Status::Ok();
  return Status::OutOfMemory("no memory for hierarchical selection");
}

Status Layer::SetAudit(const AuditConfig& config) {
  if (Status status = ValidateAuditConfig(config); !status.ok()) return status;
  if (config.share == 0) {
    impl_->audit.reset();
    return Status::Ok();
  }
  try {
    impl_->audit = std::make_unique<Audit>(impl_->shape, impl_->config, config, impl_->taus.size());
  } catch (const std::bad_alloc&) {
    ++impl_->stats.audit_failures;
    return Status::OutOfMemory("no memory for the audit of an attention layer");
  }
  return Status::Ok();
}

std::span<const AuditSample> Layer::AuditSamples() const {
  if (impl_->audit == nullptr) return {};
  return impl_->audit->samples();
}

void Layer::set_serial(bool serial) { impl_->serial = serial; }
const Shape& Layer::shape() const { return impl_->shape; }
const Config& Layer::config() const { return impl_->config; }

LayerStats Layer::stats() const {
  const std::lock_guard lock(impl_->memory.mutex());
  LayerStats stats = impl_->stats;
  stats.plan_bytes = impl_->method->PlanBytes();
  stats.evicted_blocks = impl_->memory.evicted_blocks();
  stats.refused_blocks = impl_->memory.refused_blocks();
  return stats;
}

std::span<const HeadReads> Layer::head_reads() const { return impl_->reads; }

void Layer::ResetStats() {
  const std::lock_guard lock(impl_->memory.mutex());
  impl_->memory.ResetCounters();
  impl_->stats = LayerStats{};
  std::fill(impl_->reads.begin(), impl_->reads.end(), HeadReads{});
}
std::int64_t Layer::sealed_end() const {
  const std::lock_guard lock(impl_->memory.mutex());
  return impl_->method->sealed_end();
}

}  // namespace scsa
