// SPDX-License-Identifier: Apache-2.0
//
// Choice of the clusters that all query heads of a KV head open together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace scsa {

// Orders clusters by key = share / members (attention mass gained per row read), largest first, the lower index first
// among equals, and opens the shortest prefix of that order for which
//   sum of the shares of the unopened clusters < tau.
// shares: non-negative and finite, a cluster's part of the estimated mass, averaged over the query heads. keys: as
// above, negative for clusters that cannot be opened; the share of such a cluster must be 0.
//
// Thread-safe with one selector per thread.
class JointSelector {
 public:
  // opened: ascending cluster indices. The contents of the previous call are replaced. A few streaming passes over the
  // keys narrow down the place of the stop; only what is left around it is sorted. Throws std::bad_alloc.
  void Select(std::span<const float> shares, std::span<const float> keys, float tau, std::vector<std::int32_t>& opened);

  // The nested choices for several thresholds, at least one, largest first: the clusters that can be opened, those that
  // a threshold opens in opening order and then the others, and for each threshold how many of them are open. Used by
  // calibration. Throws std::bad_alloc.
  void Order(std::span<const float> shares, std::span<const float> keys, std::span<const float> taus,
             std::vector<std::int32_t>& order, std::span<std::int32_t> counts);

 private:
  std::vector<std::int32_t> boundary_;
  // Of Order: what the smallest threshold opens, and the same with its keys.
  std::vector<std::int32_t> opened_;
  std::vector<std::uint64_t> sorted_;
  std::uint32_t guess_ = 0;  // bits of a key near the last stop: where the search begins, not where it ends
};

}  // namespace scsa
