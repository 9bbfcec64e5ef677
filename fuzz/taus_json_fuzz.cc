// SPDX-License-Identifier: Apache-2.0
//
// Feeds arbitrary text to the thresholds parser. What it accepts must be in range, unique, and survive a round trip.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/taus_json.h"

namespace {

void Require(bool condition) {
  if (!condition) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr int kLayers = 4;
  constexpr int kHeads = 12;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<scsa::TauEntry> entries;
  const scsa::Status status = scsa::ParseTausJson(text, kLayers, kHeads, &entries);
  if (!status.ok()) {
    Require(entries.empty() && !status.message().empty());
    return 0;
  }
  Require(entries.size() <= std::size_t{kLayers} * kHeads);
  for (const scsa::TauEntry& entry : entries) {
    Require(entry.layer >= 0 && entry.layer < kLayers && entry.head >= 0 && entry.head < kHeads);
    Require(entry.tau >= 0.0f && entry.tau <= 1.0f);
  }
  std::vector<scsa::TauEntry> again;
  Require(scsa::ParseTausJson(scsa::FormatTausJson(entries), kLayers, kHeads, &again).ok());
  Require(again.size() == entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    Require(again[i].layer == entries[i].layer && again[i].head == entries[i].head && again[i].tau == entries[i].tau);
  }
  return 0;
}
