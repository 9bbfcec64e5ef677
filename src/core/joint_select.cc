// SPDX-License-Identifier: Apache-2.0
#include "core/joint_select.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace scsa {
namespace {

// Sign (always 0), 8 exponent bits and 3 mantissa bits: buckets an eighth of an octave to an octave wide, which leaves
// a few clusters per bucket on real score distributions.
constexpr int kBucketShift = 20;
constexpr std::size_t kBuckets = std::size_t{1} << 11;
constexpr std::uint16_t kNever = 0xFFFF;

struct KeyGreater {
  std::span<const float> shares;
  std::span<const float> rows;
  bool operator()(std::int32_t a, std::int32_t b) const {
    const float key_a = shares[a] / rows[a];
    const float key_b = shares[b] / rows[b];
    return key_a != key_b ? key_a > key_b : a < b;
  }
};

}  // namespace

void JointSelector::Select(std::span<const float> shares, std::span<const float> rows, float tau,
                           std::vector<std::int32_t>& opened) {
  const auto n = static_cast<std::int32_t>(shares.size());
  opened.clear();
  mass_.assign(kBuckets, 0.0);
  bucket_.resize(shares.size());
  for (std::int32_t c = 0; c < n; ++c) {
    if (rows[c] <= 0.0f) {
      bucket_[c] = kNever;
      continue;
    }
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(shares[c] / rows[c]) >> kBucketShift;
    const auto bucket = std::min<std::uint32_t>(bits, kBuckets - 1);
    bucket_[c] = static_cast<std::uint16_t>(bucket);
    mass_[bucket] += shares[c];
  }
  // From the smallest keys up: everything below the boundary bucket stays unopened, everything above it opens.
  double unopened = 0.0;
  std::size_t boundary = 0;
  while (boundary < kBuckets && unopened + mass_[boundary] < tau) unopened += mass_[boundary++];
  if (boundary == kBuckets) return;

  boundary_.clear();
  for (std::int32_t c = 0; c < n; ++c) {
    if (bucket_[c] == boundary) boundary_.push_back(c);
  }
  std::sort(boundary_.begin(), boundary_.end(), KeyGreater{shares, rows});
  // Close clusters from the end of the order while the threshold allows.
  std::size_t keep = boundary_.size();
  while (keep > 0 && unopened + shares[boundary_[keep - 1]] < tau) unopened += shares[boundary_[--keep]];
  for (std::size_t i = keep; i < boundary_.size(); ++i) bucket_[boundary_[i]] = kNever;
  for (std::int32_t c = 0; c < n; ++c) {
    if (bucket_[c] != kNever && bucket_[c] >= boundary) opened.push_back(c);
  }
}

void JointSelector::Order(std::span<const float> shares, std::span<const float> rows, std::span<const float> taus,
                          std::vector<std::int32_t>& order, std::span<std::int32_t> counts) {
  order.clear();
  for (std::int32_t c = 0; c < static_cast<std::int32_t>(shares.size()); ++c) {
    if (rows[c] > 0.0f) order.push_back(c);
  }
  std::sort(order.begin(), order.end(), KeyGreater{shares, rows});
  // Sums run from the small end, as in Select, so that both take the same decision at a threshold.
  std::size_t keep = order.size();
  double unopened = 0.0;
  for (std::size_t t = taus.size(); t-- > 0;) {
    while (keep > 0 && unopened + shares[order[keep - 1]] < taus[t]) unopened += shares[order[--keep]];
    counts[t] = static_cast<std::int32_t>(keep);
  }
}

}  // namespace scsa
