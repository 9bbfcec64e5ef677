// SPDX-License-Identifier: Apache-2.0
#include "core/joint_kernels.h"

#include <cmath>
#include <cstddef>

#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/joint_kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

EstimateSums EstimateClustersTarget(const EstimateArgs& args, float* HWY_RESTRICT estimates,
                                    float* HWY_RESTRICT tails) {
  const EightTag d;
  const std::size_t lanes = hn::Lanes(d);
  const auto slots = static_cast<std::size_t>(args.slots);
  const auto nothing = hn::Set(d, -HUGE_VALF);

  // First the exponents, log m + a + s, and the largest of them; `tails` keeps s meanwhile.
  auto largest = nothing;
  for (std::size_t b = 0; b < static_cast<std::size_t>(args.n_blocks); ++b) {
    const std::size_t begin = b * slots;
    if (args.usable[b] == 0) {
      for (std::size_t c = begin; c < begin + slots; c += lanes) hn::StoreU(nothing, d, estimates + c);
      continue;
    }
    const auto spread = hn::Set(d, args.spreads[b]);
    for (std::size_t c = begin; c < begin + slots; c += lanes) {
      const auto s = hn::Mul(hn::LoadU(d, args.half_traces + c), spread);
      const auto exponent = hn::Add(hn::Add(hn::LoadU(d, args.log_counts + c), hn::LoadU(d, estimates + c)), s);
      hn::StoreU(s, d, tails + c);
      hn::StoreU(exponent, d, estimates + c);
      largest = hn::Max(largest, exponent);
    }
  }
  const float gauge = hn::GetLane(hn::MaxOfLanes(d, largest));
  const std::size_t n = static_cast<std::size_t>(args.n_blocks) * slots;
  if (!(gauge > -HUGE_VALF)) {
    for (std::size_t c = 0; c < n; ++c) estimates[c] = tails[c] = 0.0f;
    return {-HUGE_VALF, 0.0f};
  }

  const auto shift = hn::Set(d, gauge);
  const auto shrink = hn::Set(d, args.tail_shrink);
  const auto one = hn::Set(d, 1.0f);
  auto sum = hn::Zero(d);
  for (std::size_t b = 0; b < static_cast<std::size_t>(args.n_blocks); ++b) {
    const std::size_t begin = b * slots;
    for (std::size_t c = begin; c < begin + slots; c += lanes) {
      if (args.usable[b] == 0) {
        hn::StoreU(hn::Zero(d), d, estimates + c);
        hn::StoreU(hn::Zero(d), d, tails + c);
        continue;
      }
      const auto exponent = hn::Sub(hn::LoadU(d, estimates + c), shift);
      const auto s = hn::LoadU(d, tails + c);
      const auto estimate = ExpNonPositive(d, exponent);
      const auto tail = hn::Mul(ExpNonPositive(d, hn::Sub(exponent, s)), hn::MulAdd(shrink, s, one));
      hn::StoreU(estimate, d, estimates + c);
      hn::StoreU(tail, d, tails + c);
      sum = hn::Add(sum, estimate);
    }
  }
  return {gauge, hn::GetLane(hn::SumOfLanes(d, sum))};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scsa {

HWY_EXPORT(EstimateClustersTarget);

EstimateSums EstimateClusters(const EstimateArgs& args, float* estimates, float* tails) {
  return SCSA_DISPATCH(EstimateClustersTarget)(args, estimates, tails);
}

}  // namespace scsa
#endif  // HWY_ONCE
