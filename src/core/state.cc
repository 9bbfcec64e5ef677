// SPDX-License-Identifier: Apache-2.0
#include "scsa/state.h"

#include <new>
#include <utility>
#include <vector>

#include "core/taus_json.h"

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
}

}  // namespace

struct State::Impl {
  std::vector<std::unique_ptr<Layer>> layers;
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
    return {StatusCode::kOutOfMemory, "no memory for the attention layers"};
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
  return Status::Ok();
}

Status State::FinishCalibration() {
  // Looked at first, so that a call outside a window changes no layer.
  for (const auto& layer : impl_->layers) {
    if (!layer->calibrating()) {
      return {StatusCode::kFailedPrecondition, "no calibration window is open: call StartCalibration first"};
    }
  }
  for (const auto& layer : impl_->layers) {
    if (Status status = layer->FinishCalibration(); !status.ok()) return status;
  }
  return Status::Ok();
}

std::string State::TausToJson() const {
  try {
    std::vector<TauEntry> entries;
    for (int i = 0; i < num_layers(); ++i) {
      const std::span<const float> taus = layer(i).taus();
      for (std::size_t h = 0; h < taus.size(); ++h) entries.push_back({i, static_cast<int>(h), taus[h]});
    }
    return FormatTausJson(entries);
  } catch (const std::bad_alloc&) {
    return {};
  }
}

Status State::LoadTausJson(std::string_view text) {
  std::vector<TauEntry> entries;
  if (Status status = ParseTausJson(text, num_layers(), static_cast<int>(layer(0).taus().size()), &entries);
      !status.ok()) {
    return status;
  }
  for (const TauEntry& entry : entries) {
    if (Status status = layer(entry.layer).SetTau(entry.head, entry.tau); !status.ok()) return status;
  }
  return Status::Ok();
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
