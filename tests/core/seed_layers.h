// SPDX-License-Identifier: Apache-2.0
//
// Layers of preset `seed` and what a query head of them reads whatever it opens: for the tests of flat and of
// hierarchical selection.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/layer_impl.h"
#include "core/seed_method.h"
#include "scsa/layer.h"
#include "tests/core/synthetic.h"

namespace scsa::test {

// Small clusters and regions.
inline Config SmallSeedConfig(Selection selection = Selection::kFlat) {
  Config config;
  config.cluster_size = 16;
  config.rebuild_interval = 64;
  config.block_size = 256;
  config.selection = selection;
  return config;
}

inline std::unique_ptr<Layer> NewLayer(const Shape& shape, const Config& config) {
  std::unique_ptr<Layer> layer;
  EXPECT_TRUE(Layer::Create(shape, config, &layer).ok());
  return layer;
}

inline void SetAllTaus(Layer& layer, float tau) {
  for (int h = 0; h < layer.shape().q_heads; ++h) ASSERT_TRUE(layer.SetTau(h, tau).ok());
}

inline std::span<const Region> SeedRegions(const Layer& layer) {
  return static_cast<const SeedMethod&>(*layer.impl().method).plan().regions();
}

inline Vector HeadOf(const std::vector<float>& out, const Shape& shape, int h) {
  return ToDouble(out.data() + std::int64_t{h} * shape.head_dim, shape.head_dim);
}

// A query head before anything is opened.
struct PlainQuery {
  Vector qs;              // scaled
  Vector packed_q{};      // as it meets packed keys
  double exact_mass = 0;  // of the rows outside the regions and of the attention sink
  PlainSoftmax softmax;   // over these rows
};

inline PlainQuery ReadExactRows(const Layer& layer, const SyntheticCache& cache, const std::vector<bool>& visible,
                                const float* q, int h, const LogitParams& params) {
  const Shape& shape = layer.shape();
  const Config& config = layer.config();
  const int kv_head = h / shape.group();
  const int head_dim = shape.head_dim;
  PlainQuery out{.qs = ToDouble(q + std::int64_t{h} * head_dim, head_dim), .softmax = PlainSoftmax(head_dim)};
  for (double& x : out.qs) x *= params.scale;
  // With q8_0 keys the query is quantised too: 32 values to 8 bits behind one scale.
  out.packed_q = out.qs;
  if (config.packed_format == PackedFormat::kQ8_0) {
    const int blocks = (head_dim + 31) / 32;
    std::vector<std::int8_t> values(blocks * 32);
    std::vector<float> scales(blocks);
    QuantizeQuery(q + std::int64_t{h} * head_dim, head_dim, params.scale, values.data(), scales.data());
    for (int d = 0; d < head_dim; ++d) out.packed_q[d] = static_cast<double>(values[d]) * scales[d / 32];
  }
  if (params.sinks != nullptr) out.exact_mass = std::exp(static_cast<double>(params.sinks[h]));
  const std::int64_t sealed_end = SeedRegions(layer).back().end;
  for (std::int64_t r = 0; r < std::ssize(visible); ++r) {
    if (!visible[r] || (r >= config.sink && r < sealed_end)) continue;
    const double x = DotOf(out.qs, cache.DecodedKey(r, kv_head));
    out.exact_mass += std::exp(x);
    out.softmax.Add(x, cache.DecodedValue(r, kv_head));
  }
  return out;
}

// Adds the packed rows of a cluster.
inline void AddPackedRows(const Layer& layer, const Block& block, int cluster, PlainQuery* query) {
  const DType type = PackedType(layer.config().packed_format);
  const int head_dim = layer.shape().head_dim;
  const std::size_t row_bytes = RowBytes(type, head_dim);
  for (int r = block.partition.offsets[cluster]; r < block.partition.offsets[cluster + 1]; ++r) {
    const Vector key = DecodedRow(block.packed_k.get() + r * row_bytes, type, head_dim);
    query->softmax.Add(DotOf(query->packed_q, key), DecodedRow(block.packed_v.get() + r * row_bytes, type, head_dim));
  }
}

}  // namespace scsa::test
