/* SPDX-License-Identifier: Apache-2.0
 *
 * The C interface of libscsa, C99 and later. It mirrors the C++ interface: exact.h, layer.h, audit.h, state.h and
 * taus.h say more about what each operation does, docs/operator.md holds the mathematics. Results are the same bits.
 *
 * Errors. A function that can fail returns an enum scsa_status. scsa_last_error() is the message of the calling
 * thread's last failed call. A call that fails leaves its objects and outputs as they were unless it says otherwise.
 * No function prints, aborts, or lets a C++ exception out. A null pointer where one is not allowed is
 * SCSA_INVALID_ARGUMENT.
 *
 * Structs and the binary interface. Each struct starts with struct_size, which the caller sets to its sizeof; the
 * ..._INIT macros do that and set defaults. Later versions append fields. A library reads and writes no more than
 * struct_size bytes; of a struct that is larger than it knows it fills the rest with zeros, and takes it as input only
 * when the rest is zero (SCSA_UNSUPPORTED otherwise), so that a field it does not know is never ignored.
 * Values of the enums below are passed as int, and an unknown one is SCSA_INVALID_ARGUMENT.
 *
 * Ownership. What ..._create and scsa_taus_parse make, the matching ..._destroy frees; destroying NULL does nothing.
 * Where they fail, the object is NULL. Memory that a call takes by pointer stays the caller's and is not used after it.
 *
 * Thread safety. One call at a time per object; different objects are independent, layers of one state too. Functions
 * without an object are thread-safe, but for scsa_force_target. Nothing outlives a call but the worker threads that
 * OpenMP keeps. */
#ifndef SCSA_SCSA_H
#define SCSA_SCSA_H

#include <stddef.h>
#include <stdint.h>

/* Of this header; scsa_version() is that of the library in use. */
#define SCSA_VERSION_MAJOR 0
#define SCSA_VERSION_MINOR 1
#define SCSA_VERSION_PATCH 0

#if defined(__GNUC__)
#define SCSA_API __attribute__((visibility("default")))
#else
#define SCSA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status, version --------------------------------------------------------------------------------------------- */

enum scsa_status {
  SCSA_OK = 0,
  SCSA_INVALID_ARGUMENT = 1,    /* a value is out of its documented range */
  SCSA_UNSUPPORTED = 2,         /* a valid request that this build or shape cannot serve */
  SCSA_OUT_OF_MEMORY = 3,       /* an allocation failed; the object is unchanged and still usable */
  SCSA_NOT_FOUND = 4,           /* an entry does not exist */
  SCSA_PARSE_ERROR = 5,         /* a text could not be understood; nothing was changed */
  SCSA_IO_ERROR = 6,            /* reading or writing failed */
  SCSA_FAILED_PRECONDITION = 7, /* the call is valid, but not in the object's present state */
  SCSA_INTERNAL_ERROR = 8       /* a defect of the library: please report it with the message */
};

/* One line for a person: what was wrong with the calling thread's last failed call and, where it helps, what to do.
 * Empty before the first failure. Thread-local storage, valid until this thread's next failed call; cut off at 1023
 * bytes. */
SCSA_API const char* scsa_last_error(void);

/* "MAJOR.MINOR.PATCH" of the library in use. Static storage. */
SCSA_API const char* scsa_version(void);
/* The version of the binary interface, what follows "libscsa.so." in the name that programs are linked to. Before 1.0
 * it is "MAJOR.MINOR". Static storage. */
SCSA_API const char* scsa_abi_version(void);

/* ---- Shapes and views -------------------------------------------------------------------------------------------- */

/* Element formats of cached rows. Q8_0 is ggml's: blocks of 32 signed bytes behind one f16 scale, 34 bytes each. */
enum scsa_dtype { SCSA_F32 = 0, SCSA_F16 = 1, SCSA_BF16 = 2, SCSA_Q8_0 = 3 };

/* Bytes of one row of head_dim values; for SCSA_Q8_0 the last block is padded. 0 for an unknown type or head_dim < 1.
 */
