// SPDX-License-Identifier: Apache-2.0
#include "core/joint_kernels.h"

#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/joint_kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/joint_kernels-inl.h"
#include "hwy/highway.h"

#if HWY_ONCE
namespace scsa {

HWY_EXPORT(EstimateClustersTarget);
HWY_EXPORT(SharesAndKeysTarget);
HWY_EXPORT(FoldValueMeansTarget);
HWY_EXPORT(AddValueMeansTarget);
HWY_EXPORT(MassBelowTarget);
HWY_EXPORT(IndicesFromTarget);

void EstimateClusters(const BlockRange& range, const EstimateArgs& args, float* estimates, float* tails,
                      EstimateSums* sums) {
  SCSA_DISPATCH(EstimateClustersTarget)(range, args, estimates, tails, sums);
}

void SharesAndKeys(const BlockRange& range, int n, const float* estimates, std::int64_t stride, const float* factors,
                   float* shares, float* keys, float* block_shares) {
  SCSA_DISPATCH(SharesAndKeysTarget)(range, n, estimates, stride, factors, shares, keys, block_shares);
}

int FoldValueMeans(const BlockRange& range, const TailArgs& args, float* sums, float* num) {
  return SCSA_DISPATCH(FoldValueMeansTarget)(range, args, sums, num);
}

void AddValueMeans(const BlockRange& range, std::span<const std::int32_t> clusters, int n, const float* weights,
                   const float* block_shares, float* num) {
  SCSA_DISPATCH(AddValueMeansTarget)(range, clusters, n, weights, block_shares, num);
}

KeyMass MassBelow(const float* keys, const float* shares, std::int64_t n, float at) {
  return SCSA_DISPATCH(MassBelowTarget)(keys, shares, n, at);
}

std::int64_t IndicesFrom(const float* keys, std::int64_t n, float at, std::int32_t* indices) {
  return SCSA_DISPATCH(IndicesFromTarget)(keys, n, at, indices);
}

}  // namespace scsa
#endif  // HWY_ONCE
