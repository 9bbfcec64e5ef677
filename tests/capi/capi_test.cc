// SPDX-License-Identifier: Apache-2.0
//
// The C interface gives the bits of the C++ interface, and refuses what it must.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "scsa/scsa.h"
#include "scsa/state.h"
#include "scsa/target.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::Bitmap;
using test::SyntheticCache;

constexpr Shape kShape{6, 2, 32};
constexpr int kOutSize = 6 * 32;

scsa_shape CShape(const Shape& shape = kShape) {
  return {sizeof(scsa_shape), shape.q_heads, shape.kv_heads, shape.head_dim, 0};
}

scsa_kv CKv(const KvView& kv) {
  scsa_kv c = SCSA_KV_INIT;
  c.k = kv.k;
  c.v = kv.v;
  c.k_row_stride = kv.k_row_stride;
  c.k_head_stride = kv.k_head_stride;
  c.v_row_stride = kv.v_row_stride;
  c.v_head_stride = kv.v_head_stride;
  c.n_kv = kv.n_kv;
  c.k_type = static_cast<int>(kv.k_type);
  c.v_type = static_cast<int>(kv.v_type);
  return c;
}

scsa_attend_args CArgs(const std::vector<float>& q, std::vector<float>* out, int n_q = 1) {
  out->assign(q.size(), -1.0f);
  scsa_attend_args args = SCSA_ATTEND_ARGS_INIT;
  args.q = q.data();
  args.out = out->data();
  args.q_row_stride = args.out_row_stride = kOutSize;
  args.q_head_stride = args.out_head_stride = kShape.head_dim;
  args.n_q = n_q;
  args.n_threads = 2;
  args.scale = 0.3f;
  return args;
}

scsa_tau_entry Entry(int layer, int head, float tau) { return {sizeof(scsa_tau_entry), layer, head, tau, 0}; }

scsa_config CConfig(int preset) {
  scsa_config config;
  config.struct_size = sizeof(config);
  EXPECT_EQ(scsa_config_init(preset, &config), SCSA_OK);
  return config;
}

struct FreeWorkspace {
  void operator()(scsa_workspace* p) const { scsa_workspace_destroy(p); }
};
struct FreeLayer {
  void operator()(scsa_layer* p) const { scsa_layer_destroy(p); }
};
struct FreeState {
  void operator()(scsa_state* p) const { scsa_state_destroy(p); }
};
struct FreeTaus {
  void operator()(scsa_taus* p) const { scsa_taus_destroy(p); }
};
using CWorkspace = std::unique_ptr<scsa_workspace, FreeWorkspace>;
using CLayer = std::unique_ptr<scsa_layer, FreeLayer>;
using CState = std::unique_ptr<scsa_state, FreeState>;
using CTaus = std::unique_ptr<scsa_taus, FreeTaus>;

CWorkspace NewWorkspace() {
  scsa_workspace* workspace = nullptr;
  EXPECT_EQ(scsa_workspace_create(&workspace), SCSA_OK);
  return CWorkspace(workspace);
}

CLayer NewLayer(const scsa_config& config) {
  const scsa_shape shape = CShape();
  scsa_layer* layer = nullptr;
  EXPECT_EQ(scsa_layer_create(&shape, &config, &layer), SCSA_OK) << scsa_last_error();
  return CLayer(layer);
}

CState NewState(int layers, const scsa_config& config) {
  const scsa_shape shape = CShape();
  scsa_state* state = nullptr;
  EXPECT_EQ(scsa_state_create(layers, &shape, &config, &state), SCSA_OK) << scsa_last_error();
  return CState(state);
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

std::string LastError() { return scsa_last_error(); }
::testing::AssertionResult ErrorSays(const std::string& part) {
  if (LastError().find(part) != std::string::npos && LastError().find('\n') == std::string::npos) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "the message is \"" << LastError() << "\", not about \"" << part << '"';
}

scsa_stats StatsOf(const scsa_layer* layer) {
  scsa_stats stats = SCSA_STATS_INIT;
  EXPECT_EQ(scsa_layer_get_stats(layer, &stats), SCSA_OK);
  return stats;
}

// All counters but the time.
void ExpectSameCounters(const scsa_stats& c, const LayerStats& cc) {
  EXPECT_EQ(c.rebuild_count, cc.rebuild_count);
  EXPECT_EQ(c.stat_opened_rows, cc.stat_opened_rows);
  EXPECT_EQ(c.stat_exact_rows, cc.stat_exact_rows);
  EXPECT_EQ(c.stat_scored, cc.stat_scored);
  EXPECT_EQ(c.stat_calls, cc.stat_calls);
  EXPECT_EQ(c.union_rows, cc.union_rows);
  EXPECT_EQ(c.visible_rows, cc.visible_rows);
  EXPECT_EQ(c.bytes_read, cc.bytes_read);
  EXPECT_EQ(c.sparse_steps, cc.sparse_steps);
  EXPECT_EQ(c.calibration_steps, cc.calibration_steps);
  EXPECT_EQ(c.exact_steps, cc.exact_steps);
  EXPECT_EQ(c.build_failures, cc.build_failures);
  EXPECT_EQ(c.dropped_blocks, cc.dropped_blocks);
  EXPECT_EQ(c.plan_bytes, cc.plan_bytes);
  EXPECT_EQ(c.audited_outputs, cc.audited_outputs);
  EXPECT_EQ(c.recalibrated_heads, cc.recalibrated_heads);
  EXPECT_EQ(c.audit_failures, cc.audit_failures);
  EXPECT_EQ(c.step_failures, cc.step_failures);
  EXPECT_EQ(c.evicted_blocks, cc.evicted_blocks);
  EXPECT_EQ(c.refused_blocks, cc.refused_blocks);
  EXPECT_EQ(c.audit_ns > 0, cc.audit_ns > 0);
  EXPECT_EQ(c.build_ns > 0, cc.build_ns > 0);
}

// The same layer through both interfaces.
struct Pair {
  explicit Pair(Preset preset)
      : config(ConfigFor(preset)), c(NewLayer(CConfig(static_cast<int>(preset)))), c_workspace(NewWorkspace()) {
    EXPECT_TRUE(Layer::Create(kShape, config, &cc).ok());
  }

  void Attend(const SyntheticCache& cache, std::int64_t n_kv, std::uint32_t seed) {
    const std::vector<float> q = test::RandomQueries(kShape, seed);
    std::vector<float> c_out;
    std::vector<float> cc_out;
    const scsa_kv kv = CKv(cache.View(n_kv));
    const scsa_attend_args args = CArgs(q, &c_out);
    ASSERT_EQ(scsa_layer_attend(c.get(), &kv, &args, c_workspace.get()), SCSA_OK) << scsa_last_error();
    const OutView out = test::ViewOut(cc_out, kShape);
    ASSERT_TRUE(cc->Attend(test::ViewQueries(q, kShape), cache.View(n_kv), {}, {.scale = 0.3f}, Verify::kSample, 2,
                           workspace, out)
                    .ok());
    EXPECT_TRUE(SameBits(c_out, cc_out)) << "query " << seed;
  }

  void ExpectSame() const {
    ExpectSameCounters(StatsOf(c.get()), cc->stats());
    EXPECT_EQ(scsa_layer_sealed_end(c.get()), cc->sealed_end());
    ASSERT_EQ(scsa_layer_n_taus(c.get()), static_cast<int>(cc->taus().size()));
    std::vector<float> taus(cc->taus().size());
    ASSERT_EQ(scsa_layer_get_taus(c.get(), taus.data(), taus.size()), SCSA_OK);
    EXPECT_TRUE(SameBits(taus, {cc->taus().begin(), cc->taus().end()}));
    EXPECT_EQ(scsa_layer_calibrating(c.get()), cc->calibrating() ? 1 : 0);
    EXPECT_EQ(scsa_layer_calibration_steps(c.get()), cc->calibration_steps());
    for (int g = 0; g < kShape.kv_heads; ++g) {
      scsa_head_reads reads = SCSA_HEAD_READS_INIT;
      ASSERT_EQ(scsa_layer_get_head_reads(c.get(), g, &reads), SCSA_OK);
      const HeadReads& expected = cc->head_reads()[static_cast<std::size_t>(g)];
      EXPECT_EQ(reads.rows_read, expected.rows_read);
      EXPECT_EQ(reads.rows_visible, expected.rows_visible);
      EXPECT_EQ(reads.bytes_read, expected.bytes_read);
    }
    for (int h = 0; h < kShape.q_heads; ++h) {
      for (int g = 0; g < SCSA_TAU_GRID_SIZE; ++g) {
        const float* errors = nullptr;
        std::size_t n = 99;
        ASSERT_EQ(scsa_layer_calibration_errors(c.get(), h, g, &errors, &n), SCSA_OK);
        const std::span<const float> expected = cc->CalibrationErrors(h, g);
        EXPECT_TRUE(SameBits(std::vector<float>(errors, errors + n), {expected.begin(), expected.end()}));
      }
    }
  }

  Config config;
  CLayer c;
  std::unique_ptr<Layer> cc;
  CWorkspace c_workspace;
  Workspace workspace;
};

class BothPresets : public ::testing::TestWithParam<Preset> {};
INSTANTIATE_TEST_SUITE_P(Presets, BothPresets, ::testing::Values(Preset::kSeed, Preset::kFast),
                         [](const auto& tested) { return std::string(PresetName(tested.param)); });

TEST(CApiExact, GivesTheBitsOfCpp) {
  constexpr int kQueries = 3;
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0}) {
    const SyntheticCache cache(kShape, 333, type, 5, DType::kF16, false);
    std::vector<float> q;
    for (std::uint32_t i = 0; i < kQueries; ++i) {
      const std::vector<float> row = test::RandomQueries(kShape, 10 + i);
      q.insert(q.end(), row.begin(), row.end());
    }
    std::vector<std::uint64_t> words;
    for (int i = 0; i < kQueries; ++i) {
      std::vector<bool> visible(333);
      for (int r = 0; r < 333; ++r) visible[r] = r < 100 || (r + i) % 3 != 0;
      const std::vector<std::uint64_t> row = Bitmap(visible);
      words.insert(words.end(), row.begin(), row.end());
    }
    const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f, 1.5f, -2.0f};

    std::vector<float> c_out;
    scsa_attend_args args = CArgs(q, &c_out, kQueries);
    args.visible = words.data();
    args.visible_row_stride = static_cast<std::int64_t>(words.size() / kQueries);
    args.softcap = 20.0f;
    args.sinks = sinks.data();
    args.verify = 77;  // not looked at
    const scsa_shape shape = CShape();
    const scsa_kv kv = CKv(cache.View());
    const CWorkspace c_workspace = NewWorkspace();
    ASSERT_EQ(scsa_exact_attention(&shape, &kv, &args, c_workspace.get()), SCSA_OK) << scsa_last_error();

    std::vector<float> cc_out(q.size());
    Workspace workspace;
    ASSERT_TRUE(ExactAttention(kShape, {q.data(), kOutSize, 32, kQueries}, cache.View(),
                               {words.data(), static_cast<std::int64_t>(words.size() / kQueries)},
                               {0.3f, 20.0f, sinks.data()}, 2, workspace, {cc_out.data(), kOutSize, 32})
                    .ok());
    EXPECT_TRUE(SameBits(c_out, cc_out));
  }
}

