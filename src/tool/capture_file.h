// SPDX-License-Identifier: Apache-2.0
//
// Captures: keys, values and decode queries of a real run, in a GGUF file. docs/tool.md describes the format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "scsa/types.h"

namespace scsa::tool {

struct CapturedLayer {
  int layer = 0;                 // its number in the model
  std::vector<std::uint16_t> k;  // f16, [kv_heads][rows][head_dim]
  std::vector<std::uint16_t> v;  // f16, [kv_heads][rows][head_dim]
  std::vector<float> q;          // [steps][q_heads][head_dim], not yet scaled
};

// The query of step s (from 0) sees the rows [0, n_kv + s), its own token's row included.
struct Capture {
  std::string model;         // name of the model file without ".gguf"
  std::string architecture;  // as the model file names it
  std::string llama_cpp_version;
  std::string date;  // UTC, "2026-01-31"
  Shape shape;       // the same in all layers
  float scale = 1.0f;
  std::int64_t n_kv = 0;  // rows that the first step sees
  int steps = 0;
  std::vector<CapturedLayer> layers;  // ascending

  std::int64_t rows() const { return n_kv + steps - 1; }  // of K and V: those that the last step sees
};

// The whole file appears at `path`, in place of an old one, or nothing changes there. ToolError when it cannot be
// written.
void WriteCapture(const std::string& path, const Capture& capture);

// ToolError: no such file, no GGUF, no capture, another version of the format, cut off, or damaged. What it returns has
// at least one layer and one step, a shape that the library takes, and finite numbers only.
Capture ReadCapture(const std::string& path);

}  // namespace scsa::tool
