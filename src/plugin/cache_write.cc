// SPDX-License-Identifier: Apache-2.0
#include "plugin/cache_write.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/parallel.h"
#include "plugin/layer_table.h"
#include "plugin/stats.h"

namespace scsa::plugin {
namespace {

// Values below which starting the threads costs more than the conversion.
constexpr std::int64_t kParallelValues = 1 << 15;
// Cells that are noted and written together: a list of them that fits on the stack, for a write must not fail.
constexpr std::int64_t kCellsAtATime = 512;
constexpr std::int64_t kRowsPerTask = 16;

}  // namespace

ggml_status ComputeCacheWrite(const ggml_tensor* node, int n_threads) {
  const auto start = std::chrono::steady_clock::now();
  const ggml_tensor* source = node->src[0];
  const ggml_tensor* cells = node->src[1];
  const std::int64_t n = source->ne[1];
  const auto cell_of = [cells](std::int64_t i) -> std::int64_t {
    const char* cell = static_cast<const char*>(cells->data) + static_cast<std::size_t>(i) * cells->nb[0];
    if (cells->type == GGML_TYPE_I64) return *reinterpret_cast<const std::int64_t*>(cell);
    return *reinterpret_cast<const std::int32_t*>(cell);
  };
  for (std::int64_t i = 0; i < n; ++i) {
    if (cell_of(i) < 0 || cell_of(i) >= node->ne[1]) {
      LogOnce({"a cache write to a cell that does not exist was refused"});
      return GGML_STATUS_FAILED;
    }
  }
  const ggml_from_float_t encode = CpuRowEncoder(node->type);
  std::array<std::int64_t, kCellsAtATime> rows;
  for (std::int64_t first = 0; first < n; first += kCellsAtATime) {
    const std::int64_t count = std::min(kCellsAtATime, n - first);
    for (std::int64_t i = 0; i < count; ++i) rows[static_cast<std::size_t>(i)] = cell_of(first + i);
    LayerTable::Get().NoteWrites(Root(node), std::span(rows).first(static_cast<std::size_t>(count)));

    const int team = count * source->ne[0] < kParallelValues ? 1 : n_threads;
    ParallelFor(team, (count + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task, int /*thread*/) {
      const std::int64_t end = std::min(count, (task + 1) * kRowsPerTask);
      for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
        encode(
            reinterpret_cast<const float*>(static_cast<const char*>(source->data) +
                                           static_cast<std::size_t>(first + i) * source->nb[1]),
            static_cast<char*>(node->data) + static_cast<std::size_t>(rows[static_cast<std::size_t>(i)]) * node->nb[1],
            source->ne[0]);
      }
    });
  }
  const auto elapsed = std::chrono::steady_clock::now() - start;
  Count(GlobalCounters().set_rows_ns,
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count()));
  return GGML_STATUS_SUCCESS;
}

}  // namespace scsa::plugin
