// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "core/roofline.h"

namespace scsa::tool {
namespace {

std::optional<int> ReadInt(const std::string& path) {
  std::ifstream file(path);
  int value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// Whole CPUs that control group v2 grants, or nothing without a quota.
std::optional<int> CgroupQuota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0.0;
  double period = 0.0;
  if (file >> quota >> period && period > 0.0) return std::max(1, static_cast<int>(std::ceil(quota / period)));
  return std::nullopt;
}

// The value after "key<blanks>:<blanks>" in a /proc file.
std::optional<std::string> ProcValue(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  return std::nullopt;
}

}  // namespace

int UsableCores() {
  int cores = 0;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    std::set<std::pair<int, int>> physical;
    int unknown = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &set)) continue;
      const std::string topology = fmt::format("/sys/devices/system/cpu/cpu{}/topology/", cpu);
      const auto package = ReadInt(topology + "physical_package_id");
      const auto core = ReadInt(topology + "core_id");
      if (package && core) {
        physical.emplace(*package, *core);
      } else {
        ++unknown;
      }
    }
    cores = static_cast<int>(physical.size()) + unknown;
  }
  if (cores == 0) cores = static_cast<int>(std::thread::hardware_concurrency());
  if (const auto quota = CgroupQuota()) cores = std::min(cores, *quota);
  return std::max(cores, 1);
}

CacheSizes CoreCaches() {
  CacheSizes caches;
  int last_level = 2;
  for (int index = 0;; ++index) {
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", index);
    const auto level = ReadInt(folder + "level");
    const auto kibibytes = ReadInt(folder + "size");  // "512K": the number ends at the unit
    if (!level || !kibibytes) break;
    const std::size_t bytes = static_cast<std::size_t>(*kibibytes) * 1024;
    if (*level == 2) caches.l2 = bytes;
    if (*level > last_level) {
      last_level = *level;
      caches.last_level = bytes;
    }
  }
  if (caches.l2 == 0) caches = {.l2 = std::size_t{512} << 10, .last_level = std::size_t{32} << 20};
  return caches;
}

std::string CpuName() {
  if (auto name = ProcValue("/proc/cpuinfo", "model name")) return *name;
  if (auto name = ProcValue("/proc/cpuinfo", "Model")) return *name;
  return "unknown CPU";
}

std::string UtcDate() { return fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr))); }

MachineRates MeasureMachineRates(int threads) {
  return {.bandwidth = MeasureReadBandwidth(threads), .multiply_add_rate = MeasureMultiplyAddRate(threads)};
}

}  // namespace scsa::tool
