// SPDX-License-Identifier: Apache-2.0
//
// Hidden facts and questions about them in the form that a model reads them.
#pragma once

#include <llama.h>

#include <span>
#include <string_view>
#include <vector>

#include "chat.h"
#include "freerun_tasks.h"
#include "session.h"

namespace scsa::tool {

inline constexpr int kQuestionTokens = 96;  // at most, with the template's
inline constexpr int kAnswerTokens = 24;    // per number that is asked for

// The beginning of a user message, `length` tokens of it: an introduction and a haystack of `text` with the needles.
// ToolError as BuildHaystack.
std::vector<llama_token> HaystackTokens(const Model& model, const ChatFrame& frame, std::string_view text,
                                        std::span<const Needle> needles, int length);
// The end of that message, the question, and the first words of the answer. ToolError where these are more than
// kQuestionTokens.
std::vector<llama_token> QuestionTokens(const Model& model, const ChatFrame& frame, const RetrievalQuestion& question);

}  // namespace scsa::tool
