// SPDX-License-Identifier: Apache-2.0
//
// Calibrated thresholds outside of a process: what a file of them holds, reading and writing it, and whether it fits.
// docs/operator.md describes the format. All functions are thread-safe, allocate, and never throw.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "scsa/config.h"
#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

struct TauEntry {
  int layer = 0;
  int head = 0;  // query head (seed) or KV head (fast), as Layer::taus() counts them
  float tau = 0;
};

// The model that thresholds were calibrated on.
struct ModelIdentity {
  std::string architecture;   // printable ASCII without '"' and '\'; empty: not known
  std::string metadata_hash;  // likewise; compared for equality alone
  int layers = 0;             // 0: not known
  // 0: not known, or not the same in every layer.
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
};

struct TausFile {
  // A bare {"layer:head": tau}: nothing is known but `taus`, which need not name every head.
  bool bare = false;
  // What the thresholds were calibrated with. Fields that belong to the other preset, seal_delay and tau_default (on
  // which calibrated thresholds do not depend) are not part of a file: they read as ConfigFor(preset) has them.
  Config config;
  std::optional<float> tolerance;  // above 0, below 1e6; nothing where no calibration chose the thresholds
  std::optional<ModelIdentity> model;
  // Each (layer, head) once. Where not bare: all heads of a layer or none of them.
  std::vector<TauEntry> taus;
};

inline constexpr int kTausVersion = 1;
inline constexpr std::size_t kMaxTausBytes = std::size_t{16} << 20;
inline constexpr int kMaxTausLayers = 4096;

// Reads a text of either form. kParseError for a malformed text, one that contradicts itself or is larger than
// kMaxTausBytes; kInvalidArgument for a value out of range (a tau outside [0, 1], a layer beyond kMaxTausLayers, a head
// beyond kMaxQHeads, a Config that ValidateConfig refuses); kUnsupported for another format or version; kOutOfMemory.
// The message is one line, with line and column where there is one. `file` is untouched then.
Status ParseTaus(std::string_view text, TausFile* file);

// Writes version kTausVersion, or the bare form if file.bare: one threshold per line, the shortest digits that read
// back as the same float. kInvalidArgument for a tolerance out of range or a string of `model` that
// holds other characters than allowed; kOutOfMemory. `text` is untouched then.
Status FormatTaus(const TausFile& file, std::string* text);

// Whether thresholds from `file` mean the same with `config`. kInvalidArgument with a line that says which parameter
// differs and what to do. A bare file fits every Config.
Status CheckTausConfig(const TausFile& file, const Config& config);
// Whether `file` was made for that model. What either side does not know is not compared. kInvalidArgument as above.
Status CheckTausModel(const TausFile& file, const ModelIdentity& model);

// All thresholds of one layer under `preset`, by head; empty where the file names none of its heads. kInvalidArgument
// where it names a head that the layer does not have, some of its heads only, or was made for other dimensions; `taus`
// is untouched then. kOutOfMemory.
Status TausOfLayer(const TausFile& file, int layer, const Shape& shape, Preset preset, std::vector<float>* taus);

// Heads that have a threshold each: KV heads with `fast`, query heads with `seed`.
constexpr int TauHeads(Preset preset, const Shape& shape) {
  return preset == Preset::kFast ? shape.kv_heads : shape.q_heads;
}

}  // namespace scsa
