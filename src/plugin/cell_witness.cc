// SPDX-License-Identifier: Apache-2.0
#include "plugin/cell_witness.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "hwy/cache_control.h"

namespace scsa::plugin {
namespace {

// 16 values of an f16 key, more than half a block of a q8_0 one. They lie in one cache line where the cache is aligned.
constexpr std::size_t kMarkBytes = 32;
// Keys lie too far apart for the hardware to fetch them in time.
constexpr std::int64_t kPrefetchCells = 16;

}  // namespace

CellWitness::CellWitness(std::int64_t cells)
    : witness_(std::numeric_limits<int>::max()), marks_(static_cast<std::size_t>(cells) * kMarkBytes) {}

bool CellWitness::Look(const Keys& keys, std::span<const std::uint64_t> visible, std::span<const std::uint64_t> seen,
                       std::span<const std::uint64_t> written) {
  const auto cells = static_cast<std::int64_t>(marks_.size() / kMarkBytes);
  const std::size_t bytes = std::min(keys.bytes, kMarkBytes);
  bool changed = false;
  for (std::size_t w = 0; w < visible.size(); ++w) {
    for (std::uint64_t bits = visible[w]; bits != 0; bits &= bits - 1) {
      const int bit = std::countr_zero(bits);
      const std::int64_t cell = static_cast<std::int64_t>(w) * 64 + bit;
      hwy::Prefetch(keys.first + std::min(cell + kPrefetchCells, cells - 1) * keys.stride);
      const std::byte* key = keys.first + cell * keys.stride;
      std::byte* mark = marks_.data() + static_cast<std::size_t>(cell) * kMarkBytes;
      // A constant size compiles to two vector operations.
      const bool same =
          bytes == kMarkBytes ? std::memcmp(key, mark, kMarkBytes) == 0 : std::memcmp(key, mark, bytes) == 0;
      if (same) continue;
      changed = changed || (seen[w] & ~written[w] & (std::uint64_t{1} << bit)) != 0;
      std::memcpy(mark, key, bytes);
    }
  }
  return changed;
}

void CellWitness::Report(bool alarm) {
  ++reports_;
  alarms_ += alarm;
}

}  // namespace scsa::plugin
