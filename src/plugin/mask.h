// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace scsa::plugin {

// Turns one row of ggml's f16 attention mask into a bitmap: bit r of `words` is set when mask[r] is zero (row r is
// seen); -inf means that it is not seen. Writes ceil(n / 64) words; bits from n on are zero.
// Returns false when some value is neither 0 nor -inf (a bias): then the bitmap cannot stand for the mask.
bool MaskToBitmap(const std::uint16_t* mask, std::int64_t n, std::uint64_t* words);

}  // namespace scsa::plugin
