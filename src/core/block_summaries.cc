// SPDX-License-Identifier: Apache-2.0
#include "core/block_summaries.h"

#include <algorithm>
#include <cmath>

namespace scsa {
namespace {

constexpr float kSteps = 127.0f;

// The block's mean over its members and the largest deviation in each dimension.
void ChooseFrame(const SummaryLayout& layout, const float* vectors, std::span<const float> counts, float* mean,
                 float* step) {
  const int head_dim = layout.head_dim();
  std::fill_n(mean, head_dim, 0.0f);
  std::fill_n(step, head_dim, 0.0f);
  float members = 0.0f;
  for (const float count : counts) members += count;
  if (members == 0.0f) return;
  for (int c = 0; c < layout.slots(); ++c) {
    const float share = counts[c] / members;
    for (int d = 0; d < head_dim; ++d) mean[d] += share * vectors[std::int64_t{c} * head_dim + d];
  }
  for (int c = 0; c < layout.slots(); ++c) {
    if (counts[c] == 0.0f) continue;
    for (int d = 0; d < head_dim; ++d) {
      step[d] = std::max(step[d], std::fabs(vectors[std::int64_t{c} * head_dim + d] - mean[d]) / kSteps);
    }
  }
}

std::int8_t Stored(float value, float mean, float step) {
  if (!(step > 0.0f)) return 0;
  return static_cast<std::int8_t>(std::clamp(std::nearbyint((value - mean) / step), -kSteps, kSteps));
}

template <class At>
void StoreAll(const SummaryLayout& layout, const float* vectors, std::span<const float> counts, const float* mean,
              const float* step, std::int8_t* out, At&& at) {
  for (int c = 0; c < layout.slots(); ++c) {
    for (int d = 0; d < layout.head_dim(); ++d) {
      out[at(c, d)] = counts[c] == 0.0f ? std::int8_t{0}
                                        : Stored(vectors[std::int64_t{c} * layout.head_dim() + d], mean[d], step[d]);
    }
  }
}

}  // namespace

void StoreCentroids(const SummaryLayout& layout, const float* vectors, std::span<const float> counts,
                    const KeyRecord& record) {
  ChooseFrame(layout, vectors, counts, record.mean, record.step);
  std::fill_n(record.largest_step, 8, *std::max_element(record.step, record.step + layout.head_dim()));
  StoreAll(layout, vectors, counts, record.mean, record.step, record.centroids,
           [&](int slot, int dim) { return layout.CentroidAt(slot, dim); });
}

void StoreValueMeans(const SummaryLayout& layout, const float* vectors, std::span<const float> counts,
                     const ValueRecord& record) {
  ChooseFrame(layout, vectors, counts, record.mean, record.step);
  StoreAll(layout, vectors, counts, record.mean, record.step, record.means,
           [&](int slot, int dim) { return layout.ValueAt(slot, dim); });
}

}  // namespace scsa