TEST_P(BothPresets, LayerGivesTheBitsOfCpp) {
  const SyntheticCache cache(kShape, 1700, DType::kF16, 3);
  Pair pair(GetParam());
  pair.ExpectSame();
  ASSERT_EQ(scsa_layer_start_calibration(pair.c.get(), 0.05f), SCSA_OK);
  ASSERT_TRUE(pair.cc->StartCalibration(0.05f).ok());
  for (std::uint32_t i = 0; i < 4; ++i) pair.Attend(cache, 1500 + i, i);
  pair.ExpectSame();
  EXPECT_EQ(scsa_layer_calibrating(pair.c.get()), 1);
  EXPECT_EQ(scsa_layer_calibration_steps(pair.c.get()), 4);
  ASSERT_EQ(scsa_layer_finish_calibration(pair.c.get()), SCSA_OK);
  ASSERT_TRUE(pair.cc->FinishCalibration().ok());
  for (std::uint32_t i = 4; i < 8; ++i) pair.Attend(cache, 1500 + i, i);
  pair.ExpectSame();
  EXPECT_EQ(StatsOf(pair.c.get()).sparse_steps, 4u);
  scsa_head_reads reads = SCSA_HEAD_READS_INIT;
  ASSERT_EQ(scsa_layer_get_head_reads(pair.c.get(), 1, &reads), SCSA_OK);
  EXPECT_EQ(reads.rows_visible, 1504u + 1505 + 1506 + 1507);
  EXPECT_EQ(scsa_layer_get_head_reads(pair.c.get(), 2, &reads), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("kv_head is 2, must be 0 ... 1"));

  ASSERT_EQ(scsa_layer_set_tau(pair.c.get(), 1, 0.0f), SCSA_OK);
  ASSERT_TRUE(pair.cc->SetTau(1, 0.0f).ok());
  ASSERT_EQ(scsa_layer_set_serial(pair.c.get(), 1), SCSA_OK);
  pair.Attend(cache, 1510, 20);
  pair.ExpectSame();

  // Row 800 lies in the first region and in a block in the middle.
  const std::int64_t written[] = {800};
  ASSERT_EQ(scsa_layer_notify_writes(pair.c.get(), written, 1), SCSA_OK);
  pair.cc->NotifyWrites(written);
  EXPECT_GT(StatsOf(pair.c.get()).dropped_blocks, 0u);
  pair.ExpectSame();
  ASSERT_EQ(scsa_layer_reset_stats(pair.c.get()), SCSA_OK);
  pair.cc->ResetStats();
  EXPECT_EQ(StatsOf(pair.c.get()).sparse_steps, 0u);
  pair.Attend(cache, 1700, 21);
  pair.ExpectSame();
  ASSERT_EQ(scsa_layer_drop_plans(pair.c.get()), SCSA_OK);
  pair.cc->DropPlans();
  EXPECT_EQ(scsa_layer_sealed_end(pair.c.get()), pair.config.sink);
  EXPECT_EQ(StatsOf(pair.c.get()).plan_bytes, pair.cc->stats().plan_bytes);
  pair.ExpectSame();
}

TEST_P(BothPresets, PromptIsThatOfCpp) {
  constexpr int kRows = 1500;
  constexpr int kQueries = 120;
  const SyntheticCache cache(kShape, kRows, DType::kF16);
  const KvView kv = cache.View();
  const scsa_kv c_kv = CKv(kv);
  std::vector<float> q;
  for (std::uint32_t row = 0; row < kQueries; ++row) {
    const std::vector<float> of_row = test::RandomQueries(kShape, row / 60);  // two texts, so that few clusters matter
    q.insert(q.end(), of_row.begin(), of_row.end());
  }
  std::unique_ptr<Layer> cpp;
  ASSERT_TRUE(Layer::Create(kShape, ConfigFor(GetParam()), &cpp).ok());
  PromptConfig prompt;
  prompt.tolerance = 0.2f;
  prompt.share = 0.5;
  ASSERT_TRUE(cpp->SetPrompt(prompt).ok());
  const CLayer c = NewLayer(CConfig(static_cast<int>(GetParam())));
  ASSERT_EQ(scsa_layer_set_prompt(c.get(), 0.2f, 0.5), SCSA_OK);
  const CWorkspace c_workspace = NewWorkspace();
  Workspace workspace;
  for (int call = 0; call < 3; ++call) {
    std::vector<float> c_out;
    const scsa_attend_args args = CArgs(q, &c_out, kQueries);
    ASSERT_EQ(scsa_layer_attend_prompt(c.get(), &c_kv, &args, c_workspace.get()), SCSA_OK) << LastError();
    std::vector<float> out(q.size());
    LogitParams params;
    params.scale = 0.3f;
    ASSERT_TRUE(cpp->AttendPrompt({q.data(), kOutSize, kShape.head_dim, kQueries}, kv, {}, params, Verify::kNone, 2,
                                  workspace, {out.data(), kOutSize, kShape.head_dim})
                    .ok());
    EXPECT_TRUE(SameBits(out, c_out)) << call;
  }
  for (int h = 0; h < kShape.kv_heads; ++h) {
    const PromptHead& expected = cpp->prompt_heads()[static_cast<std::size_t>(h)];
    scsa_prompt_head head = SCSA_PROMPT_HEAD_INIT;
    ASSERT_EQ(scsa_layer_get_prompt_head(c.get(), h, &head), SCSA_OK);
    // Three calls of three tiles each; preset seed answers exactly.
    EXPECT_EQ(head.tiles, GetParam() == Preset::kFast ? 9u : 0u);
    EXPECT_EQ(head.tiles, expected.tiles);
    EXPECT_EQ(head.sparse, expected.sparse);
    EXPECT_EQ(head.sparse > 0, GetParam() == Preset::kFast);
    EXPECT_EQ(head.measured, expected.measured);
    EXPECT_EQ(head.audited, expected.audited);
    EXPECT_EQ(head.error_sum, expected.error_sum);
    EXPECT_EQ(head.rows_read, expected.rows_read);
    EXPECT_EQ(head.rows_visible, expected.rows_visible);
    EXPECT_EQ(head.tau, expected.tau);
  }
  scsa_prompt_head head = SCSA_PROMPT_HEAD_INIT;
  EXPECT_EQ(scsa_layer_get_prompt_head(c.get(), 2, &head), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("kv_head is 2, must be 0 ... 1"));
  EXPECT_EQ(scsa_layer_set_prompt(c.get(), -1.0f, 0.5), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("the prompt's tolerance is -1"));
  EXPECT_EQ(scsa_layer_set_prompt(c.get(), 0.1f, 0.0), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("the share of measured tiles is 0"));
}

