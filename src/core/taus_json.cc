// SPDX-License-Identifier: Apache-2.0
#include "core/taus_json.h"

#include <algorithm>
#include <charconv>
#include <new>
#include <utility>

namespace scsa {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  Parser(std::string_view text, int num_layers, int q_heads)
      : text_(text), num_layers_(num_layers), q_heads_(q_heads), seen_(std::size_t{1} * num_layers * q_heads) {}

  Status Parse(std::vector<TauEntry>* entries) {
    SkipSpace();
    if (!Accept('{')) return Error("expected '{'");
    SkipSpace();
    if (!Accept('}')) {
      do {
        TauEntry entry;
        SkipSpace();
        if (Status status = ParseKey(&entry); !status.ok()) return status;
        SkipSpace();
        if (!Accept(':')) return Error("expected ':'");
        SkipSpace();
        if (Status status = ParseTau(&entry); !status.ok()) return status;
        entries->push_back(entry);
        SkipSpace();
      } while (Accept(','));
      if (!Accept('}')) return Error("expected ',' or '}'");
    }
    SkipSpace();
    if (at_ != text_.size()) return Error("unexpected text after the object");
    return Status::Ok();
  }

 private:
  Status Fail(StatusCode code, std::size_t at, const std::string& what) const {
    const std::string_view before = text_.substr(0, at);
    const std::size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
    return {code, "taus JSON, line " + std::to_string(std::ranges::count(before, '\n') + 1) + ", column " +
                      std::to_string(at - line_start + 1) + ": " + what};
  }
  Status Error(const char* what) const { return Fail(StatusCode::kParseError, at_, what); }

  void SkipSpace() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool Accept(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool AtDigit() const { return at_ < text_.size() && IsDigit(text_[at_]); }

  bool ParseIndex(int* value) {
    const char* begin = text_.data() + at_;
    if (!AtDigit() || (*begin == '0' && at_ + 1 < text_.size() && IsDigit(begin[1]))) return false;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), *value);
    if (error != std::errc()) return false;
    at_ += static_cast<std::size_t>(end - begin);
    return true;
  }

  Status ParseKey(TauEntry* entry) {
    const std::size_t start = at_;
    if (!Accept('"')) return Error("expected a key \"layer:head\"");
    if (!ParseIndex(&entry->layer) || !Accept(':') || !ParseIndex(&entry->head) || !Accept('"')) {
      return Error("a key must be \"layer:head\" in decimal digits");
    }
    if (entry->layer >= num_layers_) {
      return Fail(
          StatusCode::kInvalidArgument, start,
          "layer " + std::to_string(entry->layer) + " does not exist, there are " + std::to_string(num_layers_));
    }
    if (entry->head >= q_heads_) {
      return Fail(
          StatusCode::kInvalidArgument, start,
          "query head " + std::to_string(entry->head) + " does not exist, there are " + std::to_string(q_heads_));
    }
    const std::size_t index = std::size_t{1} * entry->layer * q_heads_ + entry->head;
    if (seen_[index]) return Fail(StatusCode::kParseError, start, "this key occurs twice");
    seen_[index] = true;
    return Status::Ok();
  }

  // A number in JSON's grammar, which is narrower than that of std::from_chars.
  bool SkipNumber() {
    Accept('-');
    if (!AtDigit()) return false;
    if (Accept('0')) {
      if (AtDigit()) return false;
    } else {
      while (AtDigit()) ++at_;
    }
    if (Accept('.')) {
      if (!AtDigit()) return false;
      while (AtDigit()) ++at_;
    }
    if (Accept('e') || Accept('E')) {
      if (!Accept('+')) Accept('-');
      if (!AtDigit()) return false;
      while (AtDigit()) ++at_;
    }
    return true;
  }

  Status ParseTau(TauEntry* entry) {
    const std::size_t start = at_;
    if (!SkipNumber()) return Error("expected a number");
    double value = 0;
    const auto [end, error] = std::from_chars(text_.data() + start, text_.data() + at_, value);
    // Out of the range of double: too large is out of ours too, too small is not distinguished from it.
    if (error != std::errc() || !(value >= 0 && value <= 1)) {
      return Fail(StatusCode::kInvalidArgument, start, "a tau must be in [0, 1]");
    }
    entry->tau = static_cast<float>(value);
    return Status::Ok();
  }

  const std::string_view text_;
  const int num_layers_;
  const int q_heads_;
  std::vector<bool> seen_;
  std::size_t at_ = 0;
};

}  // namespace

Status ParseTausJson(std::string_view text, int num_layers, int q_heads, std::vector<TauEntry>* entries) {
  if (text.size() > kMaxTausJsonBytes) {
    return {StatusCode::kParseError, "taus JSON is larger than " + std::to_string(kMaxTausJsonBytes) + " bytes"};
  }
  try {
    std::vector<TauEntry> parsed;
    if (Status status = Parser(text, num_layers, q_heads).Parse(&parsed); !status.ok()) return status;
    *entries = std::move(parsed);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "no memory to read taus JSON"};
  }
}

std::string FormatTausJson(std::span<const TauEntry> entries) {
  std::string text = "{";
  const char* separator = "\n";
  for (const TauEntry& entry : entries) {
    char digits[32];
    const auto result = std::to_chars(digits, digits + sizeof(digits), entry.tau);
    text += separator;
    text += "  \"" + std::to_string(entry.layer) + ":" + std::to_string(entry.head) + "\": ";
    text.append(digits, result.ptr);
    separator = ",\n";
  }
  text += entries.empty() ? "}\n" : "\n}\n";
  return text;
}

}  // namespace scsa
