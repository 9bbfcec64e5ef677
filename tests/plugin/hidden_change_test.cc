// SPDX-License-Identifier: Apache-2.0
//
// Programs that change cached cells in a way that no graph shows, while the set of visible cells stays as it was and
// most of a block keeps its content. The first answer after that must be the one of a fresh context.
//
// One block is in use, and its clusters stay closed whatever the query: an answer from it is far from exact attention.
// Where it is noticed that the block is outdated, all rows are read, and the answer is exact.
#include "small_model.h"

namespace scsa::plugin_test {
namespace {

constexpr int kBlock = 256;
constexpr int kTokens = 304;  // the block, and what must lie behind a block before it is built
constexpr int kPrompt = 20;   // a batch that the plugin answers exactly
constexpr int kLayers = 2;
constexpr llama_token kNext = 7;

Tokens Part(const Tokens& tokens, int begin, int end) { return {tokens.begin() + begin, tokens.begin() + end}; }
Tokens Joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class HiddenChange : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    model_ = MakeModel(kLayers);
    taus_ = TemporaryFile("hidden_change.json");
    WriteTaus(taus_, "1");
  }
  static void TearDownTestSuite() {
    model_.reset();
    std::remove(taus_.c_str());
  }
  void SetUp() override {
    const LoadedPlugin& plugin = LoadedPlugin::Get();
    plugin.Set("preset", "fast");
    plugin.Set("crossover", "0");
    plugin.Set("taus", taus_);
    plugin.Set("mode", "auto");
  }
  void TearDown() override {
    LoadedPlugin::Get().Set("mode", "auto");
    LoadedPlugin::Get().Set("taus", "");
    LoadedPlugin::Get().Set("crossover", "4096");
  }

  static LlamaContextPtr MakeContext(int n_seq = 1, bool unified = true) {
    ContextOptions options = SmallOptions();
    options.n_seq = n_seq;
    options.unified = unified;
    options.n_ctx = 1024 * (unified ? 1 : n_seq);
    return MakeLlama(model_.get(), options);
  }
  // Tokens in the first cells, exactly. The plugin takes no shorter cache than one that kFilled tokens were in.
  static void Prefill(llama_context* context, const Tokens& tokens, llama_seq_id seq = 0) {
    const int n = static_cast<int>(tokens.size());
    Decode(context, Joined(Part(tokens, 0, n - kPrompt), Text(99, kFilled - n + kPrompt)), 0, seq);
    EXPECT_TRUE(llama_memory_seq_rm(llama_get_memory(context), seq, n - kPrompt, -1));
    Decode(context, Part(tokens, n - kPrompt, n), n - kPrompt, seq);
  }
  // What a context says after these tokens that decodes nothing else, in mode exact.
  static std::vector<float> Fresh(const Tokens& tokens) {
    LoadedPlugin::Get().Set("mode", "exact");
    const LlamaContextPtr context = MakeContext();
    const int last = static_cast<int>(tokens.size()) - 1;
    Prefill(context.get(), Part(tokens, 0, last));
    std::vector<float> logits = Decode(context.get(), {tokens.back()}, last);
    LoadedPlugin::Get().Set("mode", "auto");
    return logits;
  }
  static std::vector<std::uint8_t> Save(llama_context* context) {
    std::vector<std::uint8_t> state(llama_state_seq_get_size(context, 0));
    state.resize(llama_state_seq_get_data(context, state.data(), state.size(), 0));
    return state;
  }
  static std::vector<std::uint8_t> StateOf(const Tokens& tokens) {
    const LlamaContextPtr context = MakeContext();
    Prefill(context.get(), tokens);
    return Save(context.get());
  }
  static void Load(llama_context* context, const std::vector<std::uint8_t>& state) {
    ASSERT_EQ(llama_state_seq_set_data(context, state.data(), state.size(), 0), state.size());
  }
  // The tokens in the first cells, the last one answered from the block's summaries in each layer.
  static void PutIntoUse(llama_context* context, const Tokens& tokens, llama_seq_id seq = 0) {
    Prefill(context, Part(tokens, 0, kTokens - 1), seq);
    const auto before = LoadedPlugin::Get().Stats();
    const std::vector<float> logits = Decode(context, {tokens.back()}, kTokens - 1, seq);
    const auto after = LoadedPlugin::Get().Stats();
    EXPECT_EQ(after.sparse_calls - before.sparse_calls, kLayers);
    EXPECT_GT(RelativeDifference(logits, Fresh(tokens)), 4 * kPlain) << "summaries would not show";
  }
  // The first answer after the change, which left these tokens.
  static void ExpectAnswerOf(llama_context* context, const Tokens& tokens, llama_seq_id seq = 0) {
    const std::vector<float> fresh = Fresh(Joined(tokens, {kNext}));
    const auto before = LoadedPlugin::Get().Stats();
    const std::vector<float> logits = Decode(context, {kNext}, kTokens, seq);
    const auto after = LoadedPlugin::Get().Stats();
    EXPECT_LE(RelativeDifference(logits, fresh), kPlain);
    EXPECT_EQ(after.dropped_blocks - before.dropped_blocks, kLayers);
  }
  // A state of these tokens, loaded over the text.
  void ExpectSeen(const std::vector<std::uint8_t>& state, const Tokens& tokens) const {
    const LlamaContextPtr context = MakeContext();
    PutIntoUse(context.get(), text_);
    Load(context.get(), state);
    ExpectAnswerOf(context.get(), tokens);
  }

  static ModelPtr model_;
  static std::string taus_;
  const Tokens text_ = Text(1, kTokens);
};
ModelPtr HiddenChange::model_;
std::string HiddenChange::taus_;

TEST_F(HiddenChange, AStateThatDiffersInTheLastCellsOfABlock) {
  const Tokens other = Joined(Part(text_, 0, kBlock - 3), Text(2, kTokens - kBlock + 3));
  ExpectSeen(StateOf(other), other);
}

// In layer 0 one cell changes, in layer 1 all that follow.
TEST_F(HiddenChange, AStateThatDiffersInOneEarlyToken) {
  Tokens other = text_;
  other[20] = (other[20] + 1) % kVocab;
  ExpectSeen(StateOf(other), other);
}

TEST_F(HiddenChange, AStateThatHasTwoCellsSwapped) {
  constexpr int kSwapped = 100;
  const LlamaContextPtr writer = MakeContext(2);
  Decode(writer.get(), Part(text_, 0, kSwapped), 0);
  Decode(writer.get(), {kNext}, 0, 1);  // keeps a cell free for the token after next
  Decode(writer.get(), {text_[kSwapped]}, kSwapped);
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(writer.get()), 1, -1, -1));
  Decode(writer.get(), {text_[kSwapped + 1]}, kSwapped + 1);
  Decode(writer.get(), Part(text_, kSwapped + 2, kTokens), kSwapped + 2);
  ExpectSeen(Save(writer.get()), text_);
}

TEST_F(HiddenChange, AStreamCopiedOverOneThatDiffersInTheLastCellsOfABlock) {
  const Tokens other = Joined(Part(text_, 0, kBlock - 3), Text(2, kTokens - kBlock + 3));
  const LlamaContextPtr context = MakeContext(2, false);
  Prefill(context.get(), other, 0);
  PutIntoUse(context.get(), text_, 1);
  llama_memory_seq_cp(llama_get_memory(context.get()), 0, 1, -1, -1);
  ExpectAnswerOf(context.get(), other, 1);
}

}  // namespace
}  // namespace scsa::plugin_test
