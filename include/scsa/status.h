// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>
#include <string>
#include <utility>

namespace scsa {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,     // a value the caller passed is out of its documented range
  kUnsupported,         // a valid request that this build or shape cannot serve
  kOutOfMemory,         // an allocation failed; the object is unchanged and still usable
  kNotFound,            // a file or entry does not exist
  kParseError,          // a text could not be understood; nothing was changed
  kIoError,             // reading or writing a file failed
  kFailedPrecondition,  // the call is valid, but not in the object's present state
};

// Result of every fallible call of the library. The library never throws, aborts or prints.
// `message` is one line for a person: what is wrong and, where it helps, what to do. Empty when ok.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return {}; }
  static Status Invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
  // For handlers of std::bad_alloc: where there is no memory for the message either, a shorter one that needs none.
  static Status OutOfMemory(const char* message) noexcept {
    try {
      return {StatusCode::kOutOfMemory, message};
    } catch (const std::bad_alloc&) {
      return {StatusCode::kOutOfMemory, "out of memory"};
    }
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace scsa
