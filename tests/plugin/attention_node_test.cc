// SPDX-License-Identifier: Apache-2.0
//
// FLASH_ATTN_EXT nodes through ggml's scheduler: the plugin's result and ggml-cpu's, each against double precision.
#include <sstream>

#include "plugin_fixture.h"

namespace scsa::plugin_test {
namespace {

constexpr ggml_fp16_t kSeen = 0x0000;
constexpr ggml_fp16_t kHidden = 0xFC00;

struct Case {
  int q_heads, kv_heads, head_dim;
  ggml_type k_type, v_type;
  int n_q;
  int streams;
  bool mask, sinks;
  float softcap;
};

std::string NameOf(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::ostringstream name;
  name << 'q' << c.q_heads << "kv" << c.kv_heads << 'd' << c.head_dim << '_' << ggml_type_name(c.k_type) << '_'
       << ggml_type_name(c.v_type) << "_n" << c.n_q << "_s" << c.streams << (c.mask ? "_mask" : "")
       << (c.sinks ? "_sinks" : "") << (c.softcap != 0 ? "_softcap" : "");
  return name.str();
}

AttentionInputs MakeInputs(const Case& c, std::int64_t n_kv, unsigned seed) {
  AttentionInputs in;
  in.q_heads = c.q_heads;
  in.n_q = c.n_q;
  in.n_kv = n_kv;
  in.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  in.softcap = c.softcap;
  in.q = Normal(static_cast<std::size_t>(c.head_dim) * c.q_heads * c.n_q * c.streams, seed, 2.0f);
  if (c.mask) {
    // Causal at the end, with holes before it: cells of other sequences.
    std::mt19937 random(seed);
    in.mask.resize(static_cast<std::size_t>(c.streams) * c.n_q * n_kv);
    for (std::size_t m = 0; m < in.mask.size(); ++m) {
      const std::int64_t r = static_cast<std::int64_t>(m) % n_kv;
      const std::int64_t i = static_cast<std::int64_t>(m) / n_kv % c.n_q;
      in.mask[m] = r > n_kv - 40 + i || random() % 8 == 0 ? kHidden : kSeen;
    }
  }
  if (c.sinks) in.sinks = Normal(static_cast<std::size_t>(c.q_heads), seed + 1, 2.0f);
  return in;
}

class AttentionNode : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { Plugin::Get().Set("mode", "exact"); }
};

TEST_P(AttentionNode, IsExact) {
  const Case& c = GetParam();
  constexpr std::int64_t kCells = 1024;
  constexpr std::int64_t kNkv = 768;
  Cache cache(c.head_dim, c.kv_heads, kCells, c.streams, c.k_type, c.v_type);
  const std::size_t n = static_cast<std::size_t>(ggml_nelements(cache.k));
  Cache::Fill(cache.k, Normal(n, 1));
  std::vector<float> v = Normal(n, 2);
  for (float& x : v) x += 1.0f;
  Cache::Fill(cache.v, v);
  const AttentionInputs in = MakeInputs(c, kNkv, 3);

  const Session ours(true);
  AttentionGraph graph(ours, cache, in);
  ASSERT_TRUE(graph.on_plugin());
  const scsa_plugin_stats before = Plugin::Get().Stats();
  const std::vector<float> a = graph.Compute(in);
  const scsa_plugin_stats after = Plugin::Get().Stats();
  EXPECT_EQ(after.attn_calls - before.attn_calls, 1u);
  EXPECT_EQ(after.exact_calls - before.exact_calls, static_cast<std::uint64_t>(c.streams));

  const Session theirs(false);
  AttentionGraph ggml_graph(theirs, cache, in);
  ASSERT_FALSE(ggml_graph.on_plugin());
  const std::vector<float> b = ggml_graph.Compute(in);

  const std::vector<double> reference = Reference(cache, in);
  const double our_error = RelativeError(a, reference);
  const double ggml_error = RelativeError(b, reference);
  RecordProperty("our_error", std::to_string(our_error));
  RecordProperty("ggml_error", std::to_string(ggml_error));
  // With q8_0 keys a kernel may quantise the query too, as ggml does.
  EXPECT_LT(our_error, c.k_type == GGML_TYPE_Q8_0 ? 1e-2 : 1e-4);
  EXPECT_LT(ggml_error, 5e-2);
  // ggml adds values of f16 up in f16, but not where 64 query rows or more make tiles.
  if (c.v_type == GGML_TYPE_F16 && c.n_q < 64) {
    EXPECT_LT(our_error, ggml_error);
  }
}

std::vector<Case> Cases() {
  constexpr ggml_type kTypes[] = {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0};
  constexpr int kShapes[][3] = {{9, 3, 64}, {14, 2, 64}, {4, 1, 256}, {16, 8, 128}};
  std::vector<Case> cases;
  for (ggml_type type : kTypes) {
    for (const auto& s : kShapes) cases.push_back({s[0], s[1], s[2], type, type, 1, 1, true, false, 0.0f});
  }
  for (int n_q : {2, 5, 16, 70}) {
    for (ggml_type type : kTypes) cases.push_back({9, 3, 64, type, type, n_q, 1, true, false, 0.0f});
  }
  const ggml_type f16 = GGML_TYPE_F16;
  cases.push_back({14, 2, 64, f16, f16, 1, 1, false, false, 0.0f});
  cases.push_back({16, 8, 128, f16, f16, 1, 1, true, true, 0.0f});
  cases.push_back({16, 8, 128, f16, f16, 3, 1, true, true, 0.0f});
  cases.push_back({9, 3, 64, f16, f16, 1, 1, true, false, 30.0f});
  cases.push_back({9, 3, 64, f16, f16, 1, 2, true, false, 0.0f});
  cases.push_back({9, 3, 64, f16, f16, 4, 2, true, true, 20.0f});
  cases.push_back({9, 3, 64, GGML_TYPE_Q8_0, f16, 1, 1, true, false, 0.0f});
  cases.push_back({8, 8, 80, f16, f16, 1, 1, true, false, 0.0f});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All, AttentionNode, testing::ValuesIn(Cases()), NameOf);

// What stays ggml's.

constexpr Case kPlain = {9, 3, 64, GGML_TYPE_F16, GGML_TYPE_F16, 1, 1, true, false, 0.0f};

std::unique_ptr<Cache> FilledCache(const Case& c, std::int64_t cells = 1024, const char* k_name = "cache_k_l3",
                                   const char* v_name = "cache_v_l3") {
  auto cache = std::make_unique<Cache>(c.head_dim, c.kv_heads, cells, c.streams, c.k_type, c.v_type, k_name, v_name);
  const std::size_t n = static_cast<std::size_t>(ggml_nelements(cache->k));
  Cache::Fill(cache->k, Normal(n, 1));
  Cache::Fill(cache->v, Normal(n, 2));
  return cache;
}

bool Taken(const Case& c, const Cache& cache, std::int64_t n_kv, float max_bias = 0.0f) {
  AttentionInputs in = MakeInputs(c, n_kv, 3);
  in.max_bias = max_bias;
  const Session session(true);
  return AttentionGraph(session, cache, in).on_plugin();
}

class Claim : public testing::Test {
 protected:
  void SetUp() override { Plugin::Get().Set("mode", "exact"); }
};

TEST_F(Claim, TakesDecodingOverAFilledCache) { EXPECT_TRUE(Taken(kPlain, *FilledCache(kPlain), 768)); }

TEST_F(Claim, LeavesAnEmptyCache) {
  const Cache empty(64, 3, 1024, 1, GGML_TYPE_F16, GGML_TYPE_F16);
  EXPECT_FALSE(Taken(kPlain, empty, 1024));
}

TEST_F(Claim, LeavesShortCaches) {
  const auto cache = FilledCache(kPlain);
  EXPECT_FALSE(Taken(kPlain, *cache, 256));
  EXPECT_TRUE(Taken(kPlain, *cache, 512));
}

TEST_F(Claim, TakesPrompts) {
  Case c = kPlain;
  c.n_q = 512;
  EXPECT_TRUE(Taken(c, *FilledCache(c), 768));
}

TEST_F(Claim, LeavesPositionBiases) { EXPECT_FALSE(Taken(kPlain, *FilledCache(kPlain), 768, 8.0f)); }

TEST_F(Claim, LeavesOtherTypes) {
  Case c = kPlain;
  c.k_type = GGML_TYPE_Q4_0;
  EXPECT_FALSE(Taken(c, *FilledCache(c), 768));
}

TEST_F(Claim, LeavesTensorsThatAreNoCache) {
  EXPECT_FALSE(Taken(kPlain, *FilledCache(kPlain, 1024, "k", "v"), 768));
  EXPECT_FALSE(Taken(kPlain, *FilledCache(kPlain, 1024, "cache_k_l0", "cache_k_l0"), 768));
}

TEST_F(Claim, LeavesEverythingInModeOff) {
  Plugin::Get().Set("mode", "off");
  EXPECT_FALSE(Taken(kPlain, *FilledCache(kPlain), 768));
}

// What is decided at each step.

class Step : public testing::Test {
 protected:
  void SetUp() override { Plugin::Get().Set("mode", "exact"); }
  const Case c_ = kPlain;
  const std::unique_ptr<Cache> cache_ = FilledCache(kPlain);
  AttentionInputs in_ = MakeInputs(kPlain, 768, 3);
};

TEST_F(Step, ABiasInTheMaskIsLeftToGgml) {
  for (std::size_t i = 0; i < in_.mask.size(); i += 3) in_.mask[i] = ggml_fp32_to_fp16(-1.5f);
  const Session ours(true);
  const Session theirs(false);
  AttentionGraph graph(ours, *cache_, in_);
  AttentionGraph ggml_graph(theirs, *cache_, in_);
  ASSERT_TRUE(graph.on_plugin());
  EXPECT_EQ(graph.Compute(in_), ggml_graph.Compute(in_));
}

TEST_F(Step, ModesSwitchWhileAGraphIsReused) {
  const Session ours(true);
  const Session theirs(false);
  AttentionGraph graph(ours, *cache_, in_);
  AttentionGraph ggml_graph(theirs, *cache_, in_);
  const std::vector<float> exact = graph.Compute(in_);
  const std::vector<float> ggml = ggml_graph.Compute(in_);
  EXPECT_NE(exact, ggml);
  Plugin::Get().Set("mode", "off");
  EXPECT_EQ(graph.Compute(in_), ggml);
  Plugin::Get().Set("mode", "limit");
  const scsa_plugin_stats before = Plugin::Get().Stats();
  EXPECT_EQ(graph.Compute(in_), std::vector<float>(exact.size(), 0.0f));
  EXPECT_EQ(Plugin::Get().Stats().limit_calls - before.limit_calls, 1u);
  Plugin::Get().Set("mode", "exact");
  EXPECT_EQ(graph.Compute(in_), exact);
}

TEST_F(Step, AnUnknownOptionIsRefusedWithOneLine) {
  const char* error = Plugin::Get().set()("mode", "quick");
  ASSERT_NE(error, nullptr);
  EXPECT_NE(std::string(error).find("auto, exact, off or limit"), std::string::npos);
  EXPECT_NE(Plugin::Get().set()("speed", "1"), nullptr);
}

TEST_F(Step, TheObserverSeesTheCall) {
  struct Seen {
    int calls = 0;
    scsa_attention_call call{};
    std::vector<float> out;
    std::uint64_t visible = 0;
  } seen;
  Plugin::Get().set_observer()(
      [](void* user, const scsa_attention_call* call) {
        auto* s = static_cast<Seen*>(user);
        ++s->calls;
        s->call = *call;
        for (int h = 0; h < call->q_heads; ++h) {
          s->out.insert(s->out.end(), call->out + h * call->out_head_stride,
                        call->out + h * call->out_head_stride + call->head_dim);
        }
        for (std::int64_t w = 0; w < call->n_kv / 64; ++w) s->visible += __builtin_popcountll(call->visible[w]);
      },
      &seen);
  const Session ours(true);
  AttentionGraph graph(ours, *cache_, in_);
  const std::vector<float> out = graph.Compute(in_);
  Plugin::Get().set_observer()(nullptr, nullptr);
  EXPECT_EQ(graph.Compute(in_), out);
  EXPECT_EQ(seen.calls, 1);
  EXPECT_EQ(seen.call.layer, 3);
  EXPECT_EQ(seen.call.path, 0);
  EXPECT_EQ(seen.call.q_heads, 9);
  EXPECT_EQ(seen.call.kv_heads, 3);
  EXPECT_EQ(seen.call.head_dim, 64);
  EXPECT_EQ(seen.call.n_kv, 768);
  EXPECT_EQ(seen.call.k_type, GGML_TYPE_F16);
  EXPECT_EQ(seen.call.k, cache_->k->data);
  EXPECT_EQ(seen.out, out);
  std::uint64_t visible = 0;
  for (ggml_fp16_t m : in_.mask) visible += m == kSeen;
  EXPECT_EQ(seen.visible, visible);
}

}  // namespace
}  // namespace scsa::plugin_test
