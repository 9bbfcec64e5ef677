// SPDX-License-Identifier: Apache-2.0
#include "retrieval_prompt.h"

#include <fmt/format.h>

#include "tool_error.h"

namespace scsa::tool {
namespace {

void Append(const std::vector<llama_token>& more, std::vector<llama_token>* tokens) {
  tokens->insert(tokens->end(), more.begin(), more.end());
}

}  // namespace

std::vector<llama_token> HaystackTokens(const Model& model, const ChatFrame& frame, std::string_view text,
                                        std::span<const Needle> needles, int length) {
  const auto tokenize = [&](std::string_view part) { return model.Tokenize(part, false, false); };
  std::vector<llama_token> tokens = frame.before;
  Append(tokenize("Some facts are hidden in the following text. Remember them: you will be asked for them.\n\n"),
         &tokens);
  Append(BuildHaystack(tokenize, text, needles, length - static_cast<int>(tokens.size())), &tokens);
  return tokens;
}

std::vector<llama_token> QuestionTokens(const Model& model, const ChatFrame& frame, const RetrievalQuestion& question) {
  std::vector<llama_token> tokens = model.Tokenize(fmt::format("\n\nQuestion: {}", question.question), false, false);
  Append(frame.after, &tokens);
  Append(model.Tokenize(question.answer_start, false, false), &tokens);
  if (static_cast<int>(tokens.size()) > kQuestionTokens) {
    throw ToolError("the model's chat template is too long for this command");
  }
  return tokens;
}

}  // namespace scsa::tool
