// SPDX-License-Identifier: Apache-2.0
#include "core/roofline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "core/parallel.h"
#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/roofline.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

// Reads `count` floats (a multiple of 8 vectors) and returns a value that depends on all of them.
float ReadAllTarget(const float* data, std::size_t count) {
  const FullTag d;
  constexpr std::size_t kLanes = hn::MaxLanes(FullTag());
  constexpr std::size_t kChains = 8;
  hn::VFromD<FullTag> sums[kChains];
  SCSA_UNROLL
  for (std::size_t c = 0; c < kChains; ++c) sums[c] = hn::Zero(d);
  for (std::size_t i = 0; i < count; i += kChains * kLanes) {
    SCSA_UNROLL
    for (std::size_t c = 0; c < kChains; ++c) sums[c] = hn::Add(sums[c], hn::LoadU(d, data + i + c * kLanes));
  }
  auto sum = sums[0];
  for (std::size_t c = 1; c < kChains; ++c) sum = hn::Add(sum, sums[c]);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Runs `steps` rounds of independent multiply-adds; *result depends on all of them. Returns multiply-adds done.
std::int64_t MultiplyAddTarget(std::int64_t steps, float* result) {
  const FullTag d;
  constexpr std::size_t kChains = 12;
  hn::VFromD<FullTag> sums[kChains];
  SCSA_UNROLL
  for (std::size_t c = 0; c < kChains; ++c) sums[c] = hn::Set(d, static_cast<float>(c));
  const auto factor = hn::Set(d, 0.5f + *result);
  const auto addend = hn::Set(d, 1.0f + *result);
  for (std::int64_t s = 0; s < steps; ++s) {
    SCSA_UNROLL
    for (std::size_t c = 0; c < kChains; ++c) sums[c] = hn::MulAdd(sums[c], factor, addend);
  }
  auto sum = sums[0];
  for (std::size_t c = 1; c < kChains; ++c) sum = hn::Add(sum, sums[c]);
  *result = hn::GetLane(hn::SumOfLanes(d, sum));
  return steps * static_cast<std::int64_t>(kChains * hn::Lanes(d));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scsa {
namespace {

HWY_EXPORT(ReadAllTarget);
HWY_EXPORT(MultiplyAddTarget);

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// What a sanitizer leaves of the machine's rates tells nothing: enough to run each line.
constexpr std::size_t kBufferBytes = std::size_t{8} << 20;
constexpr std::int64_t kMultiplyAddSteps = 1 << 12;
#else
constexpr std::size_t kBufferBytes = std::size_t{512} << 20;
constexpr std::int64_t kMultiplyAddSteps = 1 << 20;
#endif
constexpr std::size_t kChunkFloats = std::size_t{1} << 18;  // 1 MiB
constexpr int kPasses = 5;

// Results of measured work go here, so that the compiler cannot drop it.
std::atomic<float> g_sink{0.0f};

template <class F>
double Seconds(F&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double MeasureReadBandwidth(int n_threads) {
  const std::size_t count = kBufferBytes / sizeof(float);
  const std::unique_ptr<float[]> buffer(new (std::nothrow) float[count]);
  if (buffer == nullptr) return 0.0;
  const std::int64_t chunks = static_cast<std::int64_t>(count / kChunkFloats);
  // Written by the threads that read it later, and with no two pages alike.
  ParallelFor(n_threads, chunks, [&](std::int64_t chunk, int) {
    float* data = buffer.get() + static_cast<std::size_t>(chunk) * kChunkFloats;
    for (std::size_t i = 0; i < kChunkFloats; ++i) data[i] = static_cast<float>(chunk) + static_cast<float>(i);
  });
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double seconds = Seconds([&] {
      ParallelFor(n_threads, chunks, [&](std::int64_t chunk, int) {
        const float* data = buffer.get() + static_cast<std::size_t>(chunk) * kChunkFloats;
        g_sink.store(SCSA_DISPATCH(ReadAllTarget)(data, kChunkFloats), std::memory_order_relaxed);
      });
    });
    best = std::max(best, static_cast<double>(kBufferBytes) / seconds);
  }
  return best;
}

double MeasureMultiplyAddRate(int n_threads) {
  const std::int64_t tasks = std::max(1, n_threads) * std::int64_t{4};
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::atomic<std::int64_t> done{0};
    const double seconds = Seconds([&] {
      ParallelFor(n_threads, tasks, [&](std::int64_t, int) {
        float result = 0.0f;
        done.fetch_add(SCSA_DISPATCH(MultiplyAddTarget)(kMultiplyAddSteps, &result), std::memory_order_relaxed);
        g_sink.store(result, std::memory_order_relaxed);
      });
    });
    best = std::max(best, static_cast<double>(done.load()) / seconds);
  }
  return best;
}

}  // namespace scsa
#endif  // HWY_ONCE
