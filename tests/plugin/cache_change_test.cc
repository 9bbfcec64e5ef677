// SPDX-License-Identifier: Apache-2.0
//
// Cells that change after the sparse operator has planned over them. All values of one half of the cells are one
// vector, those of the other half another one, and the query's mass lies in one half: an answer from a stale plan is
// the wrong vector, whatever the operator opens or approximates.
#include <ggml-backend-impl.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "plugin_fixture.h"
#include "tests/core/short_memory.h"

namespace scsa::plugin_test {
namespace {

constexpr int kDim = 64;
constexpr std::int64_t kCells = 2048;
constexpr std::int64_t kFilled = 1500;
constexpr std::int64_t kNkv = 1536;
constexpr float kNear = 10.0f;  // logit of the half that the query looks at; the other half has -kNear

// A cell that the query does not look at: its cluster stays closed. An opened one would be read from the cache,
// whatever its summary says.
constexpr std::int64_t kIgnored = 701;

struct Values {
  float first, second;  // the values of cells in the even and the odd half
};

class CacheChange : public testing::Test {
 protected:
  void SetUp() override {
    Plugin& plugin = Plugin::Get();
    plugin.Set("mode", "auto");
    plugin.Set("crossover", "600");
    plugin.Set("calibrate", "0");
    Fill(0, kFilled, {1.0f, 2.0f}, +1);
    in_.q_heads = 2;
    in_.n_kv = kNkv;
    in_.scale = 1.0f;
    in_.q.assign(2 * kDim, 0.0f);
    in_.q[0] = in_.q[kDim] = 1.0f;
    ShowUpTo(kFilled);
    Track();
  }
  void TearDown() override {
    Plugin::Get().Set("crossover", "4096");
    Plugin::Get().Set("calibrate", "32");
    Plugin::Get().Set("taus", "");
  }

  std::vector<float> KeyRow(std::int64_t cell, int sign) const {
    std::vector<float> row = Normal(kDim, static_cast<unsigned>(cell), 0.05f);
    row[0] = (cell % 2 == 0 ? kNear : -kNear) * static_cast<float>(sign);
    return row;
  }
  void Fill(std::int64_t begin, std::int64_t end, Values values, int sign) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::vector<float> k = KeyRow(r, sign);
      const std::vector<float> v(kDim, r % 2 == 0 ? values.first : values.second);
      ggml_fp32_to_fp16_row(k.data(), static_cast<ggml_fp16_t*>(cache_.k->data) + r * kDim, kDim);
      ggml_fp32_to_fp16_row(v.data(), static_cast<ggml_fp16_t*>(cache_.v->data) + r * kDim, kDim);
    }
  }
  void ShowUpTo(std::int64_t end) {
    in_.mask.assign(static_cast<std::size_t>(kNkv), 0xFC00);
    for (std::int64_t r = 0; r < end; ++r) in_.mask[static_cast<std::size_t>(r)] = 0;
  }

  // Changes one cell behind the graph's back, so that it draws all the mass (or, with a negative logit, none).
  void Draw(std::int64_t cell, float value, float logit) {
    const std::vector<float> v(kDim, value);
    static_cast<ggml_fp16_t*>(cache_.k->data)[cell * kDim] = ggml_fp32_to_fp16(logit);
    ggml_fp32_to_fp16_row(v.data(), static_cast<ggml_fp16_t*>(cache_.v->data) + cell * kDim, kDim);
  }

