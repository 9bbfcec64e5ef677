/* SPDX-License-Identifier: Apache-2.0
 *
 * A decode loop in C99: calibrates a small model, checks every answer against attention in double precision, saves the
 * thresholds and goes on with them in another state. Arguments: the project's version, that of the binary interface. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Both in one program, as a program would that embeds the operator and sets up the plugin. */
#include "scsa/plugin.h"
#include "scsa/scsa.h"

#define CHECK(condition)                                                                                    \
  do {                                                                                                      \
    if (!(condition)) {                                                                                     \
      fprintf(stderr, "%s:%d: %s does not hold (%s)\n", __FILE__, __LINE__, #condition, scsa_last_error()); \
      exit(1);                                                                                              \
    }                                                                                                       \
  } while (0)

enum { kQHeads = 4, kKvHeads = 2, kHeadDim = 32, kRows = 1200, kFirst = 900, kLayers = 2, kWindow = 8 };

static float k_rows[kRows][kKvHeads][kHeadDim];
static float v_rows[kRows][kKvHeads][kHeadDim];
static float queries[kRows][kQHeads][kHeadDim];

/* Values in [-1, 1) from a fixed sequence. */
static float Next(uint32_t* seed) {
  *seed = *seed * 1664525u + 1013904223u;
  return (float)(*seed >> 8) / (float)(1u << 23) - 1.0f;
}

static void MakeData(void) {
  uint32_t seed = 1;
  int r, h, d;
  for (r = 0; r < kRows; ++r) {
    for (h = 0; h < kKvHeads; ++h) {
      for (d = 0; d < kHeadDim; ++d) {
        /* Keys around eight centres, so that there are clusters to find. */
        k_rows[r][h][d] = (float)(((r / 16 % 8) >> (d % 3)) % 2) + 0.3f * Next(&seed);
        v_rows[r][h][d] = Next(&seed);
      }
    }
    for (h = 0; h < kQHeads; ++h) {
      for (d = 0; d < kHeadDim; ++d) queries[r][h][d] = 2.0f * Next(&seed);
    }
  }
}

/* Relative L2 error of `out` over all query heads. */
static double ErrorOf(int step, int n_kv, float scale, const float* out) {
  double difference = 0.0, norm = 0.0;
  int h, r, d;
  for (h = 0; h < kQHeads; ++h) {
    const int kv_head = h / (kQHeads / kKvHeads);
    double sum = 0.0;
    double value[kHeadDim] = {0.0};
    for (r = 0; r < n_kv; ++r) {
      double x = 0.0, weight;
      for (d = 0; d < kHeadDim; ++d) x += (double)queries[step][h][d] * (double)k_rows[r][kv_head][d];
      weight = exp((double)scale * x); /* |x| is far below 700 here */
      sum += weight;
      for (d = 0; d < kHeadDim; ++d) value[d] += weight * (double)v_rows[r][kv_head][d];
    }
    for (d = 0; d < kHeadDim; ++d) {
      const double expected = value[d] / sum;
      difference += pow((double)out[h * kHeadDim + d] - expected, 2.0);
      norm += expected * expected;
    }
  }
  return sqrt(difference / norm);
}

static scsa_state* NewState(const struct scsa_config* config) {
  struct scsa_shape shape = SCSA_SHAPE_INIT;
  scsa_state* state = NULL;
  shape.q_heads = kQHeads;
  shape.kv_heads = kKvHeads;
  shape.head_dim = kHeadDim;
  CHECK(scsa_validate_shape(&shape) == SCSA_OK);
  CHECK(scsa_state_create(kLayers, &shape, config, &state) == SCSA_OK);
  CHECK(scsa_state_num_layers(state) == kLayers);
  return state;
}

/* One decode step of all layers, the worst error of which is returned. */
static double Step(scsa_state* state, scsa_workspace* workspace, int n_kv) {
  struct scsa_kv kv = SCSA_KV_INIT;
  struct scsa_attend_args args = SCSA_ATTEND_ARGS_INIT;
  float out[kQHeads * kHeadDim];
  double worst = 0.0;
  int i;
  kv.k = k_rows;
  kv.v = v_rows;
  kv.k_type = kv.v_type = SCSA_F32;
  kv.k_row_stride = kv.v_row_stride = (int64_t)sizeof(k_rows[0]);
  kv.k_head_stride = kv.v_head_stride = (int64_t)scsa_row_bytes(SCSA_F32, kHeadDim);
  kv.n_kv = n_kv;
  args.q = &queries[n_kv - 1][0][0];
  args.q_row_stride = args.out_row_stride = kQHeads * kHeadDim;
  args.q_head_stride = args.out_head_stride = kHeadDim;
  args.out = out;
  args.n_threads = 2;
  args.scale = 0.25f;
  for (i = 0; i < kLayers; ++i) {
    double error;
    memset(out, 0xff, sizeof(out));
    CHECK(scsa_layer_attend(scsa_state_layer(state, i), &kv, &args, workspace) == SCSA_OK);
    error = ErrorOf(n_kv - 1, n_kv, args.scale, out);
    CHECK(isfinite(error)); /* the output was written */
    worst = error > worst ? error : worst;
  }
  return worst;
}

static void Run(const char* preset_name) {
  struct scsa_config config;
  struct scsa_stats stats = SCSA_STATS_INIT;
  scsa_state* state;
  scsa_state* other;
  scsa_workspace* workspace = NULL;
  char* text;
  size_t length = 0;
  int preset = -1, n_kv = kFirst, i, h;
  float tolerance;

  CHECK(scsa_preset_from_name(preset_name, &preset) == SCSA_OK);
  CHECK(strcmp(scsa_preset_name(preset), preset_name) == 0);
  config.struct_size = sizeof(config);
  CHECK(scsa_config_init(preset, &config) == SCSA_OK);
  tolerance = scsa_default_tolerance(preset);
  CHECK(tolerance > 0.0f);
  state = NewState(&config);
  CHECK(scsa_workspace_create(&workspace) == SCSA_OK);

  CHECK(scsa_state_start_calibration(state, tolerance) == SCSA_OK);
  for (; n_kv < kFirst + kWindow; ++n_kv) CHECK(Step(state, workspace, n_kv) < 1e-5);
  CHECK(scsa_state_finish_calibration(state) == SCSA_OK);
  for (; n_kv < kRows / 2 + kFirst / 2; ++n_kv) CHECK(Step(state, workspace, n_kv) < 10.0 * (double)tolerance);

  CHECK(scsa_state_get_stats(state, &stats) == SCSA_OK);
  CHECK(stats.calibration_steps == kWindow * kLayers);
  CHECK(stats.sparse_steps == (uint64_t)(n_kv - kFirst - kWindow) * kLayers);
  CHECK(stats.union_rows < stats.visible_rows);

  /* The thresholds go through a text into a state that needs no window. */
  CHECK(scsa_state_taus_to_json(state, NULL, NULL, 0, &length) == SCSA_OK);
  text = malloc(length + 1);
  CHECK(text != NULL);
  CHECK(scsa_state_taus_to_json(state, NULL, text, length + 1, &length) == SCSA_OK);
  CHECK(strlen(text) == length);
  other = NewState(&config);
  CHECK(scsa_state_load_taus_json(other, text, length, NULL) == SCSA_OK);
  for (i = 0; i < kLayers; ++i) {
    float left[kQHeads], right[kQHeads];
    const int n_taus = scsa_layer_n_taus(scsa_state_layer(state, i));
    CHECK(n_taus == (preset == SCSA_PRESET_FAST ? kKvHeads : kQHeads));
    CHECK(scsa_layer_get_taus(scsa_state_layer(state, i), left, kQHeads) == SCSA_OK);
    CHECK(scsa_layer_get_taus(scsa_state_layer(other, i), right, kQHeads) == SCSA_OK);
    for (h = 0; h < n_taus; ++h) CHECK(left[h] == right[h] && left[h] > 0.0f);
  }
  CHECK(Step(other, workspace, n_kv) < 10.0 * (double)tolerance);

  free(text);
  scsa_workspace_destroy(workspace);
  scsa_state_destroy(other);
  scsa_state_destroy(state);
}

int main(int argc, char** argv) {
  int unknown = -7;
  CHECK(argc == 3);
  CHECK(strcmp(scsa_version(), argv[1]) == 0);
  CHECK(strcmp(scsa_abi_version(), argv[2]) == 0);
  CHECK(strcmp(scsa_last_error(), "") == 0);
  CHECK(scsa_preset_from_name("slow", &unknown) == SCSA_INVALID_ARGUMENT);
  CHECK(strstr(scsa_last_error(), "\"slow\"") != NULL && unknown == -7);
  MakeData();
  Run("seed");
  Run("fast");
  puts("the C interface works");
  return 0;
}
