// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace scsa::tool {

struct CommandResult {
  int status = -1;  // exit status; -1 when it did not exit by itself
  std::string out;
  std::string err;
};

// Runs a program with stdin closed and no terminal, with the variables of `environment` ("NAME=value") added.
CommandResult RunCommand(const std::vector<std::string>& argv, const std::vector<std::string>& environment = {});

}  // namespace scsa::tool
