// SPDX-License-Identifier: Apache-2.0
#include "capi/convert.h"

#include <algorithm>

#include "capi/error.h"

namespace scsa::capi {
namespace {

// C's enumerations number the enumerators of C++ from 0 on; `last` is the highest.
template <class Enum>
Status ReadEnum(int value, Enum last, const char* name, const char* type, Enum* to) {
  if (value < 0 || value > static_cast<int>(last)) {
    return Status::Invalid(std::string(name) + " is " + std::to_string(value) + ", must be a value of enum " + type +
                           ", 0 ... " + std::to_string(static_cast<int>(last)));
  }
  *to = static_cast<Enum>(value);
  return Status::Ok();
}

Status CheckReserved(int reserved, const char* name) {
  if (reserved == 0) return Status::Ok();
  return {StatusCode::kUnsupported, std::string("reserved of ") + name + " is not 0"};
}

static_assert(static_cast<int>(DType::kF32) == SCSA_F32);
static_assert(static_cast<int>(DType::kF16) == SCSA_F16);
static_assert(static_cast<int>(DType::kBF16) == SCSA_BF16);
static_assert(static_cast<int>(DType::kQ8_0) == SCSA_Q8_0);
static_assert(static_cast<int>(Verify::kNone) == SCSA_VERIFY_NONE);
static_assert(static_cast<int>(Verify::kSample) == SCSA_VERIFY_SAMPLE);
static_assert(static_cast<int>(Verify::kFull) == SCSA_VERIFY_FULL);
static_assert(static_cast<int>(Preset::kSeed) == SCSA_PRESET_SEED);
static_assert(static_cast<int>(Preset::kFast) == SCSA_PRESET_FAST);
static_assert(static_cast<int>(PackedFormat::kQ8_0) == SCSA_PACKED_Q8_0);
static_assert(static_cast<int>(PackedFormat::kF16) == SCSA_PACKED_F16);
static_assert(static_cast<int>(PackedFormat::kNone) == SCSA_PACKED_NONE);
static_assert(static_cast<int>(PackedFormat::kInt8) == SCSA_PACKED_INT8);
static_assert(static_cast<int>(CalibrationStatistic::kMedian) == SCSA_STATISTIC_MEDIAN);
static_assert(static_cast<int>(CalibrationStatistic::kMean) == SCSA_STATISTIC_MEAN);
static_assert(static_cast<int>(Selection::kFlat) == SCSA_SELECTION_FLAT);
static_assert(static_cast<int>(Selection::kHierarchical) == SCSA_SELECTION_HIERARCHICAL);
static_assert(static_cast<int>(Selection::kAutomatic) == SCSA_SELECTION_AUTOMATIC);

}  // namespace

Status CheckSize(std::size_t struct_size, std::size_t known_size, const char* name) {
  if (struct_size >= known_size) return Status::Ok();
  return Status::Invalid("struct_size of " + std::string(name) + " is " + std::to_string(struct_size) +
                         ", must be at least " + std::to_string(known_size) + ": set it to sizeof(struct " + name +
                         ")");
}

Status CheckRest(const void* from, std::size_t struct_size, std::size_t known_size, const char* name) {
  const auto* bytes = static_cast<const unsigned char*>(from);
  if (std::all_of(bytes + known_size, bytes + struct_size, [](unsigned char byte) { return byte == 0; })) {
    return Status::Ok();
  }
  return {StatusCode::kUnsupported,
          std::string(name) + " sets a field that version " + scsa_version() + " of the library does not know"};
}

Status ReadPreset(int preset, Preset* to) { return ReadEnum(preset, Preset::kFast, "preset", "scsa_preset", to); }
Status ReadSelection(int selection, Selection* to) {
  return ReadEnum(selection, Selection::kAutomatic, "selection", "scsa_selection", to);
}
Status ReadVerify(int verify, Verify* to) { return ReadEnum(verify, Verify::kFull, "verify", "scsa_verify", to); }

Status ReadShape(const scsa_shape* from, Shape* to) {
  scsa_shape shape;
  if (Status status = ReadStruct(from, "scsa_shape", &shape); !status.ok()) return status;
  if (Status status = CheckReserved(shape.reserved, "scsa_shape"); !status.ok()) return status;
  *to = {shape.q_heads, shape.kv_heads, shape.head_dim};
  return Status::Ok();
}

Status ReadConfig(const scsa_config* from, Config* to) {
  scsa_config c;
  if (Status status = ReadStruct(from, "scsa_config", &c); !status.ok()) return status;
  if (Status status = CheckReserved(c.reserved, "scsa_config"); !status.ok()) return status;
  Config config;
  Status status = AllOf(
      ReadPreset(c.preset, &config.preset),
      ReadEnum(c.packed_format, PackedFormat::kInt8, "packed_format", "scsa_packed_format", &config.packed_format),
      ReadEnum(c.statistic, CalibrationStatistic::kMean, "statistic", "scsa_statistic", &config.statistic),
      ReadSelection(c.selection, &config.selection));
  if (!status.ok()) return status;
  config.cluster_size = c.cluster_size;
  config.rebuild_interval = c.rebuild_interval;
  config.block_size = c.block_size;
  config.sink = c.sink;
  config.recent = c.recent;
  config.seal_delay = c.seal_delay;
  config.tau_default = c.tau_default;
  config.rank = c.rank;
  config.power_iterations = c.power_iterations;
  config.kmeans_rounds = c.kmeans_rounds;
  config.tail_shrink = c.tail_shrink;
  *to = config;
  return Status::Ok();
}

Status ReadAuditConfig(const scsa_audit_config* from, AuditConfig* to) {
  scsa_audit_config config;
  if (Status status = ReadStruct(from, "scsa_audit_config", &config); !status.ok()) return status;
  to->share = config.share;
  to->seed = config.seed;
  to->capacity = config.capacity;
  to->tolerance = config.tolerance;
  to->drift_factor = config.drift_factor;
  to->window = config.window;
  return Status::Ok();
}

Status ReadKv(const scsa_kv* from, KvView* to) {
  scsa_kv kv;
  if (Status status = ReadStruct(from, "scsa_kv", &kv); !status.ok()) return status;
  KvView view;
  Status status = AllOf(ReadEnum(kv.k_type, DType::kQ8_0, "k_type", "scsa_dtype", &view.k_type),
                        ReadEnum(kv.v_type, DType::kQ8_0, "v_type", "scsa_dtype", &view.v_type));
  if (!status.ok()) return status;
  view.k = kv.k;
  view.v = kv.v;
  view.k_row_stride = kv.k_row_stride;
  view.k_head_stride = kv.k_head_stride;
  view.v_row_stride = kv.v_row_stride;
  view.v_head_stride = kv.v_head_stride;
  view.n_kv = kv.n_kv;
  *to = view;
  return Status::Ok();
}

Status ReadAttendArgs(const scsa_attend_args* from, AttendArgs* to) {
  scsa_attend_args args;
  if (Status status = ReadStruct(from, "scsa_attend_args", &args); !status.ok()) return status;
  if (Status status = CheckReserved(args.reserved, "scsa_attend_args"); !status.ok()) return status;
  to->q = {args.q, args.q_row_stride, args.q_head_stride, args.n_q};
  to->visible = {args.visible, args.visible_row_stride};
  to->params = {args.scale, args.softcap, args.sinks};
  to->out = {args.out, args.out_row_stride, args.out_head_stride};
  to->n_threads = args.n_threads;
  to->verify = args.verify;
  return Status::Ok();
}

Status ReadModel(const scsa_model* from, ModelIdentity* to) {
  *to = {};
  if (from == nullptr) return Status::Ok();
  scsa_model model;
  if (Status status = ReadStruct(from, "scsa_model", &model); !status.ok()) return status;
  if (model.architecture != nullptr) to->architecture = model.architecture;
  if (model.metadata_hash != nullptr) to->metadata_hash = model.metadata_hash;
  to->layers = model.layers;
  to->q_heads = model.q_heads;
  to->kv_heads = model.kv_heads;
  to->head_dim = model.head_dim;
  return Status::Ok();
}

Status ReadTauEntry(const scsa_tau_entry* from, TauEntry* to) {
  scsa_tau_entry entry;
  if (Status status = ReadStruct(from, "scsa_tau_entry", &entry); !status.ok()) return status;
  if (Status status = CheckReserved(entry.reserved, "scsa_tau_entry"); !status.ok()) return status;
  if (entry.layer < 0 || entry.layer >= kMaxTausLayers) {
    return Status::Invalid("layer is " + std::to_string(entry.layer) + ", must be 0 ... " +
                           std::to_string(kMaxTausLayers - 1));
  }
  if (entry.head < 0 || entry.head >= kMaxQHeads) {
    return Status::Invalid("head is " + std::to_string(entry.head) + ", must be 0 ... " +
                           std::to_string(kMaxQHeads - 1));
  }
  if (!(entry.tau >= 0.0f && entry.tau <= 1.0f)) {
    return Status::Invalid("tau is " + std::to_string(entry.tau) + ", must be in [0, 1]");
  }
  *to = {entry.layer, entry.head, entry.tau};
  return Status::Ok();
}

Status WriteShape(const Shape& from, scsa_shape* to) {
  return WriteStruct({sizeof(scsa_shape), from.q_heads, from.kv_heads, from.head_dim, 0}, "scsa_shape", to);
}

Status WriteConfig(const Config& from, scsa_config* to) {
  scsa_config config;
  config.struct_size = sizeof(config);
  config.preset = static_cast<int>(from.preset);
  config.cluster_size = from.cluster_size;
  config.rebuild_interval = from.rebuild_interval;
  config.block_size = from.block_size;
  config.sink = from.sink;
  config.recent = from.recent;
  config.seal_delay = from.seal_delay;
  config.tau_default = from.tau_default;
  config.packed_format = static_cast<int>(from.packed_format);
  config.rank = from.rank;
  config.power_iterations = from.power_iterations;
  config.kmeans_rounds = from.kmeans_rounds;
  config.tail_shrink = from.tail_shrink;
  config.statistic = static_cast<int>(from.statistic);
  config.selection = static_cast<int>(from.selection);
  config.reserved = 0;
  return WriteStruct(config, "scsa_config", to);
}

Status WriteAuditSummary(const AuditSummary& from, scsa_audit_summary* to) {
  return WriteStruct({sizeof(scsa_audit_summary), from.outputs, from.observations, from.mean, from.median,
                      from.median_low, from.median_high, from.p90, from.p99},
                     "scsa_audit_summary", to);
}

Status WritePromptHead(const PromptHead& from, scsa_prompt_head* to) {
  scsa_prompt_head c = SCSA_PROMPT_HEAD_INIT;
  c.tiles = from.tiles;
  c.sparse = from.sparse;
  c.measured = from.measured;
  c.audited = from.audited;
  c.error_sum = from.error_sum;
  c.rows_read = from.rows_read;
  c.rows_visible = from.rows_visible;
  c.tau = from.tau;
  return WriteStruct(c, "head", to);
}

Status WriteStats(const LayerStats& from, scsa_stats* to) {
  scsa_stats stats;
  stats.struct_size = sizeof(stats);
  stats.rebuild_count = from.rebuild_count;
  stats.stat_opened_rows = from.stat_opened_rows;
  stats.stat_exact_rows = from.stat_exact_rows;
  stats.stat_scored = from.stat_scored;
  stats.stat_calls = from.stat_calls;
  stats.union_rows = from.union_rows;
  stats.visible_rows = from.visible_rows;
  stats.bytes_read = from.bytes_read;
  stats.sparse_steps = from.sparse_steps;
  stats.calibration_steps = from.calibration_steps;
  stats.exact_steps = from.exact_steps;
  stats.build_failures = from.build_failures;
  stats.dropped_blocks = from.dropped_blocks;
  stats.build_ns = from.build_ns;
  stats.plan_bytes = from.plan_bytes;
  stats.audited_outputs = from.audited_outputs;
  stats.recalibrated_heads = from.recalibrated_heads;
  stats.audit_failures = from.audit_failures;
  stats.audit_ns = from.audit_ns;
  stats.step_failures = from.step_failures;
  stats.evicted_blocks = from.evicted_blocks;
  stats.refused_blocks = from.refused_blocks;
  return WriteStruct(stats, "scsa_stats", to);
}

Status WriteHeadReads(const HeadReads& from, scsa_head_reads* to) {
  return WriteStruct({sizeof(scsa_head_reads), from.rows_read, from.rows_visible, from.bytes_read}, "scsa_head_reads",
                     to);
}

Status WriteModel(const ModelIdentity& from, scsa_model* to) {
  return WriteStruct({sizeof(scsa_model), from.architecture.c_str(), from.metadata_hash.c_str(), from.layers,
                      from.q_heads, from.kv_heads, from.head_dim},
                     "scsa_model", to);
}

Status CheckText(const char* text, std::size_t size, const std::size_t* length) {
  return AllOf(NotNull(length, "length"), size == 0 ? Status::Ok() : NotNull(text, "text"));
}

void WriteText(const std::string& from, char* text, std::size_t size, std::size_t* length) {
  if (size > 0) {
    const std::size_t copied = std::min(from.size(), size - 1);
    std::memcpy(text, from.data(), copied);
    text[copied] = '\0';
  }
  *length = from.size();
}

}  // namespace scsa::capi
