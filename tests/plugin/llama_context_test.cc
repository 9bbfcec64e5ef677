// SPDX-License-Identifier: Apache-2.0
//
// SmolLM2 through libllama: the exact mode agrees with ggml, and whatever happens to the cache, the sparse mode answers
// what a fresh context in exact mode answers after the same steps.
#include <algorithm>
#include <functional>

#include "llama_fixture.h"
#include "true_errors.h"

namespace scsa::plugin_test {
namespace {

constexpr std::size_t kPrompt = 1100;
constexpr std::size_t kSteps = 6;
constexpr double kApproximation = 0.2;  // nats, mean of kSteps steps; measured: up to 0.11

class LlamaContext : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    model_ = LoadModel(ModelPath("SmolLM2-135M-Instruct.Q4_1.gguf"));
    ASSERT_NE(model_, nullptr) << "SmolLM2 is missing in " SCSA_MODEL_DIR "; scripts/setup gets it";
    tokens_ = TextTokens(model_.get(), kPrompt + 200);
    other_ = TextTokens(model_.get(), 300, 40000);
    LoadedPlugin::Get().Set("mode", "off");
    state_ = Prefill({tokens_.begin(), tokens_.begin() + kPrompt}, kPrompt);
    // Another text of the same length: a part of it, doubled.
    other_state_ = Prefill({other_.begin(), other_.end()}, kPrompt);
  }
  // The state after `length` tokens: the given ones and then, repeated, their beginning.
  static std::vector<std::uint8_t> Prefill(std::vector<llama_token> tokens, std::size_t length) {
    for (std::size_t i = 0; tokens.size() < length; ++i) tokens.push_back(tokens[i]);
    const LlamaContextPtr context = MakeLlama(model_.get(), {});
    Decode(context.get(), tokens, 0);
    std::vector<std::uint8_t> state(llama_state_seq_get_size(context.get(), 0));
    state.resize(llama_state_seq_get_data(context.get(), state.data(), state.size(), 0));
    return state;
  }
  static void TearDownTestSuite() { model_.reset(); }
  // A window of two steps at a tolerance that nothing meets: every head gets the smallest threshold.
  void SetUp() override {
    LoadedPlugin::Get().Set("crossover", "600");
    LoadedPlugin::Get().Set("calibrate", "2");
    LoadedPlugin::Get().Set("tolerance", "0.000001");
  }

  static void Load(llama_context* context, const std::vector<std::uint8_t>& state = state_) {
    ASSERT_GT(llama_state_seq_set_data(context, state.data(), state.size(), 0), 0u);
  }
  // Single steps over the given tokens, as decoding does; the logits of each.
  static std::vector<std::vector<float>> Steps(llama_context* context, const std::vector<llama_token>& tokens,
                                               std::size_t begin, std::size_t n, llama_pos pos, llama_seq_id seq = 0) {
    std::vector<std::vector<float>> logits;
    for (std::size_t i = 0; i < n; ++i) {
      logits.push_back(Decode(context, {tokens[begin + i]}, pos + static_cast<llama_pos>(i), seq));
    }
    return logits;
  }

  using Scenario = std::function<std::vector<std::vector<float>>(llama_context*)>;
  static std::vector<std::vector<float>> Run(const char* mode, const ContextOptions& options,
                                             const Scenario& scenario) {
    LoadedPlugin::Get().Set("mode", mode);
    const LlamaContextPtr context = MakeLlama(model_.get(), options);
    return scenario(context.get());
  }
  // The scenario's logits in mode auto must be those in mode exact, but for the approximation. Logits that rest on a
  // stale plan are off by nats.
  static void ExpectSameAnswers(const ContextOptions& options, const Scenario& scenario) {
    const auto exact = Run("exact", options, scenario);
    const auto before = LoadedPlugin::Get().Stats();
    const auto sparse = Run("auto", options, scenario);
    const auto after = LoadedPlugin::Get().Stats();
    EXPECT_GT(after.sparse_calls - before.sparse_calls, 0u);
    ASSERT_EQ(exact.size(), sparse.size());
    // The steps after the last change.
    double mean = 0;
    for (std::size_t i = exact.size() - kSteps; i < exact.size(); ++i)
      mean += KlDivergence(exact[i], sparse[i]) / kSteps;
    RecordProperty("mean_kl", std::to_string(mean));
    EXPECT_LT(mean, kApproximation);
  }

