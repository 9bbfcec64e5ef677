/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions that libggml-scsa.so offers through ggml_backend_reg_get_proc_address(reg, NAME), NAME being the name of
 * the function. They configure and observe the plugin at run time; the environment variables of docs/plugin.md set the
 * same options before it loads. C89-compatible. Thread-safe unless a function says otherwise. */
#ifndef SCSA_PLUGIN_H
#define SCSA_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sets one option by the lower-case name of its environment variable without the SCSA_ prefix: "mode" (auto, exact,
 * off, limit), "preset" (fast, seed), "selection" (auto, flat, hierarchical), "tolerance" (0 ... 1), "calibrate"
 * (steps), "crossover" (auto, or cached rows), "taus" (a file of thresholds, read at once; empty: none), "audit"
 * (share, 0 ... 1), "prompt_tolerance" (0 ... 1; 0: prompts are exact), "progress" (0, 1), "stats" (0, 1), "max_mem"
 * (bytes, 512M, 2G, or none; in force at once), "checks" (on, off: to time them; unsafe, in force at once). Returns
 * NULL, or one line that says what is wrong (static or thread-local storage, valid until this thread's next call); then
 * nothing was changed. "mode" takes effect at once for nodes that the plugin already holds, and for others when
 * llama.cpp next builds a graph. Options of the operator hold for layers first seen afterwards. */
typedef const char* (*scsa_plugin_set_t)(const char* name, const char* value);
#define SCSA_PLUGIN_SET "scsa_plugin_set"

/* Totals since load over all contexts and layers; take differences of two snapshots. struct_size is set by the caller
 * to sizeof(struct scsa_plugin_stats) as it was compiled; only that many bytes are written. */
struct scsa_plugin_stats {
  size_t struct_size;
  uint64_t attn_ns;            /* wall time inside attention nodes, plan building included */
  uint64_t attn_calls;         /* attention nodes computed (one per layer and decode step) */
  uint64_t set_rows_ns;        /* wall time inside the cache writes that the plugin does itself */
  uint64_t sparse_calls;       /* answered by the sparse operator */
  uint64_t exact_calls;        /* answered by the exact kernel */
  uint64_t calibration_calls;  /* answered exactly inside a calibration window while decoding */
  uint64_t limit_calls;        /* answered with zeros (mode limit) */
  uint64_t rows_read;          /* cached rows read, each once per KV head and call */
  uint64_t rows_visible;       /* cached rows visible, each once per KV head and call: the 100 % of rows_read */
  uint64_t bytes_read;         /* bytes of cached rows, packed rows and summaries read */
  uint64_t plan_build_ns;      /* clustering and packing, part of attn_ns */
  uint64_t plan_bytes;         /* memory that plans hold now (not a total) */
  uint64_t rebuild_count;      /* regions clustered */
  uint64_t dropped_blocks;     /* blocks dropped since their rows changed or left the visible set */
  uint64_t failures;           /* builds and steps that failed: answered exactly */
  uint64_t calibrated_layers;  /* layers whose thresholds are frozen now (not a total) */
  uint64_t audited_outputs;    /* outputs of query heads compared with the exact ones; their rows count in no field */
  uint64_t recalibrated_heads; /* thresholds calibrated again, for the error had drifted beyond the tolerance */
  uint64_t audit_failures;     /* audits given up, for memory was short: the answers are as without an audit */
  uint64_t audit_ns;           /* wall time of the audit, part of attn_ns */
  uint64_t prompt_rows;        /* query rows of prompts that a calibration window used, once per layer */
  uint64_t prompt_ns;          /* wall time of building and calibrating during prompts, part of attn_ns */
  /* Tiles of prompts with a prompt tolerance: some query rows of one KV head together. */
  uint64_t prompt_tiles;            /* answered */
  uint64_t prompt_sparse_tiles;     /* of them, answered sparsely */
  uint64_t prompt_measured_tiles;   /* of them, answered exactly and measured at every threshold */
  uint64_t prompt_rows_read;        /* cached rows read, each once per tile; not part of rows_read */
  uint64_t prompt_rows_visible;     /* cached rows visible, each once per tile: the 100 % of prompt_rows_read */
  uint64_t prompt_audited_tiles;    /* measured tiles for which a threshold was in force */
  uint64_t prompt_error_millionths; /* sum of their mean relative errors at it, times a million */
  uint64_t max_mem;                 /* bytes that plan_bytes is kept to; UINT64_MAX: no limit (not a total) */
  uint64_t evicted_blocks;          /* blocks that gave way to others of more use, or to a lower limit */
  uint64_t refused_blocks;          /* blocks that there was no room for: their rows are read exactly */
  uint64_t crossover_trials;        /* comparisons of both kinds of step that "crossover" auto went by */
  uint64_t crossover; /* visible cells from which steps are sparse, or tried again: the option's number, or what the
                         last trial of any context gave; UINT64_MAX: none is over yet (not a total) */
};
typedef void (*scsa_plugin_get_stats_t)(struct scsa_plugin_stats* stats);
#define SCSA_PLUGIN_GET_STATS "scsa_plugin_get_stats"

/* The thresholds that are frozen now, calibrated or from a file, as JSON with their origin (docs/operator.md) but
 * without "model", which the plugin does not know: of all layers that exist and were made with the preset in force.
 * Where several contexts hold a layer, those of the one made last. Writes at most size bytes, the terminating 0
 * included, and returns the length of the whole text without it; 0 when no layer has thresholds or memory runs out, and
 * then nothing is written. text may be NULL when size is 0. Must not be called from an observer. */
typedef size_t (*scsa_plugin_get_taus_t)(char* text, size_t size);
#define SCSA_PLUGIN_GET_TAUS "scsa_plugin_get_taus"

/* Observations from which there is a confidence interval. */
#define SCSA_AUDIT_INTERVAL_FROM 6

/* What the audit measured: relative L2 errors of sparse attention outputs, one per query head audited, of the last 256
 * of each layer (docs/operator.md). Contexts share the figures of a layer, and those of freed ones stay. Without
 * samples all errors are 0. */
struct scsa_plugin_audit {
  size_t struct_size;    /* set by the caller, as in scsa_plugin_stats */
  uint64_t outputs;      /* audited since load or the last reset */
  uint64_t samples;      /* those that the errors below are taken from */
  uint64_t observations; /* independent ones among them: the query heads of a KV head count as one */
  double mean, median;
  /* 95 % confidence interval of the median; 0 and infinity below SCSA_AUDIT_INTERVAL_FROM observations. */
  double median_low, median_high;
  double p90, p99;             /* quantiles */
  uint64_t recalibrated_heads; /* since load or the last reset */
};
/* layer: of the model, as in scsa_attention_call; -1: all together. 0 when memory runs out (then nothing is written),
 * otherwise 1. */
typedef int (*scsa_plugin_get_audit_t)(int layer, struct scsa_plugin_audit* audit);
#define SCSA_PLUGIN_GET_AUDIT "scsa_plugin_get_audit"

/* The same as JSON: {"share": the option's value, "all": {...}, "layers": {"0": {...}, ...}}, the objects with the
 * fields of scsa_plugin_audit; an error that is infinite or that no sample shows is null. Writes and returns as
 * scsa_plugin_get_taus does. */
typedef size_t (*scsa_plugin_get_audit_json_t)(char* text, size_t size);
#define SCSA_PLUGIN_GET_AUDIT_JSON "scsa_plugin_get_audit_json"

/* Forgets all samples and figures of the audit, not the counters of scsa_plugin_stats. */
typedef void (*scsa_plugin_reset_audit_t)(void);
#define SCSA_PLUGIN_RESET_AUDIT "scsa_plugin_reset_audit"

/* One of the errors that the audit's figures are taken from: of a query head's output. together: outputs audited with
 * it, the query heads of its KV head, which count as one observation. An error that is no number is infinite. */
struct scsa_plugin_audit_sample {
  int layer, q_head, together;
  float error;
};
/* All of them, by layer and then oldest first. Writes at most count and returns how many there are. samples may be NULL
 * when count is 0. */
typedef size_t (*scsa_plugin_get_audit_samples_t)(struct scsa_plugin_audit_sample* samples, size_t count);
#define SCSA_PLUGIN_GET_AUDIT_SAMPLES "scsa_plugin_get_audit_samples"

/* What sparse answers read of one KV head of a layer, as in scsa_plugin_stats: totals since load over all contexts. */
struct scsa_plugin_head_reads {
  uint64_t rows_read, rows_visible, bytes_read;
};
/* layer: as in scsa_attention_call. Writes at most count heads and returns how many KV heads the layer has; 0 where it
 * was never answered sparsely, or when memory runs out. heads may be NULL when count is 0. */
typedef size_t (*scsa_plugin_get_head_reads_t)(int layer, struct scsa_plugin_head_reads* heads, size_t count);
#define SCSA_PLUGIN_GET_HEAD_READS "scsa_plugin_get_head_reads"

/* One attention node just computed. Pointers are valid during the callback only. Row types are ggml_type values;
 * strides are bytes for K and V, floats for q and out. q and out: vector of query row i, query head h at data + i *
 * row_stride + h * head_stride. visible: bitmap words per query row, bit r: cached row r is seen. */
struct scsa_attention_call {
  int layer; /* from the name of the cache tensor, or -1 */
  int path;  /* 0 exact, 1 sparse, 2 calibration, 3 limit */
  int q_heads, kv_heads, head_dim, n_q;
  int64_t n_kv;
  const float* q;
  int64_t q_row_stride, q_head_stride;
  const void* k;
  const void* v;
  int k_type, v_type;
  int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;
  const uint64_t* visible;
  int64_t visible_stride;
  float scale, softcap;
  const float* sinks;
  const float* out;
  int64_t out_row_stride, out_head_stride;
  const void* node; /* the ggml_tensor of the FLASH_ATTN_EXT node */
};
typedef void (*scsa_plugin_observer_t)(void* user, const struct scsa_attention_call* call);
/* At most one observer; NULL removes it. Must not be called while a graph is computed. */
typedef void (*scsa_plugin_set_observer_t)(scsa_plugin_observer_t observer, void* user);
#define SCSA_PLUGIN_SET_OBSERVER "scsa_plugin_set_observer"

#ifdef __cplusplus
}
#endif
#endif
