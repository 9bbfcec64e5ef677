// SPDX-License-Identifier: Apache-2.0
#include "core/joint_select.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/joint_kernels.h"

namespace scsa {
namespace {

// So few clusters around the stop are sorted.
constexpr std::int64_t kFew = 32;
constexpr std::uint32_t kInfinity = std::bit_cast<std::uint32_t>(std::numeric_limits<float>::infinity());
// First step of the search away from the last stop: a factor of two.
constexpr std::uint32_t kFirstStep = std::uint32_t{1} << 23;

struct KeyGreater {
  std::span<const float> keys;
  bool operator()(std::int32_t a, std::int32_t b) const { return keys[a] != keys[b] ? keys[a] > keys[b] : a < b; }
};

}  // namespace

void JointSelector::Select(std::span<const float> shares, std::span<const float> keys, float tau,
                           std::vector<std::int32_t>& opened) {
  const std::int64_t n = std::ssize(keys);
  opened.clear();
  if (n == 0) return;
  // Positive floats are ordered like their bits. The mass of the keys below `low` is below tau, that below `high` is
  // not.
  const auto mass_below = [&](std::uint32_t bits) {
    return MassBelow(keys.data(), shares.data(), n, std::bit_cast<float>(bits));
  };
  std::uint32_t low = 0;
  std::uint32_t high = kInfinity;
  KeyMass below_low = mass_below(low);
  KeyMass below_high = mass_below(high);
  if (below_high.mass < tau) return;
  std::uint32_t step = kFirstStep;
  std::uint32_t probe = std::clamp<std::uint32_t>(guess_, 1, kInfinity - 1);
  while (below_low.mass < tau && below_high.below - below_low.below > kFew && high - low > 1) {
    const KeyMass below = mass_below(probe);
    if (below.mass < tau) {
      low = probe;
      below_low = below;
      probe = high == kInfinity && high - low > step ? low + step : low + (high - low) / 2;
    } else {
      high = probe;
      below_high = below;
      probe = low == 0 && high - low > step ? high - step : low + (high - low) / 2;
    }
    step *= 2;
    if (step == 0) step = kInfinity;
  }
  guess_ = low;

  // Clusters between the two, from the end of the order: closed while the threshold allows.
  opened.resize(keys.size());
  opened.resize(IndicesFrom(keys.data(), n, std::bit_cast<float>(low), opened.data()));
  const float bound = std::bit_cast<float>(high);
  boundary_.clear();
  std::ranges::copy_if(opened, std::back_inserter(boundary_), [&](std::int32_t c) { return keys[c] < bound; });
  const KeyGreater before{keys};
  std::ranges::sort(boundary_, before);
  double closed = below_low.mass;
  std::size_t keep = boundary_.size();
  while (keep > 0 && closed + shares[boundary_[keep - 1]] < tau) closed += shares[boundary_[--keep]];
  if (keep == boundary_.size()) return;
  const std::int32_t first_closed = boundary_[keep];
  std::erase_if(opened, [&](std::int32_t c) { return !before(c, first_closed); });
}

void JointSelector::Order(std::span<const float> shares, std::span<const float> keys, std::span<const float> taus,
                          std::vector<std::int32_t>& order, std::span<std::int32_t> counts) {
  // The clusters that the smallest threshold leaves closed need no order among themselves.
  Select(shares, keys, taus.back(), opened_);
  order.clear();
  sorted_.clear();
  double unopened = 0.0;
  auto next_opened = opened_.begin();
  for (std::int32_t c = 0; c < static_cast<std::int32_t>(keys.size()); ++c) {
    if (keys[c] < 0.0f) continue;
    if (next_opened != opened_.end() && *next_opened == c) {
      ++next_opened;
      // Larger keys first, then smaller indices. Positive floats are ordered like their bits.
      sorted_.push_back(std::uint64_t{~std::bit_cast<std::uint32_t>(keys[c])} << 32 | static_cast<std::uint32_t>(c));
    } else {
      order.push_back(c);
      unopened += shares[c];
    }
  }
  std::ranges::sort(sorted_);
  order.insert(order.begin(), sorted_.size(), 0);
  std::ranges::transform(sorted_, order.begin(), [](std::uint64_t item) { return static_cast<std::int32_t>(item); });
  // Sums run from the small end, as in Select, so that both take the same decision at a threshold.
  std::size_t keep = sorted_.size();
  for (std::size_t t = taus.size(); t-- > 0;) {
    while (keep > 0 && unopened + shares[order[keep - 1]] < taus[t]) unopened += shares[order[--keep]];
    counts[t] = static_cast<std::int32_t>(keep);
  }
}

}  // namespace scsa