  static ModelPtr model_;
  static std::vector<llama_token> tokens_, other_;
  static std::vector<std::uint8_t> state_, other_state_;
};
ModelPtr LlamaContext::model_;
std::vector<llama_token> LlamaContext::tokens_, LlamaContext::other_;
std::vector<std::uint8_t> LlamaContext::state_, LlamaContext::other_state_;

TEST_F(LlamaContext, ExactModeAgreesWithGgml) {
  const Scenario scenario = [](llama_context* c) {
    Load(c);
    return Steps(c, tokens_, kPrompt, 16, kPrompt);
  };
  const auto ggml = Run("off", {}, scenario);
  const auto before = LoadedPlugin::Get().Stats();
  const auto exact = Run("exact", {}, scenario);
  const auto after = LoadedPlugin::Get().Stats();
  EXPECT_EQ(after.exact_calls - before.exact_calls,
            16u * static_cast<std::uint64_t>(llama_model_n_layer(model_.get())));
  double mean = 0;
  for (std::size_t i = 0; i < ggml.size(); ++i)
    mean += KlDivergence(exact[i], ggml[i]) / static_cast<double>(ggml.size());
  RecordProperty("mean_kl", std::to_string(mean));
  // ggml accumulates the values in f16.
  EXPECT_LT(mean, 0.01);
  EXPECT_GT(mean, 0.0);
}

TEST_F(LlamaContext, ModeOffIsGgmlToTheBit) {
  const Scenario scenario = [](llama_context* c) {
    Load(c);
    return Steps(c, tokens_, kPrompt, 2, kPrompt);
  };
  const auto before = LoadedPlugin::Get().Stats();
  const auto a = Run("off", {}, scenario);
  EXPECT_EQ(LoadedPlugin::Get().Stats().attn_calls, before.attn_calls);
  EXPECT_EQ(a, Run("off", {}, scenario));
}

TEST_F(LlamaContext, FlashAttentionOffLeavesEverythingToGgml) {
  ContextOptions options;
  options.flash_attn = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const auto before = LoadedPlugin::Get().Stats();
  Run("auto", options, [](llama_context* c) {
    // A transposed V cache cannot take the saved state: a short prompt does.
    Decode(c, {tokens_.begin(), tokens_.begin() + 520}, 0);
    return Steps(c, tokens_, 520, 2, 520);
  });
  EXPECT_EQ(LoadedPlugin::Get().Stats().attn_calls, before.attn_calls);
}

TEST_F(LlamaContext, PromptMakesDecodingReady) {
  LoadedPlugin::Get().Set("calibrate", "8");
  LoadedPlugin::Get().Set("tolerance", "0.015");
  const Scenario scenario = [](llama_context* c) {
    Decode(c, {tokens_.begin(), tokens_.begin() + kPrompt}, 0);
    return Steps(c, tokens_, kPrompt, kSteps, kPrompt);
  };
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model_.get()));
  const auto before = LoadedPlugin::Get().Stats();
  ExpectSameAnswers({}, scenario);
  const auto after = LoadedPlugin::Get().Stats();
  // Every step after the prompt is sparse, in the run of mode auto.
  EXPECT_EQ(after.sparse_calls - before.sparse_calls, kSteps * layers);
  EXPECT_EQ(after.calibration_calls, before.calibration_calls);
  EXPECT_EQ(after.prompt_rows - before.prompt_rows, 8u * layers);
  EXPECT_GT(after.rebuild_count, before.rebuild_count);
}