TEST_P(BothPresets, SealIsThatOfCpp) {
  const SyntheticCache cache(kShape, 1100, DType::kF16, 4);
  Pair pair(GetParam());
  const scsa_kv kv = CKv(cache.View());
  ASSERT_EQ(scsa_layer_seal(pair.c.get(), &kv, 1000, 2), SCSA_OK);
  ASSERT_TRUE(pair.cc->Seal(cache.View(), 1000, 2).ok());
  pair.ExpectSame();
  // Three blocks of 256 rows at least, wherever the sink puts them.
  if (GetParam() == Preset::kFast) {
    EXPECT_GE(scsa_layer_sealed_end(pair.c.get()), 3 * 256);
  }
}

TEST_P(BothPresets, ConfigIsThatOfCpp) {
  const Config expected = ConfigFor(GetParam());
  const scsa_config config = CConfig(static_cast<int>(GetParam()));
  EXPECT_EQ(config.struct_size, sizeof(config));
  EXPECT_EQ(config.preset, static_cast<int>(expected.preset));
  EXPECT_EQ(config.cluster_size, expected.cluster_size);
  EXPECT_EQ(config.rebuild_interval, expected.rebuild_interval);
  EXPECT_EQ(config.block_size, expected.block_size);
  EXPECT_EQ(config.sink, expected.sink);
  EXPECT_EQ(config.recent, expected.recent);
  EXPECT_EQ(config.seal_delay, expected.seal_delay);
  EXPECT_EQ(config.tau_default, expected.tau_default);
  EXPECT_EQ(config.packed_format, static_cast<int>(expected.packed_format));
  EXPECT_EQ(config.rank, expected.rank);
  EXPECT_EQ(config.power_iterations, expected.power_iterations);
  EXPECT_EQ(config.kmeans_rounds, expected.kmeans_rounds);
  EXPECT_EQ(config.tail_shrink, expected.tail_shrink);
  EXPECT_EQ(config.statistic, static_cast<int>(expected.statistic));
  EXPECT_EQ(config.selection, SCSA_SELECTION_FLAT);
  EXPECT_EQ(scsa_validate_config(&config), SCSA_OK);
  EXPECT_EQ(scsa_default_tolerance(config.preset), DefaultTolerance(GetParam()));
  EXPECT_EQ(std::string(scsa_preset_name(config.preset)), PresetName(GetParam()));
  int preset = -1;
  ASSERT_EQ(scsa_preset_from_name(PresetName(GetParam()), &preset), SCSA_OK);
  EXPECT_EQ(preset, config.preset);
  const std::span<const float, kTauGridSize> grid = TauGrid(GetParam());
  EXPECT_TRUE(std::equal(grid.begin(), grid.end(), scsa_tau_grid(config.preset)));

  // A layer hands back every field that it was created with. No two of these values are the same.
  scsa_config other = config;
  other.cluster_size = 16;
  other.rebuild_interval = 300;
  other.block_size = 512;
  other.sink = 6;
  other.recent = 40;
  other.seal_delay = 9;
  other.tau_default = 0.125f;
  other.packed_format = SCSA_PACKED_F16;
  other.rank = 3;
  other.power_iterations = 5;
  other.kmeans_rounds = 7;
  other.tail_shrink = 0.75f;
  other.statistic = config.statistic == SCSA_STATISTIC_MEAN ? SCSA_STATISTIC_MEDIAN : SCSA_STATISTIC_MEAN;
  // `seed` has no other value.
  if (GetParam() == Preset::kFast) other.selection = SCSA_SELECTION_AUTOMATIC;
  const CLayer layer = NewLayer(other);
  scsa_config back = CConfig(SCSA_PRESET_SEED);
  ASSERT_EQ(scsa_layer_get_config(layer.get(), &back), SCSA_OK);
  EXPECT_EQ(std::memcmp(&back, &other, sizeof(back)), 0);
  scsa_shape shape = SCSA_SHAPE_INIT;
  ASSERT_EQ(scsa_layer_get_shape(layer.get(), &shape), SCSA_OK);
  const scsa_shape expected_shape = CShape();
  EXPECT_EQ(std::memcmp(&shape, &expected_shape, sizeof(shape)), 0);
}

