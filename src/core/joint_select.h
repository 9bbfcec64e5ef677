// SPDX-License-Identifier: Apache-2.0
//
// Choice of the clusters that all query heads of a KV head open together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace scsa {

// Orders clusters by key = share / rows (attention mass gained per row read), largest first, the lower index first
// among equals, and opens the shortest prefix of that order for which
//   sum of the shares of the unopened clusters < tau.
// shares: non-negative and finite, the mean over the heads of a cluster's estimated mass as a fraction of the head's
// whole estimated mass. rows: members per cluster; a cluster with no rows is never opened and its share must be 0.
//
// Linear in the number of clusters: a histogram over the leading bits of the key's float representation finds the
// bucket in which the stop falls, and only that bucket is sorted. Thread-safe with one selector per thread.
class JointSelector {
 public:
  // opened: ascending cluster indices. The contents of the previous call are replaced. Throws std::bad_alloc.
  void Select(std::span<const float> shares, std::span<const float> rows, float tau, std::vector<std::int32_t>& opened);

  // The nested choices for several thresholds, largest first: clusters in opening order, and for each threshold how
  // many of them are open. Used by calibration. Throws std::bad_alloc.
  void Order(std::span<const float> shares, std::span<const float> rows, std::span<const float> taus,
             std::vector<std::int32_t>& order, std::span<std::int32_t> counts);

 private:
  std::vector<double> mass_;           // per bucket
  std::vector<std::uint16_t> bucket_;  // per cluster
  std::vector<std::int32_t> boundary_;
};

}  // namespace scsa
