// SPDX-License-Identifier: Apache-2.0
//
// What programs do with contexts: several at a time, of one model and so with cache tensors of equal names, one after
// the other at the same addresses, in several threads, with graphs that are kept, made anew, or split for a callback.
// Every cluster stays closed, so that an answer consists of the plan; and the same rows give the same plan and the same
// bits, so a context answers what it answers alone, to the bit.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "small_model.h"

namespace scsa::plugin_test {
namespace {

constexpr int kSteps = 12;
constexpr int kTexts = 3;

using Logits = std::vector<std::vector<float>>;

// The prompt of a text and what follows it, step by step.
class Reader {
 public:
  Reader(llama_model* model, int text, const ContextOptions& options = SmallOptions())
      : tokens_(Text(static_cast<unsigned>(text), kFilled + kSteps)), context_(MakeLlama(model, options)) {}
  llama_context* context() const { return context_.get(); }
  const Logits& logits() const { return logits_; }
  void Prompt() { Read(kFilled); }
  void Step() { Read(1); }
  void ReadAll() {
    Prompt();
    for (int i = 0; i < kSteps; ++i) Step();
  }

 private:
  void Read(int n) {
    const auto begin = tokens_.begin() + pos_;
    logits_.push_back(Decode(context_.get(), {begin, begin + n}, pos_));
    pos_ += n;
  }
  const Tokens tokens_;
  const LlamaContextPtr context_;
  llama_pos pos_ = 0;
  Logits logits_;
};

class ContextLife : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    model_ = MakeModel(2);
    taus_ = TemporaryFile("context_life.json");
    WriteTaus(taus_, "1");
    Use("auto");
    for (int text = 0; text < kTexts; ++text) alone_[text] = LogitsOf(text);
  }
  static void TearDownTestSuite() {
    const LoadedPlugin& plugin = LoadedPlugin::Get();
    plugin.Set("mode", "auto");
    plugin.Set("taus", "");
    plugin.Set("crossover", "4096");
    model_.reset();
    std::remove(taus_.c_str());
  }
  static void Use(const char* mode) {
    const LoadedPlugin& plugin = LoadedPlugin::Get();
    plugin.Set("mode", mode);
    plugin.Set("preset", "fast");
    plugin.Set("crossover", "0");
    plugin.Set("taus", taus_);
  }
  void SetUp() override { before_ = LoadedPlugin::Get().Stats(); }
  // `readers` whole texts were read sparsely, from few rows.
  void ExpectSparse(int readers) const {
    const auto after = LoadedPlugin::Get().Stats();
    EXPECT_EQ(after.failures, before_.failures);
    EXPECT_EQ(after.sparse_calls - before_.sparse_calls, static_cast<std::uint64_t>(2 * kSteps * readers));
    EXPECT_LT(2 * (after.rows_read - before_.rows_read), after.rows_visible - before_.rows_visible);
  }
  static Logits LogitsOf(int text) {
    Reader reader(model_.get(), text);
    reader.ReadAll();
    return reader.logits();
  }

  static ModelPtr model_;
  static std::string taus_;
  static std::map<int, Logits> alone_;
  scsa_plugin_stats before_{};
};
ModelPtr ContextLife::model_;
std::string ContextLife::taus_;
std::map<int, Logits> ContextLife::alone_;

TEST_F(ContextLife, TheSameTextGivesTheSameBits) {
  EXPECT_EQ(LogitsOf(0), alone_[0]);
  ExpectSparse(1);
  EXPECT_NE(alone_[0], alone_[1]);
}

TEST_F(ContextLife, SeveralAtATimeWithTensorsOfTheSameNames) {
  std::vector<std::unique_ptr<Reader>> readers;
  for (int text = 0; text < kTexts; ++text) readers.push_back(std::make_unique<Reader>(model_.get(), text));
  for (const auto& reader : readers) reader->Prompt();
  for (int i = 0; i < kSteps; ++i) {
    for (const auto& reader : readers) reader->Step();
  }
  for (int text = 0; text < kTexts; ++text) EXPECT_EQ(readers[static_cast<std::size_t>(text)]->logits(), alone_[text]);
  ExpectSparse(kTexts);
}

TEST_F(ContextLife, OneThatEndsLeavesTheOthersAlone) {
  auto first = std::make_unique<Reader>(model_.get(), 0);
  Reader second(model_.get(), 1);
  first->Prompt();
  second.Prompt();
  for (int i = 0; i < kSteps; ++i) {
    if (i < kSteps / 2) first->Step();
    if (i == kSteps / 2) first.reset();
    second.Step();
  }
  EXPECT_EQ(second.logits(), alone_[1]);
}

// Where the keys of each layer lie, whenever attention is the plugin's.
void NoteKeys(void* user, const scsa_attention_call* call) {
  static_cast<std::set<std::pair<int, const void*>>*>(user)->emplace(call->layer, call->k);
}

TEST_F(ContextLife, FreedAndMadeAgainAtTheSameAddresses) {
  constexpr int kContexts = 12;
  std::set<std::pair<int, const void*>> addresses;
  LoadedPlugin::Get().SetObserver(NoteKeys, &addresses);
  for (int i = 0; i < kContexts; ++i) EXPECT_EQ(LogitsOf(i % kTexts), alone_[i % kTexts]) << "context " << i;
  LoadedPlugin::Get().SetObserver(nullptr, nullptr);
  // Otherwise nothing was tested.
  EXPECT_LT(addresses.size(), 2u * kContexts);
  ExpectSparse(kContexts);
}

