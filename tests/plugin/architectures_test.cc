// SPDX-License-Identifier: Apache-2.0
//
// Kinds of attention that model families use, on small models with random weights: whatever the plugin takes of them or
// leaves to ggml, logits are those without it.
#include <gguf.h>
#include <unistd.h>

#include <functional>
#include <random>

#include "llama_fixture.h"

namespace scsa::plugin_test {
namespace {

constexpr int kVocab = 128;
constexpr int kHeads = 2;
constexpr int kEmbd = 128;
constexpr int kPrompt = 600;  // past the sliding windows below and past what the plugin leaves to ggml
constexpr int kSteps = 6;
// A wrong cell with a tenth of the mass in one of two heads moves logits by about 1 / 20. What separates right answers
// is f32 against f16 queries, some 2^-10, in each of two layers.
constexpr double kTolerance = 0x1p-6;

// Metadata of one architecture: what all need, under its name, and what is its own.
class Metadata {
 public:
  explicit Metadata(const std::string& architecture) : prefix_(architecture + "."), file_(gguf_init_empty()) {
    gguf_set_val_str(get(), "general.architecture", architecture.c_str());
    gguf_set_val_str(get(), "tokenizer.ggml.model", "no_vocab");
    Set("vocab_size", kVocab);
    Set("context_length", 2048);
    Set("embedding_length", kEmbd);
    Set("block_count", 2);
    Set("feed_forward_length", 128);
    Set("attention.head_count", kHeads);
    Set("attention.head_count_kv", kHeads);
    Set("attention.layer_norm_epsilon", 1e-5f);
    Set("attention.layer_norm_rms_epsilon", 1e-5f);
  }
  Metadata& Set(const char* key, int value) {
    gguf_set_val_u32(get(), (prefix_ + key).c_str(), static_cast<std::uint32_t>(value));
    return *this;
  }
  Metadata& Set(const char* key, float value) {
    gguf_set_val_f32(get(), (prefix_ + key).c_str(), value);
    return *this;
  }
  Metadata& SetFlag(const char* key, bool value) {
    gguf_set_val_bool(get(), (prefix_ + key).c_str(), value);
    return *this;
  }
  gguf_context* get() const { return file_.get(); }

