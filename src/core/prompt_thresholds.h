// SPDX-License-Identifier: Apache-2.0
//
// Thresholds of the tiles of a prompt: chosen from the errors of measured tiles, again after each of them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "scsa/layer.h"

namespace scsa {

class PromptThresholds {
 public:
  // Throws std::bad_alloc.
  PromptThresholds(int kv_heads, std::span<const float, kTauGridSize> grid)
      : grid_(grid), heads_(kv_heads), errors_(kv_heads), unmeasured_(kv_heads, 0.0) {}

  // Starts over with a tolerance above 0, or 0: nothing is sparse.
  void Set(const PromptConfig& config);
  const PromptConfig& config() const { return config_; }
  std::span<const float, kTauGridSize> grid() const { return grid_; }
  std::span<const PromptHead> heads() const { return heads_; }
  PromptHead& head(int kv_head) { return heads_[kv_head]; }

  // How many of the next n_tiles tiles of a KV head are to be measured. Over many calls that is the configured share.
  int TakeMeasured(int kv_head, int n_tiles);
  // errors[g]: mean error of a measured tile at grid()[g]. Where no threshold of the grid keeps the tolerance, there is
  // none in force.
  void Add(int kv_head, std::span<const float, kTauGridSize> errors);

 private:
  std::span<const float, kTauGridSize> grid_;
  PromptConfig config_;
  std::vector<PromptHead> heads_;
  std::vector<std::array<float, kTauGridSize>> errors_;  // running means, [kv_head]
  std::vector<double> unmeasured_;                       // tiles that are owed a measurement, times the share
};

}  // namespace scsa
