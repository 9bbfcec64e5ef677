// SPDX-License-Identifier: Apache-2.0
#include "freerun_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>

#include "chat.h"
#include "retrieval_prompt.h"
#include "stats.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr int kStartStride = 16;  // tokens from one start to the next

// One arm with a cache of its own, at the end of its calibration window.
class ArmSession {
 public:
  // What is to be decoded before the free run: a saved prompt, more tokens that are read exactly for every arm, the
  // window.
  struct Prompt {
    std::span<const llama_token> tokens;
    int saved = 0;   // first tokens, loaded
    int window = 0;  // last tokens, decoded one by one
  };

  ArmSession(Arm arm, const FreerunOptions& options, const Model& model, const StateStore& states,
             const PluginClient& plugin, Prompt prompt)
      : arm_(arm), options_(options), model_(model), states_(states), plugin_(plugin), prompt_(prompt) {
    Start();
  }

  // Back to the end of the window.
  void Rewind() {
    if (!context_->Truncate(static_cast<int>(prompt_.tokens.size()))) Start();
    std::copy(end_logits_.begin(), end_logits_.end(), logits_.begin());
  }

  // One step after another.
  void Step(llama_token token) {
    Use();
    context_->Decode({&token, 1});
    KeepLogits();
  }
  // A prompt, in batches.
  void Read(std::span<const llama_token> tokens) {
    Use();
    context_->Decode(tokens);
    KeepLogits();
  }
  // After the last token.
  std::span<const float> Logits() const { return logits_; }

 private:
  void Use() const { plugin_.Set("mode", ArmMode(arm_)); }
  void KeepLogits() {
    const std::span<const float> logits = context_->Logits();
    logits_.assign(logits.begin(), logits.end());
  }

  void Start() {
    context_.reset();
    plugin_.Set("mode", "exact");
    context_ = std::make_unique<Context>(model_, options_.TokensNeeded(static_cast<int>(prompt_.tokens.size())),
                                         CacheType::kF16, options_.threads);
    states_.Load(model_, prompt_.tokens.first(prompt_.saved), CacheType::kF16, *context_);
    const std::size_t window_begin = prompt_.tokens.size() - prompt_.window;
    context_->Decode(prompt_.tokens.subspan(prompt_.saved, window_begin - prompt_.saved));
    for (const llama_token token : prompt_.tokens.subspan(window_begin)) Step(token);
    end_logits_ = logits_;
  }

  Arm arm_;
  const FreerunOptions& options_;
  const Model& model_;
  const StateStore& states_;
  const PluginClient& plugin_;
  Prompt prompt_;
  std::unique_ptr<Context> context_;
  std::vector<float> logits_;
  std::vector<float> end_logits_;  // at the end of the window
};

class FreerunMeasurement {
 public:
  FreerunMeasurement(const FreerunOptions& options, const Model& model, int context, StateStore& states,
                     const PluginClient& plugin, Progress& progress)
      : options_(options), model_(model), context_(context), states_(states), plugin_(plugin), progress_(progress) {
    plugin_.Set("preset", options.preset);
    plugin_.Set("tolerance", fmt::format("{}", options.Tolerance()));
    plugin_.Set("calibrate", fmt::format("{}", options.calibrate));
    plugin_.Set("crossover", fmt::format("{}", options.crossover));
    plugin_.Set("taus", "");
    result_.context = context;
  }

  void Continue(std::string_view text) {
    const std::vector<llama_token> tokens = model_.Tokenize(text, true, false);
    if (static_cast<int>(tokens.size()) < context_) {
      throw ToolError(fmt::format("the text has {} tokens, {} are needed: use a longer text or a shorter -c",
                                  tokens.size(), context_));
    }
    const std::span<const llama_token> all(tokens);
    // What the shortest prompt and the longest one have in common.
    const int saved = context_ - options_.calibrate - (options_.starts - 1) * kStartStride;
    Save(all, saved);
    for (int start = 0; start < options_.starts; ++start) {
      const int end = saved + options_.calibrate + start * kStartStride;
      const ArmSession::Prompt prompt = {.tokens = all.first(end), .saved = saved, .window = options_.calibrate};
      const auto show = [&](const char* what, Arm arm) {
        progress_.Show(fmt::format("{} tokens, continuation {}/{}: {} {}", context_, start + 1, options_.starts,
                                   ArmName(arm), what));
      };
      std::vector<Continuation> written;
      show("writes", Arm::kExact);
      ArmSession judge(Arm::kExact, options_, model_, states_, plugin_, prompt);
      for (const Arm arm : options_.arms) {
        Continuation continuation;
        if (arm == Arm::kExact) {
          continuation = Write(judge);
        } else {
          show("writes", arm);
          ArmSession session(arm, options_, model_, states_, plugin_, prompt);
          continuation = Write(session);
        }
        continuation.loop = LongestPeriodicRun(continuation.tokens);
        written.push_back(std::move(continuation));
      }
      for (std::size_t i = 0; i < written.size(); ++i) {
        show("is judged", options_.arms[i]);
        judge.Rewind();
        written[i].nll = Judge(judge, written[i].tokens);
      }
      result_.continuations.push_back(std::move(written));
    }
  }