  // Writes cells through the graph, as llama.cpp does with new tokens. Every graph of llama.cpp writes K and V.
  void Write(const std::vector<std::int64_t>& cells, Values values, int sign) {
    ContextPtr context = MakeContext();
    ggml_context* c = context.get();
    const auto n = static_cast<std::int64_t>(cells.size());
    ggml_tensor* k = ggml_new_tensor_2d(c, GGML_TYPE_F32, kDim, n);
    ggml_tensor* v = ggml_new_tensor_2d(c, GGML_TYPE_F32, kDim, n);
    ggml_tensor* index = ggml_new_tensor_1d(c, GGML_TYPE_I64, n);
    for (ggml_tensor* t : {k, v, index}) ggml_set_input(t);
    ggml_cgraph* graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, ggml_set_rows(c, cache_.k, k, index));
    ggml_build_forward_expand(graph, ggml_set_rows(c, cache_.v, v, index));
    ggml_backend_sched_reset(session_->sched());
    ASSERT_TRUE(ggml_backend_sched_alloc_graph(session_->sched(), graph));
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t cell = cells[static_cast<std::size_t>(i)];
      const std::vector<float> key = KeyRow(cell, sign);
      const std::vector<float> value(kDim, cell % 2 == 0 ? values.first : values.second);
      const std::size_t at = static_cast<std::size_t>(i) * kDim * sizeof(float);
      ggml_backend_tensor_set(k, key.data(), at, kDim * sizeof(float));
      ggml_backend_tensor_set(v, value.data(), at, kDim * sizeof(float));
    }
    ggml_backend_tensor_set(index, cells.data(), 0, ggml_nbytes(index));
    ASSERT_EQ(ggml_backend_sched_graph_compute(session_->sched(), graph), GGML_STATUS_SUCCESS);
  }
  // Makes the plugin see that it is asked for the cache's writes.
  void Track() { Write({kFilled}, {0.0f, 0.0f}, +1); }

  float Attend() {
    AttentionGraph graph(*session_, cache_, in_);
    EXPECT_TRUE(graph.on_plugin());
    return graph.Compute(in_)[5];
  }
  // Attends and expects the sparse operator to have answered.
  float AttendSparsely() {
    const auto before = Plugin::Get().Stats();
    const float x = Attend();
    const auto after = Plugin::Get().Stats();
    EXPECT_EQ(after.sparse_calls - before.sparse_calls, 1u);
    EXPECT_LT(after.rows_read - before.rows_read, after.rows_visible - before.rows_visible);
    return x;
  }

  std::optional<Session> session_{true};
  Cache cache_{kDim, 1, kCells, 1, GGML_TYPE_F16, GGML_TYPE_F16};
  AttentionInputs in_;
};

TEST_F(CacheChange, NothingChanged) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
}

TEST_F(CacheChange, WritesThroughTheGraphAreSeen) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  std::vector<std::int64_t> cells;
  for (std::int64_t r = 0; r < kFilled; r += 2) cells.push_back(r);
  Write(cells, {7.0f, 0.0f}, +1);
  EXPECT_NEAR(Attend(), 7.0f, 0.05f);
  EXPECT_NEAR(Attend(), 7.0f, 0.05f);
}

// One cell of 1,500 is too little for the comparison of some rows at each step: the write itself must be noticed.
TEST_F(CacheChange, OneOverwrittenCellIsSeen) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  const std::uint64_t dropped = Plugin::Get().Stats().dropped_blocks;
  Write({kIgnored}, {0.0f, 5.0f}, +1);
  Draw(kIgnored, 5.0f, 40.0f);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
  EXPECT_EQ(Plugin::Get().Stats().dropped_blocks - dropped, 1u);
}

TEST_F(CacheChange, OneChangedCellIsSeenWhenCellsVanish) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  ShowUpTo(1400);
  Draw(kIgnored, 5.0f, 40.0f);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
}

TEST_F(CacheChange, OneChangedCellIsSeenWhenCellsAppearThatWereNotWritten) {
  ShowUpTo(1400);
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  ShowUpTo(1401);
  Draw(kIgnored, 5.0f, 40.0f);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
}

// A state of 1,400 cells was loaded and the text went on: the visible cells are the same as before.
TEST_F(CacheChange, OneChangedCellIsSeenWhenSeenCellsAreWrittenAnew) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  Draw(kIgnored, 5.0f, 40.0f);
  std::vector<std::int64_t> cells;
  for (std::int64_t r = 1400; r < kFilled; ++r) cells.push_back(r);
  Write(cells, {1.0f, 2.0f}, +1);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
}

TEST_F(CacheChange, OneChangedCellIsSeenThoughTheVisibleCellsAreTheSame) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  Draw(kIgnored, 5.0f, 40.0f);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
}

TEST_F(CacheChange, ReplacedContentIsSeen) {
  // A state load writes behind the graph's back; the visible cells stay the same.
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  Fill(0, kFilled, {3.0f, 4.0f}, +1);
  EXPECT_NEAR(Attend(), 3.0f, 0.03f);
  Fill(0, kFilled, {3.0f, 4.0f}, -1);
  EXPECT_NEAR(Attend(), 4.0f, 0.03f);
}