TEST_P(BothPresets, StateIsThatOfCpp) {
  const SyntheticCache cache(kShape, 1300, DType::kF16, 6);
  const CState state = NewState(2, CConfig(static_cast<int>(GetParam())));
  std::unique_ptr<State> expected;
  ASSERT_TRUE(State::Create(2, kShape, ConfigFor(GetParam()), &expected).ok());
  EXPECT_EQ(scsa_state_num_layers(state.get()), 2);
  const CWorkspace c_workspace = NewWorkspace();
  Workspace workspace;
  ASSERT_EQ(scsa_state_set_serial(state.get(), 1), SCSA_OK);
  scsa_audit_config audit = SCSA_AUDIT_CONFIG_INIT;
  audit.share = 1.0;
  audit.seed = 3;
  ASSERT_EQ(scsa_state_set_audit(state.get(), &audit), SCSA_OK);
  AuditConfig expected_audit;
  expected_audit.share = 1.0;
  expected_audit.seed = 3;
  ASSERT_TRUE(expected->SetAudit(expected_audit).ok());
  ASSERT_EQ(scsa_state_start_calibration(state.get(), 0.04f), SCSA_OK);
  ASSERT_TRUE(expected->StartCalibration(0.04f).ok());
  for (std::uint32_t step = 0; step < 5; ++step) {
    if (step == 3) {
      ASSERT_EQ(scsa_state_finish_calibration(state.get()), SCSA_OK);
      ASSERT_TRUE(expected->FinishCalibration().ok());
    }
    for (int i = 0; i < 2; ++i) {
      const std::vector<float> q = test::RandomQueries(kShape, 100 * i + step);
      std::vector<float> c_out;
      std::vector<float> cc_out;
      const scsa_kv kv = CKv(cache.View());
      const scsa_attend_args args = CArgs(q, &c_out);
      ASSERT_EQ(scsa_layer_attend(scsa_state_layer(state.get(), i), &kv, &args, c_workspace.get()), SCSA_OK);
      const OutView out = test::ViewOut(cc_out, kShape);
      ASSERT_TRUE(expected->layer(i)
                      .Attend(test::ViewQueries(q, kShape), cache.View(), {}, {.scale = 0.3f}, Verify::kSample, 2,
                              workspace, out)
                      .ok());
      EXPECT_TRUE(SameBits(c_out, cc_out));
    }
  }
  scsa_stats stats = SCSA_STATS_INIT;
  ASSERT_EQ(scsa_state_get_stats(state.get(), &stats), SCSA_OK);
  ExpectSameCounters(stats, expected->stats());
  EXPECT_EQ(stats.sparse_steps, 4u);
  scsa_audit_summary summary = SCSA_AUDIT_SUMMARY_INIT;
  AuditSummary figures;
  ASSERT_EQ(scsa_state_summarize_audit(state.get(), &summary), SCSA_OK);
  ASSERT_TRUE(expected->SummarizeAudit(&figures).ok());
  EXPECT_EQ(summary.outputs, 4u * kShape.q_heads);  // every output of the four sparse calls
  EXPECT_EQ(summary.mean, figures.mean);
  EXPECT_EQ(summary.p99, figures.p99);

  scsa_model model = SCSA_MODEL_INIT;
  model.architecture = "llama";
  model.metadata_hash = "cafe";
  const std::string json = expected->TausToJson({"llama", "cafe", 0, 0, 0, 0});
  ASSERT_FALSE(json.empty());
  std::string text(json.size() + 10, '#');
  std::size_t length = 0;
  ASSERT_EQ(scsa_state_taus_to_json(state.get(), &model, text.data(), text.size(), &length), SCSA_OK);
  EXPECT_EQ(length, json.size());
  EXPECT_EQ(text, json + '\0' + std::string(9, '#'));
  // Cut off: as many bytes as there is room for, with the 0, and the whole length.
  std::string part(8, '#');
  ASSERT_EQ(scsa_state_taus_to_json(state.get(), &model, part.data(), 5, &length), SCSA_OK);
  EXPECT_EQ(length, json.size());
  EXPECT_EQ(part, json.substr(0, 4) + '\0' + "###");

  const CState other = NewState(2, CConfig(static_cast<int>(GetParam())));
  ASSERT_EQ(scsa_state_load_taus_json(other.get(), json.data(), json.size(), &model), SCSA_OK) << scsa_last_error();
  std::vector<float> taus(kShape.q_heads);
  for (int i = 0; i < 2; ++i) {
    const std::span<const float> there = expected->layer(i).taus();
    ASSERT_EQ(scsa_layer_get_taus(scsa_state_layer(other.get(), i), taus.data(), taus.size()), SCSA_OK);
    EXPECT_TRUE(std::equal(there.begin(), there.end(), taus.begin()));
  }
  model.metadata_hash = "beef";
  EXPECT_EQ(scsa_state_load_taus_json(other.get(), json.data(), json.size(), &model), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("metadata_hash"));
  const CState three = NewState(3, CConfig(static_cast<int>(GetParam())));
  EXPECT_EQ(scsa_state_load_taus_json(three.get(), json.data(), json.size(), nullptr), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("layers"));
  EXPECT_EQ(scsa_state_load_taus_json(other.get(), "{\"0:0\": ", 8, nullptr), SCSA_PARSE_ERROR);
  model.architecture = "\"";
  EXPECT_EQ(scsa_state_taus_to_json(state.get(), &model, part.data(), 5, &length), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("architecture"));
  // Destroying a layer of a state does nothing.
  scsa_layer_destroy(scsa_state_layer(state.get(), 0));
  EXPECT_EQ(scsa_layer_n_taus(scsa_state_layer(state.get(), 0)), TauHeads(GetParam(), kShape));
}

TEST_P(BothPresets, AuditIsThatOfCpp) {
  const AuditConfig defaults;
  scsa_audit_config config = SCSA_AUDIT_CONFIG_INIT;
  EXPECT_EQ(config.share, defaults.share);
  EXPECT_EQ(config.seed, defaults.seed);
  EXPECT_EQ(config.tolerance, defaults.tolerance);
  EXPECT_EQ(config.drift_factor, defaults.drift_factor);
  EXPECT_EQ(config.capacity, defaults.capacity);
  EXPECT_EQ(config.window, defaults.window);

  const SyntheticCache cache(kShape, 1300, DType::kF16, 7);
  Pair pair(GetParam());
  // Thresholds far too large for the tolerance, so that heads drift and are calibrated again.
  for (int h = 0; h < static_cast<int>(pair.cc->taus().size()); ++h) {
    ASSERT_EQ(scsa_layer_set_tau(pair.c.get(), h, 1.0f), SCSA_OK);
    ASSERT_TRUE(pair.cc->SetTau(h, 1.0f).ok());
  }
  config.share = 0.9;
  config.seed = 5;
  config.tolerance = 1e-4f;
  config.drift_factor = 1.5f;
  config.capacity = 100;
  config.window = 3;
  ASSERT_EQ(scsa_layer_set_audit(pair.c.get(), &config), SCSA_OK) << scsa_last_error();
  AuditConfig audit;
  audit.share = 0.9;
  audit.seed = 5;
  audit.tolerance = 1e-4f;
  audit.drift_factor = 1.5f;
  audit.capacity = 100;
  audit.window = 3;
  ASSERT_TRUE(pair.cc->SetAudit(audit).ok());
  for (std::uint32_t i = 0; i < 60; ++i) pair.Attend(cache, 1100 + i, i);
  pair.ExpectSame();
  EXPECT_GT(StatsOf(pair.c.get()).recalibrated_heads, 0u);

  const std::span<const AuditSample> expected = pair.cc->AuditSamples();
  ASSERT_GT(expected.size(), 4u);
  std::vector<scsa_audit_sample> samples(expected.size());
  std::size_t n = 0;
  ASSERT_EQ(scsa_layer_audit_samples(pair.c.get(), samples.data(), samples.size(), &n), SCSA_OK);
  ASSERT_EQ(n, expected.size());
  for (std::size_t i = 0; i < n; ++i) {
    EXPECT_EQ(samples[i].call, expected[i].call);
    EXPECT_EQ(samples[i].error, expected[i].error);
    EXPECT_EQ(samples[i].q_head, expected[i].q_head);
    EXPECT_EQ(samples[i].together, expected[i].together);
  }
  // Room for the oldest alone.
  scsa_audit_sample few[2] = {{77, 0, 0, 0}, {77, 0, 0, 0}};
  ASSERT_EQ(scsa_layer_audit_samples(pair.c.get(), few, 1, &n), SCSA_OK);
  EXPECT_EQ(n, expected.size());
  EXPECT_EQ(few[0].error, expected[0].error);
  EXPECT_EQ(few[1].call, 77u);

  scsa_audit_summary summary = SCSA_AUDIT_SUMMARY_INIT;
  AuditSummary figures;
  ASSERT_EQ(scsa_summarize_audit(samples.data(), samples.size(), &summary), SCSA_OK);
  ASSERT_TRUE(SummarizeAudit(expected, &figures).ok());
  EXPECT_EQ(summary.outputs, figures.outputs);
  EXPECT_EQ(summary.observations, figures.observations);
  EXPECT_EQ(summary.mean, figures.mean);
  EXPECT_EQ(summary.median, figures.median);
  EXPECT_EQ(summary.median_low, figures.median_low);
  EXPECT_EQ(summary.median_high, figures.median_high);
  EXPECT_EQ(summary.p90, figures.p90);
  EXPECT_EQ(summary.p99, figures.p99);
  EXPECT_GT(summary.mean, 0.0);
  ASSERT_EQ(scsa_summarize_audit(nullptr, 0, &summary), SCSA_OK);
  EXPECT_EQ(summary.outputs, 0u);
  summary.struct_size = 8;
  EXPECT_EQ(scsa_summarize_audit(samples.data(), samples.size(), &summary), SCSA_INVALID_ARGUMENT);

  config.share = 0;
  ASSERT_EQ(scsa_layer_set_audit(pair.c.get(), &config), SCSA_OK);
  ASSERT_EQ(scsa_layer_audit_samples(pair.c.get(), nullptr, 0, &n), SCSA_OK);
  EXPECT_EQ(n, 0u);
  config.share = 1.5;
  EXPECT_EQ(scsa_layer_set_audit(pair.c.get(), &config), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("share"));
  config.share = 0.5;
  config.capacity = 0;
  EXPECT_EQ(scsa_layer_set_audit(pair.c.get(), &config), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("capacity"));
}

