// SPDX-License-Identifier: Apache-2.0
//
// A program of a user of the library: the sparse operator with threshold 0 opens every cluster, so its answer must be
// that of exact attention up to the packed format's rounding.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "scsa/exact.h"
#include "scsa/layer.h"
#include "scsa/target.h"

namespace {

void Check(const scsa::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(1);
  }
}

// Values in [-1, 1) from a fixed sequence.
std::vector<float> Sequence(std::size_t n, unsigned seed) {
  std::vector<float> values(n);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) / static_cast<float>(1u << 23) - 1.0f;
  }
  return values;
}

}  // namespace

int main() {
  const scsa::Shape shape{.q_heads = 4, .kv_heads = 2, .head_dim = 64};
  constexpr int kRows = 1500;
  const int cache_row = shape.kv_heads * shape.head_dim;
  const int out_size = shape.q_heads * shape.head_dim;
  const std::vector<float> k = Sequence(std::size_t{kRows} * cache_row, 1);
  const std::vector<float> v = Sequence(std::size_t{kRows} * cache_row, 2);
  const std::vector<float> q = Sequence(out_size, 3);
  std::vector<float> exact(out_size);
  std::vector<float> sparse(out_size);

  scsa::KvView kv;
  kv.k = k.data();
  kv.v = v.data();
  kv.k_type = kv.v_type = scsa::DType::kF32;
  kv.k_row_stride = kv.v_row_stride = std::int64_t{4} * cache_row;
  kv.k_head_stride = kv.v_head_stride = std::int64_t{4} * shape.head_dim;
  kv.n_kv = kRows;
  const scsa::QueryView query{.data = q.data(), .row_stride = out_size, .head_stride = shape.head_dim, .n_q = 1};
  const scsa::LogitParams params{.scale = 0.125f};
  scsa::Workspace workspace;

  Check(scsa::ExactAttention(shape, query, kv, {}, params, 2, workspace,
                             {.data = exact.data(), .row_stride = out_size, .head_stride = shape.head_dim}));

  scsa::Config config;
  config.packed_format = scsa::PackedFormat::kF16;
  std::unique_ptr<scsa::Layer> layer;
  Check(scsa::Layer::Create(shape, config, &layer));
  for (int head = 0; head < shape.q_heads; ++head) Check(layer->SetTau(head, 0.0f));
  Check(layer->Attend(query, kv, {}, params, scsa::Verify::kFull, 2, workspace,
                      {.data = sparse.data(), .row_stride = out_size, .head_stride = shape.head_dim}));

  double difference = 0.0;
  double norm = 0.0;
  for (int i = 0; i < out_size; ++i) {
    difference += std::pow(exact[i] - sparse[i], 2);
    norm += std::pow(exact[i], 2);
  }
  const double error = std::sqrt(difference / norm);
  std::printf("target %s, %lld rows in blocks, relative difference %.2e\n", scsa::ActiveTarget().c_str(),
              static_cast<long long>(layer->sealed_end() - config.sink), error);
  if (!(norm > 0.0) || !(error < 2e-3) || layer->stats().sparse_steps != 1) {
    std::fprintf(stderr, "exact and sparse attention differ\n");
    return 1;
  }
  std::puts("exact and sparse attention agree");
  return 0;
}
