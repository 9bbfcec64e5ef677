// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace scsa::tool {

// A script that makes bash complete the commands, options and values of `app`. It needs no other completion package.
std::string BashCompletion(const CLI::App& app);

}  // namespace scsa::tool