TEST(CApiTaus, TravelWithoutAState) {
  const scsa_config config = CConfig(SCSA_PRESET_FAST);
  scsa_model model = SCSA_MODEL_INIT;
  model.architecture = "gemma3";
  model.layers = 2;
  scsa_taus* raw = nullptr;
  ASSERT_EQ(scsa_taus_create(&config, 0.02f, &model, &raw), SCSA_OK) << scsa_last_error();
  const CTaus made(raw);
  EXPECT_EQ(scsa_taus_count(made.get()), 0u);
  // The third replaces the first.
  for (const scsa_tau_entry& entry : {Entry(1, 0, 0.5f), Entry(1, 1, 0.25f), Entry(1, 0, 0.125f)}) {
    ASSERT_EQ(scsa_taus_set(made.get(), &entry), SCSA_OK);
  }
  EXPECT_EQ(scsa_taus_count(made.get()), 2u);

  TausFile file;
  file.config = ConfigFor(Preset::kFast);
  file.tolerance = 0.02f;
  file.model = ModelIdentity{"gemma3", "", 2, 0, 0, 0};
  file.taus = {{1, 0, 0.125f}, {1, 1, 0.25f}};
  std::string expected;
  ASSERT_TRUE(FormatTaus(file, &expected).ok());
  std::vector<char> text(expected.size() + 1);
  std::size_t length = 0;
  ASSERT_EQ(scsa_taus_to_json(made.get(), text.data(), text.size(), &length), SCSA_OK);
  EXPECT_EQ(std::string(text.data()), expected);

  ASSERT_EQ(scsa_taus_parse(text.data(), length, &raw), SCSA_OK) << scsa_last_error();
  const CTaus read(raw);
  ASSERT_EQ(scsa_taus_count(read.get()), 2u);
  scsa_tau_entry entry = SCSA_TAU_ENTRY_INIT;
  ASSERT_EQ(scsa_taus_get(read.get(), 1, &entry), SCSA_OK);
  EXPECT_EQ(entry.layer, 1);
  EXPECT_EQ(entry.head, 1);
  EXPECT_EQ(entry.tau, 0.25f);
  EXPECT_EQ(scsa_taus_get(read.get(), 2, &entry), SCSA_NOT_FOUND);
  scsa_config config_back = CConfig(SCSA_PRESET_SEED);
  ASSERT_EQ(scsa_taus_get_config(read.get(), &config_back), SCSA_OK);
  EXPECT_EQ(std::memcmp(&config_back, &config, sizeof(config)), 0);
  float tolerance = 0;
  ASSERT_EQ(scsa_taus_get_tolerance(read.get(), &tolerance), SCSA_OK);
  EXPECT_EQ(tolerance, 0.02f);
  scsa_model model_back = SCSA_MODEL_INIT;
  ASSERT_EQ(scsa_taus_get_model(read.get(), &model_back), SCSA_OK);
  EXPECT_STREQ(model_back.architecture, "gemma3");
  EXPECT_STREQ(model_back.metadata_hash, "");
  EXPECT_EQ(model_back.layers, 2);

  EXPECT_EQ(scsa_taus_check_model(read.get(), &model), SCSA_OK);
  model.architecture = "llama";
  EXPECT_EQ(scsa_taus_check_model(read.get(), &model), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("architecture"));
  EXPECT_EQ(scsa_taus_check_config(read.get(), &config), SCSA_OK);
  const scsa_config seed = CConfig(SCSA_PRESET_SEED);
  EXPECT_EQ(scsa_taus_check_config(read.get(), &seed), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("preset"));

  const CLayer layer = NewLayer(config);
  ASSERT_EQ(scsa_taus_apply(read.get(), 1, layer.get()), SCSA_OK) << scsa_last_error();
  float taus[2] = {};
  ASSERT_EQ(scsa_layer_get_taus(layer.get(), taus, 2), SCSA_OK);
  EXPECT_EQ(taus[0], 0.125f);
  EXPECT_EQ(taus[1], 0.25f);
  EXPECT_EQ(scsa_taus_apply(read.get(), 0, layer.get()), SCSA_NOT_FOUND);
  EXPECT_EQ(scsa_taus_apply(read.get(), 2, layer.get()), SCSA_INVALID_ARGUMENT);  // the model has two layers
  EXPECT_EQ(scsa_taus_apply(read.get(), -1, layer.get()), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_taus_apply(read.get(), 1, NewLayer(seed).get()), SCSA_INVALID_ARGUMENT);
  entry = Entry(1, 2, 0.5f);  // a third KV head
  ASSERT_EQ(scsa_taus_set(read.get(), &entry), SCSA_OK);
  EXPECT_EQ(scsa_taus_apply(read.get(), 1, layer.get()), SCSA_INVALID_ARGUMENT);
  ASSERT_EQ(scsa_layer_get_taus(layer.get(), taus, 2), SCSA_OK);
  EXPECT_EQ(taus[0], 0.125f);

  // The bare form knows nothing of its origin.
  ASSERT_EQ(scsa_taus_create(nullptr, 0.0f, nullptr, &raw), SCSA_OK);
  const CTaus bare(raw);
  entry = Entry(0, 3, 0.25f);
  ASSERT_EQ(scsa_taus_set(bare.get(), &entry), SCSA_OK);
  char small[40] = "";
  ASSERT_EQ(scsa_taus_to_json(bare.get(), small, sizeof(small), &length), SCSA_OK);
  EXPECT_STREQ(small, "{\n  \"0:3\": 0.25\n}\n");
  EXPECT_EQ(scsa_taus_get_config(bare.get(), &config_back), SCSA_NOT_FOUND);
  EXPECT_EQ(scsa_taus_get_tolerance(bare.get(), &tolerance), SCSA_NOT_FOUND);
  EXPECT_EQ(scsa_taus_get_model(bare.get(), &model_back), SCSA_NOT_FOUND);
}

TEST(CApiBudget, LimitsThePlansOfItsLayers) {
  const CLayer free = NewLayer(CConfig(SCSA_PRESET_FAST));
  const CState state = NewState(2, CConfig(SCSA_PRESET_FAST));
  const SyntheticCache cache(kShape, 1100, DType::kF16);
  const scsa_kv kv = CKv(cache.View());
  ASSERT_EQ(scsa_layer_seal(free.get(), &kv, 1100, 1), SCSA_OK);
  const std::uint64_t block = StatsOf(free.get()).plan_bytes / 4;
  scsa_budget* budget = nullptr;
  ASSERT_EQ(scsa_budget_create(5 * block, &budget), SCSA_OK);
  ASSERT_EQ(scsa_state_set_budget(state.get(), budget), SCSA_OK);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(scsa_layer_seal(scsa_state_layer(state.get(), i), &kv, 1100, 1), SCSA_OK);
  }
  EXPECT_EQ(scsa_budget_used(budget), 5 * block);
  EXPECT_EQ(StatsOf(scsa_state_layer(state.get(), 0)).plan_bytes, 4 * block);
  EXPECT_EQ(StatsOf(scsa_state_layer(state.get(), 1)).plan_bytes, block);
  EXPECT_EQ(StatsOf(scsa_state_layer(state.get(), 1)).refused_blocks, 3u);
  ASSERT_EQ(scsa_budget_set_limit(budget, 2 * block), SCSA_OK);
  EXPECT_EQ(scsa_budget_used(budget), 2 * block);
  ASSERT_EQ(scsa_layer_set_budget(scsa_state_layer(state.get(), 0), nullptr), SCSA_OK);
  EXPECT_EQ(StatsOf(scsa_state_layer(state.get(), 0)).plan_bytes, 0u);
  scsa_budget_destroy(budget);
  ASSERT_EQ(scsa_layer_seal(scsa_state_layer(state.get(), 1), &kv, 1100, 1), SCSA_OK);
  EXPECT_EQ(StatsOf(scsa_state_layer(state.get(), 1)).plan_bytes, 2 * block);
}

