// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// Format of the per-cluster copies of member rows.
enum class PackedFormat : std::uint8_t {
  kQ8_0,
  kF16,
  kNone,  // no copies, opened clusters are read from the cache itself (preset `fast` alone)
  kInt8,  // 8 bits relative to the block, laid out for integer dot products (preset `fast` alone)
};

// Which errors of the calibration window a threshold must keep within the tolerance.
enum class CalibrationStatistic : std::uint8_t { kMedian, kMean };

// How the clusters to open are found.
enum class Selection : std::uint8_t {
  kFlat,          // every cluster is scored
  kHierarchical,  // a walk down a tree of summaries: the work follows what is opened
  // One of the two, by the length of the context when a calibration window begins; flat before. Thresholds of one are
  // not those of the other, so it stays until the next window or Layer::SetSelection.
  kAutomatic,
};

enum class Preset : std::uint8_t {
  kSeed,  // the method as its specification states it: regions that grow and freeze, selection per query head
  kFast,  // small blocks that are built once, one opened set for all query heads of a KV head
};

// Parameters of the sparse operator. docs/operator.md says what they mean. The defaults are those of preset `seed`;
// ConfigFor gives those of each preset.
struct Config {
  Preset preset = Preset::kSeed;
  // Most members of a cluster (seed), members on average (fast). 2 ... 65536; for fast block_size / cluster_size must
  // be a multiple of 8.
  int cluster_size = 128;
  int rebuild_interval = 512;  // seed: rows appended before the growing tail region is split again, >= 1
  // Rows at which a region freezes (seed), >= cluster_size; rows of a block (fast), a multiple of 64 up to 32768.
  int block_size = 4096;
  int sink = 4;               // first rows, always read exactly, >= 0; fast: less than block_size
  int recent = 32;            // last rows, always read exactly, >= 0
  int seal_delay = 0;         // fast: rows that a block waits beyond `recent` before it is built, >= 0
  float tau_default = 0.05f;  // threshold before calibration, and of a head that recorded nothing; in [0, 1]
  PackedFormat packed_format = PackedFormat::kQ8_0;  // kNone and kInt8 for fast alone
  int rank = 2;                                      // seed: eigenpairs kept per cluster, 0 ... 8
  int power_iterations = 4;                          // per eigenpair (seed) or split (fast), >= 1
  int kmeans_rounds = 2;                             // fast: rounds of k-means after the split of a block, >= 0
  float tail_shrink = 0.5f;  // fast: share of the second cumulant that a closed cluster's weight takes; in [0, 1]
  CalibrationStatistic statistic = CalibrationStatistic::kMedian;
  Selection selection = Selection::kFlat;
};

// Rows in blocks, or in regions (seed), from which Selection::kAutomatic is hierarchical. docs/measurements.md
// shows why, and that preset `seed` gains nothing from it up to twice as many.
inline constexpr std::int64_t kHierarchicalRows = 262144;

// Layers of a model that take seal_delay = layer % kSealStagger build their blocks in different steps, so that no step
// builds one for every layer.
inline constexpr int kSealStagger = 64;

Config ConfigFor(Preset preset);
// The calibration tolerance that a preset is meant for (docs/measurements.md shows what it gives).
constexpr float DefaultTolerance(Preset preset) { return preset == Preset::kFast ? 0.015f : 0.025f; }
const char* PresetName(Preset preset);
// False when no preset has that name.
bool ParsePreset(std::string_view name, Preset* preset);

inline constexpr int kMaxRank = 8;

Status ValidateConfig(const Config& config);

}  // namespace scsa
