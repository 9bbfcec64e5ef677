// SPDX-License-Identifier: Apache-2.0
//
// What programs do to a KV cache, step by step, on small models with random weights: without the plugin, in mode exact,
// and sparse with every cluster opened. All logits agree, and in mode exact also with those of a fresh context that
// decodes the same tokens.
//
//   SCSA_CACHE_LIFE_TOKENS=16384   tokens that the speculative decoding writes (default: kSpeculativeTokens)
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "small_model.h"
#include "true_errors.h"

namespace scsa::plugin_test {
namespace {

constexpr std::uint64_t kSpeculativeTokens = 2048;

// A context and what each of its sequences consists of, as long as some text describes it.
class Player {
 public:
  // fresh_interval: after how many comparable decodes a fresh context is asked; 0: never.
  Player(llama_model* model, const ContextOptions& options, int fresh_interval, double tolerance = kPlain)
      : model_(model), options_(options), fresh_interval_(fresh_interval), tolerance_(tolerance) {
    context_ = MakeLlama(model, options);
  }
  llama_context* context() const { return context_.get(); }
  llama_memory_t memory() const { return llama_get_memory(context_.get()); }
  const std::vector<std::vector<float>>& logits() const { return logits_; }
  Tokens& tokens(int seq = 0) { return sequences_[seq].tokens; }
  int fresh_comparisons() const { return fresh_comparisons_; }

  struct Token {
    llama_token token;
    llama_pos pos;
    llama_seq_id seq;
    bool output;
  };
  // One batch; the logits of its outputs are kept.
  void Batch(const std::vector<Token>& batch_tokens) {
    llama_batch batch = llama_batch_init(static_cast<std::int32_t>(batch_tokens.size()), 0, 1);
    batch.n_tokens = static_cast<std::int32_t>(batch_tokens.size());
    for (std::size_t i = 0; i < batch_tokens.size(); ++i) {
      const Token& t = batch_tokens[i];
      batch.token[i] = t.token;
      batch.pos[i] = t.pos;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = t.seq;
      batch.logits[i] = t.output;
      sequences_[t.seq].tokens.push_back(t.token);
    }
    const int status = llama_decode(context_.get(), batch);
    llama_batch_free(batch);
    if (status != 0) throw std::runtime_error("llama_decode ended with " + std::to_string(status));
    for (std::size_t i = 0; i < batch_tokens.size(); ++i) {
      if (!batch_tokens[i].output) continue;
      const float* row = llama_get_logits_ith(context_.get(), static_cast<std::int32_t>(i));
      logits_.emplace_back(row, row + kVocab);
    }
    std::set<int> seqs;
    for (const Token& t : batch_tokens) seqs.insert(t.seq);
    if (seqs.size() == 1 && batch_tokens.back().output) CompareWithFresh(*seqs.begin());
  }
  llama_pos Next(int seq) const { return llama_memory_seq_pos_max(memory(), seq) + 1; }
  // A prompt, one batch.
  void Append(const Tokens& tokens, int seq = 0) {
    std::vector<Token> batch;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      batch.push_back({tokens[i], Next(seq) + static_cast<llama_pos>(i), seq, i + 1 == tokens.size()});
    }
    Batch(batch);
  }
  // Single steps.
  void Steps(const Tokens& tokens, int seq = 0) {
    for (llama_token t : tokens) Batch({{t, Next(seq), seq, true}});
  }
  // One step of several sequences at once.
  void Together(const std::vector<int>& seqs, unsigned text) {
    std::vector<Token> batch;
    for (int seq : seqs) batch.push_back({Text(text + static_cast<unsigned>(seq), 1)[0], Next(seq), seq, true});
    Batch(batch);
  }
  void RemoveSuffix(int n, int seq = 0) {
    EXPECT_TRUE(llama_memory_seq_rm(memory(), seq, Next(seq) - n, -1));
    Tokens& t = sequences_[seq].tokens;
    t.resize(t.size() - static_cast<std::size_t>(n));
  }
  void RemoveMiddle(llama_pos begin, llama_pos end, int seq = 0) {
    EXPECT_TRUE(llama_memory_seq_rm(memory(), seq, begin, end));
    sequences_[seq].pure = false;
  }
  // As servers do when the context is full, or to use a cached chunk again.
  void Shift(llama_pos begin, llama_pos end, int seq = 0) {
    RemoveMiddle(begin, end, seq);
    llama_memory_seq_add(memory(), seq, end, -1, begin - end);
  }
  void Copy(int from, int to, llama_pos end = -1) {
    llama_memory_seq_cp(memory(), from, to, -1, end);
    sequences_[to] = sequences_[from];
    if (end >= 0) sequences_[to].tokens.resize(static_cast<std::size_t>(end));
  }
  void Clear(bool data) {
    llama_memory_clear(memory(), data);
    sequences_.clear();
  }
  void Forget(int seq = 0) {
    llama_memory_seq_rm(memory(), seq, -1, -1);
    sequences_[seq] = {};
  }