TEST(CApiTaus, RefuseBadValues) {
  scsa_config config = CConfig(SCSA_PRESET_FAST);
  scsa_taus* taus = reinterpret_cast<scsa_taus*>(&config);
  EXPECT_EQ(scsa_taus_create(&config, -1.0f, nullptr, &taus), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("tolerance"));
  EXPECT_EQ(taus, nullptr);
  scsa_model model = SCSA_MODEL_INIT;
  EXPECT_EQ(scsa_taus_create(&config, 0.1f, &model, &taus), SCSA_INVALID_ARGUMENT);  // could not be read back
  EXPECT_TRUE(ErrorSays("layers"));
  model.layers = 1;
  model.head_dim = -8;
  EXPECT_EQ(scsa_taus_create(&config, 0.1f, &model, &taus), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("head_dim"));
  config.rank = 9;
  EXPECT_EQ(scsa_taus_create(&config, 0.1f, nullptr, &taus), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("rank"));
  EXPECT_EQ(scsa_taus_parse("[]", 2, &taus), SCSA_PARSE_ERROR);
  EXPECT_EQ(taus, nullptr);
  EXPECT_EQ(scsa_taus_parse("{\"format\": \"x\"}", 15, &taus), SCSA_UNSUPPORTED);

  ASSERT_EQ(scsa_taus_create(nullptr, 0.0f, nullptr, &taus), SCSA_OK);
  const CTaus owner(taus);
  for (const scsa_tau_entry& bad : {Entry(-1, 0, 0.5f), Entry(4096, 0, 0.5f), Entry(0, -1, 0.5f), Entry(0, 128, 0.5f),
                                    Entry(0, 0, 1.5f), Entry(0, 0, -0.5f)}) {
    EXPECT_EQ(scsa_taus_set(taus, &bad), SCSA_INVALID_ARGUMENT);
  }
  EXPECT_EQ(scsa_taus_count(taus), 0u);
}

