// SPDX-License-Identifier: Apache-2.0
#include "chat.h"

#include <fmt/format.h>

#include <string>
#include <utility>

namespace scsa::tool {
namespace {

// Stands for the message while the template is applied; no template changes such a word.
constexpr std::string_view kMark = "SCSAMESSAGEMARK";

struct Frame {
  std::string before;
  std::string after;
};

Frame TemplateFrame(const Model& model) {
  if (const char* chat_template = llama_model_chat_template(model.get(), nullptr)) {
    const std::string content(kMark);
    const llama_chat_message message = {"user", content.c_str()};
    std::string text(4096, '\0');
    std::int32_t n = llama_chat_apply_template(chat_template, &message, 1, true, text.data(),
                                               static_cast<std::int32_t>(text.size()));
    if (n > static_cast<std::int32_t>(text.size())) {
      text.resize(static_cast<std::size_t>(n));
      n = llama_chat_apply_template(chat_template, &message, 1, true, text.data(), n);
    }
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    const std::size_t mark = text.find(kMark);
    if (mark != std::string::npos) return {text.substr(0, mark), text.substr(mark + kMark.size())};
  }
  return {"", "\n\nAnswer:"};
}

}  // namespace

ChatFrame ChatFrameOf(const Model& model) {
  const Frame frame = TemplateFrame(model);
  std::vector<llama_token> before = model.Tokenize(frame.before, true, true);
  // A template that writes the start token itself must not get a second one.
  const llama_token start = llama_vocab_bos(model.vocab());
  if (before.size() >= 2 && before[0] == start && before[1] == start) before.erase(before.begin());
  return {std::move(before), model.Tokenize(frame.after, false, true)};
}

std::vector<llama_token> ChatPrompt(const Model& model, std::string_view document, std::string_view question) {
  const std::string message =
      document.empty() ? std::string(question) : fmt::format("{}\n\nQuestion: {}", document, question);
  ChatFrame frame = ChatFrameOf(model);
  std::vector<llama_token> tokens = std::move(frame.before);
  for (const auto& part : {model.Tokenize(message, false, false), frame.after}) {
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  return tokens;
}

}  // namespace scsa::tool
