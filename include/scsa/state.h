// SPDX-License-Identifier: Apache-2.0
//
// The sparse operator of a whole model: one Layer per attention layer, calibrated together.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "scsa/layer.h"
#include "scsa/taus.h"

namespace scsa {

class State {
 public:
  // num_layers >= 1; shape and config as Layer::Create checks them.
  static Status Create(int num_layers, const Shape& shape, const Config& config, std::unique_ptr<State>* state);
  ~State();

  int num_layers() const;
  Layer& layer(int index);  // 0 ... num_layers() - 1
  const Layer& layer(int index) const;

  Status StartCalibration(float tolerance);
  Status FinishCalibration();

  // Thresholds with their origin as JSON (scsa/taus.h, docs/operator.md): of `model`, architecture and metadata_hash
  // are written where they are not empty; its numbers are the state's own. The tolerance is that of the last window
  // that FinishCalibration closed, or of the last text loaded. Gives an empty text when memory runs out or FormatTaus
  // refuses a value.
  std::string TausToJson(const ModelIdentity& model = {}) const;
  // Takes thresholds from such a text, or from a bare {"layer:head": tau, ...}, of which any subset will do; a head
  // that the text does not name keeps its threshold. A text that is malformed, of another preset, Config, number of
  // layers or heads, or of another model than `model` (where both sides know) is refused as ParseTaus, CheckTausConfig
  // and CheckTausModel say, and changes nothing.
  Status LoadTausJson(std::string_view text, const ModelIdentity& model = {});

  // Layer::SetBudget for each layer; after an error for some of them.
  Status SetBudget(const std::shared_ptr<MemoryBudget>& budget);

  // Layer::SetAudit for each layer, with the seed raised by one from layer to layer.
  Status SetAudit(AuditConfig config);
  // Figures over the samples of all layers. kOutOfMemory.
  Status SummarizeAudit(AuditSummary* summary) const;

  void set_serial(bool serial);
  LayerStats stats() const;  // summed over the layers

 private:
  struct Impl;
  explicit State(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace scsa
