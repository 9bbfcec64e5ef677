// SPDX-License-Identifier: Apache-2.0
#include "output_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tool_error.h"

namespace scsa::tool {

namespace fs = std::filesystem;

void CheckWritable(const std::string& path, std::string_view option) {
  std::error_code error;
  const fs::path parent = fs::absolute(path).parent_path();
  std::string problem;
  if (fs::is_directory(path, error)) {
    problem = "it is a folder";
  } else if (!fs::is_directory(parent, error)) {
    problem = fmt::format("folder {} does not exist", parent.string());
  } else if (access(parent.c_str(), W_OK | X_OK) != 0) {
    problem = std::strerror(errno);
  }
  if (!problem.empty()) throw ToolError(fmt::format("{}: cannot write {}: {}", option, path, problem));
}

void WriteFileAtomically(const std::string& path, const std::function<void(std::ostream&)>& write) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, getpid());
  std::error_code error;
  std::ofstream file(temporary, std::ios::binary);
  write(file);
  file.close();
  if (file) fs::rename(temporary, path, error);
  if (!file || error) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    throw ToolError(fmt::format("cannot write {}: is the disk full?", path));
  }
}

void WriteFileAtomically(const std::string& path, std::string_view content) {
  WriteFileAtomically(path, [content](std::ostream& file) { file << content; });
}

}  // namespace scsa::tool