TEST_F(CacheChange, ReplacedContentBehindAJumpIsSeen) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  // Removing a suffix, loading something shorter, growing again by a copy.
  ShowUpTo(800);
  Fill(500, 800, {1.0f, 2.0f}, +1);
  EXPECT_NEAR(Attend(), 1.0f, 0.02f);
  Fill(0, kFilled, {6.0f, 2.0f}, +1);
  ShowUpTo(kFilled);
  EXPECT_NEAR(Attend(), 6.0f, 0.05f);
}

TEST_F(CacheChange, APositionShiftIsSeen) {
  Draw(700, 5.0f, -40.0f);
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  // The K-shift of llama.cpp: a rotation of keys in place. Here of one cell by 3 positions: cos 3 = -0.99 turns the
  // key's first component, on which the logit rests, around.
  ContextPtr context = MakeContext();
  ggml_context* c = context.get();
  ggml_tensor* view = ggml_view_3d(c, cache_.k, kDim, 1, kCells, ggml_row_size(GGML_TYPE_F16, kDim),
                                   ggml_row_size(GGML_TYPE_F16, kDim), 0);
  ggml_tensor* shift = ggml_new_tensor_1d(c, GGML_TYPE_I32, kCells);
  ggml_set_input(shift);
  ggml_tensor* rope = ggml_rope_ext_inplace(c, view, shift, nullptr, kDim, 0, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 0, 0);
  ggml_cgraph* graph = ggml_new_graph(c);
  ggml_build_forward_expand(graph, rope);
  ggml_backend_sched_reset(session_->sched());
  ASSERT_TRUE(ggml_backend_sched_alloc_graph(session_->sched(), graph));
  std::vector<std::int32_t> by(static_cast<std::size_t>(kCells), 0);
  by[700] = 3;
  ggml_backend_tensor_set(shift, by.data(), 0, ggml_nbytes(shift));
  ASSERT_EQ(ggml_backend_sched_graph_compute(session_->sched(), graph), GGML_STATUS_SUCCESS);
  EXPECT_NEAR(Attend(), 5.0f, 0.03f);
}

// A prompt of two sequences: the last row does not see the cell.
TEST_F(CacheChange, OneChangedCellIsSeenThatOnlyTheFirstRowsOfAPromptSee) {
  constexpr int kRows = 128;
  Plugin::Get().Set("prompt_tolerance", "1");
  in_.n_q = kRows;
  in_.q.assign(static_cast<std::size_t>(kRows) * 2 * kDim, 0.0f);
  for (std::size_t i = 0; i < in_.q.size(); i += kDim) in_.q[i] = 1.0f;
  in_.mask.assign(static_cast<std::size_t>(kRows) * kNkv, 0xFC00);
  for (int row = 0; row < kRows; ++row) {
    const auto cells = in_.mask.begin() + static_cast<std::ptrdiff_t>(row) * kNkv;
    std::fill(cells + (row < kRows / 2 ? 0 : 1400), cells + kFilled, 0);
  }
  EXPECT_NEAR(Attend(), 1.0f, 0.02f);  // measures a tile and builds blocks
  const auto before = Plugin::Get().Stats();
  EXPECT_NEAR(Attend(), 1.0f, 0.02f);
  EXPECT_GT(Plugin::Get().Stats().prompt_sparse_tiles, before.prompt_sparse_tiles);
  Draw(kIgnored, 5.0f, 40.0f);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
  Plugin::Get().Set("prompt_tolerance", "0");
}

// A cache of two layers, that of the fixture and one above it. Only a change of the lowest layer's keys is looked for.
class TwoLayers : public CacheChange {
 protected:
  void SetUp() override {
    CacheChange::SetUp();
    // As if llama.cpp had put both into one buffer, as it does with the layers of a cache.
    upper_.k->buffer = upper_.v->buffer = cache_.buffer.get();
    InUpper([this] {
      Fill(0, kFilled, {1.0f, 2.0f}, +1);
      Track();
    });
  }
  // Does something with the upper layer.
  template <typename F>
  void InUpper(const F& f) {
    std::swap(cache_, upper_);
    f();
    std::swap(cache_, upper_);
  }