SCSA_API size_t scsa_row_bytes(int dtype, int head_dim);

/* Head counts of one attention layer. Query head h reads KV head h / (q_heads / kv_heads). */
struct scsa_shape {
  size_t struct_size;
  int32_t q_heads;  /* 1 ... 128, a multiple of kv_heads */
  int32_t kv_heads; /* 1 ... 64 */
  int32_t head_dim; /* a multiple of 8, 8 ... 512; the same for K and V */
  int32_t reserved; /* 0 */
};
#define SCSA_SHAPE_INIT \
  { sizeof(struct scsa_shape), 0, 0, 0, 0 }

/* SCSA_INVALID_ARGUMENT when the shape is outside these limits. */
SCSA_API enum scsa_status scsa_validate_shape(const struct scsa_shape* shape);

/* Cached keys and values of one layer. Row r of KV head h starts at k + r * k_row_stride + h * k_head_stride; likewise
 * V. Strides are bytes. A row itself is dense. No alignment beyond that of the element type is needed. */
struct scsa_kv {
  size_t struct_size;
  const void* k;
  const void* v;
  int64_t k_row_stride;
  int64_t k_head_stride;
  int64_t v_row_stride;
  int64_t v_head_stride;
  int64_t n_kv;   /* rows that may be addressed, >= 0; k and v may be NULL when 0 */
  int32_t k_type; /* enum scsa_dtype */
  int32_t v_type;
};
#define SCSA_KV_INIT \
  { sizeof(struct scsa_kv), NULL, NULL, 0, 0, 0, 0, 0, SCSA_F16, SCSA_F16 }

/* How attending looks for rows that changed behind the caller's back. */
enum scsa_verify {
  SCSA_VERIFY_NONE = 0,   /* trust scsa_layer_notify_writes */
  SCSA_VERIFY_SAMPLE = 1, /* a few rows of each block at every call */
  SCSA_VERIFY_FULL = 2    /* every row of each block */
};

/* One attention call. Vectors are f32 and dense: that of query row i and query head h starts at
 * q + i * q_row_stride + h * q_head_stride, its output likewise at out + ...; these strides are floats. Every output
 * vector is written completely.
 * visible: bit r % 64 of visible[i * visible_row_stride + r / 64] is set when query row i sees cached row r; bits from
 * n_kv on are ignored. NULL: every query row sees all rows. A query row that sees nothing gets zeros.
 * A key becomes a logit as x = scale * (q . k), and with softcap > 0 as x = softcap * tanh(x / softcap). */
struct scsa_attend_args {
  size_t struct_size;
  const float* q;
  int64_t q_row_stride;
  int64_t q_head_stride;
  float* out;
  int64_t out_row_stride;
  int64_t out_head_stride;
  const uint64_t* visible;
  int64_t visible_row_stride; /* words, at least ceil(n_kv / 64) where n_q > 1 */
  const float* sinks;         /* NULL, or q_heads logits that join their head's normaliser with no value */
  int32_t n_q;                /* query rows, >= 1 */
  int32_t n_threads;          /* OpenMP threads, >= 1. Inside a parallel region one is used */
  float scale;                /* finite */
  float softcap;              /* finite, >= 0 */
  int32_t verify;             /* enum scsa_verify; exact attention ignores it */
  int32_t reserved;           /* 0 */
};
#define SCSA_ATTEND_ARGS_INIT \
  { sizeof(struct scsa_attend_args), NULL, 0, 0, NULL, 0, 0, NULL, 0, NULL, 1, 1, 1.0f, 0.0f, SCSA_VERIFY_SAMPLE, 0 }

/* ---- Parameters of the sparse operator --------------------------------------------------------------------------- */