  void Retrieve(std::string_view text) {
    for (int haystack = 0; haystack < options_.haystacks; ++haystack) Search(text, haystack);
  }

  FreerunResult Take() {
    progress_.Clear();
    if (rows_visible_ > 0.0) result_.rows_read = rows_read_ / rows_visible_;
    return std::move(result_);
  }

 private:
  void Save(std::span<const llama_token> tokens, int length) {
    plugin_.Set("mode", "exact");
    states_.Prefill(model_, tokens, {&length, 1}, CacheType::kF16, options_.threads, progress_);
  }

  // The text from another paragraph on for each haystack, its beginning after its end.
  std::string TextOf(std::string_view text, int haystack) const {
    const std::size_t gap = text.find(
        "\n\n", text.size() / static_cast<std::size_t>(options_.haystacks) * static_cast<std::size_t>(haystack));
    if (haystack == 0 || gap == std::string_view::npos) return std::string(text);
    return fmt::format("{}\n\n{}", text.substr(gap + 2), text.substr(0, gap + 2));
  }

  // One haystack and its questions.
  void Search(std::string_view text, int haystack) {
    const RetrievalSet set = MakeRetrievalSet(options_.seed, haystack);
    const ChatFrame frame = ChatFrameOf(model_);
    const std::vector<llama_token> tokens =
        HaystackTokens(model_, frame, TextOf(text, haystack), set.needles, context_);

    const std::span<const llama_token> all(tokens);
    const int saved = context_ - options_.calibrate;
    Save(all, saved);
    const std::size_t first = result_.questions.size();
    result_.questions.insert(result_.questions.end(), set.questions.begin(), set.questions.end());
    result_.answers.resize(result_.questions.size());
    for (const Arm arm : options_.arms) {
      const auto show = [&](const std::string& what) {
        progress_.Show(fmt::format("{} tokens, haystack {}/{}, {}: {}", context_, haystack + 1, options_.haystacks,
                                   ArmName(arm), what));
      };
      show("calibration window");
      ArmSession session(arm, options_, model_, states_, plugin_,
                         {.tokens = all, .saved = saved, .window = options_.calibrate});
      for (std::size_t i = 0; i < set.questions.size(); ++i) {
        const RetrievalQuestion& question = set.questions[i];
        show(fmt::format("question {}/{}", i + 1, set.questions.size()));
        if (i > 0) session.Rewind();
        session.Read(QuestionTokens(model_, frame, question));
        Answer answer = Reply(session, kAnswerTokens * static_cast<int>(question.expected.size()));
        answer.found = FoundNumbers(answer.text, question.expected);
        result_.answers[first + i].push_back(std::move(answer));
      }
    }
  }

  // The free run: each token is the most likely one. Control tokens are tokens like all others, so that all
  // continuations have the same length.
  Continuation Write(ArmSession& session) {
    Continuation continuation;
    const scsa_plugin_stats before = plugin_.Stats();
    for (int step = 0; step < options_.steps; ++step) {
      continuation.tokens.push_back(Argmax(session.Logits()));
      if (step + 1 < options_.steps) session.Step(continuation.tokens.back());
    }
    CountRows(before);
    return continuation;
  }

  // Mean negative log-likelihood of the tokens under the judge, which is at the end of the window.
  static double Judge(ArmSession& judge, std::span<const llama_token> tokens) {
    double sum = 0.0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      sum -= LogSoftmax(judge.Logits())[tokens[i]];
      if (i + 1 < tokens.size()) judge.Step(tokens[i]);
    }
    return sum / static_cast<double>(tokens.size());
  }

  Answer Reply(ArmSession& session, int most) {
    Answer answer;
    const scsa_plugin_stats before = plugin_.Stats();
    for (int i = 0; i < most; ++i) {
      const llama_token token = Argmax(session.Logits());
      if (llama_vocab_is_eog(model_.vocab(), token)) break;
      answer.text += model_.Piece(token);
      session.Step(token);
    }
    CountRows(before);
    return answer;
  }

  void CountRows(const scsa_plugin_stats& before) {
    const scsa_plugin_stats stats = StatsDifference(plugin_.Stats(), before);
    if (stats.sparse_calls == 0) return;
    rows_read_ += static_cast<double>(stats.rows_read);
    rows_visible_ += static_cast<double>(stats.rows_visible);
  }

  const FreerunOptions& options_;
  const Model& model_;
  int context_;
  StateStore& states_;
  const PluginClient& plugin_;
  Progress& progress_;
  FreerunResult result_;
  double rows_read_ = 0.0;
  double rows_visible_ = 0.0;
};

}  // namespace

double FreerunOptions::Tolerance() const { return tolerance.value_or(PresetTolerance(preset)); }

int FreerunOptions::TokensNeeded(int context) const {
  constexpr int kMostNumbers = 3;
  return context + std::max(steps, kQuestionTokens + kMostNumbers * kAnswerTokens);
}

FreerunResult MeasureFreerun(const FreerunOptions& options, const Model& model, std::string_view text, int context,
                             StateStore& states, const PluginClient& plugin, Progress& progress) {
  FreerunMeasurement measurement(options, model, context, states, plugin, progress);
  if (options.starts > 0) measurement.Continue(text);
  measurement.Retrieve(text);
  return measurement.Take();
}

}  // namespace scsa::tool