TEST_F(ContextLife, OnePerThread) {
  constexpr int kThreadsAtOnce = 2;
  constexpr int kRounds = 4;
  Logits logits[kThreadsAtOnce][kRounds];
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreadsAtOnce; ++t) {
    threads.emplace_back([t, &logits] {
      for (int i = 0; i < kRounds; ++i) logits[t][i] = LogitsOf((t + i) % kTexts);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreadsAtOnce; ++t) {
    for (int i = 0; i < kRounds; ++i) EXPECT_EQ(logits[t][i], alone_[(t + i) % kTexts]) << "thread " << t << ", " << i;
  }
  ExpectSparse(kThreadsAtOnce * kRounds);
}

TEST_F(ContextLife, GraphsAreMadeAnewForEveryStep) {
  Reader kept(model_.get(), 0);
  kept.ReadAll();
  EXPECT_GT(llama_perf_context(kept.context()).n_reused, kSteps / 2);
  setenv("LLAMA_GRAPH_REUSE_DISABLE", "1", 1);
  Reader anew(model_.get(), 0);
  unsetenv("LLAMA_GRAPH_REUSE_DISABLE");
  anew.ReadAll();
  EXPECT_EQ(llama_perf_context(anew.context()).n_reused, 0);
  EXPECT_EQ(kept.logits(), alone_[0]);
  EXPECT_EQ(anew.logits(), alone_[0]);
  ExpectSparse(2);
}

// An eval callback, which has ggml compute a graph in parts.
struct Callback {
  enum Kind { kEveryNode, kAttention, kCacheWrites } kind = kEveryNode;
  bool stop = false;  // gives up at the next node that it asked for
  int seen = 0;
  std::map<const void*, std::vector<float>> outputs{};  // that the plugin computed, by node
  int compared = 0;

  static bool OnNode(ggml_tensor* node, bool ask, void* user) {
    auto& self = *static_cast<Callback*>(user);
    if (ask) {
      return self.kind == kEveryNode || (self.kind == kAttention && node->op == GGML_OP_FLASH_ATTN_EXT) ||
             (self.kind == kCacheWrites && node->op == GGML_OP_SET_ROWS);
    }
    ++self.seen;
    if (self.stop) return false;
    if (const auto output = self.outputs.find(node); output != self.outputs.end()) {
      EXPECT_EQ(std::memcmp(node->data, output->second.data(), ggml_nbytes(node)), 0);
      self.outputs.erase(output);
      ++self.compared;
    }
    return true;
  }
  static void OnAttention(void* user, const scsa_attention_call* call) {
    const auto* node = static_cast<const ggml_tensor*>(call->node);
    const auto* data = static_cast<const float*>(node->data);
    static_cast<Callback*>(user)->outputs[node] = {data, data + ggml_nelements(node)};
  }
};

TEST_F(ContextLife, ACallbackThatSplitsGraphsSeesWhatWasComputed) {
  for (const Callback::Kind kind : {Callback::kEveryNode, Callback::kAttention, Callback::kCacheWrites}) {
    SCOPED_TRACE(kind);
    SetUp();
    Callback callback{kind};
    ContextOptions options = SmallOptions();
    options.on_node = Callback::OnNode;
    options.on_node_user = &callback;
    Reader reader(model_.get(), 0, options);
    LoadedPlugin::Get().SetObserver(Callback::OnAttention, &callback);
    reader.ReadAll();
    LoadedPlugin::Get().SetObserver(nullptr, nullptr);
    EXPECT_EQ(reader.logits(), alone_[0]);
    ExpectSparse(1);
    EXPECT_GE(callback.seen, 2 * kSteps);
    EXPECT_GE(callback.compared, kind == Callback::kCacheWrites ? 0 : 2 * kSteps);
  }
}

// The callback ends a decode in the middle. Its token is removed, as after any decode that failed, and the text goes
// on.
TEST_F(ContextLife, ADecodeThatACallbackEnded) {
  for (const Callback::Kind kind : {Callback::kEveryNode, Callback::kAttention, Callback::kCacheWrites}) {
    SCOPED_TRACE(kind);
    Callback callback{kind};
    ContextOptions options = SmallOptions();
    options.on_node = Callback::OnNode;
    options.on_node_user = &callback;
    Reader reader(model_.get(), 0, options);
    reader.Prompt();
    for (int i = 0; i < kSteps; ++i) {
      if (i % 4 == 2) {
        callback.stop = true;
        const llama_memory_t memory = llama_get_memory(reader.context());
        const llama_pos next = llama_memory_seq_pos_max(memory, 0) + 1;
        Decode(reader.context(), Text(77, 1), next);
        EXPECT_TRUE(llama_memory_seq_rm(memory, 0, next, -1));
        callback.stop = false;
      }
      reader.Step();
    }
    EXPECT_EQ(reader.logits(), alone_[0]);
  }
}

}  // namespace
}  // namespace scsa::plugin_test
