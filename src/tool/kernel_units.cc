// SPDX-License-Identifier: Apache-2.0
#include "kernel_units.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "core/parallel.h"
#include "tool_error.h"

namespace scsa::tool {

KernelCase MakeCase(const CaseLabel& label, CacheState cache, const Units& units, std::int64_t n,
                    std::function<void(std::int64_t)> run) {
  const auto count = static_cast<double>(n);
  KernelCase result;
  result.label = label;
  result.cache = cache;
  result.rows = units.rows * count;
  result.bytes = units.bytes * count;
  if (units.multiply_adds) result.multiply_adds = *units.multiply_adds * count;
  result.run = std::move(run);
  return result;
}

KernelCase HotCase(const CaseLabel& label, const Units& units, int threads, const UnitKernel& kernel) {
  return MakeCase(label, CacheState::kHot, units, threads, [=](std::int64_t repeats) {
    ParallelFor(threads, threads, [&](std::int64_t unit, int thread) {
      for (std::int64_t i = 0; i < repeats; ++i) kernel(unit, unit, thread);
    });
  });
}

KernelCase PassingCase(const CaseLabel& label, CacheState cache, const Units& units, int threads,
                       const UnitKernel& kernel) {
  return MakeCase(label, cache, units, units.per_pass, [=, first = std::int64_t{0}](std::int64_t repeats) mutable {
    for (std::int64_t i = 0; i < repeats; ++i) {
      ParallelForAhead(threads, units.per_pass, [&](std::int64_t task, std::int64_t next, int thread) {
        kernel((first + task) % units.count, next < units.per_pass ? (first + next) % units.count : kNoUnit, thread);
      });
      first = (first + units.per_pass) % units.count;
    }
  });
}

void AppendHotAndCold(const CaseLabel& label, const Units& units, int threads, const UnitKernel& kernel,
                      std::vector<KernelCase>& cases) {
  cases.push_back(HotCase(label, units, threads, kernel));
  cases.push_back(PassingCase(label, CacheState::kCold, units, threads, kernel));
}

void Require(const Status& status) {
  if (!status.ok()) throw ToolError("a measured operator failed: " + status.message());
}

std::vector<float> RandomVector(std::size_t count, float size) {
  std::mt19937 random(static_cast<std::uint32_t>(count) + 1);
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

Queries::Queries(int heads, int head_dim)
    : vectors(RandomVector(static_cast<std::size_t>(heads) * head_dim, 1.0f / std::sqrt(static_cast<float>(head_dim)))),
      quantized(heads) {
  const std::size_t padded = static_cast<std::size_t>((head_dim + kQ8BlockSize - 1) / kQ8BlockSize) * kQ8BlockSize;
  values.resize(heads * padded);
  scales.resize(heads * padded / kQ8BlockSize);
  for (std::size_t h = 0; h < quantized.size(); ++h) {
    quantized[h] = {values.data() + h * padded, scales.data() + h * padded / kQ8BlockSize};
    QuantizeQuery(vectors.data() + h * head_dim, head_dim, 1.0f, values.data() + h * padded,
                  scales.data() + h * padded / kQ8BlockSize);
  }
}

std::shared_ptr<std::vector<std::vector<float>>> PerThread(int threads, std::size_t count) {
  return std::make_shared<std::vector<std::vector<float>>>(threads, std::vector<float>(count));
}

States::States(int threads, int heads, int head_dim)
    : heads_(heads), memory_(PerThread(threads, static_cast<std::size_t>(heads) * (head_dim + 2))) {}

SoftmaxState States::Cleared(int thread) const {
  std::vector<float>& memory = (*memory_)[thread];
  std::ranges::fill(memory, 0.0f);
  std::fill_n(memory.begin(), heads_, -std::numeric_limits<float>::infinity());
  return {memory.data(), memory.data() + heads_, memory.data() + std::ptrdiff_t{2} * heads_};
}

}  // namespace scsa::tool
