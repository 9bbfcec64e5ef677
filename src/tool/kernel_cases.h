// SPDX-License-Identifier: Apache-2.0
//
// The primitives that `scsa bench kernels` measures, each as a function over data of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "machine.h"

namespace scsa::tool {

struct KernelSetup {
  int head_dim = 128;
  std::int64_t rows = 8192;  // of a KV head in one cold pass; a pass has kBenchKvHeads of them
  int threads = 1;
  std::vector<int> heads = {1, 3, 4, 7};  // query heads per KV head
  CacheSizes caches;

  // Bytes of one array (keys, for example) that cold cases go through.
  std::size_t ColdBytes() const;
};

inline constexpr int kBenchKvHeads = 4;
inline constexpr int kMaxBenchHeads = 32;  // query heads per KV head

enum class CacheState : std::uint8_t {
  kHot,
  kCold,
  kAny,  // clustering, which takes so long for each byte that it does not matter
};
std::string_view CacheStateName(CacheState state);

struct CaseLabel {
  std::string primitive;
  std::string format;
  int heads = 0;  // query heads per KV head; 0 where no query takes part
};

struct KernelCase {
  CaseLabel label;
  CacheState cache = CacheState::kAny;
  // Of one repeat, all threads together. A row of an estimate is a cluster.
  double rows = 0.0;
  double bytes = 0.0;  // each byte that must be read counted once
  std::optional<double> multiply_adds;
  // Does the work `repeats` times on the SIMD target in force. Throws ToolError when an operator fails.
  std::function<void(std::int64_t repeats)> run;
};

// Names for --primitives, in the order of the report.
const std::vector<std::string>& PrimitiveNames();

// Cases that share data. The data lives as long as the cases do, so one set at a time is made.
struct CaseSet {
  std::string name;
  std::function<std::vector<KernelCase>()> make;
};
// The sets of the chosen primitives (names of PrimitiveNames).
std::vector<CaseSet> CaseSets(const KernelSetup& setup, const std::vector<std::string>& primitives);

// Memory of the largest set.
std::uint64_t CaseSetBytes(const KernelSetup& setup);

}  // namespace scsa::tool
