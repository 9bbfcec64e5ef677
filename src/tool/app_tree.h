// SPDX-License-Identifier: Apache-2.0
//
// Walking the commands and options of the program, for what is generated from them.
#pragma once

#include <CLI/CLI.hpp>
#include <vector>

namespace scsa::tool {

inline std::vector<const CLI::App*> Subcommands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* command) { return !command->get_group().empty(); });
}

// The visible options that have a name with dashes.
inline std::vector<const CLI::Option*> NamedOptions(const CLI::App& app) {
  return app.get_options(
      [](const CLI::Option* option) { return !option->get_group().empty() && option->nonpositional(); });
}

inline bool TakesValue(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

}  // namespace scsa::tool