 private:
  struct Sequence {
    Tokens tokens;
    bool pure = true;
  };
  void CompareWithFresh(int seq) {
    const Sequence& s = sequences_[seq];
    if (fresh_interval_ == 0 || !s.pure || ++comparable_ % fresh_interval_ != 0) return;
    ContextOptions options = options_;
    options.n_seq = 1;
    options.unified = true;
    const LlamaContextPtr context = MakeLlama(model_, options);
    const std::vector<float> fresh = Decode(context.get(), s.tokens, 0);
    EXPECT_LE(RelativeDifference(logits_.back(), fresh), tolerance_)
        << "decode " << logits_.size() << ", sequence " << seq << ": not what a fresh context says";
    ++fresh_comparisons_;
  }

  llama_model* model_;
  ContextOptions options_;
  int fresh_interval_;
  double tolerance_;
  LlamaContextPtr context_;
  std::map<int, Sequence> sequences_;
  std::vector<std::vector<float>> logits_;
  int comparable_ = 0;
  int fresh_comparisons_ = 0;
};

class CacheLife : public testing::Test {
 protected:
  using Scenario = std::function<void(Player&)>;

  static void SetUpTestSuite() {
    model_ = MakeModel(2);
    taus_ = TemporaryFile("cache_life.json");
    WriteTaus(taus_, "0");
  }
  static void TearDownTestSuite() {
    model_.reset();
    std::remove(taus_.c_str());
  }
  void TearDown() override {
    const LoadedPlugin& plugin = LoadedPlugin::Get();
    plugin.Set("mode", "auto");
    plugin.Set("taus", "");
    plugin.Set("crossover", "4096");
    EXPECT_EQ(plugin.Stats().failures, failures_);
  }
  void SetUp() override { failures_ = LoadedPlugin::Get().Stats().failures; }

  // Every cluster opened, from the first cell on.
  static void Use(const char* mode) {
    const LoadedPlugin& plugin = LoadedPlugin::Get();
    plugin.Set("mode", mode);
    plugin.Set("preset", "fast");
    plugin.Set("crossover", "0");
    plugin.Set("taus", taus_);
  }

  struct Outcome {
    std::uint64_t calls = 0, exact = 0, sparse = 0;
    int fresh = 0;
    double worst = 0;
  };
  // against_ggml: what may separate an answer from one without the plugin. Sparse and exact are kPlain apart at most.
  static Outcome Compare(const ContextOptions& options, const Scenario& scenario, double against_ggml = kPlain,
                         int fresh_interval = 1) {
    const auto play = [&](const char* mode, int interval, int* comparisons = nullptr) {
      Use(mode);
      Player player(model_.get(), options, interval, against_ggml);
      scenario(player);
      if (comparisons != nullptr) *comparisons = player.fresh_comparisons();
      return player.logits();
    };
    Outcome outcome;
    const auto start = LoadedPlugin::Get().Stats();
    const auto without = play("off", 0);
    EXPECT_EQ(LoadedPlugin::Get().Stats().attn_calls, start.attn_calls);
    const auto exact = play("exact", fresh_interval, &outcome.fresh);
    const auto middle = LoadedPlugin::Get().Stats();
    const auto opened = play("auto", 0);
    const auto end = LoadedPlugin::Get().Stats();
    outcome.calls = end.attn_calls - start.attn_calls;
    outcome.exact = middle.exact_calls - start.exact_calls;
    outcome.sparse = end.sparse_calls - middle.sparse_calls;
    EXPECT_FALSE(without.empty());
    EXPECT_EQ(without.size(), exact.size());
    EXPECT_EQ(without.size(), opened.size());
    for (std::size_t i = 0; i < without.size(); ++i) {
      const double a = RelativeDifference(exact[i], without[i]);
      const double b = RelativeDifference(opened[i], without[i]);
      outcome.worst = std::max({outcome.worst, a, b});
      EXPECT_LE(a, against_ggml) << "exact, output " << i;
      EXPECT_LE(b, against_ggml) << "sparse, output " << i;
      EXPECT_LE(RelativeDifference(opened[i], exact[i]), kPlain) << "sparse and exact, output " << i;
    }
    testing::Test::RecordProperty("worst", std::to_string(outcome.worst));
    return outcome;
  }
  static void ExpectTaken(const Outcome& outcome) {
    EXPECT_GT(outcome.exact, 0u);
    EXPECT_GT(outcome.sparse, 0u);
  }

