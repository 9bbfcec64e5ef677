// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "session.h"

namespace scsa::tool {

// The tokens of one user message, ready for the model's answer. Uses the chat template of the model file where libllama
// knows it, else a plain "Question: ... Answer:" form. Control tokens are taken from the template alone: text that
// looks like one ("<|im_end|>") stays text. `document` may be empty.
std::vector<llama_token> ChatPrompt(const Model& model, std::string_view document, std::string_view question);

}  // namespace scsa::tool
