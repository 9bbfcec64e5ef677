// SPDX-License-Identifier: Apache-2.0
#include "plugin/mask.h"

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

namespace scsa::plugin {
namespace hn = hwy::HWY_NAMESPACE;

// The target that the compiler's flags allow is enough: this reads 2 bytes per cached row where attention reads
// hundreds.
bool MaskToBitmap(const std::uint16_t* mask, std::int64_t n, std::uint64_t* words) {
  constexpr std::uint16_t kSignless = 0x7FFF;
  constexpr std::uint16_t kMinusInfinity = 0xFC00;
  const hn::CappedTag<std::uint16_t, 64> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  bool plain = true;
  for (std::int64_t begin = 0; begin < n; begin += 64) {
    std::uint64_t word = 0;
    const std::int64_t count = std::min<std::int64_t>(64, n - begin);
    std::int64_t i = 0;
    auto other = hn::Zero(d);
    for (; i + lanes <= count; i += lanes) {
      const auto x = hn::LoadU(d, mask + begin + i);
      const auto seen = hn::Eq(hn::And(x, hn::Set(d, kSignless)), hn::Zero(d));
      const auto hidden = hn::Eq(x, hn::Set(d, kMinusInfinity));
      other = hn::Or(other, hn::IfThenZeroElse(hn::Or(seen, hidden), hn::Set(d, 1)));
      std::uint8_t bits[8] = {};
      hn::StoreMaskBits(d, seen, bits);
      std::uint64_t piece = 0;
      std::memcpy(&piece, bits, sizeof(piece));
      word |= piece << i;
    }
    plain = plain && hn::AllTrue(d, hn::Eq(other, hn::Zero(d)));
    for (; i < count; ++i) {
      const std::uint16_t x = mask[begin + i];
      const bool seen = (x & kSignless) == 0;
      plain = plain && (seen || x == kMinusInfinity);
      word |= static_cast<std::uint64_t>(seen) << i;
    }
    words[begin / 64] = word;
  }
  return plain;
}

}  // namespace scsa::plugin
