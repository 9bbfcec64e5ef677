// SPDX-License-Identifier: Apache-2.0
#include "core/validate.h"

#include <cmath>
#include <string>

#include "scsa/config.h"

namespace scsa {
namespace {

Status OutOfRange(const char* name, long long value, const char* range) {
  return Status::Invalid(std::string(name) + " is " + std::to_string(value) + ", must be " + range);
}

bool IsKnown(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kQ8_0:
      return true;
  }
  return false;
}

// What fixed blocks need besides: whole words of visible sets, vectors of clusters, 16-bit member indices.
Status ValidateBlocks(const Config& config) {
  if (config.block_size % 64 != 0 || config.block_size > 32768) {
    return OutOfRange("block_size", config.block_size, "a multiple of 64 up to 32768");
  }
  if (config.block_size % config.cluster_size != 0 || config.block_size / config.cluster_size % 8 != 0) {
    return Status::Invalid("cluster_size is " + std::to_string(config.cluster_size) +
                           ", must divide block_size into a multiple of 8 clusters");
  }
  if (config.sink >= config.block_size) return OutOfRange("sink", config.sink, "less than block_size");
  return Status::Ok();
}

}  // namespace

Config ConfigFor(Preset preset) {
  Config config;
  if (preset == Preset::kFast) {
    config.preset = Preset::kFast;
    config.cluster_size = 8;
    config.block_size = 256;
    config.recent = 96;
    config.packed_format = PackedFormat::kNone;
    config.power_iterations = 3;
    config.statistic = CalibrationStatistic::kMean;
  }
  return config;
}

const char* PresetName(Preset preset) { return preset == Preset::kFast ? "fast" : "seed"; }

bool ParsePreset(std::string_view name, Preset* preset) {
  for (const Preset known : {Preset::kSeed, Preset::kFast}) {
    if (name != PresetName(known)) continue;
    *preset = known;
    return true;
  }
  return false;
}

Status ValidateShape(const Shape& shape) {
  if (shape.kv_heads < 1 || shape.kv_heads > kMaxKvHeads) return OutOfRange("kv_heads", shape.kv_heads, "1 ... 64");
  if (shape.q_heads < 1 || shape.q_heads > kMaxQHeads) return OutOfRange("q_heads", shape.q_heads, "1 ... 128");
  if (shape.q_heads % shape.kv_heads != 0) {
    return Status::Invalid("q_heads is " + std::to_string(shape.q_heads) + ", must be a multiple of kv_heads, " +
                           std::to_string(shape.kv_heads));
  }
  if (shape.head_dim < 8 || shape.head_dim > kMaxHeadDim || shape.head_dim % 8 != 0) {
    return OutOfRange("head_dim", shape.head_dim, "a multiple of 8, 8 ... 512");
  }
  return Status::Ok();
}

Status ValidateConfig(const Config& config) {
  if (config.cluster_size < 2 || config.cluster_size > 65536) {
    return OutOfRange("cluster_size", config.cluster_size, "2 ... 65536");
  }
  if (config.rebuild_interval < 1) return OutOfRange("rebuild_interval", config.rebuild_interval, "at least 1");
  if (config.block_size < config.cluster_size) {
    return Status::Invalid("block_size is " + std::to_string(config.block_size) + ", must be at least cluster_size, " +
                           std::to_string(config.cluster_size));
  }
  if (config.sink < 0) return OutOfRange("sink", config.sink, "at least 0");
  if (config.recent < 0) return OutOfRange("recent", config.recent, "at least 0");
  if (!(config.tau_default >= 0.0f && config.tau_default <= 1.0f)) {
    return Status::Invalid("tau_default is " + std::to_string(config.tau_default) + ", must be in [0, 1]");
  }
  const bool fast = config.preset == Preset::kFast;
  if (config.packed_format != PackedFormat::kQ8_0 && config.packed_format != PackedFormat::kF16 &&
      !(fast && (config.packed_format == PackedFormat::kNone || config.packed_format == PackedFormat::kInt8))) {
    return Status::Invalid(std::string("packed_format is no known format, must be q8_0 or f16") +
                           (fast ? " or none or int8" : ""));
  }
  if (config.rank < 0 || config.rank > kMaxRank) return OutOfRange("rank", config.rank, "0 ... 8");
  if (config.power_iterations < 1) return OutOfRange("power_iterations", config.power_iterations, "at least 1");
  if (config.kmeans_rounds < 0) return OutOfRange("kmeans_rounds", config.kmeans_rounds, "at least 0");
  if (config.seal_delay < 0) return OutOfRange("seal_delay", config.seal_delay, "at least 0");
  if (!(config.tail_shrink >= 0.0f && config.tail_shrink <= 1.0f)) {
    return Status::Invalid("tail_shrink is " + std::to_string(config.tail_shrink) + ", must be in [0, 1]");
  }
  if (config.selection > Selection::kAutomatic) {
    return Status::Invalid("selection is not known, must be flat, hierarchical or automatic");
  }
  return fast ? ValidateBlocks(config) : Status::Ok();
}

Status ValidateKv(const KvView& kv) {
  if (kv.n_kv < 0) return OutOfRange("n_kv", kv.n_kv, "at least 0");
  if (!IsKnown(kv.k_type) || !IsKnown(kv.v_type)) return Status::Invalid("the row type of K or V is unknown");
  if (kv.n_kv > 0 && (kv.k == nullptr || kv.v == nullptr)) return Status::Invalid("K or V is a null pointer");
  return Status::Ok();
}

Status ValidateThreads(int n_threads) {
  return n_threads < 1 ? OutOfRange("n_threads", n_threads, "at least 1") : Status::Ok();
}

Status ValidateCall(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                    int n_threads, const OutView& out) {
  if (Status status = ValidateThreads(n_threads); !status.ok()) return status;
  if (q.n_q < 1) return OutOfRange("n_q", q.n_q, "at least 1");
  if (q.data == nullptr) return Status::Invalid("the queries are a null pointer");
  if (out.data == nullptr) return Status::Invalid("the output is a null pointer");
  if (Status status = ValidateKv(kv); !status.ok()) return status;
  if (visible.words != nullptr && q.n_q > 1 && visible.row_stride < (kv.n_kv + 63) / 64) {
    return OutOfRange("the visible sets' row_stride", visible.row_stride, "at least ceil(n_kv / 64)");
  }
  if (!std::isfinite(params.scale)) return Status::Invalid("scale is not finite");
  if (!(params.softcap >= 0.0f && std::isfinite(params.softcap))) {
    return Status::Invalid("softcap is " + std::to_string(params.softcap) + ", must be finite and at least 0");
  }
  return Status::Ok();
}

}  // namespace scsa
