// SPDX-License-Identifier: Apache-2.0
#include "prefill_bench.h"

#include <fmt/format.h>

#include <chrono>

#include "stats.h"
#include "timing.h"

namespace scsa::tool {
namespace {

constexpr Arm kArms[] = {Arm::kLlama, Arm::kExact, Arm::kScsa};
constexpr int kNumArms = 3;

// What the rounds of one arm gave.
struct Samples {
  std::vector<double> ttft_s, attention_s, ready_s, first_ms, step_ms;
  std::vector<double> log_probabilities;  // of the first token after the prompt
};

}  // namespace

std::vector<PrefillResult> MeasurePrefill(const PrefillBenchOptions& options, const Model& model,
                                          std::span<const llama_token> tokens, int context, const PluginClient& plugin,
                                          Progress& progress) {
  Samples samples[kNumArms];
  TimeInterleaved(kNumArms, options.rounds, [&](int arm, int round) {
    plugin.Set("mode", ArmMode(kArms[arm]));
    Context cache(model, context + options.steps, CacheType::kF16, options.threads);
    const scsa_plugin_stats before = plugin.Stats();
    const double ttft = SecondsOf([&] {
      const auto start = std::chrono::steady_clock::now();
      cache.Decode(tokens.first(static_cast<std::size_t>(context)), [&](int done) {
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        progress.Show(fmt::format("{} tokens, {}, round {}/{}: {}", context, ArmName(kArms[arm]), round + 1,
                                  options.rounds, RateText(done, context, seconds)));
      });
    });
    const scsa_plugin_stats spent = StatsDifference(plugin.Stats(), before);
    Samples& of_arm = samples[arm];
    of_arm.ttft_s.push_back(ttft);
    of_arm.attention_s.push_back(static_cast<double>(spent.attn_ns) * 1e-9);
    of_arm.ready_s.push_back(static_cast<double>(spent.prompt_ns) * 1e-9);
    of_arm.log_probabilities = LogSoftmax(cache.Logits());
    for (int step = 0; step < options.steps; ++step) {
      const std::span<const llama_token> token = tokens.subspan(static_cast<std::size_t>(context + step), 1);
      const double ms = 1e3 * SecondsOf([&] { cache.Decode(token); });
      (step == 0 ? of_arm.first_ms : of_arm.step_ms).push_back(ms);
    }
  });

  const Samples& exact = samples[1];
  const double llama_s = Quantile(samples[0].ttft_s, 0.5);
  const double elsewhere_s = Quantile(exact.ttft_s, 0.5) - Quantile(exact.attention_s, 0.5);
  std::vector<PrefillResult> results;
  for (int arm = 0; arm < kNumArms; ++arm) {
    const Samples& of_arm = samples[arm];
    PrefillResult result;
    result.context = context;
    result.arm = kArms[arm];
    result.ttft_s = Quantile(of_arm.ttft_s, 0.5);
    result.attention_s = kArms[arm] == Arm::kLlama ? result.ttft_s - elsewhere_s : Quantile(of_arm.attention_s, 0.5);
    result.ready_s = Quantile(of_arm.ready_s, 0.5);
    result.first_step_ms = Quantile(of_arm.first_ms, 0.5);
    result.step_ms = Quantile(of_arm.step_ms, 0.5);
    result.speedup = llama_s / result.ttft_s;
    result.kl_prompt = KlDivergence(exact.log_probabilities, of_arm.log_probabilities);
    results.push_back(result);
  }
  return results;
}

}  // namespace scsa::tool
