// SPDX-License-Identifier: Apache-2.0
#include "scsa/layer.h"

#include <chrono>
#include <cmath>
#include <new>
#include <string>
#include <utility>

#include "core/layer_impl.h"
#include "core/validate.h"

namespace scsa {
namespace {

// Brings the plan in line with what the query sees and, when it is due, extends it.
void Maintain(Layer::Impl& layer, const KvView& kv, std::int64_t n_prefix, Verify verify, int n_threads) {
  layer.stats.dropped_blocks += layer.plan.DropBeyond(n_prefix);
  const int changed = layer.plan.DropChanged(kv, verify, n_threads);
  layer.stats.dropped_blocks += changed;
  // Rows that were just found to have changed may still be changing: this call attends to them exactly.
  if (changed > 0 || !layer.plan.Due(n_prefix)) return;
  const auto start = std::chrono::steady_clock::now();
  int built = 0;
  if (!layer.plan.Extend(kv, n_prefix, n_threads, &built).ok()) ++layer.stats.build_failures;
  layer.stats.rebuild_count += built;
  layer.stats.build_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Layer::Layer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Layer::~Layer() = default;

Status Layer::Create(const Shape& shape, const Config& config, std::unique_ptr<Layer>* layer) {
  if (Status status = ValidateShape(shape); !status.ok()) return status;
  if (Status status = ValidateConfig(config); !status.ok()) return status;
  try {
    layer->reset(new Layer(std::make_unique<Impl>(shape, config)));
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "no memory for an attention layer"};
  }
  return Status::Ok();
}

Status Layer::Attend(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                     Verify verify, int n_threads, Workspace& workspace, const OutView& out) {
  if (Status status = ValidateCall(q, kv, visible, params, n_threads, out); !status.ok()) return status;
  Impl& layer = *impl_;
  if (layer.serial) n_threads = 1;
  const auto exact = [&] { return ExactAttention(layer.shape, q, kv, visible, params, n_threads, workspace, out); };
  const auto answer_exactly = [&] {
    Status status = exact();
    if (status.ok()) ++layer.stats.exact_steps;
    return status;
  };
  if (q.n_q != 1 || params.softcap > 0) return answer_exactly();

  const std::int64_t n_prefix = VisiblePrefix(visible, kv.n_kv);
  Maintain(layer, kv, n_prefix, verify, n_threads);
  if (layer.plan.regions().empty()) return answer_exactly();

  std::int64_t exact_rows = 0;
  try {
    exact_rows =
        ListExactRuns(visible, kv.n_kv, n_prefix, layer.config.sink, layer.plan.sealed_end(), &layer.exact_runs);
  } catch (const std::bad_alloc&) {
    return answer_exactly();
  }
  const StepArgs step{layer.shape, layer.config,     layer.plan.regions(), q,         kv,       visible,
                      params,      layer.exact_runs, exact_rows,           n_threads, workspace};
  if (layer.window.open()) {
    if (Status status = exact(); !status.ok()) return status;
    if (RecordStep(step, out, &layer.window).ok()) {
      ++layer.stats.calibration_steps;
    } else {
      ++layer.stats.exact_steps;
    }
    return Status::Ok();
  }
  if (AttendSparse(step, layer.taus, out, &layer.stats).ok()) return Status::Ok();
  return answer_exactly();
}

void Layer::NotifyWrites(std::span<const std::int64_t> rows) {
  impl_->stats.dropped_blocks += impl_->plan.DropWritten(rows);
}

void Layer::DropPlans() { impl_->stats.dropped_blocks += impl_->plan.DropAll(); }

Status Layer::StartCalibration(float tolerance) {
  if (!(tolerance > 0.0f && std::isfinite(tolerance))) {
    return Status::Invalid("tolerance is " + std::to_string(tolerance) + ", must be finite and above 0");
  }
  impl_->window.Start(tolerance);
  return Status::Ok();
}

Status Layer::FinishCalibration() {
  if (!impl_->window.open()) {
    return {StatusCode::kFailedPrecondition, "no calibration window is open: call StartCalibration first"};
  }
  try {
    impl_->window.Finish(impl_->config.tau_default, impl_->taus);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "no memory to evaluate the calibration window"};
  }
  return Status::Ok();
}

bool Layer::calibrating() const { return impl_->window.open(); }
int Layer::calibration_steps() const { return impl_->window.steps(); }

std::span<const float> Layer::CalibrationErrors(int q_head, int grid_index) const {
  if (q_head < 0 || q_head >= impl_->shape.q_heads || grid_index < 0 || grid_index >= kTauGridSize) return {};
  return impl_->window.Errors(q_head, grid_index);
}

std::span<const float> Layer::taus() const { return impl_->taus; }

Status Layer::SetTau(int q_head, float tau) {
  if (q_head < 0 || q_head >= impl_->shape.q_heads) {
    return Status::Invalid("query head " + std::to_string(q_head) + " does not exist, there are " +
                           std::to_string(impl_->shape.q_heads));
  }
  if (!(tau >= 0.0f && tau <= 1.0f)) return Status::Invalid("tau is " + std::to_string(tau) + ", must be in [0, 1]");
  impl_->taus[q_head] = tau;
  return Status::Ok();
}

void Layer::set_serial(bool serial) { impl_->serial = serial; }
const Shape& Layer::shape() const { return impl_->shape; }
const Config& Layer::config() const { return impl_->config; }

LayerStats Layer::stats() const {
  LayerStats stats = impl_->stats;
  stats.plan_bytes = impl_->plan.Bytes();
  return stats;
}

void Layer::ResetStats() { impl_->stats = LayerStats{}; }
std::int64_t Layer::sealed_end() const { return impl_->plan.sealed_end(); }

}  // namespace scsa