TEST(CApiStructs, AreReadAndWrittenBySize) {
  EXPECT_EQ(sizeof(scsa_shape), 24u);  // the layout of version 0.1
  EXPECT_EQ(sizeof(scsa_kv), 72u);
  EXPECT_EQ(sizeof(scsa_attend_args), 104u);
  EXPECT_EQ(sizeof(scsa_config), 72u);
  EXPECT_EQ(sizeof(scsa_stats), 184u);
  EXPECT_EQ(sizeof(scsa_head_reads), 32u);
  EXPECT_EQ(sizeof(scsa_audit_config), 40u);
  EXPECT_EQ(sizeof(scsa_audit_sample), 16u);
  EXPECT_EQ(sizeof(scsa_audit_summary), 72u);
  EXPECT_EQ(sizeof(scsa_model), 40u);
  EXPECT_EQ(sizeof(scsa_tau_entry), 24u);

  scsa_shape shape = CShape();
  shape.struct_size = 0;
  EXPECT_EQ(scsa_validate_shape(&shape), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("struct_size of scsa_shape is 0"));
  shape.struct_size = sizeof(shape) - 1;
  EXPECT_EQ(scsa_validate_shape(&shape), SCSA_INVALID_ARGUMENT);
  shape = CShape();
  shape.reserved = 1;
  EXPECT_EQ(scsa_validate_shape(&shape), SCSA_UNSUPPORTED);

  // A caller of a later version whose new field is not set, and set.
  struct Later {
    scsa_shape shape;
    std::int64_t new_field;
  } later = {CShape(), 0};
  later.shape.struct_size = sizeof(later);
  EXPECT_EQ(scsa_validate_shape(&later.shape), SCSA_OK);
  later.new_field = std::int64_t{1} << 56;
  EXPECT_EQ(scsa_validate_shape(&later.shape), SCSA_UNSUPPORTED);
  EXPECT_TRUE(ErrorSays("does not know"));

  const CLayer layer = NewLayer(CConfig(SCSA_PRESET_FAST));
  ASSERT_EQ(scsa_layer_get_shape(layer.get(), &later.shape), SCSA_OK);
  EXPECT_EQ(later.shape.q_heads, 6);
  EXPECT_EQ(later.shape.struct_size, sizeof(later));
  EXPECT_EQ(later.new_field, 0);
  scsa_stats stats = SCSA_STATS_INIT;
  stats.struct_size = 16;
  stats.rebuild_count = 4711;
  EXPECT_EQ(scsa_layer_get_stats(layer.get(), &stats), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(stats.rebuild_count, 4711u);
}

TEST(CApiErrors, NullPointers) {
  const scsa_shape shape = CShape();
  const scsa_config config = CConfig(SCSA_PRESET_FAST);
  const CLayer layer = NewLayer(config);
  const CState state = NewState(1, config);
  const CWorkspace workspace = NewWorkspace();
  const SyntheticCache cache(kShape, 10, DType::kF16);
  const scsa_kv kv = CKv(cache.View());
  const std::vector<float> q = test::RandomQueries(kShape, 1);
  std::vector<float> out;
  const scsa_attend_args args = CArgs(q, &out);
  const scsa_tau_entry entry = SCSA_TAU_ENTRY_INIT;
  const scsa_model model = SCSA_MODEL_INIT;
  scsa_layer* new_layer = layer.get();
  scsa_state* new_state = state.get();
  scsa_taus* taus = nullptr;
  ASSERT_EQ(scsa_taus_create(nullptr, 0.0f, nullptr, &taus), SCSA_OK);
  const CTaus owner(taus);
  float value = 0;
  const float* values = nullptr;
  std::size_t size = 0;
  char text[4] = "";
  int preset = 0;
  scsa_shape shape_out = SCSA_SHAPE_INIT;
  scsa_config config_out = config;
  scsa_stats stats = SCSA_STATS_INIT;
  scsa_head_reads reads = SCSA_HEAD_READS_INIT;
  const scsa_audit_config audit = SCSA_AUDIT_CONFIG_INIT;
  scsa_audit_summary summary = SCSA_AUDIT_SUMMARY_INIT;

  scsa_workspace_destroy(nullptr);
  scsa_budget_destroy(nullptr);
  EXPECT_EQ(scsa_budget_used(nullptr), 0u);
  scsa_layer_destroy(nullptr);
  scsa_state_destroy(nullptr);
  scsa_taus_destroy(nullptr);
  EXPECT_EQ(scsa_layer_calibrating(nullptr), 0);
  EXPECT_EQ(scsa_layer_calibration_steps(nullptr), 0);
  EXPECT_EQ(scsa_layer_n_taus(nullptr), 0);
  EXPECT_EQ(scsa_layer_sealed_end(nullptr), 0);
  EXPECT_EQ(scsa_state_num_layers(nullptr), 0);
  EXPECT_EQ(scsa_taus_count(nullptr), 0u);
  EXPECT_EQ(scsa_state_layer(nullptr, 0), nullptr);
  EXPECT_TRUE(ErrorSays("state is a null pointer"));

  const scsa_status refused[] = {
      scsa_validate_shape(nullptr),
      scsa_config_init(SCSA_PRESET_FAST, nullptr),
      scsa_validate_config(nullptr),
      scsa_preset_from_name(nullptr, &preset),
      scsa_preset_from_name("fast", nullptr),
      scsa_workspace_create(nullptr),
      scsa_exact_attention(nullptr, &kv, &args, workspace.get()),
      scsa_exact_attention(&shape, nullptr, &args, workspace.get()),
      scsa_exact_attention(&shape, &kv, nullptr, workspace.get()),
      scsa_exact_attention(&shape, &kv, &args, nullptr),
      scsa_layer_create(&shape, &config, nullptr),
      scsa_layer_create(nullptr, &config, &new_layer),
      scsa_layer_create(&shape, nullptr, &new_layer),
      scsa_layer_attend(nullptr, &kv, &args, workspace.get()),
      scsa_layer_attend(layer.get(), nullptr, &args, workspace.get()),
      scsa_layer_attend(layer.get(), &kv, nullptr, workspace.get()),
      scsa_layer_attend(layer.get(), &kv, &args, nullptr),
      scsa_layer_seal(nullptr, &kv, 0, 1),
      scsa_layer_seal(layer.get(), nullptr, 0, 1),
      scsa_layer_notify_writes(nullptr, nullptr, 0),
      scsa_layer_notify_writes(layer.get(), nullptr, 1),
      scsa_layer_drop_plans(nullptr),
      scsa_budget_create(1, nullptr),
      scsa_budget_set_limit(nullptr, 1),
      scsa_layer_set_budget(nullptr, nullptr),
      scsa_state_set_budget(nullptr, nullptr),
      scsa_layer_start_calibration(nullptr, 0.1f),
      scsa_layer_finish_calibration(nullptr),
      scsa_layer_calibration_errors(nullptr, 0, 0, &values, &size),
      scsa_layer_calibration_errors(layer.get(), 0, 0, nullptr, &size),
      scsa_layer_calibration_errors(layer.get(), 0, 0, &values, nullptr),
      scsa_layer_get_taus(nullptr, &value, 1),
      scsa_layer_get_taus(layer.get(), nullptr, 1),
      scsa_layer_set_tau(nullptr, 0, 0.1f),
      scsa_layer_set_serial(nullptr, 1),
      scsa_layer_get_shape(nullptr, &shape_out),
      scsa_layer_get_shape(layer.get(), nullptr),
      scsa_layer_get_config(nullptr, &config_out),
      scsa_layer_get_config(layer.get(), nullptr),
      scsa_layer_get_stats(nullptr, &stats),
      scsa_layer_get_stats(layer.get(), nullptr),
      scsa_layer_get_head_reads(nullptr, 0, &reads),
      scsa_layer_get_head_reads(layer.get(), 0, nullptr),
      scsa_layer_reset_stats(nullptr),
      scsa_layer_set_audit(nullptr, &audit),
      scsa_layer_set_audit(layer.get(), nullptr),
      scsa_layer_audit_samples(nullptr, nullptr, 0, &size),
      scsa_layer_audit_samples(layer.get(), nullptr, 1, &size),
      scsa_layer_audit_samples(layer.get(), nullptr, 0, nullptr),
      scsa_summarize_audit(nullptr, 1, &summary),
      scsa_summarize_audit(nullptr, 0, nullptr),
      scsa_state_set_audit(nullptr, &audit),
      scsa_state_set_audit(state.get(), nullptr),
      scsa_state_summarize_audit(nullptr, &summary),
      scsa_state_summarize_audit(state.get(), nullptr),
      scsa_state_create(1, &shape, &config, nullptr),
      scsa_state_create(1, nullptr, &config, &new_state),
      scsa_state_create(1, &shape, nullptr, &new_state),
      scsa_state_start_calibration(nullptr, 0.1f),
      scsa_state_finish_calibration(nullptr),
      scsa_state_set_serial(nullptr, 1),
      scsa_state_get_stats(nullptr, &stats),
      scsa_state_get_stats(state.get(), nullptr),
      scsa_state_taus_to_json(nullptr, nullptr, text, 4, &size),
      scsa_state_taus_to_json(state.get(), nullptr, nullptr, 4, &size),
      scsa_state_taus_to_json(state.get(), nullptr, text, 4, nullptr),
      scsa_state_load_taus_json(nullptr, "{}", 2, nullptr),
      scsa_state_load_taus_json(state.get(), nullptr, 2, nullptr),
      scsa_taus_create(nullptr, 0.0f, nullptr, nullptr),
      scsa_taus_parse(nullptr, 2, &taus),
      scsa_taus_parse("{}", 2, nullptr),
      scsa_taus_to_json(nullptr, text, 4, &size),
      scsa_taus_to_json(owner.get(), nullptr, 4, &size),
      scsa_taus_to_json(owner.get(), text, 4, nullptr),
      scsa_taus_get(nullptr, 0, nullptr),
      scsa_taus_set(nullptr, &entry),
      scsa_taus_set(owner.get(), nullptr),
      scsa_taus_get_config(nullptr, &config_out),
      scsa_taus_get_tolerance(nullptr, &value),
      scsa_taus_get_tolerance(owner.get(), nullptr),
      scsa_taus_get_model(nullptr, nullptr),
      scsa_taus_check_config(nullptr, &config),
      scsa_taus_check_config(owner.get(), nullptr),
      scsa_taus_check_model(nullptr, &model),
      scsa_taus_check_model(owner.get(), nullptr),
      scsa_taus_apply(nullptr, 0, layer.get()),
      scsa_taus_apply(owner.get(), 0, nullptr),
  };
  for (std::size_t i = 0; i < std::size(refused); ++i) {
    EXPECT_EQ(refused[i], SCSA_INVALID_ARGUMENT) << "call " << i;
  }
  EXPECT_TRUE(ErrorSays("layer is a null pointer"));
  EXPECT_EQ(new_layer, nullptr);
  EXPECT_EQ(new_state, nullptr);
  EXPECT_EQ(scsa_layer_notify_writes(layer.get(), nullptr, 0), SCSA_OK);
}

TEST(CApiErrors, BadValues) {
  const scsa_config config = CConfig(SCSA_PRESET_FAST);
  scsa_layer* layer = nullptr;
  for (const Shape& bad : {Shape{0, 1, 32}, Shape{3, 2, 32}, Shape{129, 1, 32}, Shape{65, 65, 32}, Shape{4, 2, 12}}) {
    const scsa_shape shape = CShape(bad);
    EXPECT_EQ(scsa_validate_shape(&shape), SCSA_INVALID_ARGUMENT);
    EXPECT_EQ(scsa_layer_create(&shape, &config, &layer), SCSA_INVALID_ARGUMENT);
    EXPECT_EQ(layer, nullptr);
  }
  const scsa_shape shape = CShape();
  // 256 would be 0 in the type that C++ uses.
  for (const int unknown : {-1, 2, 256}) {
    scsa_config bad = config;
    EXPECT_EQ(scsa_config_init(unknown, &bad), SCSA_INVALID_ARGUMENT);
    EXPECT_TRUE(ErrorSays("preset is " + std::to_string(unknown)));
    EXPECT_EQ(std::memcmp(&bad, &config, sizeof(bad)), 0);
    EXPECT_EQ(scsa_preset_name(unknown), nullptr);
    EXPECT_EQ(scsa_default_tolerance(unknown), 0.0f);
    EXPECT_EQ(scsa_tau_grid(unknown), nullptr);
    bad.preset = unknown;
    EXPECT_EQ(scsa_layer_create(&shape, &bad, &layer), SCSA_INVALID_ARGUMENT);
    EXPECT_TRUE(ErrorSays("preset is " + std::to_string(unknown)));
    bad = config;
    bad.statistic = unknown;
    EXPECT_EQ(scsa_validate_config(&bad), SCSA_INVALID_ARGUMENT);
    EXPECT_TRUE(ErrorSays("statistic"));
  }
  int preset = 5;
  EXPECT_EQ(scsa_preset_from_name("FAST", &preset), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("choose seed or fast"));
  EXPECT_EQ(preset, 5);
  scsa_config bad = config;
  bad.packed_format = 4;
  EXPECT_EQ(scsa_validate_config(&bad), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("packed_format"));
  for (const int unknown : {-1, 3, 256}) {
    bad = config;
    bad.selection = unknown;
    EXPECT_EQ(scsa_validate_config(&bad), SCSA_INVALID_ARGUMENT);
    EXPECT_TRUE(ErrorSays("selection is " + std::to_string(unknown)));
  }
  bad = config;
  bad.reserved = 1;
  EXPECT_EQ(scsa_validate_config(&bad), SCSA_UNSUPPORTED);
  bad = config;
  bad.cluster_size = 1;
  scsa_state* state = nullptr;
  EXPECT_EQ(scsa_state_create(2, &shape, &bad, &state), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("cluster_size is 1"));
  EXPECT_EQ(scsa_state_create(0, &shape, &config, &state), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("num_layers is 0"));
  EXPECT_EQ(state, nullptr);

  const CState one = NewState(1, config);
  EXPECT_EQ(scsa_state_layer(one.get(), 1), nullptr);
  EXPECT_TRUE(ErrorSays("there is no layer 1"));
  EXPECT_EQ(scsa_state_layer(one.get(), -1), nullptr);
  EXPECT_EQ(scsa_state_finish_calibration(one.get()), SCSA_FAILED_PRECONDITION);
  EXPECT_EQ(scsa_state_start_calibration(one.get(), 0.0f), SCSA_INVALID_ARGUMENT);

  scsa_layer* target = scsa_state_layer(one.get(), 0);
  float taus[2] = {};
  const float* errors = nullptr;
  std::size_t n = 0;
  EXPECT_EQ(scsa_layer_finish_calibration(target), SCSA_FAILED_PRECONDITION);
  EXPECT_EQ(scsa_layer_start_calibration(target, -1.0f), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_layer_set_tau(target, 2, 0.1f), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_layer_set_tau(target, 0, 1.1f), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_layer_get_taus(target, taus, 1), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("at least 2"));
  EXPECT_EQ(scsa_layer_calibration_errors(target, 6, 0, &errors, &n), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_layer_calibration_errors(target, -1, 0, &errors, &n), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_layer_calibration_errors(target, 0, 13, &errors, &n), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_layer_calibration_errors(target, 0, -1, &errors, &n), SCSA_INVALID_ARGUMENT);
}

TEST(CApiSelection, FollowsTheConfigAndTheCaller) {
  EXPECT_EQ(scsa_layer_selection(nullptr), SCSA_SELECTION_FLAT);
  scsa_config config = CConfig(SCSA_PRESET_FAST);
  config.selection = SCSA_SELECTION_HIERARCHICAL;
  const CLayer fixed = NewLayer(config);
  EXPECT_EQ(scsa_layer_selection(fixed.get()), SCSA_SELECTION_HIERARCHICAL);
  EXPECT_EQ(scsa_layer_set_selection(fixed.get(), SCSA_SELECTION_FLAT), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("was not made for"));
  config.selection = SCSA_SELECTION_AUTOMATIC;
  const CLayer free = NewLayer(config);
  EXPECT_EQ(scsa_layer_selection(free.get()), SCSA_SELECTION_FLAT);
  EXPECT_EQ(scsa_layer_set_selection(free.get(), SCSA_SELECTION_HIERARCHICAL), SCSA_OK);
  EXPECT_EQ(scsa_layer_selection(free.get()), SCSA_SELECTION_HIERARCHICAL);
  EXPECT_EQ(scsa_layer_set_selection(free.get(), 3), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(scsa_layer_selection(free.get()), SCSA_SELECTION_HIERARCHICAL);
  config = CConfig(SCSA_PRESET_SEED);
  config.selection = SCSA_SELECTION_HIERARCHICAL;
  const CLayer seed = NewLayer(config);
  EXPECT_EQ(scsa_layer_selection(seed.get()), SCSA_SELECTION_HIERARCHICAL);
}

TEST(CApiErrors, BadCallsLeaveTheOutput) {
  const CWorkspace workspace = NewWorkspace();
  const CLayer layer = NewLayer(CConfig(SCSA_PRESET_FAST));
  const SyntheticCache cache(kShape, 10, DType::kF16);
  const std::vector<float> q = test::RandomQueries(kShape, 1);
  std::vector<float> out;
  const scsa_shape shape = CShape();
  const scsa_kv kv = CKv(cache.View());
  const scsa_attend_args args = CArgs(q, &out);
  const std::vector<float> untouched = out;
  const auto refused = [&](const scsa_kv& bad_kv, const scsa_attend_args& bad_args, const char* message) {
    EXPECT_EQ(scsa_exact_attention(&shape, &bad_kv, &bad_args, workspace.get()), SCSA_INVALID_ARGUMENT);
    EXPECT_TRUE(ErrorSays(message));
    EXPECT_EQ(scsa_layer_attend(layer.get(), &bad_kv, &bad_args, workspace.get()), SCSA_INVALID_ARGUMENT);
    EXPECT_TRUE(ErrorSays(message));
    EXPECT_TRUE(SameBits(out, untouched));
  };
  scsa_kv bad_kv = kv;
  bad_kv.k = nullptr;
  refused(bad_kv, args, "null pointer");
  EXPECT_EQ(scsa_layer_seal(layer.get(), &bad_kv, 10, 1), SCSA_INVALID_ARGUMENT);
  bad_kv = kv;
  bad_kv.n_kv = -1;
  refused(bad_kv, args, "n_kv");
  EXPECT_EQ(scsa_layer_seal(layer.get(), &bad_kv, 10, 1), SCSA_INVALID_ARGUMENT);
  for (const int unknown : {-1, 4, 256}) {
    bad_kv = kv;
    bad_kv.k_type = unknown;
    refused(bad_kv, args, "k_type");
    EXPECT_EQ(scsa_layer_seal(layer.get(), &bad_kv, 10, 1), SCSA_INVALID_ARGUMENT);
    bad_kv = kv;
    bad_kv.v_type = unknown;
    refused(bad_kv, args, "v_type");
    EXPECT_EQ(scsa_row_bytes(unknown, 32), 0u);
  }
  scsa_attend_args bad = args;
  bad.q = nullptr;
  refused(kv, bad, "queries");
  bad = args;
  bad.out = nullptr;
  refused(kv, bad, "output");
  bad = args;
  bad.n_q = 0;
  refused(kv, bad, "n_q");
  bad = args;
  bad.n_threads = 0;
  refused(kv, bad, "n_threads");
  EXPECT_EQ(scsa_layer_seal(layer.get(), &kv, 10, 0), SCSA_INVALID_ARGUMENT);
  bad = args;
  bad.softcap = -1.0f;
  refused(kv, bad, "softcap");
  bad = args;
  bad.struct_size = 8;
  refused(kv, bad, "struct_size of scsa_attend_args");
  bad = args;
  bad.verify = 3;
  EXPECT_EQ(scsa_layer_attend(layer.get(), &kv, &bad, workspace.get()), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("verify is 3"));
  EXPECT_TRUE(SameBits(out, untouched));

  EXPECT_EQ(scsa_row_bytes(SCSA_F32, 40), 160u);
  EXPECT_EQ(scsa_row_bytes(SCSA_F16, 40), 80u);
  EXPECT_EQ(scsa_row_bytes(SCSA_Q8_0, 40), 68u);
  EXPECT_EQ(scsa_row_bytes(SCSA_F32, 0), 0u);
}

TEST(CApiErrors, MessagesBelongToTheirThread) {
  EXPECT_EQ(scsa_validate_shape(nullptr), SCSA_INVALID_ARGUMENT);
  std::string elsewhere = "unset";
  std::thread([&] { elsewhere = scsa_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_TRUE(ErrorSays("scsa_shape is a null pointer"));
  // A success keeps the message; one that is too long is cut off.
  const scsa_shape shape = CShape();
  EXPECT_EQ(scsa_validate_shape(&shape), SCSA_OK);
  EXPECT_TRUE(ErrorSays("scsa_shape is a null pointer"));
  int preset = 0;
  EXPECT_EQ(scsa_preset_from_name(std::string(5000, 'x').c_str(), &preset), SCSA_INVALID_ARGUMENT);
  EXPECT_EQ(LastError().size(), 1023u);
}

TEST(CApiTargets, AreThoseOfCpp) {
  const std::vector<std::string> targets = AvailableTargets();
  ASSERT_EQ(scsa_n_targets(), static_cast<int>(targets.size()));
  for (int i = 0; i < scsa_n_targets(); ++i) {
    EXPECT_EQ(scsa_target_name(i), targets[i]);
    ASSERT_EQ(scsa_force_target(scsa_target_name(i)), SCSA_OK);
    EXPECT_EQ(scsa_active_target(), targets[i]);
    EXPECT_EQ(ActiveTarget(), targets[i]);
  }
  EXPECT_EQ(scsa_target_name(-1), nullptr);
  EXPECT_EQ(scsa_target_name(scsa_n_targets()), nullptr);
  EXPECT_EQ(scsa_force_target("AVX9000"), SCSA_INVALID_ARGUMENT);
  EXPECT_TRUE(ErrorSays("AVX9000"));
  ASSERT_EQ(scsa_force_target(nullptr), SCSA_OK);
  EXPECT_EQ(scsa_active_target(), targets.front());
  EXPECT_EQ(scsa_target_from_environment(), TargetFromEnvironment().ok() ? SCSA_OK : SCSA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace scsa
