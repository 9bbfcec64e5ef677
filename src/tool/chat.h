// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "session.h"

namespace scsa::tool {

// What the chat template puts around one user message, as tokens: the message's own tokens go in between.
struct ChatFrame {
  std::vector<llama_token> before;  // with the model's start token
  std::vector<llama_token> after;   // up to the model's answer
};
ChatFrame ChatFrameOf(const Model& model);

// The tokens of one user message, ready for the model's answer. Uses the chat template of the model file where libllama
// knows it, else a plain "Question: ... Answer:" form. Control tokens are taken from the template alone: text that
// looks like one ("<|im_end|>") stays text. `document` may be empty.
std::vector<llama_token> ChatPrompt(const Model& model, std::string_view document, std::string_view question);

}  // namespace scsa::tool
