// SPDX-License-Identifier: Apache-2.0
#include "memory_limit.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace scsa::tool {
namespace {

namespace fs = std::filesystem;

// Names of one version's files.
struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* cache;  // key in memory.stat
};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};

// Nothing for "max" too.
std::optional<std::uint64_t> ReadNumber(const fs::path& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `key` at the start of a line, 0 without one.
std::uint64_t ReadValue(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  std::uint64_t value = 0;
  while (file >> name >> value) {
    if (name == key) return value;
    file.ignore(256, '\n');  // the unit, in /proc/meminfo
  }
  return 0;
}

std::optional<std::uint64_t> LeftIn(const fs::path& group, const GroupFiles& files) {
  const auto limit = ReadNumber(group / files.limit);
  if (!limit) return std::nullopt;
  const std::uint64_t usage = ReadNumber(group / files.usage).value_or(0);
  const std::uint64_t held = usage - std::min(usage, ReadValue(group / "memory.stat", files.cache));
  return *limit - std::min(*limit, held);
}

bool NamesMemory(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

}  // namespace

std::optional<std::uint64_t> ControlGroupMemory(const fs::path& groups, const fs::path& mount) {
  std::optional<std::uint64_t> least;
  std::ifstream file(groups);
  // "number:controllers:path"; version 2 has no controllers.
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !NamesMemory(controllers)) continue;
    const fs::path top = controllers.empty() ? mount : mount / "memory";
    fs::path path = fs::path(line.substr(second + 1)).relative_path();
    for (;; path = path.parent_path()) {
      if (const auto left = LeftIn(top / path, controllers.empty() ? kVersion2 : kVersion1)) {
        least = std::min(least.value_or(*left), *left);
      }
      if (path.empty()) break;
    }
  }
  return least;
}

std::optional<std::uint64_t> AvailableMemory() {
  const std::uint64_t system = ReadValue("/proc/meminfo", "MemAvailable:") * 1024;
  if (system == 0) return std::nullopt;
  return std::min(system, ControlGroupMemory("/proc/self/cgroup", "/sys/fs/cgroup").value_or(system));
}

}  // namespace scsa::tool
