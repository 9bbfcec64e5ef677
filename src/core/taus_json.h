// SPDX-License-Identifier: Apache-2.0
//
// Thresholds as JSON text: {"layer:head": tau, ...}.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "scsa/status.h"

namespace scsa {

struct TauEntry {
  int layer = 0;
  int head = 0;  // query head
  float tau = 0;
};

inline constexpr std::size_t kMaxTausJsonBytes = std::size_t{16} << 20;

// Parses one JSON object whose keys are "layer:head" (plain decimal digits) and whose values are numbers in [0, 1].
// Strict: no other value types and so no nesting, no escapes in keys, no duplicates, nothing after the object, at most
// kMaxTausJsonBytes. kParseError for a malformed text, kInvalidArgument for an index or tau out of range; the message
// names line and column. `entries` is untouched then. kOutOfMemory.
Status ParseTausJson(std::string_view text, int num_layers, int q_heads, std::vector<TauEntry>* entries);

// One entry per line, shortest digits that parse back to the same float. Throws std::bad_alloc.
std::string FormatTausJson(std::span<const TauEntry> entries);

}  // namespace scsa