TEST_F(LlamaContext, SparsePromptsAreWithinTheirTolerance) {
  const std::vector<llama_token> text = TextTokens(model_.get(), 3000);
  const auto read = [&](const char* tolerance) {
    LoadedPlugin::Get().Set("prompt_tolerance", tolerance);
    LoadedPlugin::Get().Set("mode", "auto");
    ContextOptions options;
    options.n_ctx = 3072;
    const LlamaContextPtr context = MakeLlama(model_.get(), options);
    return Decode(context.get(), text, 0);
  };
  const auto start = LoadedPlugin::Get().Stats();
  const std::vector<float> exact = read("0");
  EXPECT_EQ(LoadedPlugin::Get().Stats().prompt_tiles, start.prompt_tiles);
  // No threshold meets this tolerance, so that all tiles are exact. ggml quantises activations: another order of
  // additions is enough for logits to differ.
  EXPECT_LT(KlDivergence(exact, read("0.000001")), 0.05);
  const auto tight = LoadedPlugin::Get().Stats();
  EXPECT_GT(tight.prompt_tiles, start.prompt_tiles);
  EXPECT_EQ(tight.prompt_sparse_tiles, start.prompt_sparse_tiles);
  EXPECT_GT(tight.prompt_measured_tiles, start.prompt_measured_tiles);
  const std::vector<float> loose = read("0.05");
  const auto after = LoadedPlugin::Get().Stats();
  LoadedPlugin::Get().Set("prompt_tolerance", "0");
  // Tiles are sparse from about 1,500 rows on, and read a part of the rows.
  EXPECT_GT(after.prompt_sparse_tiles - tight.prompt_sparse_tiles, (after.prompt_tiles - tight.prompt_tiles) / 3);
  EXPECT_LT(static_cast<double>(after.prompt_rows_read - tight.prompt_rows_read),
            0.8 * static_cast<double>(after.prompt_rows_visible - tight.prompt_rows_visible));
  const std::uint64_t audited = after.prompt_audited_tiles - tight.prompt_audited_tiles;
  ASSERT_GT(audited, 0u);
  const double error = 1e-6 * static_cast<double>(after.prompt_error_millionths - tight.prompt_error_millionths) /
                       static_cast<double>(audited);
  EXPECT_LT(error, 2 * 0.05);
  EXPECT_GT(error, 0.05 / 4);
  EXPECT_LT(KlDivergence(exact, loose), 0.1);
  EXPECT_GT(KlDivergence(exact, loose), 0.0);
}

TEST_F(LlamaContext, LongerPromptCalibratesAgain) {
  LoadedPlugin::Get().Set("mode", "auto");
  LoadedPlugin::Get().Set("calibrate", "4");
  LoadedPlugin::Get().Set("crossover", "0");
  const LlamaContextPtr context = MakeLlama(model_.get(), {});
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model_.get()));
  const auto rows = [&](std::size_t begin, std::size_t end) {
    const auto before = LoadedPlugin::Get().Stats();
    Decode(context.get(),
           {tokens_.begin() + static_cast<std::ptrdiff_t>(begin), tokens_.begin() + static_cast<std::ptrdiff_t>(end)},
           static_cast<llama_pos>(begin));
    return (LoadedPlugin::Get().Stats().prompt_rows - before.prompt_rows) / layers;
  };
  EXPECT_EQ(rows(0, 520), 0u);  // llama.cpp's own: the cache is empty
  EXPECT_EQ(rows(520, 560), 4u);
  EXPECT_EQ(rows(560, 1000), 0u);
  EXPECT_EQ(rows(1000, 1130), 4u);  // more than twice 560
}

TEST_F(LlamaContext, ParallelRowsAreExact) {
  // A draft of five tokens at once, as speculative decoding checks them.
  const Scenario scenario = [](llama_context* c) {
    Load(c);
    return std::vector<std::vector<float>>{
        Decode(c, {tokens_.begin() + kPrompt, tokens_.begin() + kPrompt + 5}, kPrompt)};
  };
  const auto exact = Run("exact", {}, scenario);
  const auto automatic = Run("auto", {}, scenario);
  EXPECT_EQ(exact, automatic);
}

TEST_F(LlamaContext, Growth) {
  ExpectSameAnswers({}, [](llama_context* c) {
    Load(c);
    return Steps(c, tokens_, kPrompt, 2 * kSteps, kPrompt);
  });
}

TEST_F(LlamaContext, ARemovedSuffixGrownAnew) {
  ExpectSameAnswers({}, [](llama_context* c) {
    Load(c);
    auto logits = Steps(c, tokens_, kPrompt, kSteps, kPrompt);
    llama_memory_seq_rm(llama_get_memory(c), 0, 700, -1);
    // A prefill of another text into the freed cells, then decoding.
    Decode(c, other_, 700);
    const auto more = Steps(c, tokens_, kPrompt, kSteps, 1000);
    logits.insert(logits.end(), more.begin(), more.end());
    return logits;
  });
}

