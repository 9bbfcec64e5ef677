// SPDX-License-Identifier: Apache-2.0
#include "prefill_quality.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "attention_check.h"
#include "chat.h"
#include "freerun_tasks.h"
#include "retrieval_prompt.h"
#include "stats.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr std::uint64_t kSeed = 1;  // of the hidden numbers
constexpr int kHidden = 4;
constexpr std::size_t kShowEvery = 64;   // tokens
constexpr std::size_t kJudgedRows = 64;  // the last of a prompt, enough for tiles

// A haystack as a prompt, and how a question about it goes on.
struct Document {
  std::vector<llama_token> tokens;  // the prompt and what follows it
  RetrievalSet facts;
  ChatFrame frame;
};

Document MakeDocument(const Model& model, std::string_view text, int length) {
  Document document;
  document.facts = MakePasskeySet(kSeed, kHidden);
  document.frame = ChatFrameOf(model);
  document.tokens = HaystackTokens(model, document.frame, text, document.facts.needles, length);
  return document;
}

// Decodes tokens[begin, end). Sum of the negative log-likelihoods of those that follow them, as far as `tokens` goes.
double ReadTokens(Context& context, std::span<const llama_token> tokens, std::size_t begin, std::size_t end,
                  const std::function<void(int)>& progress) {
  double nll = 0.0;
  context.DecodeAll(tokens.subspan(begin, end - begin), [&](std::size_t position, std::span<const float> logits) {
    position += begin;
    if (position + 1 < tokens.size()) nll -= LogSoftmax(logits)[static_cast<std::size_t>(tokens[position + 1])];
    if (position % kShowEvery == 0) progress(static_cast<int>(position));
  });
  return nll;
}

class Reader {
 public:
  Reader(const PrefillBenchOptions& options, const Model& model, const Document& document, int context,
         const PluginClient& plugin)
      : options_(options), model_(model), document_(document), length_(context), plugin_(plugin) {}

  // log probabilities after each step of the exact arm, kept as the reference of the others.
  PrefillQuality Measure(const PrefillArm& arm, const std::function<void(const std::string&)>& show) {
    const bool is_reference = reference_.empty();
    arm.Use(plugin_);
    Context context(model_, length_ + std::max(options_.quality_steps, kQuestionTokens + kAnswerTokens),
                    CacheType::kF16, options_.threads);
    const std::span<const llama_token> tokens(document_.tokens);
    const auto prompt = tokens.first(static_cast<std::size_t>(length_));
    PrefillQuality quality;
    quality.arm = arm;
    const auto show_position = [&](int done) { show(fmt::format("{} tokens", done)); };
    const std::size_t judged = prompt.size() - std::min(prompt.size(), kJudgedRows);
    double nll = ReadTokens(context, prompt, 0, judged, show_position);
    ReferenceProbe probe(options_.threads, /*with_ggml=*/is_reference);
    {
      const ScopedObserver observer(plugin_, &ReferenceProbe::Observe, &probe);
      nll += ReadTokens(context, prompt, judged, prompt.size(), show_position);
    }
    quality.perplexity = std::exp(nll / (length_ - 1));
    quality.attention_error = Mean(probe.errors());
    if (!probe.ggml_errors().empty()) quality.ggml_attention_error = Mean(probe.ggml_errors());
    // From here on attention is exact, whatever the arm: only the prompt's rows differ.
    plugin_.Set("mode", "exact");
    Follow(context, tokens.subspan(static_cast<std::size_t>(length_)), is_reference, quality);
    for (std::size_t i = 0; i < document_.facts.questions.size(); ++i) {
      show(fmt::format("question {}/{}", i + 1, document_.facts.questions.size()));
      if (!context.Truncate(length_)) throw ToolError("--quality needs a model whose cache can be rewound");
      Ask(context, document_.facts.questions[i], quality);
    }
    return quality;
  }

 private:
  void Follow(Context& context, std::span<const llama_token> tokens, bool is_reference, PrefillQuality& quality) {
    double kl = 0.0;
    double nll = 0.0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::vector<double> log_p = LogSoftmax(context.Logits());
      nll -= log_p[static_cast<std::size_t>(tokens[i])];
      if (is_reference) {
        reference_.push_back(std::move(log_p));
      } else {
        kl += KlDivergence(reference_[i], log_p);
      }
      context.Decode(tokens.subspan(i, 1));
    }
    const auto steps = static_cast<double>(tokens.size());
    if (is_reference) reference_nll_ = nll;
    quality.kl_mean = kl / steps;
    quality.nll_delta = (nll - reference_nll_) / steps;
  }

  void Ask(Context& context, const RetrievalQuestion& question, PrefillQuality& quality) {
    context.Decode(QuestionTokens(model_, document_.frame, question));
    std::string answer;
    for (int i = 0; i < kAnswerTokens; ++i) {
      const llama_token token = Argmax(context.Logits());
      if (llama_vocab_is_eog(model_.vocab(), token)) break;
      answer += model_.Piece(token);
      context.Decode({&token, 1});
    }
    for (const bool found : FoundNumbers(answer, question.expected)) {
      quality.found += found ? 1 : 0;
      ++quality.hidden;
    }
  }

  const PrefillBenchOptions& options_;
  const Model& model_;
  const Document& document_;
  int length_;
  const PluginClient& plugin_;
  std::vector<std::vector<double>> reference_;
  double reference_nll_ = 0.0;
};

}  // namespace

std::vector<PrefillQuality> MeasurePrefillQuality(const PrefillBenchOptions& options, const Model& model,
                                                  std::string_view text, int context, const PluginClient& plugin,
                                                  Progress& progress) {
  const Document document = MakeDocument(model, text, context + options.quality_steps);
  Reader reader(options, model, document, context, plugin);
  std::vector<PrefillArm> arms = {{Arm::kExact, 0.0}};
  for (const double tolerance : options.tolerances) arms.push_back({Arm::kScsa, tolerance});
  std::vector<PrefillQuality> results;
  for (const PrefillArm& arm : arms) {
    results.push_back(reader.Measure(arm, [&](const std::string& what) {
      progress.Show(fmt::format("{} tokens, quality of {}: {}", context, arm.Name(), what));
    }));
  }
  return results;
}

}  // namespace scsa::tool
