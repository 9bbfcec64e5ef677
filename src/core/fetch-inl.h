// SPDX-License-Identifier: Apache-2.0
//
// Paced software prefetch for kernels. Per-target code: included once per SIMD target.

#if defined(SCSA_CORE_FETCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCSA_CORE_FETCH_INL_H_
#undef SCSA_CORE_FETCH_INL_H_
#else
#define SCSA_CORE_FETCH_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/kernels.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

inline constexpr std::int64_t kLineBytes = 64;

// What is fetched ahead may be larger than the first cache level, so the second one is the place for it.
HWY_INLINE void FetchIntoL2(const std::uint8_t* line) {
#if HWY_COMPILER_MSVC
  hwy::Prefetch(line);
#else
  __builtin_prefetch(line, /*write=*/0, /*locality=*/2);
#endif
}

// Spreads the prefetch of a hint over `steps` steps of work.
class Fetcher {
 public:
  Fetcher(const FetchHint& hint, std::int64_t steps)
      : data_(reinterpret_cast<const std::uint8_t*>(hint.data)),
        places_(hint.places),
        stride_(hint.stride),
        lines_per_row_((hint.row_bytes + kLineBytes - 1) / kLineBytes),
        left_(lines_per_row_ * Stretches(hint)),
        per_step_((left_ * kUnits + steps - 1) / std::max<std::int64_t>(steps, 1)) {
    if (left_ > 0) next_ = RowAt();
  }

  HWY_INLINE void Step(std::size_t steps) {
    if (left_ <= 0) return;
    due_ += static_cast<std::int64_t>(steps) * per_step_;
    // The members live in memory: they are written once for a stretch of lines, not for each line.
    std::int64_t due = std::min(due_ / kUnits, left_);
    due_ %= kUnits;
    left_ -= due;
    while (due > 0) {
      const std::int64_t lines = std::min(due, lines_per_row_ - line_);
      for (std::int64_t i = 0; i < lines; ++i) FetchIntoL2(next_ + i * kLineBytes);
      due -= lines;
      line_ += lines;
      next_ += lines * kLineBytes;
      if (line_ == lines_per_row_ && due + left_ > 0) {
        line_ = 0;
        ++row_;
        next_ = RowAt();
      }
    }
  }

 private:
  static std::int64_t Stretches(const FetchHint& hint) {
    if (hint.places == nullptr) return hint.n_rows;
    return hint.n_rows - std::count(hint.places, hint.places + hint.n_rows, nullptr);
  }

  // Of row_, or the first one after it that there is.
  HWY_INLINE const std::uint8_t* RowAt() {
    if (places_ != nullptr) {
      while (places_[row_] == nullptr) ++row_;
      return reinterpret_cast<const std::uint8_t*>(places_[row_]) + stride_;
    }
    return data_ + row_ * stride_;
  }

  static constexpr std::int64_t kUnits = 64;  // of a line
  const std::uint8_t* data_;
  const std::byte* const* places_;
  std::int64_t stride_;
  std::int64_t lines_per_row_;
  std::int64_t left_;  // lines
  std::int64_t per_step_;
  const std::uint8_t* next_ = nullptr;
  std::int64_t row_ = 0;
  std::int64_t line_ = 0;
  std::int64_t due_ = 0;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#endif  // SCSA_CORE_FETCH_INL_H_
