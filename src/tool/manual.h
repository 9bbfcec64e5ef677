// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace scsa::tool {

// The manual page, in troff's man macros: commands and options as `app` has them, so that it says what --help says.
std::string ManualPage(const CLI::App& app);

}  // namespace scsa::tool