TEST_F(LlamaContext, AContextShift) {
  ExpectSameAnswers({}, [](llama_context* c) {
    Load(c);
    auto logits = Steps(c, tokens_, kPrompt, kSteps, kPrompt);
    llama_memory_seq_rm(llama_get_memory(c), 0, 100, 300);
    llama_memory_seq_add(llama_get_memory(c), 0, 300, -1, -200);
    const auto more = Steps(c, tokens_, kPrompt + kSteps, kSteps, kPrompt + kSteps - 200);
    logits.insert(logits.end(), more.begin(), more.end());
    return logits;
  });
}

TEST_F(LlamaContext, ACopiedSequenceInOneCache) {
  ContextOptions options;
  options.n_seq = 2;
  ExpectSameAnswers(options, [](llama_context* c) {
    Load(c);
    auto logits = Steps(c, tokens_, kPrompt, kSteps, kPrompt);
    llama_memory_seq_cp(llama_get_memory(c), 0, 1, 0, 900);
    const auto more = Steps(c, other_, 0, kSteps, 900, 1);
    logits.insert(logits.end(), more.begin(), more.end());
    const auto again = Steps(c, tokens_, kPrompt + kSteps, kSteps, kPrompt + kSteps, 0);
    logits.insert(logits.end(), again.begin(), again.end());
    return logits;
  });
}

TEST_F(LlamaContext, ACopiedSequenceBetweenStreams) {
  ContextOptions options;
  options.n_seq = 2;
  options.unified = false;
  options.n_ctx = 4096;
  ExpectSameAnswers(options, [](llama_context* c) {
    // A saved state belongs to the layout of streams that it was saved with, hence the prefill.
    constexpr std::size_t kShort = 640;
    Decode(c, {tokens_.begin(), tokens_.begin() + kShort}, 0, 0);
    auto logits = Steps(c, tokens_, kShort, kSteps, kShort, 0);
    // Stream 1 first holds something else of the same length.
    Decode(c, {tokens_.begin() + 300, tokens_.begin() + 300 + kShort}, 0, 1);
    const auto before = Steps(c, other_, 0, kSteps, kShort, 1);
    logits.insert(logits.end(), before.begin(), before.end());
    llama_memory_seq_rm(llama_get_memory(c), 1, -1, -1);
    llama_memory_seq_cp(llama_get_memory(c), 0, 1, -1, -1);
    const auto copied = Steps(c, tokens_, kShort + kSteps, kSteps, kShort + kSteps, 1);
    logits.insert(logits.end(), copied.begin(), copied.end());
    return logits;
  });
}

TEST_F(LlamaContext, ALoadedState) {
  ExpectSameAnswers({}, [](llama_context* c) {
    // Another text of the same length is planned over, then replaced.
    Load(c, other_state_);
    auto logits = Steps(c, tokens_, 0, kSteps, kPrompt);
    llama_memory_clear(llama_get_memory(c), false);
    Load(c);
    const auto more = Steps(c, tokens_, kPrompt, kSteps, kPrompt);
    logits.insert(logits.end(), more.begin(), more.end());
    return logits;
  });
}

TEST_F(LlamaContext, AClearedCache) {
  ExpectSameAnswers({}, [](llama_context* c) {
    Load(c);
    auto logits = Steps(c, tokens_, kPrompt, kSteps, kPrompt);
    llama_memory_clear(llama_get_memory(c), true);
    Decode(c, {tokens_.begin() + 300, tokens_.begin() + 1000}, 0);
    const auto more = Steps(c, tokens_, 1000, kSteps, 700);
    logits.insert(logits.end(), more.begin(), more.end());
    return logits;
  });
}

TEST_F(LlamaContext, ContextsThatComeAndGoLeaveNoPlansBehind) {
  const std::uint64_t before = LoadedPlugin::Get().Stats().plan_bytes;
  for (int i = 0; i < 3; ++i) {
    Run("auto", {}, [](llama_context* c) {
      Load(c);
      auto logits = Steps(c, tokens_, kPrompt, 3, kPrompt);
      EXPECT_GT(LoadedPlugin::Get().Stats().plan_bytes, 0u);
      return logits;
    });
    EXPECT_EQ(LoadedPlugin::Get().Stats().plan_bytes, before);
  }
}

