// SPDX-License-Identifier: Apache-2.0
#include "core/int8_rows.h"

#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/int8_rows.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/int8_rows-inl.h"
#include "hwy/highway.h"

#if HWY_ONCE

#include <algorithm>

namespace scsa {

HWY_EXPORT(StoreInt8RowsTarget);
HWY_EXPORT(AttendInt8RowsTarget);

void StoreInt8Rows(const Int8RowLayout& layout, const float* keys, const float* values,
                   std::span<const std::uint16_t> order, std::byte* record) {
  SCSA_DISPATCH(StoreInt8RowsTarget)(layout, keys, values, order, record);
}

FetchHint Int8Keys(const Int8RunArgs& run, std::int64_t first) {
  return {.row_bytes = static_cast<std::int64_t>(2 * run.layout->dims()),
          .n_rows = std::min(run.n_pairs - first, kFirstRows / 2),
          .places = run.pairs + first};
}

FetchHint Int8Values(const Int8RunArgs& run, std::int64_t first) {
  FetchHint hint = Int8Keys(run, first);
  hint.stride = static_cast<std::int64_t>(run.layout->ValuesBehindKeys());
  return hint;
}

void AttendInt8Rows(const Int8RunArgs& args, const SoftmaxState& state) {
  SCSA_DISPATCH(AttendInt8RowsTarget)(args, state);
}

}  // namespace scsa
#endif  // HWY_ONCE
