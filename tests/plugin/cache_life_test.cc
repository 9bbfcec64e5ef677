// SPDX-License-Identifier: Apache-2.0
//
// What programs do to a KV cache, step by step, on small models with random weights: without the plugin, in mode exact,
// and sparse with every cluster opened. All logits agree, and in mode exact also with those of a fresh context that
// decodes the same tokens.
//
//   SCSA_CACHE_LIFE_TOKENS=16384   tokens that the speculative decoding writes (default: kSpeculativeTokens)
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "llama_fixture.h"
#include "qwen3_model.h"

namespace scsa::plugin_test {
namespace {

constexpr int kVocab = 64;
constexpr int kKvHeads = 2;
constexpr int kFilled = 560;  // cells that are filled first: more than the plugin leaves to ggml
constexpr std::uint64_t kSpeculativeTokens = 2048;

// As in cache_lockstep.cc, whose models differ in the head size only: logits of attention have a standard deviation of
// 2.3 whatever it is.
constexpr double kPlain = 0x1p-7;
double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    squares += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(squares / norm);
}

using Tokens = std::vector<llama_token>;

Tokens Text(unsigned seed, int n) {
  std::mt19937 random(seed);
  Tokens tokens(static_cast<std::size_t>(n));
  for (llama_token& t : tokens) t = static_cast<llama_token>(random() % kVocab);
  return tokens;
}

ModelPtr MakeModel(int layers) {
  static int count = 0;
  const std::string path =
      testing::TempDir() + "/scsa_cache_life_" + std::to_string(getpid()) + "_" + std::to_string(count++) + ".gguf";
  Qwen3Size size;
  size.layers = layers;
  size.embd = 64;
  size.ff = 64;
  size.heads = 4;
  size.kv_heads = kKvHeads;
  size.head_dim = 64;  // the least that ggml rotates in quantised caches
  size.token_sigma = 0.1f;
  size.vocab = kVocab;
  WriteQwen3(path, size);
  ModelPtr model = LoadModel(path);
  std::remove(path.c_str());
  if (model == nullptr) throw std::runtime_error("cannot load a model");
  return model;
}

ContextOptions Options() {
  ContextOptions o;
  // ggml sums the values of a bf16 cache in f32.
  o.v_type = GGML_TYPE_BF16;
  o.flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  o.threads = 1;
  return o;
}

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
    EXPECT_LE(Difference(logits_.back(), fresh), tolerance_)
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
    taus_ = testing::TempDir() + "/scsa_cache_life_" + std::to_string(getpid()) + ".json";
    std::ofstream(taus_) << "{\"0:0\": 0, \"0:1\": 0, \"1:0\": 0, \"1:1\": 0}\n";
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
  // against_ggml: what may separate an answer from one without the plugin. Sparse and exact are kPlain apart at most,
  // unless queries are rounded.
  static Outcome Compare(const ContextOptions& options, const Scenario& scenario, double against_ggml = kPlain) {
    const auto play = [&](const char* mode, int fresh_interval, int* comparisons = nullptr) {
      Use(mode);
      Player player(model_.get(), options, fresh_interval, against_ggml);
      scenario(player);
      if (comparisons != nullptr) *comparisons = player.fresh_comparisons();
      return player.logits();
    };
    Outcome outcome;
    const auto start = LoadedPlugin::Get().Stats();
    const auto without = play("off", 0);
    EXPECT_EQ(LoadedPlugin::Get().Stats().attn_calls, start.attn_calls);
    const auto exact = play("exact", 1, &outcome.fresh);
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
      const double a = Difference(exact[i], without[i]);
      const double b = Difference(opened[i], without[i]);
      outcome.worst = std::max({outcome.worst, a, b});
      EXPECT_LE(a, against_ggml) << "exact, output " << i;
      EXPECT_LE(b, against_ggml) << "sparse, output " << i;
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
  ExpectTaken(Compare(Options(), [](Player& p) {
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
  ExpectTaken(Compare(Options(), [](Player& p) {
    p.Append(Text(1, kFilled));
    p.Steps(Text(2, 3));
    p.RemoveMiddle(100, 300);
    p.Steps(Text(3, 5));  // into the freed cells
    p.Append(Text(4, 180));
    p.Steps(Text(5, 20));
  }));
}

TEST_F(CacheLife, ClearedWithAndWithoutItsData) {
  ExpectTaken(Compare(Options(), [](Player& p) {
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
  ExpectTaken(Compare(Options(), [](Player& p) {
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
  ExpectTaken(Compare(Options(), [](Player& p) {
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
    ContextOptions options = Options();
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
  ContextOptions options = Options();
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
    for (std::size_t i = 0; i < drafts[0].size(); ++i) ASSERT_LE(Difference(drafts[m][i], drafts[0][i]), kPlain) << i;
    for (std::size_t i = 0; i < targets[0].size(); ++i)
      ASSERT_LE(Difference(targets[m][i], targets[0][i]), kPlain) << i;
  }
}

TEST_F(CacheLife, StatesOfTheSameLengthCutOffAndInOtherCells) {
  ContextOptions options = Options();
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

}  // namespace
}  // namespace scsa::plugin_test