enum scsa_preset {
  SCSA_PRESET_SEED = 0, /* regions that grow and freeze, selection per query head */
  SCSA_PRESET_FAST = 1  /* small blocks that are built once, one opened set for all query heads of a KV head */
};
enum scsa_packed_format {
  SCSA_PACKED_Q8_0 = 0,
  SCSA_PACKED_F16 = 1,
  SCSA_PACKED_NONE = 2, /* no copies, rows are read from the cache: preset fast */
  SCSA_PACKED_INT8 = 3  /* 8 bits relative to the block: preset fast */
};
enum scsa_statistic { SCSA_STATISTIC_MEDIAN = 0, SCSA_STATISTIC_MEAN = 1 };
/* How the clusters to open are found: every one is scored, or by a walk down a tree whose cost follows what is opened.
 * Automatic is one of the two, by the length of the context when a calibration window begins; flat before. */
enum scsa_selection { SCSA_SELECTION_FLAT = 0, SCSA_SELECTION_HIERARCHICAL = 1, SCSA_SELECTION_AUTOMATIC = 2 };

/* docs/operator.md says what they mean, config.h which preset reads them. */
struct scsa_config {
  size_t struct_size;
  int32_t preset;           /* enum scsa_preset */
  int32_t cluster_size;     /* 2 ... 65536 */
  int32_t rebuild_interval; /* rows, >= 1 */
  int32_t block_size;       /* rows, >= cluster_size; fast: a multiple of 64 up to 32768 */
  int32_t sink;             /* rows, >= 0; fast: less than block_size */
  int32_t recent;           /* rows, >= 0 */
  int32_t seal_delay;       /* rows, >= 0 */
  float tau_default;        /* 0 ... 1 */
  int32_t packed_format;    /* enum scsa_packed_format */
  int32_t rank;             /* 0 ... 8 */
  int32_t power_iterations; /* >= 1 */
  int32_t kmeans_rounds;    /* >= 0 */
  float tail_shrink;        /* 0 ... 1 */
  int32_t statistic;        /* enum scsa_statistic */
  int32_t selection;        /* enum scsa_selection */
  int32_t reserved;         /* 0 */
};

/* Fills in the parameters of a preset. config->struct_size is set before the call and kept. */
SCSA_API enum scsa_status scsa_config_init(int preset, struct scsa_config* config);
SCSA_API enum scsa_status scsa_validate_config(const struct scsa_config* config);

/* "seed" or "fast", static storage; NULL for an unknown preset. */
SCSA_API const char* scsa_preset_name(int preset);
/* SCSA_INVALID_ARGUMENT when no preset has that name. */
SCSA_API enum scsa_status scsa_preset_from_name(const char* name, int* preset);
/* The calibration tolerance that a preset is meant for; 0 for an unknown preset. */
SCSA_API float scsa_default_tolerance(int preset);

#define SCSA_TAU_GRID_SIZE 13
/* The SCSA_TAU_GRID_SIZE thresholds at which a preset's calibration window replays the stop rule, largest first. Static
 * storage; NULL for an unknown preset. */
SCSA_API const float* scsa_tau_grid(int preset);

/* ---- Exact attention --------------------------------------------------------------------------------------------- */

/* Grow-only scratch memory of the operators; with one of them a decode step allocates nothing once it has grown. One
 * per calling thread. */
typedef struct scsa_workspace scsa_workspace;
SCSA_API enum scsa_status scsa_workspace_create(scsa_workspace** workspace);
SCSA_API void scsa_workspace_destroy(scsa_workspace* workspace);

/* Exact attention of args->n_q query rows over the visible rows of kv, accumulated in f32. The output bits do not
 * depend on n_threads. SCSA_INVALID_ARGUMENT (a bad shape, view or parameter) or SCSA_OUT_OF_MEMORY. */
SCSA_API enum scsa_status scsa_exact_attention(const struct scsa_shape* shape, const struct scsa_kv* kv,
                                               const struct scsa_attend_args* args, scsa_workspace* workspace);

/* ---- Sparse attention of one layer ------------------------------------------------------------------------------- */

typedef struct scsa_layer scsa_layer;

SCSA_API enum scsa_status scsa_layer_create(const struct scsa_shape* shape, const struct scsa_config* config,
                                            scsa_layer** layer);