  static ModelPtr model_;
  static std::string taus_;
  std::uint64_t failures_ = 0;
};
ModelPtr CacheLife::model_;
std::string CacheLife::taus_;

TEST_F(CacheLife, RollbackOfOneAndOfTwoHundred) {
  ExpectTaken(Compare(SmallOptions(), [](Player& p) {
    p.Append(Text(1, kFilled));
    p.Steps(Text(2, 4));
    p.RemoveSuffix(1);
    p.Steps(Text(3, 3));
    p.RemoveSuffix(200);
    p.Steps(Text(4, 6));
    p.Append(Text(5, 190));
    p.Steps(Text(6, 3));
  }));
}

TEST_F(CacheLife, AMiddlePartGoesAndOtherTokensFillItsCells) {
  ExpectTaken(Compare(SmallOptions(), [](Player& p) {
    p.Append(Text(1, kFilled));
    p.Steps(Text(2, 3));
    p.RemoveMiddle(100, 300);
    p.Steps(Text(3, 5));  // into the freed cells
    p.Append(Text(4, 180));
    p.Steps(Text(5, 20));
  }));
}

TEST_F(CacheLife, ClearedWithAndWithoutItsData) {
  ExpectTaken(Compare(SmallOptions(), [](Player& p) {
    for (const bool data : {false, true, false}) {
      p.Append(Text(data ? 1 : 2, kFilled));
      p.Steps(Text(3, 4));
      p.Clear(data);
    }
    p.Append(Text(4, kFilled + 8));
    p.Steps(Text(5, 4));
  }));
}

TEST_F(CacheLife, TwoShiftsBeforeOneDecode) {
  ExpectTaken(Compare(SmallOptions(), [](Player& p) {
    p.Append(Text(1, 900));
    p.Steps(Text(2, 3));
    p.Shift(16, 100);
    p.Shift(200, 300);
    p.Steps(Text(3, 4));
    p.Shift(16, 17);
    p.Steps(Text(4, 4));
  }));
}

TEST_F(CacheLife, ReuseWithTwoRemovedChunks) {
  ExpectTaken(Compare(SmallOptions(), [](Player& p) {
    p.Append(Text(1, 1000));
    p.Steps(Text(2, 2));
    // Kept: [0, 150), [250, 450), [600, 1000).
    p.RemoveMiddle(150, 250);
    llama_memory_seq_add(p.memory(), 0, 250, 450, -100);
    p.RemoveMiddle(450, 600);
    llama_memory_seq_add(p.memory(), 0, 600, -1, -250);
    p.Append(Text(3, 40));
    p.Steps(Text(4, 4));
  }));
}

TEST_F(CacheLife, FourSequencesInOneBatchOneOfThemShifted) {
  for (const bool unified : {true, false}) {
    SCOPED_TRACE(unified ? "one stream" : "own streams");
    ContextOptions options = SmallOptions();
    options.n_seq = 4;
    options.unified = unified;
    options.n_ctx = unified ? 4096 : 4 * 1024;
    const Outcome outcome = Compare(options, [unified](Player& p) {
      p.Append(Text(1, kFilled));
      p.Steps(Text(2, 2));
      // Within a stream a part, too.
      p.Copy(0, 1, unified ? 500 : -1);
      p.Copy(0, 2);
      p.Append(Text(3, kFilled + 30), 3);
      for (unsigned i = 0; i < 4; ++i) p.Together({0, 1, 2, 3}, 100 + 10 * i);
      p.Shift(40, 90, 3);
      for (unsigned i = 0; i < 4; ++i) p.Together({0, 1, 2, 3}, 200 + 10 * i);
      // Each alone, so that it is sparse.
      for (int seq = 0; seq < 4; ++seq) p.Steps(Text(4, 2), seq);
      p.Forget(1);
      p.Copy(2, 1);
      for (unsigned i = 0; i < 2; ++i) p.Together({1, 2}, 300 + 10 * i);
      p.Steps(Text(5, 2), 1);
    });
    ExpectTaken(outcome);
    EXPECT_GT(outcome.fresh, 4);
  }
}

// A batch of drafts, of which some are kept, over a context that is cut to its beginning whenever it is full. The
// draft model's cache tensors have the names of the main model's.
TEST_F(CacheLife, SpeculativeDecodingWithADraftModel) {
  const char* text = std::getenv("SCSA_CACHE_LIFE_TOKENS");
  const std::uint64_t n = text == nullptr || *text == '\0' ? kSpeculativeTokens : std::strtoull(text, nullptr, 10);
  const ModelPtr draft_model = MakeModel(1);
  constexpr int kCells = 1024;
  ContextOptions options = SmallOptions();
  options.n_ctx = kCells;
  std::vector<std::vector<float>> drafts[3], targets[3];
  const char* const modes[] = {"off", "exact", "auto"};
  const auto before = LoadedPlugin::Get().Stats();
  for (int m = 0; m < 3; ++m) {
    Use(modes[m]);
    Player draft(draft_model.get(), options, 0);
    Player target(model_.get(), options, m == 1 ? 32 : 0);
    std::mt19937 random(5);
    const Tokens prompt = Text(1, kFilled);
    draft.Append(prompt);
    target.Append(prompt);
    for (std::uint64_t written = 0; written < n;) {
      const int k = static_cast<int>(random() % 6);  // none: a step like any other
      const Tokens tokens = Text(static_cast<unsigned>(random()), k + 1);
      draft.Steps(tokens);
      std::vector<Player::Token> batch;
      for (int i = 0; i <= k; ++i) {
        batch.push_back({tokens[static_cast<std::size_t>(i)], target.Next(0) + i, 0, true});
      }
      target.Batch(batch);
      written += static_cast<std::uint64_t>(k + 1);
      const int rejected = k == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(k + 1));
      if (rejected > 0) {
        draft.RemoveSuffix(rejected);
        target.RemoveSuffix(rejected);
      }
      if (target.Next(0) > kCells - 8) {
        const int cut = target.Next(0) - (kFilled - 40);
        draft.RemoveSuffix(cut);
        target.RemoveSuffix(cut);
      }
    }
    drafts[m] = draft.logits();
    targets[m] = target.logits();
  }
  const auto after = LoadedPlugin::Get().Stats();
  EXPECT_GT(after.sparse_calls - before.sparse_calls, n / 2);
  for (int m = 1; m < 3; ++m) {
    ASSERT_EQ(drafts[m].size(), drafts[0].size());
    ASSERT_EQ(targets[m].size(), targets[0].size());
    for (std::size_t i = 0; i < drafts[0].size(); ++i)
      ASSERT_LE(RelativeDifference(drafts[m][i], drafts[0][i]), kPlain) << i;
    for (std::size_t i = 0; i < targets[0].size(); ++i)
      ASSERT_LE(RelativeDifference(targets[m][i], targets[0][i]), kPlain) << i;
  }
}

