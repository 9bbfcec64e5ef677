// SPDX-License-Identifier: Apache-2.0
//
// Cases of `scsa bench kernels` over cached rows.
#pragma once

#include <memory>
#include <vector>

#include "kernel_cases.h"
#include "scsa/types.h"

namespace scsa::tool {

// Cached rows of one format.
struct RowData {
  RowData(DType row_type, const KernelSetup& setup);

  DType type;
  int head_dim;
  std::size_t row_bytes;
  std::int64_t pass_rows;  // of one cold pass
  std::int64_t n_rows = 0;
  std::unique_ptr<std::byte[]> k;
  std::unique_ptr<std::byte[]> v;
};

using RowDataRef = std::shared_ptr<const RowData>;

// Exact attention. Hot: one KV head whose cache fits, a call per thread. Cold: a decoder's call, over the next layer's
// cache each time.
void AppendAttend(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases);
// The sweep of preset `seed` over packed q8_0 rows: integer dot products for the scores, then softmax and values.
void AppendPacked(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases);
// The sweep of preset `fast` over the rows of opened clusters, where they lie in the cache: an eighth of each block.
void AppendGather(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases);
// The same over packed 8-bit rows (PackedFormat::kInt8).
std::vector<KernelCase> Int8RowCases(const KernelSetup& setup);
// The two halves of attention alone: logits of keys, weighted sums of values.
void AppendScore(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases);
void AppendAccumulate(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases);

}  // namespace scsa::tool
