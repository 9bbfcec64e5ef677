// SPDX-License-Identifier: Apache-2.0
//
// The sparse operator of a whole model: one Layer per attention layer, calibrated together.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "scsa/layer.h"

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

  // Thresholds as JSON: {"layer:head": tau, ...}, heads as Layer::taus() counts them. Loading takes any subset of them;
  // a malformed text, an index out of range or a tau outside [0, 1] is kParseError or kInvalidArgument and changes
  // nothing. Writing gives an empty text when memory runs out.
  std::string TausToJson() const;
  Status LoadTausJson(std::string_view text);

  void set_serial(bool serial);
  LayerStats stats() const;  // summed over the layers

 private:
  struct Impl;
  explicit State(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace scsa