/* Does nothing for NULL and for a layer that belongs to a state. */
SCSA_API void scsa_layer_destroy(scsa_layer* layer);

/* Sparse attention. Builds blocks that are due, so that a call may take long now and then. Answers exactly where no
 * plan applies, inside a calibration window, and where a build fails; the counters say so. Errors are those of
 * scsa_exact_attention. */
SCSA_API enum scsa_status scsa_layer_attend(scsa_layer* layer, const struct scsa_kv* kv,
                                            const struct scsa_attend_args* args, scsa_workspace* workspace);

/* Tells that rows [0, end_row) hold what they are going to hold: preset fast builds every block inside them, seed
 * builds when a query needs it. SCSA_UNSUPPORTED (a row that is not finite) and SCSA_OUT_OF_MEMORY: the blocks that
 * failed stay unbuilt. */
SCSA_API enum scsa_status scsa_layer_seal(scsa_layer* layer, const struct scsa_kv* kv, int64_t end_row, int n_threads);

/* Attention of the rows of a prompt, in tiles of consecutive query rows: preset fast answers them sparsely after
 * scsa_layer_set_prompt, with thresholds of its own that are calibrated on the way; everything else is exact. Errors
 * are those of scsa_exact_attention. */
SCSA_API enum scsa_status scsa_layer_attend_prompt(scsa_layer* layer, const struct scsa_kv* kv,
                                                   const struct scsa_attend_args* args, scsa_workspace* workspace);
/* tolerance: mean relative L2 error of the outputs of a tile, 0: everything is exact. share: of the tiles that are
 * answered exactly and measured, 0 < share <= 1. Forgets what was calibrated before. */
SCSA_API enum scsa_status scsa_layer_set_prompt(scsa_layer* layer, float tolerance, double share);

/* scsa_layer_attend_prompt and one KV head, since scsa_layer_set_prompt. */
struct scsa_prompt_head {
  size_t struct_size;
  uint64_t tiles;        /* answered */
  uint64_t sparse;       /* of them, answered sparsely */
  uint64_t measured;     /* of them, measured */
  uint64_t audited;      /* measured tiles for which a threshold, chosen without them, was in force */
  double error_sum;      /* of their mean relative errors at it */
  uint64_t rows_read;    /* each row once per tile */
  uint64_t rows_visible; /* to some query of the tile */
  float tau;             /* threshold in force; 0: none yet, or none that would do */
  float reserved;        /* 0 */
};
#define SCSA_PROMPT_HEAD_INIT \
  { sizeof(struct scsa_prompt_head), 0, 0, 0, 0, 0.0, 0, 0, 0.0f, 0.0f }
SCSA_API enum scsa_status scsa_layer_get_prompt_head(const scsa_layer* layer, int kv_head,
                                                     struct scsa_prompt_head* head);

/* Rows that were (or are about to be) overwritten: blocks that cover one of them are dropped. rows may be NULL when
 * n_rows is 0. */
SCSA_API enum scsa_status scsa_layer_notify_writes(scsa_layer* layer, const int64_t* rows, size_t n_rows);
/* Forgets every block. Thresholds, calibration and counters stay. */
SCSA_API enum scsa_status scsa_layer_drop_plans(scsa_layer* layer);

/* A limit on the memory of plans, shared by layers, which may then be used by different threads at the same time. What
 * does not fit is read exactly; memory_budget.h says which blocks give way. Destroying it leaves the layers as they
 * are: the limit holds until the last one is gone. */
typedef struct scsa_budget scsa_budget;
/* *budget is NULL after an error. */
SCSA_API enum scsa_status scsa_budget_create(uint64_t limit, scsa_budget** budget);
SCSA_API void scsa_budget_destroy(scsa_budget* budget);
/* Bytes in force from now on. */
SCSA_API enum scsa_status scsa_budget_set_limit(scsa_budget* budget, uint64_t limit);
/* Bytes that the plans of its layers hold; 0 for NULL. */
SCSA_API uint64_t scsa_budget_used(const scsa_budget* budget);
/* Counts the plan of the layer in the budget, or in none (NULL). Blocks built before are dropped. */
SCSA_API enum scsa_status scsa_layer_set_budget(scsa_layer* layer, const scsa_budget* budget);

