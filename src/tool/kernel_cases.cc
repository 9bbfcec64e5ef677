// SPDX-License-Identifier: Apache-2.0
#include "kernel_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "plan_cases.h"
#include "row_cases.h"
#include "scsa/types.h"

namespace scsa::tool {

std::string_view CacheStateName(CacheState state) {
  switch (state) {
    case CacheState::kHot:
      return "hot";
    case CacheState::kCold:
      return "cold";
    case CacheState::kAny:
      break;
  }
  return "any";
}

std::size_t KernelSetup::ColdBytes() const { return std::max(std::size_t{128} << 20, 4 * caches.largest()); }

const std::vector<std::string>& PrimitiveNames() {
  static const std::vector<std::string> names = {"attend",     "packed",       "gather",        "score",
                                                 "accumulate", "gather-int8",  "estimate-seed", "estimate-fast",
                                                 "tail-fast",  "cluster-seed", "cluster-fast"};
  return names;
}

std::vector<CaseSet> CaseSets(const KernelSetup& setup, const std::vector<std::string>& primitives) {
  const auto wants = [&](const char* name) { return std::ranges::find(primitives, name) != primitives.end(); };
  std::vector<CaseSet> sets;
  for (const DType type : {DType::kF16, DType::kBF16, DType::kF32, DType::kQ8_0}) {
    const bool packs = type == DType::kQ8_0 || type == DType::kF16;
    const bool attend = wants("attend");
    const bool packed = wants("packed") && type == DType::kQ8_0;
    const bool score = wants("score") && packs;
    const bool accumulate = wants("accumulate") && packs;
    const bool gather = wants("gather") && type == DType::kF16;
    if (!attend && !packed && !gather && !score && !accumulate) continue;
    sets.push_back({fmt::format("{} rows", DTypeName(type)), [=] {
                      const auto data = std::make_shared<const RowData>(type, setup);
                      std::vector<KernelCase> cases;
                      for (const int heads : setup.heads) {
                        if (attend) AppendAttend(setup, data, heads, cases);
                        if (packed) AppendPacked(setup, data, heads, cases);
                        if (gather) AppendGather(setup, data, heads, cases);
                        if (score) AppendScore(setup, data, heads, cases);
                        if (accumulate) AppendAccumulate(setup, data, heads, cases);
                      }
                      return cases;
                    }});
  }
  const auto add = [&](const char* name, std::vector<KernelCase> (*make)(const KernelSetup&)) {
    if (wants(name)) sets.push_back({name, [=] { return make(setup); }});
  };
  add("gather-int8", &Int8RowCases);
  add("estimate-seed", &SeedEstimateCases);
  add("estimate-fast", &FastEstimateCases);
  add("tail-fast", &FastTailCases);
  add("cluster-seed", &SeedClusterCases);
  add("cluster-fast", &FastClusterCases);
  return sets;
}

std::uint64_t CaseSetBytes(const KernelSetup& setup) {
  // Keys and values of f32 rows: whole passes, at least two.
  const std::uint64_t pass =
      static_cast<std::uint64_t>(setup.rows) * kBenchKvHeads * RowBytes(DType::kF32, setup.head_dim);
  const std::uint64_t cold = std::max<std::uint64_t>(setup.ColdBytes(), setup.threads * setup.caches.l2);
  return 2 * std::max(2 * pass, cold + pass);
}

}  // namespace scsa::tool
