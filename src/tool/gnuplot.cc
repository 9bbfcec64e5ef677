// SPDX-License-Identifier: Apache-2.0
#include "gnuplot.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "output_file.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {

namespace fs = std::filesystem;

namespace {

// A folder that is removed with this object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "scsa-report-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw ToolError(fmt::format("cannot create a temporary folder {} ({}): set TMPDIR to a folder that is writable",
                                  pattern, std::strerror(errno)));
    }
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;  // a leftover in the temporary folder is no reason to fail
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Exit status of gnuplot, its messages in `log`; 127 where there is no such program.
int RunGnuplot(const fs::path& script, const fs::path& log) {
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "r", stdin) == nullptr || std::freopen(log.c_str(), "w", stderr) == nullptr) {
      _exit(126);
    }
    execlp("gnuplot", "gnuplot", script.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 126;
}

}  // namespace

std::string DrawSvg(std::string_view name, std::string_view script) {
  const TemporaryFolder folder;
  const fs::path input = folder.path() / "plot.gp";
  const fs::path output = folder.path() / "plot.svg";
  const fs::path log = folder.path() / "log";
  WriteFileAtomically(input,
                      fmt::format("set terminal svg size 520,340 dynamic font 'sans-serif,15' name '{}' noenhanced\n"
                                  "set output '{}'\n{}",
                                  name, output.string(), script));
  const int status = RunGnuplot(input, log);
  if (status == 127) throw ToolError("gnuplot draws the report and is not installed: install gnuplot-nox");
  if (status != 0) {
    throw ToolError(fmt::format("gnuplot could not draw {}: {}", name, OneLine(ReadFile(log, "log"))));
  }
  const std::string svg = ReadFile(output, "drawing");
  const std::size_t begin = svg.find("<svg");
  if (begin == std::string::npos) throw ToolError(fmt::format("gnuplot drew nothing for {}", name));
  return svg.substr(begin);
}

std::string GnuplotText(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    const bool plain =
        c != 0 && (std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr(" .,:;+-=%()/_", c) != nullptr);
    quoted += plain ? c : ' ';
  }
  return quoted + '\'';
}

}  // namespace scsa::tool