  Cache upper_{kDim, 1, kCells, 1, GGML_TYPE_F16, GGML_TYPE_F16, "cache_k_l4", "cache_v_l4"};
};

TEST_F(TwoLayers, TheLowerOneTellsTheUpperOne) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  InUpper([this] { EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f); });
  Draw(kIgnored, 5.0f, 40.0f);
  InUpper([this] { Draw(kIgnored, 6.0f, 40.0f); });
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
  InUpper([this] { EXPECT_NEAR(Attend(), 6.0f, 0.02f); });
}

TEST_F(TwoLayers, ALowerOneThatComesLaterTellsTheUpperOne) {
  InUpper([this] { EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f); });
  InUpper([this] { Draw(kIgnored, 6.0f, 40.0f); });
  Attend();
  InUpper([this] { EXPECT_NEAR(Attend(), 6.0f, 0.02f); });
  Draw(kIgnored, 5.0f, 40.0f);
  InUpper([this] { Draw(kIgnored + 2, 7.0f, 50.0f); });
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
  InUpper([this] { EXPECT_NEAR(Attend(), 7.0f, 0.02f); });
}

TEST_F(TwoLayers, TheUpperOneLooksItselfWhereTheLowerOneDoesNotCome) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  InUpper([this] { EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f); });
  InUpper([this] {
    Draw(kIgnored, 6.0f, 40.0f);
    Write({kFilled + 1}, {1.0f, 2.0f}, +1);
    EXPECT_NEAR(Attend(), 6.0f, 0.02f);
  });
}

// A step of which the upper layer saw nothing, since the evaluation ended early, let other cells be seen.
TEST_F(TwoLayers, TheUpperOneHearsOfWhatItMissed) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  InUpper([this] { EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f); });
  Draw(kIgnored, 5.0f, 40.0f);
  InUpper([this] { Draw(kIgnored, 6.0f, 40.0f); });
  in_.mask[kIgnored] = 0xFC00;
  Attend();
  in_.mask[kIgnored] = 0;
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
  InUpper([this] { EXPECT_NEAR(Attend(), 6.0f, 0.02f); });
}

TEST_F(CacheChange, ACacheAtTheSameAddressWithAnotherShapeIsAnotherLayer) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  // The same memory, now two KV heads of half the size.
  Cache other(kDim / 2, 2, kCells, 1, GGML_TYPE_F16, GGML_TYPE_F16);
  other.k->data = cache_.k->data;
  other.v->data = cache_.v->data;
  AttentionInputs in = in_;
  in.q.assign(2 * kDim / 2, 0.0f);
  in.q[0] = in.q[kDim / 2] = 1.0f;
  AttentionGraph graph(*session_, other, in);
  ASSERT_TRUE(graph.on_plugin());
  const std::vector<float> out = graph.Compute(in);
  const std::vector<double> reference = Reference(other, in);
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], reference[i], 0.05);
}

TEST_F(CacheChange, WithoutTrackedWritesTheAnswerIsExact) {
  // While the plugin is off somebody else writes the cells.
  Plugin::Get().Set("mode", "off");
  Track();
  Plugin::Get().Set("mode", "auto");
  const auto before = Plugin::Get().Stats();
  EXPECT_NEAR(Attend(), 1.0f, 0.001f);
  const auto after = Plugin::Get().Stats();
  EXPECT_EQ(after.exact_calls - before.exact_calls, 1u);
  Track();
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
}

TEST_F(CacheChange, TheCalibrationWindowIsExactAndEnds) {
  Plugin::Get().Set("calibrate", "3");
  const auto before = Plugin::Get().Stats();
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(Attend(), 1.0f, 0.001f);
  const auto after = Plugin::Get().Stats();
  EXPECT_EQ(after.calibration_calls - before.calibration_calls, 3u);
  EXPECT_EQ(after.calibrated_layers - before.calibrated_layers, 1u);
  AttendSparsely();
}