TEST_F(CacheLife, StatesOfTheSameLengthCutOffAndInOtherCells) {
  ContextOptions options = SmallOptions();
  options.n_seq = 2;
  ExpectTaken(Compare(options, [](Player& p) {
    const auto save = [&p](int seq) {
      std::vector<std::uint8_t> state(llama_state_seq_get_size(p.context(), seq));
      state.resize(llama_state_seq_get_data(p.context(), state.data(), state.size(), seq));
      return state;
    };
    const auto load = [&p](const std::vector<std::uint8_t>& state, int seq) {
      return llama_state_seq_set_data(p.context(), state.data(), state.size(), seq);
    };
    const Tokens one = Text(1, kFilled);
    p.Append(one);
    const auto first = save(0);
    p.Forget();
    const Tokens two = Text(2, kFilled);
    p.Append(two);
    const auto second = save(0);
    p.Steps(Text(3, 3));
    // Another text of the same length in its place.
    EXPECT_GT(load(first, 0), 0u);
    p.tokens() = one;
    p.Steps(Text(4, 3));
    // Into the cells behind.
    EXPECT_GT(load(second, 1), 0u);
    p.tokens(1) = two;
    p.Steps(Text(5, 3), 1);
    p.Steps(Text(6, 2), 0);
    // A file that ends early is refused; llama.cpp takes the sequence away, its cells are overwritten in part.
    for (const std::size_t size : {first.size() - 1, first.size() / 2, first.size() / 50}) {
      EXPECT_EQ(load({first.begin(), first.begin() + static_cast<std::ptrdiff_t>(size)}, 0), 0u);
      p.Forget();
      p.Steps(Text(7, 2), 1);
      p.Append(Text(8, kFilled));
      p.Steps(Text(9, 2));
    }
    // Everything at once.
    std::vector<std::uint8_t> all(llama_state_get_size(p.context()));
    all.resize(llama_state_get_data(p.context(), all.data(), all.size()));
    const Tokens zero = p.tokens(0);
    p.Steps(Text(10, 4));
    EXPECT_GT(llama_state_set_data(p.context(), all.data(), all.size()), 0u);
    p.tokens(0) = zero;
    p.Steps(Text(11, 3));
  }));
}

