// SPDX-License-Identifier: Apache-2.0
//
// Feeds arbitrary text to the thresholds parser. What it accepts must be in range, unique, complete, and survive a
// round trip.
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scsa/taus.h"

namespace {

void Require(bool condition) {
  if (!condition) __builtin_trap();
}

void RequireSameModel(const scsa::ModelIdentity& a, const scsa::ModelIdentity& b) {
  Require(a.architecture == b.architecture && a.metadata_hash == b.metadata_hash && a.layers == b.layers);
  Require(a.q_heads == b.q_heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim);
}

// A layer of the file has all the heads that it names, from 0 on.
void RequireComplete(const scsa::TausFile& file) {
  for (const scsa::TauEntry& entry : file.taus) {
    int last = 0;
    for (const scsa::TauEntry& other : file.taus) {
      if (other.layer == entry.layer && other.head > last) last = other.head;
    }
    const bool fast = file.config.preset == scsa::Preset::kFast;
    const scsa::Shape shape{fast ? 1 : last + 1, fast ? last + 1 : 1, 8};
    scsa::TausFile without_model = file;
    without_model.model.reset();
    std::vector<float> taus;
    Require(scsa::TausOfLayer(without_model, entry.layer, shape, file.config.preset, &taus).ok());
    Require(taus.at(static_cast<std::size_t>(entry.head)) == entry.tau);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  scsa::TausFile file;
  const scsa::Status status = scsa::ParseTaus(text, &file);
  if (!status.ok()) {
    Require(file.taus.empty() && !status.message().empty());
    return 0;
  }
  std::set<std::pair<int, int>> keys;
  for (const scsa::TauEntry& entry : file.taus) {
    Require(entry.layer >= 0 && entry.layer < scsa::kMaxTausLayers && entry.head >= 0 && entry.head < scsa::kMaxQHeads);
    Require(entry.tau >= 0.0f && entry.tau <= 1.0f);
    Require(keys.insert({entry.layer, entry.head}).second);
  }
  Require(scsa::ValidateConfig(file.config).ok());
  Require(!file.bare || (!file.tolerance && !file.model));
  if (!file.bare && file.taus.size() <= 64) RequireComplete(file);

  std::string written;
  Require(scsa::FormatTaus(file, &written).ok());
  scsa::TausFile again;
  Require(scsa::ParseTaus(written, &again).ok());
  Require(again.bare == file.bare && again.tolerance == file.tolerance);
  Require(scsa::CheckTausConfig(again, file.config).ok());
  Require(again.model.has_value() == file.model.has_value());
  if (file.model) RequireSameModel(*file.model, *again.model);
  Require(again.taus.size() == file.taus.size());
  for (std::size_t i = 0; i < file.taus.size(); ++i) {
    const scsa::TauEntry& a = file.taus[i];
    const scsa::TauEntry& b = again.taus[i];
    Require(a.layer == b.layer && a.head == b.head && a.tau == b.tau);
  }
  return 0;
}
