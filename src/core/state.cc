// SPDX-License-Identifier: Apache-2.0
#include "scsa/state.h"

#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace scsa {
namespace {

void Add(const LayerStats& from, LayerStats* to) {
  to->rebuild_count += from.rebuild_count;
  to->stat_opened_rows += from.stat_opened_rows;
  to->stat_exact_rows += from.stat_exact_rows;
  to->stat_scored += from.stat_scored;
  to->stat_calls += from.stat_calls;
  to->union_rows += from.union_rows;
  to->visible_rows += from.visible_rows;
  to->bytes_read += from.bytes_read;
  to->sparse_steps += from.sparse_steps;
  to->calibration_steps += from.calibration_steps;
  to->exact_steps += from.exact_steps;
  to->build_failures += from.build_failures;
  to->dropped_blocks += from.dropped_blocks;
  to->build_ns += from.build_ns;
  to->plan_bytes += from.plan_bytes;
  to->audited_outputs += from.audited_outputs;
  to->recalibrated_heads += from.recalibrated_heads;
  to->audit_failures += from.audit_failures;
  to->audit_ns += from.audit_ns;
  to->step_failures += from.step_failures;
  to->evicted_blocks += from.evicted_blocks;
  to->refused_blocks += from.refused_blocks;
}

}  // namespace

struct State::Impl {
  // `model` with the dimensions of this state. Throws std::bad_alloc.
  ModelIdentity Complete(ModelIdentity model) const {
    const Shape& shape = layers.front()->shape();
    model.layers = static_cast<int>(layers.size());
    model.q_heads = shape.q_heads;
    model.kv_heads = shape.kv_heads;
    model.head_dim = shape.head_dim;
    return model;
  }

  std::vector<std::unique_ptr<Layer>> layers;
  float window_tolerance = 0;      // of the open window
  std::optional<float> tolerance;  // behind the present thresholds
};

State::State(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
State::~State() = default;

Status State::Create(int num_layers, const Shape& shape, const Config& config, std::unique_ptr<State>* state) {
  if (num_layers < 1) {
    return Status::Invalid("num_layers is " + std::to_string(num_layers) + ", must be at least 1");
  }
  try {
    auto impl = std::make_unique<Impl>();
    for (int i = 0; i < num_layers; ++i) {
      std::unique_ptr<Layer> layer;
      if (Status status = Layer::Create(shape, config, &layer); !status.ok()) return status;
      impl->layers.push_back(std::move(layer));
    }
    state->reset(new State(std::move(impl)));
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory for the attention layers");
  }
  return Status::Ok();
}

int State::num_layers() const { return static_cast<int>(impl_->layers.size()); }
Layer& State::layer(int index) { return *impl_->layers[index]; }
const Layer& State::layer(int index) const { return *impl_->layers[index]; }

Status State::StartCalibration(float tolerance) {
  for (const auto& layer : impl_->layers) {
    if (Status status = layer->StartCalibration(tolerance); !status.ok()) return status;
  }
  impl_->window_tolerance = tolerance;
  return Status::Ok();
}

Status State::FinishCalibration() {
  // Looked at first, so that a call outside a window changes no layer. A window that an earlier call had no memory to
  // evaluate is the last one open.
  if (!impl_->layers.back()->calibrating()) {
    return {StatusCode::kFailedPrecondition, "no calibration window is open: call StartCalibration first"};
  }
  for (const auto& layer : impl_->layers) {
    if (!layer->calibrating()) continue;
    if (Status status = layer->FinishCalibration(); !status.ok()) return status;
  }
  impl_->tolerance = impl_->window_tolerance;
  return Status::Ok();
}

std::string State::TausToJson(const ModelIdentity& model) const {
  try {
    TausFile file;
    file.config = layer(0).config();
    file.config.selection = layer(0).selection();
    file.tolerance = impl_->tolerance;
    file.model = impl_->Complete(model);
    for (int i = 0; i < num_layers(); ++i) {
      if (layer(i).selection() != file.config.selection) continue;
      const std::span<const float> taus = layer(i).taus();
      for (std::size_t h = 0; h < taus.size(); ++h) file.taus.push_back({i, static_cast<int>(h), taus[h]});
    }
    std::string text;
    return FormatTaus(file, &text).ok() ? text : std::string();
  } catch (const std::bad_alloc&) {
    return {};
  }
}

Status State::LoadTausJson(std::string_view text, const ModelIdentity& model) {
  try {
    TausFile file;
    if (Status status = ParseTaus(text, &file); !status.ok()) return status;
    if (Status status = CheckTausConfig(file, layer(0).config()); !status.ok()) return status;
    if (Status status = CheckTausModel(file, impl_->Complete(model)); !status.ok()) return status;
    const int heads = static_cast<int>(layer(0).taus().size());
    for (const TauEntry& entry : file.taus) {
      if (entry.layer < num_layers() && entry.head < heads) continue;
      return Status::Invalid("taus JSON: head " + std::to_string(entry.head) + " of layer " +
                             std::to_string(entry.layer) + " does not exist: there are " +
                             std::to_string(num_layers()) + " layers with " + std::to_string(heads) + " thresholds");
    }
    for (const TauEntry& entry : file.taus) {
      // A bare file fits whatever the layers do now.
      if (!file.bare) {
        if (Status status = layer(entry.layer).SetSelection(file.config.selection); !status.ok()) return status;
      }
      if (Status status = layer(entry.layer).SetTau(entry.head, entry.tau); !status.ok()) return status;
    }
    impl_->tolerance = file.tolerance;
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory to take thresholds over");
  }
}

Status State::SetBudget(const std::shared_ptr<MemoryBudget>& budget) {
  for (const auto& layer : impl_->layers) {
    if (Status status = layer->SetBudget(budget); !status.ok()) return status;
  }
  return Status::Ok();
}

Status State::SetAudit(AuditConfig config) {
  for (const auto& layer : impl_->layers) {
    if (Status status = layer->SetAudit(config); !status.ok()) return status;
    ++config.seed;
  }
  return Status::Ok();
}

Status State::SummarizeAudit(AuditSummary* summary) const {
  std::vector<AuditSample> samples;
  try {
    for (const auto& layer : impl_->layers) {
      const std::span<const AuditSample> part = layer->AuditSamples();
      samples.insert(samples.end(), part.begin(), part.end());
    }
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory for the figures of the audit");
  }
  return scsa::SummarizeAudit(samples, summary);
}

void State::set_serial(bool serial) {
  for (const auto& layer : impl_->layers) layer->set_serial(serial);
}

LayerStats State::stats() const {
  LayerStats total;
  for (const auto& layer : impl_->layers) Add(layer->stats(), &total);
  return total;
}

}  // namespace scsa
