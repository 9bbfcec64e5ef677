// SPDX-License-Identifier: Apache-2.0
//
// Cells that change after the sparse operator has planned over them. All values of one half of the cells are one
// vector, those of the other half another one, and the query's mass lies in one half: an answer from a stale plan is
// the wrong vector, whatever the operator opens or approximates.
#include <thread>

#include "plugin_fixture.h"

namespace scsa::plugin_test {
namespace {

constexpr int kDim = 64;
constexpr std::int64_t kCells = 2048;
constexpr std::int64_t kFilled = 1500;
constexpr std::int64_t kNkv = 1536;
constexpr float kNear = 10.0f;  // logit of the half that the query looks at; the other half has -kNear

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
    ggml_backend_sched_reset(session_.sched());
    ASSERT_TRUE(ggml_backend_sched_alloc_graph(session_.sched(), graph));
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t cell = cells[static_cast<std::size_t>(i)];
      const std::vector<float> key = KeyRow(cell, sign);
      const std::vector<float> value(kDim, cell % 2 == 0 ? values.first : values.second);
      const std::size_t at = static_cast<std::size_t>(i) * kDim * sizeof(float);
      ggml_backend_tensor_set(k, key.data(), at, kDim * sizeof(float));
      ggml_backend_tensor_set(v, value.data(), at, kDim * sizeof(float));
    }
    ggml_backend_tensor_set(index, cells.data(), 0, ggml_nbytes(index));
    ASSERT_EQ(ggml_backend_sched_graph_compute(session_.sched(), graph), GGML_STATUS_SUCCESS);
  }
  // Makes the plugin see that it is asked for the cache's writes.
  void Track() { Write({kFilled}, {0.0f, 0.0f}, +1); }

  float Attend() {
    AttentionGraph graph(session_, cache_, in_);
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

  const Session session_{true};
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
  Write({700}, {5.0f, 0.0f}, +1);
  Draw(700, 5.0f, 40.0f);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
}

TEST_F(CacheChange, OneChangedCellIsSeenWhenCellsVanish) {
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  ShowUpTo(1400);
  Draw(700, 5.0f, 40.0f);
  EXPECT_NEAR(Attend(), 5.0f, 0.02f);
}

TEST_F(CacheChange, OneChangedCellIsSeenWhenCellsAppearThatWereNotWritten) {
  ShowUpTo(1400);
  EXPECT_NEAR(AttendSparsely(), 1.0f, 0.02f);
  ShowUpTo(1401);
  Draw(700, 5.0f, 40.0f);
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
  ggml_backend_sched_reset(session_.sched());
  ASSERT_TRUE(ggml_backend_sched_alloc_graph(session_.sched(), graph));
  std::vector<std::int32_t> by(static_cast<std::size_t>(kCells), 0);
  by[700] = 3;
  ggml_backend_tensor_set(shift, by.data(), 0, ggml_nbytes(shift));
  ASSERT_EQ(ggml_backend_sched_graph_compute(session_.sched(), graph), GGML_STATUS_SUCCESS);
  EXPECT_NEAR(Attend(), 5.0f, 0.03f);
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
  AttentionGraph graph(session_, other, in);
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

}  // namespace
}  // namespace scsa::plugin_test
