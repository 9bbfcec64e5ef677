// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "core/audit.h"
#include "core/calibration.h"
#include "core/method.h"
#include "core/plan_memory.h"
#include "core/prompt_thresholds.h"
#include "scsa/layer.h"

namespace scsa {

struct Layer::Impl {
  Impl(const Shape& layer_shape, const Config& layer_config);  // throws std::bad_alloc
  ~Impl() { memory.Leave(); }

  // ExactAttention of the call, which no plan serves.
  Status AnswerExactly(const LayerCall& call, const OutView& out);

  Shape shape;
  Config config;
  PlanMemory memory;
  std::unique_ptr<SparseMethod> method;
  CalibrationWindow window;
  PromptThresholds prompt;
  std::vector<float> taus;       // per query head (seed) or per KV head (fast)
  float tolerance = 0;           // of the last window that was finished
  std::unique_ptr<Audit> audit;  // nullptr: none
  LayerStats stats;              // plan_bytes is filled in when it is asked for
  std::vector<HeadReads> reads;  // [kv_heads]
  bool serial = false;
};

}  // namespace scsa