TEST_F(LlamaContext, CalibrationFreezesEveryLayer) {
  LoadedPlugin::Get().Set("calibrate", "4");
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model_.get()));
  Run("auto", {}, [layers](llama_context* c) {
    Load(c);
    const auto before = LoadedPlugin::Get().Stats();
    auto logits = Steps(c, tokens_, kPrompt, 6, kPrompt);
    const auto after = LoadedPlugin::Get().Stats();
    EXPECT_EQ(after.calibration_calls - before.calibration_calls, 4 * layers);
    EXPECT_EQ(after.sparse_calls - before.sparse_calls, 2 * layers);
    EXPECT_EQ(after.calibrated_layers, layers);
    return logits;
  });
}

TEST_F(LlamaContext, ThresholdsOfOneContextServeAnotherFromTheCrossoverOn) {
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model_.get()));
  const std::string path = testing::TempDir() + "/scsa_llama_context_taus.json";
  Run("auto", {}, [&path](llama_context* c) {
    Load(c);
    auto logits = Steps(c, tokens_, kPrompt, 2, kPrompt);
    std::ofstream(path) << LoadedPlugin::Get().Taus();
    return logits;
  });
  const std::size_t exact_steps = 3;
  LoadedPlugin::Get().Set("crossover", std::to_string(kPrompt + exact_steps + 1));
  LoadedPlugin::Get().Set("tolerance", "0.000001");
  LoadedPlugin::Get().Set("taus", path);
  Run("auto", {}, [layers](llama_context* c) {
    Load(c);
    const auto before = LoadedPlugin::Get().Stats();
    // Step i sees kPrompt + i + 1 cells.
    auto logits = Steps(c, tokens_, kPrompt, exact_steps, kPrompt);
    const auto at_crossover = LoadedPlugin::Get().Stats();
    EXPECT_EQ(at_crossover.sparse_calls, before.sparse_calls);
    EXPECT_EQ(at_crossover.calibrated_layers, 0u);
    const auto more = Steps(c, tokens_, kPrompt + exact_steps, 1, kPrompt + exact_steps);
    const auto after = LoadedPlugin::Get().Stats();
    EXPECT_EQ(after.sparse_calls - at_crossover.sparse_calls, layers);
    EXPECT_EQ(after.calibration_calls, before.calibration_calls);
    EXPECT_EQ(after.calibrated_layers, layers);
    return more;
  });
  LoadedPlugin::Get().Set("taus", "");
}

// A prompt that calibrates, and then the steps of a trial, exact and sparse in turn, and some beyond it.
TEST_F(LlamaContext, AMeasuredCrossoverSwitchesBetweenRightAnswers) {
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model_.get()));
  plugin.Set("crossover", "auto");
  constexpr std::size_t kLong = 1700;
  constexpr std::size_t kDecoded = 24;
  const std::vector<llama_token> tokens = TextTokens(model_.get(), kLong + kDecoded);
  scsa_plugin_stats before{};
  const Scenario scenario = [&](llama_context* c) {
    Decode(c, {tokens.begin(), tokens.begin() + kLong}, 0);
    before = plugin.Stats();
    return Steps(c, tokens, kLong, kDecoded, kLong);
  };
  const auto exact = Run("exact", {}, scenario);
  EXPECT_EQ(plugin.Stats().crossover_trials, before.crossover_trials);
  const auto measured = Run("auto", {}, scenario);
  const auto after = plugin.Stats();
  EXPECT_EQ(before.calibrated_layers, layers);
  EXPECT_EQ(after.calibration_calls, before.calibration_calls);
  // The trial is over, whoever won it: at least four steps of each kind, and the sparse one that comes first.
  EXPECT_EQ(after.crossover_trials - before.crossover_trials, 1u);
  EXPECT_GE(after.sparse_calls - before.sparse_calls, 5 * layers);
  EXPECT_GE(after.exact_calls - before.exact_calls, 4 * layers);
  EXPECT_EQ(after.sparse_calls + after.exact_calls - before.sparse_calls - before.exact_calls, kDecoded * layers);
  EXPECT_GE(after.crossover, 1536u);
  EXPECT_LE(after.crossover, 4 * (kLong + 1));
  double mean = 0;
  for (std::size_t i = 0; i < kDecoded; ++i) mean += KlDivergence(exact[i], measured[i]) / kDecoded;
  RecordProperty("mean_kl", std::to_string(mean));
  EXPECT_LT(mean, kApproximation);
  EXPECT_GT(mean, 0.0);
}

