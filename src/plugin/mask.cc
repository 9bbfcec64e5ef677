// SPDX-License-Identifier: Apache-2.0
#include "plugin/mask.h"

#include <algorithm>
#include <cstring>

#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "plugin/mask.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa::plugin {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

bool MaskToBitmapTarget(const std::uint16_t* mask, std::int64_t n, std::uint64_t* words) {
  constexpr std::uint16_t kSignless = 0x7FFF;
  constexpr std::uint16_t kMinusInfinity = 0xFC00;
  const hn::CappedTag<std::uint16_t, 64> d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto zero = hn::Zero(d);
  const auto signless = hn::Set(d, kSignless);
  const auto minus_infinity = hn::Set(d, kMinusInfinity);
  auto other = zero;  // not zero where a value is neither
  bool plain = true;
  for (std::int64_t begin = 0; begin < n; begin += 64) {
    std::uint64_t word = 0;
    const std::int64_t count = std::min<std::int64_t>(64, n - begin);
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const auto x = hn::LoadU(d, mask + begin + i);
      const auto magnitude = hn::And(x, signless);
      const auto seen = hn::Eq(magnitude, zero);
      other = hn::Or(other, hn::IfThenZeroElse(seen, hn::Xor(x, minus_infinity)));
      std::uint8_t bits[8] = {};
      hn::StoreMaskBits(d, seen, bits);
      std::uint64_t piece = 0;
      std::memcpy(&piece, bits, sizeof(piece));
      word |= piece << i;
    }
    for (; i < count; ++i) {
      const std::uint16_t x = mask[begin + i];
      const bool seen = (x & kSignless) == 0;
      plain = plain && (seen || x == kMinusInfinity);
      word |= static_cast<std::uint64_t>(seen) << i;
    }
    words[begin / 64] = word;
  }
  return plain && hn::AllTrue(d, hn::Eq(other, zero));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa::plugin
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scsa::plugin {

HWY_EXPORT(MaskToBitmapTarget);

bool MaskToBitmap(const std::uint16_t* mask, std::int64_t n, std::uint64_t* words) {
  return SCSA_DISPATCH(MaskToBitmapTarget)(mask, n, words);
}

}  // namespace scsa::plugin
#endif  // HWY_ONCE