// Thresholds from a file. The cache is that of layer 3, with one KV head.
class GivenTaus : public CacheChange {
 protected:
  void SetUp() override {
    CacheChange::SetUp();
    Plugin::Get().Set("calibrate", "3");
  }
  static std::string Write(const std::string& text) {
    const std::string path =
        testing::TempDir() + "/scsa_" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".json";
    std::ofstream(path) << text;
    return path;
  }
  // The file with version, preset fast and its parameters, and `more` ("taus" at least).
  static std::string Versioned(const std::string& more) {
    return "{\"format\": \"scsa-taus\", \"version\": 1, \"preset\": \"fast\", \"config\": {\"cluster_size\": 8, "
           "\"block_size\": 256, \"sink\": 4, \"recent\": 96, \"packed_format\": \"none\", \"power_iterations\": 3, "
           "\"statistic\": \"mean\", \"kmeans_rounds\": 2, \"tail_shrink\": 0.5}, " +
           more + "}";
  }
  // One step that is exact and part of a calibration window; what the plugin said about it.
  std::string AttendCalibrating() {
    testing::internal::CaptureStderr();
    const auto before = Plugin::Get().Stats();
    EXPECT_NEAR(Attend(), 1.0f, 0.001f);
    EXPECT_EQ(Plugin::Get().Stats().calibration_calls - before.calibration_calls, 1u);
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(GivenTaus, TheFirstStepIsSparse) {
  const auto before = Plugin::Get().Stats();
  Plugin::Get().Set("taus", Write("{\"3:0\": 0.0625}").c_str());
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  const auto after = Plugin::Get().Stats();
  EXPECT_EQ(after.calibration_calls, before.calibration_calls);
  EXPECT_EQ(after.calibrated_layers - before.calibrated_layers, 1u);
  EXPECT_NE(Plugin::Get().Taus().find("\"3:0\": 0.0625\n"), std::string::npos) << Plugin::Get().Taus();
}

TEST_F(GivenTaus, AVersionedFileIsUsedWithItsTolerance) {
  Plugin::Get().Set("taus", Write(Versioned("\"tolerance\": 0.03125, \"taus\": {\"3:0\": 0.125}")).c_str());
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  EXPECT_NE(Plugin::Get().Taus().find("\"tolerance\": 0.03125,"), std::string::npos) << Plugin::Get().Taus();
}

TEST_F(GivenTaus, WhatCalibrationFoundIsGivenOutAndTakenBack) {
  EXPECT_EQ(Plugin::Get().Taus(), "");
  for (int i = 0; i < 3; ++i) AttendCalibrating();
  const std::string taus = Plugin::Get().Taus();
  EXPECT_EQ(taus.rfind("{\n  \"format\": \"scsa-taus\",\n  \"version\": 1,\n  \"preset\": \"fast\",\n", 0), 0u) << taus;
  EXPECT_NE(taus.find("\"3:0\": "), std::string::npos) << taus;
  char cut[8];
  EXPECT_EQ(Plugin::Get().get_taus()(cut, sizeof(cut)), taus.size());
  EXPECT_EQ(std::string(cut), taus.substr(0, 7));
  Plugin::Get().Set("taus", Write(taus).c_str());
}

TEST_F(GivenTaus, ALayerThatIsNotInTheFileCalibratesItself) {
  Plugin::Get().Set("taus", Write("{\"2:0\": 0.1}").c_str());
  EXPECT_EQ(AttendCalibrating(), "");
}

TEST_F(GivenTaus, AFileThatDoesNotFitIsNotUsedAndSaysWhy) {
  const std::pair<std::string, std::string> cases[] = {
      {"{\"3:0\": 0.1, \"3:1\": 0.1}", "layer 3 has 2 thresholds, preset fast needs one for each of 1 KV heads"},
      {Versioned("\"model\": {\"layers\": 3, \"q_heads\": 0, \"kv_heads\": 0, \"head_dim\": 0}, \"taus\": {}"),
       "a model of 3 layers, layer 3 exists here"},
      {Versioned("\"model\": {\"layers\": 9, \"q_heads\": 2, \"kv_heads\": 1, \"head_dim\": 128}, \"taus\": {}"),
       "head_dim 128, here it is 64"},
  };
  for (const auto& [text, part] : cases) {
    SCOPED_TRACE(part);
    Cache cache(kDim, 1, kCells, 1, GGML_TYPE_F16, GGML_TYPE_F16);
    std::swap(cache_, cache);
    Fill(0, kFilled, {1.0f, 2.0f}, +1);
    Track();
    Plugin::Get().Set("taus", Write(text).c_str());
    std::optional<Session> session(true);
    std::swap(session_, session);
    const std::string said = AttendCalibrating();
    EXPECT_NE(said.find(part), std::string::npos) << said;
    EXPECT_NE(said.find("calibrating instead"), std::string::npos) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    std::swap(session_, session);
  }
}

TEST_F(GivenTaus, AnotherPresetOrToleranceIsNotUsed) {
  Plugin::Get().Set("taus", Write(Versioned("\"taus\": {\"3:0\": 0.1}")).c_str());
  Plugin::Get().Set("preset", "seed");
  EXPECT_NE(AttendCalibrating().find("preset fast, here it is seed: use preset fast"), std::string::npos);
  Plugin::Get().Set("preset", "fast");
}

TEST_F(GivenTaus, AFileThatDoesNotFitOneLayerIsNotUsedForTheOthers) {
  Plugin::Get().Set("taus", Write("{\"3:0\": 0.1, \"4:0\": 0.1, \"4:1\": 0.1}").c_str());
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  Cache other(kDim, 1, kCells, 1, GGML_TYPE_F16, GGML_TYPE_F16, "cache_k_l4", "cache_v_l4");
  std::swap(cache_, other);
  Fill(0, kFilled, {1.0f, 2.0f}, +1);
  Track();
  EXPECT_NE(AttendCalibrating().find("layer 4 has 2 thresholds"), std::string::npos);
  std::swap(cache_, other);
  EXPECT_EQ(AttendCalibrating(), "");
  EXPECT_EQ(Plugin::Get().Taus(), "");
}

TEST_F(GivenTaus, ABrokenFileIsRefusedAndChangesNothing) {
  Plugin::Get().Set("taus", Write("{\"3:0\": 0.1}").c_str());
  const std::string broken = testing::TempDir() + "/scsa_broken.json";
  std::ofstream(broken) << "{\"3:0\": 2}";
  const char* error = Plugin::Get().set()("taus", broken.c_str());
  ASSERT_NE(error, nullptr);
  EXPECT_NE(std::string(error).find("a tau must be in [0, 1]"), std::string::npos) << error;
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
}

TEST(CacheLifetime, ContextsInSeveralThreadsDoNotMeet) {
  struct Fixture : CacheChange {
    void TestBody() override {}
    void Prepare(float value) {
      SetUp();
      Fill(0, kFilled, {value, 0.0f}, +1);
    }
    void Run(float value) {
      for (int i = 0; i < 10; ++i) {
        EXPECT_NEAR(Attend(), value, 0.02f * value);
        Write({kFilled + 1 + i}, {value, 0.0f}, +1);
        ShowUpTo(kFilled + 2 + i);
      }
    }
  };
  std::vector<std::unique_ptr<Fixture>> contexts;
  for (int t = 0; t < 3; ++t) {
    contexts.push_back(std::make_unique<Fixture>());
    contexts.back()->Prepare(static_cast<float>(t + 1));
  }
  const auto before = Plugin::Get().Stats();
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&contexts, t] { contexts[static_cast<std::size_t>(t)]->Run(static_cast<float>(t + 1)); });
  }
  for (std::thread& thread : threads) thread.join();
  const auto after = Plugin::Get().Stats();
  EXPECT_EQ(after.attn_calls - before.attn_calls, 30u);
  EXPECT_GT(after.sparse_calls - before.sparse_calls, 0u);
}

