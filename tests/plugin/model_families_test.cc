// SPDX-License-Identifier: Apache-2.0
//
// Other model families through libllama. Models that are not in the model folder skip their test.
#include <unistd.h>

#include "llama_fixture.h"
#include "qwen3_model.h"

namespace scsa::plugin_test {
namespace {

struct Agreement {
  double exact_kl = 0;   // exact mode against ggml, mean over the steps
  double sparse_kl = 0;  // sparse mode against exact mode
  std::uint64_t exact_calls = 0, sparse_calls = 0;
};

// Prefills once, then decodes the same tokens in three modes.
Agreement Compare(llama_model* model, std::size_t prompt, std::size_t steps, ContextOptions options) {
  LoadedPlugin& plugin = LoadedPlugin::Get();
  plugin.Set("crossover", "600");
  plugin.Set("calibrate", "0");
  const std::vector<llama_token> tokens = TextTokens(model, prompt + steps);
  std::vector<std::uint8_t> state;
  const auto run = [&](const char* mode) {
    plugin.Set("mode", mode);
    const LlamaContextPtr context = MakeLlama(model, options);
    if (state.empty()) {
      Decode(context.get(), {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(prompt)}, 0);
      state.resize(llama_state_seq_get_size(context.get(), 0));
      state.resize(llama_state_seq_get_data(context.get(), state.data(), state.size(), 0));
    } else if (llama_state_seq_set_data(context.get(), state.data(), state.size(), 0) == 0) {
      throw std::runtime_error("cannot restore a state");
    }
    std::vector<std::vector<float>> logits;
    for (std::size_t i = 0; i < steps; ++i) {
      logits.push_back(Decode(context.get(), {tokens[prompt + i]}, static_cast<llama_pos>(prompt + i)));
    }
    return logits;
  };
  const auto ggml = run("off");
  const auto start = plugin.Stats();
  const auto exact = run("exact");
  const auto middle = plugin.Stats();
  const auto sparse = run("auto");
  const auto end = plugin.Stats();
  Agreement a;
  a.exact_calls = middle.exact_calls - start.exact_calls;
  a.sparse_calls = end.sparse_calls - middle.sparse_calls;
  for (std::size_t i = 0; i < steps; ++i) {
    a.exact_kl += KlDivergence(exact[i], ggml[i]) / static_cast<double>(steps);
    a.sparse_kl += KlDivergence(exact[i], sparse[i]) / static_cast<double>(steps);
  }
  testing::Test::RecordProperty("exact_kl", std::to_string(a.exact_kl));
  testing::Test::RecordProperty("sparse_kl", std::to_string(a.sparse_kl));
  return a;
}

constexpr std::size_t kPrompt = 800;
constexpr std::size_t kSteps = 4;

TEST(ModelFamilies, SmolLm2WithEveryCacheType) {
  const ModelPtr model = LoadModel(ModelPath("SmolLM2-135M-Instruct.Q4_1.gguf"));
  ASSERT_NE(model, nullptr) << "SmolLM2 is missing in " SCSA_MODEL_DIR "; scripts/setup gets it";
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model.get()));
  for (ggml_type type : {GGML_TYPE_BF16, GGML_TYPE_Q8_0}) {
    ContextOptions options;
    options.k_type = options.v_type = type;
    const Agreement a = Compare(model.get(), kPrompt, kSteps, options);
    EXPECT_EQ(a.exact_calls, kSteps * layers) << ggml_type_name(type);
    EXPECT_EQ(a.sparse_calls, kSteps * layers) << ggml_type_name(type);
    EXPECT_LT(a.exact_kl, 0.01) << ggml_type_name(type);
    EXPECT_LT(a.sparse_kl, 0.3) << ggml_type_name(type);
  }
}

TEST(ModelFamilies, Qwen2) {
  const ModelPtr model = LoadModel(ModelPath("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"));
  if (model == nullptr) GTEST_SKIP() << "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf is not in " SCSA_MODEL_DIR;
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model.get()));
  const Agreement a = Compare(model.get(), kPrompt, kSteps, {});
  EXPECT_EQ(a.exact_calls, kSteps * layers);
  EXPECT_EQ(a.sparse_calls, kSteps * layers);
  EXPECT_LT(a.exact_kl, 0.01);
  EXPECT_LT(a.sparse_kl, 0.3);
}

TEST(ModelFamilies, Gemma3WithASlidingWindow) {
  const ModelPtr model = LoadModel(ModelPath("gemma-3-270m-q4_k_m.gguf"));
  if (model == nullptr) GTEST_SKIP() << "gemma-3-270m-q4_k_m.gguf is not in " SCSA_MODEL_DIR;
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model.get()));
  const Agreement a = Compare(model.get(), kPrompt, kSteps, {});
  // Layers with a window of 512 are exact at every length, the others are sparse.
  EXPECT_EQ(a.exact_calls, kSteps * layers);
  EXPECT_GT(a.sparse_calls, 0u);
  EXPECT_LT(a.sparse_calls, kSteps * layers);
  EXPECT_LT(a.exact_kl, 0.01);
  EXPECT_LT(a.sparse_kl, 0.3);
}

TEST(ModelFamilies, Qwen3InTheShapeOf06B) {
  const std::string vocabulary = ModelPath("SmolLM2-135M-Instruct.Q4_1.gguf");
  ASSERT_TRUE(std::filesystem::exists(vocabulary)) << "SmolLM2 is missing in " SCSA_MODEL_DIR;
  const std::string path = (std::filesystem::temp_directory_path() /
                            std::string("scsa-qwen3-").append(std::to_string(getpid())).append(".gguf"))
                               .string();
  WriteQwen3(path, {}, vocabulary);
  const ModelPtr model = LoadModel(path);
  std::filesystem::remove(path);
  ASSERT_NE(model, nullptr);
  const Agreement a = Compare(model.get(), kPrompt, kSteps, {});
  EXPECT_EQ(a.exact_calls, kSteps * 3);
  EXPECT_EQ(a.sparse_calls, kSteps * 3);
  EXPECT_LT(a.exact_kl, 0.01);
  EXPECT_LT(a.sparse_kl, 0.3);
}

}  // namespace
}  // namespace scsa::plugin_test