/* Opens a calibration window: until scsa_layer_finish_calibration the layer answers exactly and records, per query
 * head, the error that each threshold of the grid would have produced. tolerance > 0: relative L2 error of a head's
 * output. */
SCSA_API enum scsa_status scsa_layer_start_calibration(scsa_layer* layer, float tolerance);
/* Chooses the thresholds. SCSA_FAILED_PRECONDITION outside a window. */
SCSA_API enum scsa_status scsa_layer_finish_calibration(scsa_layer* layer);
/* 1 inside a window, else 0; 0 for NULL. */
SCSA_API int scsa_layer_calibrating(const scsa_layer* layer);
/* Steps recorded in the present or last window; 0 for NULL. */
SCSA_API int scsa_layer_calibration_steps(const scsa_layer* layer);
/* Errors of one query head at scsa_tau_grid(preset)[grid_index], one per recorded step: *errors points to *n_errors of
 * them, which belong to the layer and stay valid until its next call; NULL and 0 before a window. */
SCSA_API enum scsa_status scsa_layer_calibration_errors(const scsa_layer* layer, int q_head, int grid_index,
                                                        const float** errors, size_t* n_errors);

/* Thresholds of the layer: q_heads with preset seed, kv_heads with fast; 0 for NULL. */
SCSA_API int scsa_layer_n_taus(const scsa_layer* layer);
/* Copies them; capacity counts floats and must be at least scsa_layer_n_taus(layer). */
SCSA_API enum scsa_status scsa_layer_get_taus(const scsa_layer* layer, float* taus, size_t capacity);
/* tau in [0, 1]; 0 opens every cluster. */
SCSA_API enum scsa_status scsa_layer_set_tau(scsa_layer* layer, int head, float tau);
/* How the layer finds clusters now, and what its thresholds are for: SCSA_SELECTION_FLAT (for NULL as well) or
 * SCSA_SELECTION_HIERARCHICAL. */
SCSA_API int scsa_layer_selection(const scsa_layer* layer);
/* Of a layer with SCSA_SELECTION_AUTOMATIC: what thresholds that scsa_layer_set_tau takes from elsewhere are for. Stays
 * until the next calibration window. */
SCSA_API enum scsa_status scsa_layer_set_selection(scsa_layer* layer, int selection);

/* Runs the per-head work on the calling thread if serial is not 0 (diagnosis). Results are the same bits. */
SCSA_API enum scsa_status scsa_layer_set_serial(scsa_layer* layer, int serial);

/* What the layer was created with. shape->struct_size and config->struct_size are set before the call and kept. */
SCSA_API enum scsa_status scsa_layer_get_shape(const scsa_layer* layer, struct scsa_shape* shape);
SCSA_API enum scsa_status scsa_layer_get_config(const scsa_layer* layer, struct scsa_config* config);
/* Rows [config.sink, sealed_end) are covered by blocks; 0 for NULL. */
SCSA_API int64_t scsa_layer_sealed_end(const scsa_layer* layer);