// Types of cache. llama.cpp rotates the rows of quantised ones, and the queries with them, unless it is told not to.
struct CacheType {
  ggml_type k, v;
  bool rotated = false;
};

std::string NameOf(const testing::TestParamInfo<CacheType>& info) {
  const CacheType& c = info.param;
  const bool quantised = ggml_is_quantized(c.k) || ggml_is_quantized(c.v);
  return std::string(ggml_type_name(c.k)) + "_" + ggml_type_name(c.v) +
         (c.rotated   ? "_rotated"
          : quantised ? "_unrotated"
                      : "");
}

class CacheTypes : public CacheLife, public testing::WithParamInterface<CacheType> {
 protected:
  void SetUp() override {
    CacheLife::SetUp();
    if (!GetParam().rotated) setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1);
  }
  void TearDown() override {
    unsetenv("LLAMA_ATTN_ROT_DISABLE");
    CacheLife::TearDown();
  }
  static ContextOptions OptionsOf(const CacheType& type) {
    ContextOptions options = SmallOptions();
    options.k_type = type.k;
    options.v_type = type.v;
    return options;
  }
  // Types that the plugin takes. llama.cpp casts an f32 cache to f16 before attention: a cache no longer.
  static bool Taken(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_Q8_0;
  }
  // llama.cpp's position shift crashes on a bf16 K cache, and on a quantised one that is not rotated.
  static bool Shifts(const CacheType& type) {
    return type.k != GGML_TYPE_BF16 && (type.rotated || !ggml_is_quantized(type.k));
  }

  // What separates two right answers over this cache in the worst kind of step, worked out as in cache_lockstep.cc: an
  // error of logits, and entries of the next layer's cells that it pushes to another code. An entry's standard
  // deviation is 1 here.
  static double Noise(const CacheType& type) {
    // ggml rounds queries as it does keys: to 11 or 8 bits of an entry, or to 1 / 127 of the largest one of 32.
    constexpr double kLargest = 2.1;
    double query = 0x1p-11 / std::sqrt(3.0);
    if (type.k == GGML_TYPE_BF16) query = 0x1p-8 / std::sqrt(3.0);
    if (type.k == GGML_TYPE_Q8_0) query = kLargest / 127 / std::sqrt(12.0);
    double error = 2.3 * query;
    // It sums the values of an f16 cache in f16: for each cell a rounding to 11 bits, up or down.
    if (type.v == GGML_TYPE_F16) error = std::hypot(error, std::sqrt(1.0 * kFilled) * 0x1p-11 / std::sqrt(3.0));
    double step = 0;
    for (const ggml_type t : {type.k, type.v}) {
      step = std::max(step, t == GGML_TYPE_F16    ? 0x1p-10
                            : t == GGML_TYPE_BF16 ? 0x1p-7
                            : t == GGML_TYPE_Q8_0 ? kLargest / 127
                                                  : 0);
    }
    return std::hypot(error, std::sqrt(error * step));
  }

  static void Play(Player& p) {
    p.Append(Text(1, kFilled));
    p.Append(Text(2, 70));  // a prompt over a cache that is in use, in matrix products
    p.Append(Text(3, 20));
    p.Steps(Text(4, 6));
    p.RemoveSuffix(4);
    p.Steps(Text(5, 4));
    p.RemoveMiddle(100, 130);
    p.Steps(Text(6, 4));
    if (!Shifts(GetParam())) return;
    p.Shift(200, 260);
    p.Append(Text(7, 100));  // into all cells that are free before the last one
    p.Steps(Text(8, 4));
  }
};

