// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

namespace scsa::tool {

// What a command throws to end with a message for the user: main prints "scsa: <what()>" and exits with status 1. The
// message is one line that says what is wrong and what to do.
class ToolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace scsa::tool