TEST(CacheLifetime, AFreedContextTakesItsPlansAlong) {
  Plugin::Get().Set("mode", "auto");
  const std::uint64_t before = Plugin::Get().Stats().plan_bytes;
  {
    struct Fixture : CacheChange {
      void TestBody() override {}
      void Run() {
        SetUp();
        AttendSparsely();
        EXPECT_GT(Plugin::Get().Stats().plan_bytes, 0u);
        TearDown();
      }
    } fixture;
    fixture.Run();
  }
  EXPECT_EQ(Plugin::Get().Stats().plan_bytes, before);
}

TEST_F(CacheChange, ChecksCanBeTurnedOffAndOn) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  Plugin::Get().Set("checks", "off");
  Fill(0, kFilled, {7.0f, 8.0f}, +1);
  ShowUpTo(kFilled - 300);
  const auto before = Plugin::Get().Stats();
  AttendSparsely();
  EXPECT_EQ(Plugin::Get().Stats().dropped_blocks, before.dropped_blocks);
  Plugin::Get().Set("checks", "on");
  EXPECT_NEAR(Attend(), 7.0f, 0.05f);
  EXPECT_GT(Plugin::Get().Stats().dropped_blocks, before.dropped_blocks);
}

// Runs everything that the plugin's backend computes inside ShortMemory::In.
const test::ShortMemory* g_memory = nullptr;
ggml_status (*g_graph_compute)(ggml_backend_t, ggml_cgraph*) = nullptr;
ggml_status ComputeInShortMemory(ggml_backend_t backend, ggml_cgraph* graph) {
  if (g_memory == nullptr) return g_graph_compute(backend, graph);
  return g_memory->In([&] { return g_graph_compute(backend, graph); });
}

