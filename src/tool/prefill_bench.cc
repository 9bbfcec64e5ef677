// SPDX-License-Identifier: Apache-2.0
#include "prefill_bench.h"

#include <fmt/format.h>

#include <chrono>

#include "stats.h"
#include "timing.h"

namespace scsa::tool {
namespace {

constexpr int kLlamaArm = 0;  // places in PrefillArms
constexpr int kExactArm = 1;

// What the rounds of one arm gave.
struct Samples {
  std::vector<double> ttft_s, attention_s, ready_s, first_ms, step_ms;
  std::vector<double> log_probabilities;  // of the first token after the prompt
  scsa_plugin_stats stats{};              // of all prompts
};

}  // namespace

std::string PrefillArm::Name() const { return prompt_tolerance > 0.0 ? "sparse" : std::string(ArmName(arm)); }

void PrefillArm::Use(const PluginClient& plugin) const {
  plugin.Set("prompt_tolerance", fmt::format("{}", prompt_tolerance));
  plugin.Set("mode", ArmMode(arm));
}

std::vector<PrefillArm> PrefillArms(const PrefillBenchOptions& options) {
  std::vector<PrefillArm> arms = {{Arm::kLlama, 0.0}, {Arm::kExact, 0.0}, {Arm::kScsa, 0.0}};
  for (const double tolerance : options.tolerances) arms.push_back({Arm::kScsa, tolerance});
  return arms;
}

std::vector<PrefillResult> MeasurePrefill(const PrefillBenchOptions& options, const Model& model,
                                          std::span<const llama_token> tokens, int context, const PluginClient& plugin,
                                          Progress& progress) {
  const std::vector<PrefillArm> arms = PrefillArms(options);
  const auto n_arms = static_cast<int>(arms.size());
  std::vector<Samples> samples(arms.size());
  TimeInterleaved(n_arms, options.rounds, [&](int arm, int round) {
    arms[arm].Use(plugin);
    Context cache(model, context + options.steps, CacheType::kF16, options.threads);
    const scsa_plugin_stats before = plugin.Stats();
    const double ttft = SecondsOf([&] {
      const auto start = std::chrono::steady_clock::now();
      cache.Decode(tokens.first(static_cast<std::size_t>(context)), [&](int done) {
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        progress.Show(fmt::format("{} tokens, {}, round {}/{}: {}", context, arms[arm].Name(), round + 1,
                                  options.rounds, RateText(done, context, seconds)));
      });
    });
    const scsa_plugin_stats spent = StatsDifference(plugin.Stats(), before);
    Samples& of_arm = samples[arm];
    of_arm.ttft_s.push_back(ttft);
    of_arm.attention_s.push_back(static_cast<double>(spent.attn_ns) * 1e-9);
    of_arm.ready_s.push_back(static_cast<double>(spent.prompt_ns) * 1e-9);
    AddStats(of_arm.stats, spent);
    of_arm.log_probabilities = LogSoftmax(cache.Logits());
    for (int step = 0; step < options.steps; ++step) {
      const std::span<const llama_token> token = tokens.subspan(static_cast<std::size_t>(context + step), 1);
      const double ms = 1e3 * SecondsOf([&] { cache.Decode(token); });
      (step == 0 ? of_arm.first_ms : of_arm.step_ms).push_back(ms);
    }
  });

  const Samples& exact = samples[kExactArm];
  const double llama_s = Quantile(samples[kLlamaArm].ttft_s, 0.5);
  const double elsewhere_s = Quantile(exact.ttft_s, 0.5) - Quantile(exact.attention_s, 0.5);
  std::vector<PrefillResult> results;
  for (int arm = 0; arm < n_arms; ++arm) {
    const Samples& of_arm = samples[arm];
    PrefillResult result;
    result.context = context;
    result.arm = arms[arm];
    result.ttft_s = Quantile(of_arm.ttft_s, 0.5);
    result.attention_s = arm == kLlamaArm ? result.ttft_s - elsewhere_s : Quantile(of_arm.attention_s, 0.5);
    result.ready_s = Quantile(of_arm.ready_s, 0.5);
    result.first_step_ms = Quantile(of_arm.first_ms, 0.5);
    result.step_ms = Quantile(of_arm.step_ms, 0.5);
    result.speedup = llama_s / result.ttft_s;
    result.kl_prompt = KlDivergence(exact.log_probabilities, of_arm.log_probabilities);
    result.rows_read = PromptRowsRead(of_arm.stats);
    result.error = PromptError(of_arm.stats);
    results.push_back(result);
  }
  return results;
}

}  // namespace scsa::tool
