// SPDX-License-Identifier: Apache-2.0
#include "completion.h"

#include <fmt/format.h>

#include <map>
#include <string>
#include <vector>

#include "app_tree.h"

namespace scsa::tool {
namespace {

// Values of options that take one of a few words.
const std::map<std::string, std::string> kValues = {{"preset", "fast seed"}, {"mode", "auto exact off"}};

std::vector<std::string> Names(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

// What completes the value of an option.
std::string ValueAction(const CLI::Option& option) {
  for (const std::string& name : option.get_lnames()) {
    if (const auto found = kValues.find(name); found != kValues.end()) return "_scsa_words '" + found->second + "' ''";
  }
  const std::string type = option.get_type_name();
  if (type.starts_with("FILE")) return "_scsa_files -f";
  if (type == "FOLDER") return "_scsa_files -d";
  return ":";
}

// The branches of three case statements; see BashCompletion.
struct Branches {
  std::string commands;  // "scsa bench decode": a command that leads on
  std::string values;    // "scsa run --preset": an option that takes a value
  std::string words;     // "scsa run": commands and options that may follow
};

void AddBranches(const CLI::App& command, const std::string& path, Branches* branches) {
  std::string options;
  for (const CLI::Option* option : NamedOptions(command)) {
    std::string patterns;
    for (const std::string& name : Names(*option)) {
      options += (options.empty() ? "" : " ") + name;
      patterns += (patterns.empty() ? "" : " | ") + fmt::format("'{} {}'", path, name);
    }
    if (TakesValue(*option)) branches->values += fmt::format("    {}) {} ;;\n", patterns, ValueAction(*option));
  }
  std::string commands;
  for (const CLI::App* below : Subcommands(command)) {
    commands += (commands.empty() ? "" : " ") + below->get_name();
    const std::string name = path + ' ' + below->get_name();
    branches->commands += fmt::format("      '{}') path=$path' '$word ;;\n", name);
    AddBranches(*below, name, branches);
  }
  branches->words +=
      fmt::format("        '{}') _scsa_words '{}' '{}' ;;\n", path, commands.empty() ? options : commands, options);
}

constexpr const char* kHead = R"(# bash completion of scsa. Generated from the options of the program.

# _scsa_words WORDS OPTIONS
_scsa_words() {
  local words=$1
  if [[ $cur == -* ]]; then words=$2; fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}

_scsa_files() {
  compopt -o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(compgen "$1" -- "$cur")
}

_scsa() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} path=scsa word i
  COMPREPLY=()
  # bash takes --option=value for three words.
  if [[ $cur == = ]]; then
    cur=
  elif [[ $prev == = ]]; then
    prev=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if [[ $path == 'scsa exec' && $word == -- ]]; then
      if ((i + 1 == COMP_CWORD)); then
        mapfile -t COMPREPLY < <(compgen -c -- "$cur")
      else
        _scsa_files -f
      fi
      return
    fi
    case "$path $word" in
)";

}  // namespace

std::string BashCompletion(const CLI::App& app) {
  Branches branches;
  AddBranches(app, "scsa", &branches);
  return kHead + branches.commands + "    esac\n  done\n  case \"$path $prev\" in\n" + branches.values +
         "    *)\n      case $path in\n" + branches.words +
         "      esac\n      ;;\n  esac\n}\n\ncomplete -F _scsa scsa\n";
}

}  // namespace scsa::tool