class ShortOfMemory : public CacheChange, public testing::WithParamInterface<std::pair<const char*, bool>> {
 protected:
  // A life of the cache: it is read, written through the graph, and changed behind the graph's back. Returns the calls
  // that the exact kernel answered.
  std::uint64_t Live(const test::ShortMemory& memory) {
    Fill(0, kFilled, {1.0f, 2.0f}, +1);
    ShowUpTo(kFilled);
    session_.reset();
    session_.emplace(true);
    ggml_backend_t backend = session_->first_backend();
    g_graph_compute = backend->iface.graph_compute;
    backend->iface.graph_compute = ComputeInShortMemory;
    g_memory = &memory;
    const auto before = Plugin::Get().Stats();
    Track();
    for (int i = 0; i < 4; ++i) ExpectNear(1.0f);
    std::vector<std::int64_t> cells;
    for (std::int64_t r = 0; r < kFilled; r += 2) cells.push_back(r);
    Write(cells, {7.0f, 0.0f}, +1);
    for (int i = 0; i < 2; ++i) ExpectNear(7.0f);
    Fill(0, kFilled, {3.0f, 4.0f}, +1);
    ShowUpTo(kFilled - 300);
    for (int i = 0; i < 3; ++i) ExpectNear(3.0f);
    g_memory = nullptr;
    return Plugin::Get().Stats().exact_calls - before.exact_calls;
  }
  void ExpectNear(float value) {
    AttentionGraph graph(*session_, cache_, in_);
    EXPECT_TRUE(graph.on_plugin());
    std::vector<float> out;
    const ggml_status status = graph.TryCompute(in_, &out);
    if (status == GGML_STATUS_SUCCESS) {
      EXPECT_NEAR(out[5], value, 0.02f * value);
    } else {
      EXPECT_EQ(status, GGML_STATUS_ALLOC_FAILED);
    }
  }
};

TEST_P(ShortOfMemory, AnswersStayRightAndItRecovers) {
  const auto& [calibrate, for_good] = GetParam();
  Plugin::Get().Set("calibrate", calibrate);
  Plugin::Get().Set("audit", "1");
  const std::uint64_t exact_calls = Live(test::ShortMemory(INT64_MAX, false));
  for (std::int64_t k = 1;; k += test::kAllocationStride) {
    SCOPED_TRACE("allocation " + std::to_string(k));
    const test::ShortMemory memory(k, for_good);
    const auto before = Plugin::Get().Stats();
    const std::uint64_t exact = Live(memory);
    const auto after = Plugin::Get().Stats();
    if (exact > exact_calls) {
      EXPECT_GT(after.failures, before.failures);
    }
    if (HasFailure()) break;
    if (!memory.failed()) {
      EXPECT_GT(k, 50);
      EXPECT_EQ(exact, exact_calls);
      break;
    }
    // With memory again, the rest of the calibration window, then sparse answers.
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(Attend(), 3.0f, 0.06f);
    EXPECT_NEAR(AttendSparsely(), 3.0f, 0.06f);
  }
  Plugin::Get().Set("audit", "0.00390625");
}
INSTANTIATE_TEST_SUITE_P(All, ShortOfMemory,
                         testing::Values(std::pair("0", false), std::pair("0", true), std::pair("3", false),
                                         std::pair("3", true)),
                         [](const auto& test) {
                           return std::string(test.param.second ? "for_good" : "once") + "_calibrating" +
                                  test.param.first;
                         });

}  // namespace
}  // namespace scsa::plugin_test
