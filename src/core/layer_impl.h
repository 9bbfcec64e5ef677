// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/calibration.h"
#include "core/plan.h"
#include "core/step.h"
#include "scsa/layer.h"

namespace scsa {

struct Layer::Impl {
  Impl(const Shape& layer_shape, const Config& layer_config)
      : shape(layer_shape),
        config(layer_config),
        plan(layer_shape, layer_config),
        window(layer_shape.q_heads),
        taus(layer_shape.q_heads, layer_config.tau_default) {}

  Shape shape;
  Config config;
  Plan plan;
  CalibrationWindow window;
  std::vector<float> taus;  // [q_heads]
  LayerStats stats;         // plan_bytes is filled in when it is asked for
  std::vector<CacheRun> exact_runs;
  bool serial = false;
};

}  // namespace scsa