 private:
  struct Deleter {
    void operator()(gguf_context* c) const { gguf_free(c); }
  };
  std::string prefix_;
  std::unique_ptr<gguf_context, Deleter> file_;
};

// Norms around 1, everything else small; the same for the same name.
void FillTensor(ggml_tensor* tensor, void*) {
  const std::string name = tensor->name;
  std::mt19937 random(static_cast<unsigned>(std::hash<std::string>{}(name)));
  const bool norm = name.find("norm") != std::string::npos && name.find("weight") != std::string::npos;
  std::normal_distribution<float> normal(norm ? 1.0f : 0.0f, 0.1f);
  std::vector<float> values(static_cast<std::size_t>(ggml_nelements(tensor)));
  for (float& x : values) x = normal(random);
  if (tensor->type == GGML_TYPE_F16) {
    std::vector<ggml_fp16_t> halves(values.size());
    ggml_fp32_to_fp16_row(values.data(), halves.data(), static_cast<std::int64_t>(values.size()));
    ggml_backend_tensor_set(tensor, halves.data(), 0, ggml_nbytes(tensor));
    return;
  }
  if (tensor->type != GGML_TYPE_F32) throw std::runtime_error(name + " has an unexpected type");
  ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
}

ModelPtr MakeModel(const Metadata& metadata) {
  LoadedPlugin::Get();
  ModelPtr model(llama_model_init_from_user(metadata.get(), FillTensor, nullptr, llama_model_default_params()));
  if (model == nullptr) throw std::runtime_error("llama.cpp refuses the model");
  return model;
}

std::vector<llama_token> RandomTokens(unsigned seed, int n) {
  std::mt19937 random(seed);
  std::vector<llama_token> tokens(static_cast<std::size_t>(n));
  for (llama_token& t : tokens) t = static_cast<llama_token>(random() % kVocab);
  return tokens;
}

struct Outcome {
  std::uint64_t calls = 0, exact = 0, sparse = 0;
  double worst = 0;
};

class Architectures : public testing::Test {
 protected:
  void TearDown() override {
    const LoadedPlugin& plugin = LoadedPlugin::Get();
    plugin.Set("mode", "auto");
    plugin.Set("taus", "");
    plugin.Set("crossover", "4096");
  }
  // Prompt, steps, a rollback, more steps: without the plugin, exact, and sparse with every cluster opened.
  // ggml sums values of bf16 in f32.
  static Outcome Compare(const Metadata& metadata, int kv_heads = kHeads, ggml_type v_type = GGML_TYPE_BF16) {
    const LoadedPlugin& plugin = LoadedPlugin::Get();
    const std::string taus = testing::TempDir() + "/scsa_architectures_taus_" + std::to_string(getpid()) + ".json";
    {
      std::ofstream file(taus);
      for (int i = 0; i < 2 * kv_heads; ++i) {
        file << (i == 0 ? "{\"" : ", \"") << i / kv_heads << ':' << i % kv_heads << "\": 0";
      }
      file << "}\n";
    }
    const ModelPtr model = MakeModel(metadata);
    plugin.Set("crossover", "0");
    const auto start = plugin.Stats();
    std::vector<std::vector<float>> logits[3];
    const char* const modes[] = {"off", "exact", "auto"};
    Outcome outcome;
    for (int m = 0; m < 3; ++m) {
      plugin.Set("mode", modes[m]);
      plugin.Set("taus", taus);
      const auto before = plugin.Stats();
      ContextOptions options;
      options.v_type = v_type;
      options.flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
      options.threads = 1;
      const LlamaContextPtr context = MakeLlama(model.get(), options);
      logits[m].push_back(Decode(context.get(), RandomTokens(1, kPrompt), 0));
      const auto steps = [&](unsigned seed, llama_pos pos) {
        for (const llama_token t : RandomTokens(seed, kSteps)) {
          logits[m].push_back(Decode(context.get(), {t}, pos++));
        }
      };
      steps(2, kPrompt);
      // A sliding window forgets cells that it left: three steps are not among them.
      llama_memory_seq_rm(llama_get_memory(context.get()), 0, kPrompt + kSteps - 3, -1);
      steps(3, kPrompt + kSteps - 3);
      const auto after = plugin.Stats();
      if (m == 1) outcome.exact = after.exact_calls - before.exact_calls;
      if (m == 2) outcome.sparse = after.sparse_calls - before.sparse_calls;
    }
    const auto end = plugin.Stats();
    outcome.calls = end.attn_calls - start.attn_calls;
    EXPECT_EQ(end.failures, start.failures);
    for (int m = 1; m < 3; ++m) {
      for (std::size_t i = 0; i < logits[0].size(); ++i) {
        const double difference = RelativeDifference(logits[m][i], logits[0][i]);
        EXPECT_LE(difference, kTolerance) << modes[m] << ", output " << i;
        outcome.worst = std::max(outcome.worst, difference);
      }
    }
    testing::Test::RecordProperty("worst", std::to_string(outcome.worst));
    std::remove(taus.c_str());
    return outcome;
  }
  static void ExpectLeftToGgml(const Outcome& outcome) {
    EXPECT_EQ(outcome.calls, 0u);
    EXPECT_EQ(outcome.worst, 0.0);
  }
};

TEST_F(Architectures, PlainAttention) {
  const Outcome outcome = Compare(Metadata("llama"));
  EXPECT_GE(outcome.exact, 2u * 2 * kSteps);
  EXPECT_GE(outcome.sparse, 2u * 2 * kSteps);
}

TEST_F(Architectures, ASlidingWindowInEveryOtherLayer) {
  Metadata metadata("gemma3");
  metadata.Set("attention.key_length", 64).Set("attention.value_length", 64);
  metadata.Set("attention.sliding_window", 100).Set("attention.sliding_window_pattern", 2);
  const Outcome outcome = Compare(metadata);
  EXPECT_GT(outcome.exact, 0u);
  EXPECT_GT(outcome.sparse, 0u);
}

TEST_F(Architectures, LogitsThatAreCapped) {
  Metadata metadata("gemma2");
  metadata.Set("attention.key_length", 64).Set("attention.value_length", 64);
  metadata.Set("attention.sliding_window", 100).Set("attention.sliding_window_pattern", 2);
  metadata.Set("attn_logit_softcapping", 2.0f).Set("final_logit_softcapping", 30.0f);
  const Outcome outcome = Compare(metadata);
  EXPECT_GT(outcome.exact, 0u);
  EXPECT_EQ(outcome.sparse, 0u);
}

TEST_F(Architectures, AttentionSinks) {
  Metadata metadata("gpt-oss");
  metadata.Set("attention.key_length", 64).Set("attention.value_length", 64).Set("rope.dimension_count", 64);
  metadata.Set("attention.sliding_window", 100).Set("attention.sliding_window_pattern", 2);
  metadata.Set("expert_feed_forward_length", 64).Set("expert_count", 2).Set("expert_used_count", 2);
  const Outcome outcome = Compare(metadata);
  EXPECT_GT(outcome.exact, 0u);
  EXPECT_GT(outcome.sparse, 0u);
}

TEST_F(Architectures, PositionBiasesAreLeftToGgml) {
  Metadata metadata("mpt");
  metadata.Set("attention.max_alibi_bias", 8.0f).Set("attention.clamp_kqv", 10.0f);
  ExpectLeftToGgml(Compare(metadata));
}

// Keys of 576 values and values of 512 in one tensor.
TEST_F(Architectures, LatentAttentionIsLeftToGgml) {
  Metadata metadata("deepseek2");
  metadata.Set("attention.head_count", 1).Set("attention.head_count_kv", 1);
  metadata.Set("leading_dense_block_count", 2).Set("vocab_size", kVocab);
  metadata.Set("attention.q_lora_rank", 64).Set("attention.kv_lora_rank", 512);
  metadata.Set("attention.key_length", 576).Set("attention.value_length", 512);
  metadata.Set("attention.key_length_mla", 192).Set("attention.value_length_mla", 128);
  metadata.Set("rope.dimension_count", 64);
  metadata.Set("expert_feed_forward_length", 64).Set("expert_count", 2).Set("expert_used_count", 2);
  metadata.Set("expert_shared_count", 1).Set("expert_weights_scale", 1.0f).Set("expert_gating_func", 2);
  ExpectLeftToGgml(Compare(metadata, 1, GGML_TYPE_F16));
}

// No cache at all; all rows at once see each other.
TEST_F(Architectures, AnEmbeddingModelIsLeftToGgml) {
  Metadata metadata("bert");
  gguf_set_val_u32(metadata.get(), "tokenizer.ggml.token_type_count", 2);
  metadata.SetFlag("attention.causal", false).Set("pooling_type", 1);
  const ModelPtr model = MakeModel(metadata);
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  plugin.Set("crossover", "0");
  const auto before = plugin.Stats();
  std::vector<float> embeddings[2];
  for (int m = 0; m < 2; ++m) {
    plugin.Set("mode", m == 0 ? "off" : "auto");
    llama_context_params p = llama_context_default_params();
    p.n_ctx = p.n_batch = p.n_ubatch = 1024;
    p.n_threads = p.n_threads_batch = 1;
    p.embeddings = true;
    p.pooling_type = LLAMA_POOLING_TYPE_MEAN;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    const LlamaContextPtr context(llama_init_from_model(model.get(), p));
    ASSERT_NE(context, nullptr);
    for (const int n : {600, 5}) {
      std::vector<llama_token> tokens = RandomTokens(static_cast<unsigned>(n), n);
      ASSERT_EQ(llama_encode(context.get(), llama_batch_get_one(tokens.data(), n)), 0);
      const float* row = llama_get_embeddings_seq(context.get(), 0);
      ASSERT_NE(row, nullptr);
      embeddings[m].insert(embeddings[m].end(), row, row + kEmbd);
    }
  }
  EXPECT_EQ(embeddings[0], embeddings[1]);
  EXPECT_EQ(plugin.Stats().attn_calls, before.attn_calls);
}

}  // namespace
}  // namespace scsa::plugin_test