TEST_F(LlamaContext, TheAuditFollowsProseThatTurnsIntoCode) {
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  plugin.Set("calibrate", "8");
  plugin.Set("tolerance", "0.05");
  plugin.Set("audit", "0.1");
  plugin.ResetAudit();
  const std::vector<llama_token> code = TextTokens(model_.get(), 40, 2000, SCSA_CODE_FILE);
  const auto layers = static_cast<std::uint64_t>(llama_model_n_layer(model_.get()));
  TrueErrors truth;
  const auto before = plugin.Stats();
  Run("auto", {}, [&](llama_context* c) {
    Load(c);
    plugin.SetObserver(&TrueErrors::Observe, &truth);
    auto logits = Steps(c, tokens_, kPrompt, 8 + 12, kPrompt);
    const auto prose = plugin.Stats();
    EXPECT_EQ(prose.sparse_calls - before.sparse_calls, 12 * layers);
    // A tenth of 12 steps and 3 KV heads, 3 query heads each, per layer; 3.6 rounded either way.
    EXPECT_GE(prose.audited_outputs - before.audited_outputs, layers * 3 * 3);
    EXPECT_LE(prose.audited_outputs - before.audited_outputs, layers * 4 * 3);
    const auto more = Steps(c, code, 0, code.size(), kPrompt + 20);
    plugin.SetObserver(nullptr, nullptr);
    logits.insert(logits.end(), more.begin(), more.end());
    return logits;
  });
  const auto after = plugin.Stats();
  EXPECT_EQ(after.sparse_calls - before.sparse_calls + (after.calibration_calls - before.calibration_calls),
            60 * layers);
  EXPECT_EQ(after.audit_failures, before.audit_failures);
  EXPECT_GT(after.audit_ns, before.audit_ns);
  EXPECT_LT(after.audit_ns - before.audit_ns, after.attn_ns - before.attn_ns);

  // The context is freed; the figures stay.
  const scsa_plugin_audit audit = plugin.Audit();
  EXPECT_EQ(audit.outputs, after.audited_outputs - before.audited_outputs);
  EXPECT_EQ(audit.samples, audit.outputs);  // less than 256 per layer
  EXPECT_EQ(audit.observations, audit.outputs / 3);
  std::sort(truth.errors.begin(), truth.errors.end());
  const double median = truth.errors[truth.errors.size() / 2];
  RecordProperty("true_median", std::to_string(median));
  RecordProperty("audited_median", std::to_string(audit.median));
  EXPECT_LE(audit.median_low, median);
  EXPECT_GE(audit.median_high, median);
  EXPECT_LT(audit.median_high, 1.5 * audit.median_low) << "hundreds of observations";
  EXPECT_GT(audit.p99, audit.p90);
  EXPECT_GT(audit.p90, audit.median);

  std::uint64_t outputs = 0;
  for (int layer = 0; layer < static_cast<int>(layers); ++layer) {
    const scsa_plugin_audit of_layer = plugin.Audit(layer);
    EXPECT_GE(of_layer.observations, 12u) << layer;
    EXPECT_LE(of_layer.observations, 16u) << layer;
    outputs += of_layer.outputs;
  }
  EXPECT_EQ(outputs, audit.outputs);
  const std::string json = plugin.AuditJson();
  EXPECT_EQ(json.rfind("{\n  \"share\": 0.1,\n  \"all\": {\"outputs\": " + std::to_string(audit.outputs) + ",", 0), 0u)
      << json;
  EXPECT_NE(json.find("\n    \"29\": {\"outputs\": "), std::string::npos) << json;
  EXPECT_EQ(json.find("inf"), std::string::npos) << json;

  plugin.ResetAudit();
  EXPECT_EQ(plugin.Audit().samples, 0u);
  EXPECT_EQ(plugin.AuditJson().find("\"median\": 0"), std::string::npos);
  // No audit, no samples.
  plugin.Set("audit", "0");
  Run("auto", {}, [](llama_context* c) {
    Load(c);
    return Steps(c, tokens_, kPrompt, 8 + 4, kPrompt);
  });
  EXPECT_EQ(plugin.Stats().audited_outputs, after.audited_outputs);
  plugin.Set("audit", "0.00390625");
}

}  // namespace
}  // namespace scsa::plugin_test