TEST_P(CacheTypes, AnswersAreThoseWithoutThePlugin) {
  const CacheType& type = GetParam();
  const ContextOptions options = OptionsOf(type);
  if (!Taken(type.k) || !Taken(type.v)) {
    const Outcome outcome = Compare(options, Play, kPlain, 0);
    EXPECT_EQ(outcome.calls, 0u);
    EXPECT_EQ(outcome.worst, 0.0);
    return;
  }
  const Outcome outcome = Compare(options, Play, Noise(type));
  ExpectTaken(outcome);
  EXPECT_GT(outcome.fresh, 0);
}

// Or the rotated and the unrotated cases would be the same.
TEST_F(CacheLife, ThisModelsQuantisedCachesAreRotated) {
  Use("off");
  ContextOptions options = SmallOptions();
  options.k_type = options.v_type = GGML_TYPE_Q8_0;
  std::vector<std::vector<float>> logits[2];
  for (auto& of_variant : logits) {
    Player player(model_.get(), options, 0);
    player.Append(Text(1, 20));
    player.Steps(Text(2, 1));
    of_variant = player.logits();
    setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1);
  }
  unsetenv("LLAMA_ATTN_ROT_DISABLE");
  EXPECT_NE(logits[0], logits[1]);
}

using SparseTypes = CacheTypes;

TEST_P(SparseTypes, AnswersMeetTheToleranceAndReadFewRows) {
  constexpr double kTolerance = 0.1;
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  plugin.Set("mode", "auto");
  plugin.Set("preset", "fast");
  plugin.Set("crossover", "0");
  plugin.Set("tolerance", std::to_string(kTolerance));
  TrueErrors truth;
  plugin.SetObserver(&TrueErrors::Observe, &truth);
  const auto before = plugin.Stats();
  {
    Player player(model_.get(), OptionsOf(GetParam()), 0);
    Play(player);
  }
  const auto after = plugin.Stats();
  plugin.SetObserver(nullptr, nullptr);
  plugin.Set("tolerance", "0.015");
  ASSERT_FALSE(truth.errors.empty());
  double mean = 0;
  for (const double error : truth.errors) mean += error / static_cast<double>(truth.errors.size());
  const double share = static_cast<double>(after.rows_read - before.rows_read) /
                       static_cast<double>(after.rows_visible - before.rows_visible);
  RecordProperty("mean", std::to_string(mean));
  RecordProperty("share", std::to_string(share));
  RecordProperty("outputs", std::to_string(truth.errors.size()));
  // Calibration holds the mean of other steps to it.
  EXPECT_LE(mean, 1.5 * kTolerance);
  EXPECT_LT(share, 0.8);
}

INSTANTIATE_TEST_SUITE_P(Types, SparseTypes,
                         testing::Values(CacheType{GGML_TYPE_F16, GGML_TYPE_F16},
                                         CacheType{GGML_TYPE_BF16, GGML_TYPE_BF16},
                                         CacheType{GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, true},
                                         CacheType{GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, false}),
                         NameOf);

INSTANTIATE_TEST_SUITE_P(
    Types, CacheTypes,
    testing::Values(CacheType{GGML_TYPE_F16, GGML_TYPE_F16}, CacheType{GGML_TYPE_BF16, GGML_TYPE_BF16},
                    CacheType{GGML_TYPE_F32, GGML_TYPE_F32}, CacheType{GGML_TYPE_F16, GGML_TYPE_F32},
                    CacheType{GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, true}, CacheType{GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, false},
                    CacheType{GGML_TYPE_Q8_0, GGML_TYPE_BF16, true}, CacheType{GGML_TYPE_F16, GGML_TYPE_Q8_0, true},
                    CacheType{GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, true}, CacheType{GGML_TYPE_Q5_1, GGML_TYPE_Q5_1, true},
                    CacheType{GGML_TYPE_Q5_1, GGML_TYPE_Q5_1, false}, CacheType{GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, true},
                    CacheType{GGML_TYPE_Q4_0, GGML_TYPE_Q4_0, false}),
    NameOf);

}  // namespace
}  // namespace scsa::plugin_test
