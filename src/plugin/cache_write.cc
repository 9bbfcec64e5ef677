// SPDX-License-Identifier: Apache-2.0
#include "plugin/cache_write.h"

#include <chrono>

#include "plugin/layer_table.h"
#include "plugin/stats.h"

namespace scsa::plugin {
namespace {

// Values below which starting the threads costs more than the conversion.
constexpr std::int64_t kParallelValues = 1 << 15;

}  // namespace

ggml_status ComputeCacheWrite(const ggml_tensor* node, int n_threads, std::vector<std::int64_t>& rows) {
  const auto start = std::chrono::steady_clock::now();
  const ggml_tensor* source = node->src[0];
  const ggml_tensor* cells = node->src[1];
  const std::int64_t n = source->ne[1];
  rows.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const char* cell = static_cast<const char*>(cells->data) + static_cast<std::size_t>(i) * cells->nb[0];
    std::int64_t row = 0;
    if (cells->type == GGML_TYPE_I64) {
      row = *reinterpret_cast<const std::int64_t*>(cell);
    } else {
      row = *reinterpret_cast<const std::int32_t*>(cell);
    }
    if (row < 0 || row >= node->ne[1]) {
      LogOnce("a cache write to a cell that does not exist was refused");
      return GGML_STATUS_FAILED;
    }
    rows[static_cast<std::size_t>(i)] = row;
  }
  LayerTable::Get().NoteWrites(Root(node), rows);

  const ggml_from_float_t encode = CpuRowEncoder(node->type);
  const int team = n * source->ne[0] < kParallelValues ? 1 : n_threads;
#pragma omp parallel for num_threads(team) if (team > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    encode(reinterpret_cast<const float*>(static_cast<const char*>(source->data) +
                                          static_cast<std::size_t>(i) * source->nb[1]),
           static_cast<char*>(node->data) + static_cast<std::size_t>(rows[static_cast<std::size_t>(i)]) * node->nb[1],
           source->ne[0]);
  }
  const auto elapsed = std::chrono::steady_clock::now() - start;
  Count(GlobalCounters().set_rows_ns,
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count()));
  return GGML_STATUS_SUCCESS;
}

}  // namespace scsa::plugin