/* What happened so far; layer.h explains how rows are counted. */
struct scsa_stats {
  size_t struct_size;
  uint64_t rebuild_count;      /* regions or blocks clustered */
  uint64_t stat_opened_rows;   /* rows of opened clusters, summed over query heads */
  uint64_t stat_exact_rows;    /* sinks and unsealed rows, summed over query heads */
  uint64_t stat_scored;        /* cluster estimates, summed over query heads */
  uint64_t stat_calls;         /* (query row, query head) attentions answered by the sparse operator */
  uint64_t union_rows;         /* rows read in those calls, each once per KV head */
  uint64_t visible_rows;       /* rows visible in those calls, each once per KV head: the 100 % of union_rows */
  uint64_t bytes_read;         /* bytes of rows and summaries in those calls, each once per KV head */
  uint64_t sparse_steps;       /* calls answered sparsely */
  uint64_t calibration_steps;  /* calls answered exactly and recorded */
  uint64_t exact_steps;        /* calls answered exactly since no plan applied */
  uint64_t build_failures;     /* builds that failed */
  uint64_t dropped_blocks;     /* blocks dropped since their rows changed or left the visible set */
  uint64_t build_ns;           /* wall time of clustering and packing */
  uint64_t plan_bytes;         /* memory that the plans hold now */
  uint64_t audited_outputs;    /* outputs of query heads that the audit compared; rows it reads count nowhere */
  uint64_t recalibrated_heads; /* thresholds that the audit had calibrated again */
  uint64_t audit_failures;     /* audits and recalibrations given up, for memory was short */
  uint64_t audit_ns;           /* wall time of the audit, its calibration windows not included */
  uint64_t step_failures;      /* calls answered exactly, or not recorded in a window, for memory was short */
  uint64_t evicted_blocks;     /* blocks that the budget took away */
  uint64_t refused_blocks;     /* blocks that the budget had no room for, each once until it is built or dropped */
};
#define SCSA_STATS_INIT \
  { sizeof(struct scsa_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

SCSA_API enum scsa_status scsa_layer_get_stats(const scsa_layer* layer, struct scsa_stats* stats);

/* What calls answered sparsely read of one KV head: its part of union_rows, visible_rows and bytes_read. */
struct scsa_head_reads {
  size_t struct_size;
  uint64_t rows_read;
  uint64_t rows_visible;
  uint64_t bytes_read;
};
#define SCSA_HEAD_READS_INIT \
  { sizeof(struct scsa_head_reads), 0, 0, 0 }
SCSA_API enum scsa_status scsa_layer_get_head_reads(const scsa_layer* layer, int kv_head,
                                                    struct scsa_head_reads* reads);
/* Those of its KV heads, too. */
SCSA_API enum scsa_status scsa_layer_reset_stats(scsa_layer* layer);

/* ---- Audit ------------------------------------------------------------------------------------------------------- */

/* While sparse attention runs, the exact output of a small share of the heads is computed beside it and the error
 * recorded; a head whose error has drifted is calibrated again. The audit itself changes no output. */
struct scsa_audit_config {
  size_t struct_size;
  double share;       /* part of the (query row, KV head) pairs to audit, 1e-9 ... 1; 0: no audit */
  uint64_t seed;      /* which pairs; give each layer another value */
  float tolerance;    /* that thresholds are to keep to; 0: that of the last calibration window, if there was one */
  float drift_factor; /* a head has drifted when its error is significantly above tolerance * drift_factor, >= 1 */
  int32_t capacity;   /* errors kept, the last ones; 1 ... 1048576 */
  int32_t window;     /* steps of the calibration window that a drifted head gets, all exact; 1 ... 65536 */
};
#define SCSA_AUDIT_CONFIG_INIT \
  { sizeof(struct scsa_audit_config), 0.0, 0, 0.0f, 2.0f, 256, 32 }

/* The error of one audited output: of a query head at one query row. No field will be added to this struct. */
struct scsa_audit_sample {
  uint64_t call; /* calls answered sparsely before this one, since the audit was set */
  float error;   /* relative L2 error; infinity where that is no number */
  int16_t q_head;
  int16_t together; /* outputs audited with it: the query heads of its KV head */
};

/* Figures over audited outputs, 0 (median_high: infinity) where there is none. */
struct scsa_audit_summary {
  size_t struct_size;
  uint64_t outputs;      /* query heads */
  uint64_t observations; /* independent ones: the query heads of a KV head count as one */
  double mean;
  double median;
  double median_low; /* 95 % confidence interval of the median; 0 and infinity below six observations */
  double median_high;
  double p90;
  double p99;
};
#define SCSA_AUDIT_SUMMARY_INIT \
  { sizeof(struct scsa_audit_summary), 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0 }

/* Starts an audit, or ends it where share is 0; earlier samples are dropped either way. */
SCSA_API enum scsa_status scsa_layer_set_audit(scsa_layer* layer, const struct scsa_audit_config* config);
/* Copies up to `capacity` of the samples kept, oldest first, and sets *n_samples to how many are kept. samples may be
 * NULL when capacity is 0. */
SCSA_API enum scsa_status scsa_layer_audit_samples(const scsa_layer* layer, struct scsa_audit_sample* samples,
                                                   size_t capacity, size_t* n_samples);
/* Figures over any samples, of one layer or of several together, in any order. samples may be NULL when n is 0. */
SCSA_API enum scsa_status scsa_summarize_audit(const struct scsa_audit_sample* samples, size_t n,
                                               struct scsa_audit_summary* summary);

/* ---- All layers of a model --------------------------------------------------------------------------------------- */

typedef struct scsa_state scsa_state;

/* num_layers >= 1 layers of one shape. */
SCSA_API enum scsa_status scsa_state_create(int num_layers, const struct scsa_shape* shape,
                                            const struct scsa_config* config, scsa_state** state);
/* Frees its layers too. */
SCSA_API void scsa_state_destroy(scsa_state* state);

SCSA_API int scsa_state_num_layers(const scsa_state* state); /* 0 for NULL */
/* Layer 0 ... num_layers - 1, which belongs to the state; NULL with a message when there is none. */
SCSA_API scsa_layer* scsa_state_layer(scsa_state* state, int index);

/* As for a layer, for all of them. */
SCSA_API enum scsa_status scsa_state_start_calibration(scsa_state* state, float tolerance);
SCSA_API enum scsa_status scsa_state_finish_calibration(scsa_state* state);
SCSA_API enum scsa_status scsa_state_set_budget(scsa_state* state, const scsa_budget* budget); /* for each layer */
SCSA_API enum scsa_status scsa_state_set_serial(scsa_state* state, int serial);
/* As for a layer, with the seed raised by one from layer to layer. */
SCSA_API enum scsa_status scsa_state_set_audit(scsa_state* state, const struct scsa_audit_config* config);
/* Figures over the samples of all layers. */
SCSA_API enum scsa_status scsa_state_summarize_audit(const scsa_state* state, struct scsa_audit_summary* summary);
/* Summed over the layers. */
SCSA_API enum scsa_status scsa_state_get_stats(const scsa_state* state, struct scsa_stats* stats);

/* The model that thresholds were calibrated on. */
struct scsa_model {
  size_t struct_size;
  const char* architecture;  /* printable ASCII without '"' and '\'; NULL or empty: not known */
  const char* metadata_hash; /* likewise; compared for equality alone */
  int32_t layers;            /* 0: not known */
  int32_t q_heads;           /* 0: not known, or not the same in every layer; likewise below */
  int32_t kv_heads;
  int32_t head_dim;
};
#define SCSA_MODEL_INIT \
  { sizeof(struct scsa_model), NULL, NULL, 0, 0, 0, 0 }

/* The thresholds with their origin as JSON (docs/operator.md). Of `model` (NULL: not known) the texts are written; its
 * numbers are the state's own. Writes at most size bytes, the terminating 0 included, and sets *length to the length of
 * the whole text without it: where *length >= size the text was cut off. text may be NULL when size is 0. */
SCSA_API enum scsa_status scsa_state_taus_to_json(const scsa_state* state, const struct scsa_model* model, char* text,
                                                  size_t size, size_t* length);
/* Takes thresholds from such a text of `length` bytes, or from a bare {"layer:head": tau, ...}, of which any subset
 * will do. Refuses, and changes nothing then: a text that is malformed (SCSA_PARSE_ERROR), of another format or version
 * (SCSA_UNSUPPORTED), or of other parameters, dimensions, or another model than `model` (SCSA_INVALID_ARGUMENT). */
SCSA_API enum scsa_status scsa_state_load_taus_json(scsa_state* state, const char* text, size_t length,
                                                    const struct scsa_model* model);

/* ---- Thresholds without a state ---------------------------------------------------------------------------------- */

/* What a file of thresholds holds: for layers of different shapes, and for looking into a file. */
typedef struct scsa_taus scsa_taus;

struct scsa_tau_entry {
  size_t struct_size;
  int32_t layer;
  int32_t head; /* query head (seed) or KV head (fast) */
  float tau;
  int32_t reserved; /* 0 */
};
#define SCSA_TAU_ENTRY_INIT \
  { sizeof(struct scsa_tau_entry), 0, 0, 0.0f, 0 }

/* An empty collection with its origin. config NULL: the bare form, which has no origin; tolerance and model are ignored
 * then. tolerance 0: no calibration chose the thresholds. model NULL: not known; else its `layers` is at least 1. */
SCSA_API enum scsa_status scsa_taus_create(const struct scsa_config* config, float tolerance,
                                           const struct scsa_model* model, scsa_taus** taus);
/* Reads a text of `length` bytes. Errors as for scsa_state_load_taus_json. */
SCSA_API enum scsa_status scsa_taus_parse(const char* text, size_t length, scsa_taus** taus);
SCSA_API void scsa_taus_destroy(scsa_taus* taus);

/* Writes it as scsa_state_taus_to_json does. */
SCSA_API enum scsa_status scsa_taus_to_json(const scsa_taus* taus, char* text, size_t size, size_t* length);

SCSA_API size_t scsa_taus_count(const scsa_taus* taus); /* 0 for NULL */
/* SCSA_NOT_FOUND from scsa_taus_count() on. entry->struct_size is set before the call and kept. */
SCSA_API enum scsa_status scsa_taus_get(const scsa_taus* taus, size_t index, struct scsa_tau_entry* entry);
/* Adds a threshold, or replaces that of the same layer and head. layer 0 ... 4095, head 0 ... 127, tau in [0, 1]. */
SCSA_API enum scsa_status scsa_taus_set(scsa_taus* taus, const struct scsa_tau_entry* entry);

/* What they were calibrated with. SCSA_NOT_FOUND when that is not known. The texts of *model belong to `taus`. */
SCSA_API enum scsa_status scsa_taus_get_config(const scsa_taus* taus, struct scsa_config* config);
SCSA_API enum scsa_status scsa_taus_get_tolerance(const scsa_taus* taus, float* tolerance);
SCSA_API enum scsa_status scsa_taus_get_model(const scsa_taus* taus, struct scsa_model* model);

/* Whether the thresholds mean the same with `config`, and were made for `model`; what is not known is not compared.
 * SCSA_INVALID_ARGUMENT with a message that says what differs. */
SCSA_API enum scsa_status scsa_taus_check_config(const scsa_taus* taus, const struct scsa_config* config);
SCSA_API enum scsa_status scsa_taus_check_model(const scsa_taus* taus, const struct scsa_model* model);
/* Sets all thresholds of `layer` to those of layer number `index`. SCSA_NOT_FOUND where there are none of it.
 * SCSA_INVALID_ARGUMENT where they name a head that the layer does not have, some of its heads only, or were made for
 * other dimensions or parameters. */
SCSA_API enum scsa_status scsa_taus_apply(const scsa_taus* taus, int index, scsa_layer* layer);

/* ---- SIMD targets ------------------------------------------------------------------------------------------------ */

/* Targets that this CPU can run, best first; the last one is the portable scalar target. */
SCSA_API int scsa_n_targets(void);
/* Name of target 0 ... scsa_n_targets() - 1, static storage; NULL beyond. */
SCSA_API const char* scsa_target_name(int index);
/* The target that kernels run on now. Static storage. */
SCSA_API const char* scsa_active_target(void);
/* Forces a target by name (case does not matter); NULL or "" returns to the best one. Must not run concurrently with
 * other calls of the library. */
SCSA_API enum scsa_status scsa_force_target(const char* name);
/* The error of a bad environment variable SCSA_TARGET, or SCSA_OK. A bad value leaves the best target in force. */
SCSA_API enum scsa_status scsa_target_from_environment(void);

#ifdef __cplusplus
}
#endif
#endif
