// SPDX-License-Identifier: Apache-2.0
#include "manual.h"

#include <fmt/format.h>

#include <sstream>
#include <string>

#include "app_tree.h"

namespace scsa::tool {
namespace {

// Text on a line of its own or within one: backslashes, dashes and a leading control character are troff's otherwise.
std::string Escaped(const std::string& text) {
  std::string result;
  if (!text.empty() && (text.front() == '.' || text.front() == '\'')) result = "\\&";
  for (const char c : text) {
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
  }
  return result;
}

std::string OptionItem(const CLI::Option& option) {
  std::string names;
  const auto add = [&](const std::string& dashes, const std::string& name) {
    names += (names.empty() ? "" : ", ") + ("\\fB" + Escaped(dashes + name) + "\\fR");
  };
  for (const std::string& name : option.get_snames()) add("-", name);
  for (const std::string& name : option.get_lnames()) add("--", name);
  if (TakesValue(option)) names += " \\fI" + Escaped(option.get_type_name()) + "\\fR";
  std::string text = Escaped(option.get_description());
  if (!option.get_default_str().empty()) text += fmt::format(" [default: {}]", Escaped(option.get_default_str()));
  if (option.get_required()) text += " (required)";
  return fmt::format(".TP\n{}\n{}\n", names, text);
}

// Lines that are set off by blanks keep their layout, the others are text.
std::string Footer(const std::string& footer) {
  std::string result;
  std::istringstream lines(footer);
  bool literal = false;
  for (std::string line; std::getline(lines, line);) {
    const bool indented = line.starts_with("  ");
    if (indented && !literal) result += ".PP\n.nf\n.RS 4\n";
    if (!indented && literal) result += ".RE\n.fi\n";
    if (!indented) result += ".PP\n";
    literal = indented;
    result += Escaped(indented ? line.substr(2) : line) + '\n';
  }
  return result + (literal ? ".RE\n.fi\n" : "");
}

std::string Commands(const CLI::App& parent, const std::string& path) {
  std::string result;
  for (const CLI::App* command : Subcommands(parent)) {
    const std::string name = path + ' ' + command->get_name();
    result += fmt::format(".SS {}\n{}.\n", Escaped(name), Escaped(command->get_description()));
    for (const CLI::Option* option : NamedOptions(*command)) {
      if (option != command->get_help_ptr()) result += OptionItem(*option);
    }
    result += Footer(command->get_footer()) + Commands(*command, name);
  }
  return result;
}

constexpr const char* kEnvironment = R"(.SH ENVIRONMENT
.TP
\fBSCSA_PRESET\fR, \fBSCSA_TOLERANCE\fR, \fBSCSA_CROSSOVER\fR, \fBSCSA_CALIBRATE\fR, \fBSCSA_TAUS\fR
For the commands run and exec: what holds where the option of that name is not given.
.TP
\fBSCSA_PLUGIN\fR
Path of libggml\-scsa.so, where it is not beside the program or in its library folder.
.TP
\fBSCSA_TARGET\fR
Forces a SIMD target, for example AVX2 or SCALAR.
)";

constexpr const char* kExitStatus = R"(.SH EXIT STATUS
.TP
\fB0\fR
Success.
.TP
\fB1\fR
The command failed; one line on standard error says why.
.TP
\fB2\fR
Wrong usage.
.PP
\fBscsa exec\fR exits with the status of the program that it starts.
)";

}  // namespace

std::string ManualPage(const CLI::App& app) {
  std::string page = fmt::format(
      ".\\\" Generated from the options of the program.\n"
      ".TH SCSA 1 \"\" \"scsa {}\" \"User Commands\"\n"
      ".SH NAME\nscsa \\- {}\n"
      ".SH SYNOPSIS\n\\fBscsa\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n"
      ".SH DESCRIPTION\n"
      "Answers questions about long documents, starts llama.cpp programs with sparse attention, and measures speed "
      "and\n"
      "quality of both. The documentation of the project explains every figure that is printed.\n"
      ".SH OPTIONS\n",
      SCSA_TOOL_VERSION, Escaped(app.get_description()));
  for (const CLI::Option* option : NamedOptions(app)) page += OptionItem(*option);
  page += ".SH COMMANDS\n" + Commands(app, "scsa");
  return page + kEnvironment + kExitStatus + ".SH EXAMPLES\n" + Footer(app.get_footer());
}

}  // namespace scsa::tool
