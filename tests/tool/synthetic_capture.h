// SPDX-License-Identifier: Apache-2.0
//
// A small capture with made-up numbers, the same in every run.
#pragma once

#include <ggml.h>

#include <random>

#include "capture_file.h"

namespace scsa::tool {

// Values of a standard normal distribution; keys of one cluster of 8 rows share a centre, so that there is something to
// select.
inline Capture SyntheticCapture(const Shape& shape, std::int64_t n_kv, int steps, const std::vector<int>& layers) {
  Capture capture;
  capture.model = "synthetic";
  capture.architecture = "none";
  capture.llama_cpp_version = "1/2";
  capture.date = "2026-01-31";
  capture.shape = shape;
  capture.scale = 0.5f;
  capture.n_kv = n_kv;
  capture.steps = steps;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto rows = [&](float spread) {
    std::vector<std::uint16_t> values(static_cast<std::size_t>(shape.kv_heads * capture.rows()) * shape.head_dim);
    std::vector<float> centre(shape.head_dim);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t d = i % shape.head_dim;
      if (i / shape.head_dim % 8 == 0) centre[d] = normal(random);
      values[i] = ggml_fp32_to_fp16(centre[d] + spread * normal(random));
    }
    return values;
  };
  for (const int number : layers) {
    CapturedLayer& layer = capture.layers.emplace_back();
    layer.layer = number;
    layer.k = rows(0.2f);
    layer.v = rows(1.0f);
    layer.q.resize(static_cast<std::size_t>(steps * shape.q_heads) * shape.head_dim);
    for (float& q : layer.q) q = normal(random);
  }
  return capture;
}

}  // namespace scsa::tool
