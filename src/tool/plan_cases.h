// SPDX-License-Identifier: Apache-2.0
//
// Cases of `scsa bench kernels` over plans: estimates, tails, clustering.
#pragma once

#include <vector>

#include "kernel_cases.h"

namespace scsa::tool {

// Estimates of preset `seed`: f32 centroids, directions and residuals of the clusters of one region.
std::vector<KernelCase> SeedEstimateCases(const KernelSetup& setup);
// Preset `fast` over the records of as many blocks as one of the operator's parts takes: estimates of their clusters
// from the key records, the tail from the value records, all clusters being closed.
std::vector<KernelCase> FastEstimateCases(const KernelSetup& setup);
std::vector<KernelCase> FastTailCases(const KernelSetup& setup);
// Splitting a region of keys into clusters and taking their moments, from keys that are decoded already.
std::vector<KernelCase> SeedClusterCases(const KernelSetup& setup);
// Building blocks from an f16 cache: decoding, clustering, summaries, fingerprints.
std::vector<KernelCase> FastClusterCases(const KernelSetup& setup);

}  // namespace scsa::tool
