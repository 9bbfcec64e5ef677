// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// Format of the per-cluster copies of member rows.
enum class PackedFormat : std::uint8_t { kQ8_0, kF16 };

// Parameters of the sparse operator. The defaults are preset `seed`: the method as its specification states it
// (docs/operator.md).
struct Config {
  int cluster_size = 128;      // most members of a cluster, 2 ... 65536
  int rebuild_interval = 512;  // rows appended before the growing tail region is split again, >= 1
  int block_size = 4096;       // rows at which a region freezes for good, >= cluster_size
  int sink = 4;                // first rows, always read exactly, >= 0
  int recent = 32;             // last rows, always read exactly, >= 0
  float tau_default = 0.05f;   // threshold before calibration, and of a head that recorded nothing; in [0, 1]
  PackedFormat packed_format = PackedFormat::kQ8_0;
  int rank = 2;              // eigenpairs kept per cluster, 0 ... 8
  int power_iterations = 4;  // per eigenpair, >= 1
};

inline constexpr int kMaxRank = 8;

Status ValidateConfig(const Config& config);

}  // namespace scsa
