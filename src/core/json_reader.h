// SPDX-License-Identifier: Apache-2.0
//
// A strict reader for the little JSON that the library understands: values of known type at known keys, errors with
// line and column. No escapes, so that a string is a view of the text.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>

#include "scsa/status.h"

namespace scsa {

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  std::size_t at() const { return at_; }
  void MoveTo(std::size_t at) { at_ = at; }
  bool AtEnd() const { return at_ == text_.size(); }
  // The character `ahead` of the present one, '\0' behind the end.
  char Peek(std::size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  Status Fail(StatusCode code, std::size_t at, const std::string& what) const {
    const std::string_view before = text_.substr(0, at);
    const std::size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
    return {code, "taus JSON, line " + std::to_string(std::ranges::count(before, '\n') + 1) + ", column " +
                      std::to_string(at - line_start + 1) + ": " + what};
  }
  Status Error(const std::string& what) const { return Fail(StatusCode::kParseError, at_, what); }

  void SkipSpace() {
    while (!AtEnd() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool Accept(char c) {
    if (AtEnd() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  // An object. on_member() reads a key, calls Colon() and reads the value.
  template <typename OnMember>
  Status Object(OnMember on_member) {
    if (!Accept('{')) return Error("expected '{'");
    SkipSpace();
    if (Accept('}')) return Status::Ok();
    do {
      SkipSpace();
      if (Status status = on_member(); !status.ok()) return status;
      SkipSpace();
    } while (Accept(','));
    return Accept('}') ? Status::Ok() : Error("expected ',' or '}'");
  }
  Status Colon() {
    SkipSpace();
    if (!Accept(':')) return Error("expected ':'");
    SkipSpace();
    return Status::Ok();
  }

  // Printable ASCII without escapes.
  Status String(std::string_view* value) {
    if (!Accept('"')) return Error("expected a string");
    const std::size_t start = at_;
    while (Peek() >= ' ' && Peek() <= '~' && Peek() != '"' && Peek() != '\\') ++at_;
    if (Peek() != '"') return Error(AtEnd() ? "the string does not end" : "only plain ASCII text is allowed here");
    *value = text_.substr(start, at_ - start);
    ++at_;
    return Status::Ok();
  }

  // A number in JSON's grammar (narrower than that of std::from_chars) within [low, high].
  Status Number(double low, double high, const std::string& range, double* value) {
    const std::size_t start = at_;
    if (!SkipNumber()) return Error("expected a number");
    double parsed = 0;
    const auto [end, error] = std::from_chars(text_.data() + start, text_.data() + at_, parsed);
    // Out of the range of double: too large is out of ours too, too small is not distinguished from it.
    if (error != std::errc() || !(parsed >= low && parsed <= high)) {
      return Fail(StatusCode::kInvalidArgument, start, range);
    }
    *value = parsed;
    return Status::Ok();
  }

  // A whole number from `low` on, in plain digits.
  Status Integer(int low, int* value) {
    const std::size_t start = at_;
    if (!Index(value)) return Fail(StatusCode::kParseError, start, "expected a whole number");
    if (const char c = Peek(); c == '.' || c == 'e' || c == 'E') return Error("expected a whole number");
    if (*value < low) {
      return Fail(StatusCode::kInvalidArgument, start, "must be at least " + std::to_string(low));
    }
    return Status::Ok();
  }
  // The digits of an integer without a sign, of int's range.
  bool Index(int* value) {
    const char* begin = text_.data() + at_;
    if (!IsDigit(Peek()) || (Peek() == '0' && IsDigit(Peek(1)))) return false;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), *value);
    if (error != std::errc()) return false;
    at_ += static_cast<std::size_t>(end - begin);
    return true;
  }

  // Any value. `depth` bounds the nesting, and so the recursion.
  Status SkipValue(int depth) {
    switch (Peek()) {
      case '{':
        if (depth == 0) return Error("nested too deeply");
        return Object([&]() -> Status {
          std::string_view key;
          if (Status status = String(&key); !status.ok()) return status;
          if (Status status = Colon(); !status.ok()) return status;
          return SkipValue(depth - 1);
        });
      case '[':
        return depth == 0 ? Error("nested too deeply") : SkipArray(depth);
      case '"': {
        std::string_view value;
        return String(&value);
      }
      default:
        for (const std::string_view word : {"true", "false", "null"}) {
          if (text_.substr(at_, word.size()) != word) continue;
          at_ += word.size();
          return Status::Ok();
        }
        return SkipNumber() ? Status::Ok() : Error("expected a value");
    }
  }

 private:
  static bool IsDigit(char c) { return c >= '0' && c <= '9'; }

  bool SkipDigits() {
    if (!IsDigit(Peek())) return false;
    while (IsDigit(Peek())) ++at_;
    return true;
  }
  bool SkipNumber() {
    Accept('-');
    if (Accept('0')) {
      if (IsDigit(Peek())) return false;
    } else if (!SkipDigits()) {
      return false;
    }
    if (Accept('.') && !SkipDigits()) return false;
    if (Accept('e') || Accept('E')) {
      if (!Accept('+')) Accept('-');
      if (!SkipDigits()) return false;
    }
    return true;
  }
  Status SkipArray(int depth) {
    Accept('[');
    SkipSpace();
    if (Accept(']')) return Status::Ok();
    do {
      SkipSpace();
      if (Status status = SkipValue(depth - 1); !status.ok()) return status;
      SkipSpace();
    } while (Accept(','));
    return Accept(']') ? Status::Ok() : Error("expected ',' or ']'");
  }

  const std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace scsa
