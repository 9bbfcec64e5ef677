// SPDX-License-Identifier: Apache-2.0
//
// What the cases of `scsa bench kernels` are made of: units of work, data sets of random rows, memory per thread.
//
// Data is cut into units that are worked on one by one. A hot case lets every thread repeat one unit, which stays in
// its second-level cache (a unit of rows is half as large); a cold case goes through so many units that a unit has left
// every cache when its turn comes again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/kernels.h"
#include "kernel_cases.h"
#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa::tool {

struct Units {
  std::int64_t count = 0;
  std::int64_t per_pass = 0;
  double rows = 0.0;  // of one unit, as the two below
  double bytes = 0.0;
  std::optional<double> multiply_adds;
};

inline constexpr std::int64_t kNoUnit = -1;

// Works on one unit. `next` is the one that follows on this thread, kNoUnit at the end of a pass: kernels that the
// operator lets fetch ahead fetch what they read first of it. Hot: the unit itself.
using UnitKernel = std::function<void(std::int64_t unit, std::int64_t next, int thread)>;

// A case whose run is given: one repeat of it takes n units.
KernelCase MakeCase(const CaseLabel& label, CacheState cache, const Units& units, std::int64_t n,
                    std::function<void(std::int64_t)> run);
// Every thread repeats a unit of its own.
KernelCase HotCase(const CaseLabel& label, const Units& units, int threads, const UnitKernel& kernel);
// A repeat is a pass; it goes on where the last one ended.
KernelCase PassingCase(const CaseLabel& label, CacheState cache, const Units& units, int threads,
                       const UnitKernel& kernel);
void AppendHotAndCold(const CaseLabel& label, const Units& units, int threads, const UnitKernel& kernel,
                      std::vector<KernelCase>& cases);

// Throws ToolError.
void Require(const Status& status);

// The same numbers for the same arguments; normal, standard deviation `size`.
std::vector<float> RandomVector(std::size_t count, float size = 1.0f);

// Query vectors of one KV head in both forms, scaled by 1 / sqrt(head_dim).
struct Queries {
  Queries(int heads, int head_dim);

  std::vector<float> vectors;  // [heads][head_dim]
  std::vector<QuantizedQuery> quantized;
  std::vector<std::int8_t> values;
  std::vector<float> scales;
};

// A float array per thread.
std::shared_ptr<std::vector<std::vector<float>>> PerThread(int threads, std::size_t count);

// Per-thread softmax states of a few query vectors: maxima, sums, weighted values.
class States {
 public:
  States(int threads, int heads, int head_dim);
  SoftmaxState Cleared(int thread) const;

 private:
  int heads_;
  std::shared_ptr<std::vector<std::vector<float>>> memory_;
};

}  // namespace scsa::tool
