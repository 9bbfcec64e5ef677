// SPDX-License-Identifier: Apache-2.0
#include "attention_check.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "core/parallel.h"
#include "stats.h"

namespace scsa::tool {
namespace {

bool Visible(const scsa_attention_call& call, int query, std::int64_t row) {
  if (call.visible == nullptr) return true;
  return ((call.visible[query * call.visible_stride + row / 64] >> (row % 64)) & 1) != 0;
}

void DecodeRow(const void* row, int type, int n, float* values) {
  if (type == GGML_TYPE_F32) {
    std::memcpy(values, row, sizeof(float) * n);
  } else {
    ggml_get_type_traits(static_cast<ggml_type>(type))->to_float(row, values, n);
  }
}

void ReferenceHead(const scsa_attention_call& call, int query, int head, double* out) {
  const int dim = call.head_dim;
  const int kv_head = head / (call.q_heads / call.kv_heads);
  const float* q = call.q + query * call.q_row_stride + head * call.q_head_stride;
  const auto* k = static_cast<const char*>(call.k) + kv_head * call.k_head_stride;
  const auto* v = static_cast<const char*>(call.v) + kv_head * call.v_head_stride;
  std::vector<float> row(dim);
  std::vector<double> logits(call.n_kv, -std::numeric_limits<double>::infinity());
  const bool sink = call.sinks != nullptr;
  double max = sink ? call.sinks[head] : -std::numeric_limits<double>::infinity();
  for (std::int64_t r = 0; r < call.n_kv; ++r) {
    if (!Visible(call, query, r)) continue;
    DecodeRow(k + r * call.k_row_stride, call.k_type, dim, row.data());
    double dot = 0.0;
    for (int d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * row[d];
    logits[r] = dot * call.scale;
    if (call.softcap > 0.0f) logits[r] = call.softcap * std::tanh(logits[r] / call.softcap);
    max = std::max(max, logits[r]);
  }
  std::fill(out, out + dim, 0.0);
  if (max == -std::numeric_limits<double>::infinity()) return;
  double sum = sink ? std::exp(call.sinks[head] - max) : 0.0;
  for (std::int64_t r = 0; r < call.n_kv; ++r) {
    if (logits[r] == -std::numeric_limits<double>::infinity()) continue;
    const double weight = std::exp(logits[r] - max);
    sum += weight;
    DecodeRow(v + r * call.v_row_stride, call.v_type, dim, row.data());
    for (int d = 0; d < dim; ++d) out[d] += weight * row[d];
  }
  for (int d = 0; d < dim; ++d) out[d] /= sum;
}

std::span<const float> OutputHead(const scsa_attention_call& call, int query, int head) {
  return {call.out + query * call.out_row_stride + head * call.out_head_stride,
          static_cast<std::size_t>(call.head_dim)};
}

}  // namespace

std::vector<double> ReferenceAttention(const scsa_attention_call& call, int threads) {
  std::vector<double> out(static_cast<std::size_t>(call.n_q) * call.q_heads * call.head_dim);
  ParallelFor(threads, std::int64_t{call.n_q} * call.q_heads, [&](std::int64_t task, int) {
    ReferenceHead(call, static_cast<int>(task / call.q_heads), static_cast<int>(task % call.q_heads),
                  out.data() + task * call.head_dim);
  });
  return out;
}

double VisiblePairs(const scsa_attention_call& call) {
  if (call.visible == nullptr) return static_cast<double>(call.n_kv) * call.q_heads * call.n_q;
  std::int64_t rows = 0;
  for (int query = 0; query < call.n_q; ++query) {
    const std::uint64_t* words = call.visible + query * call.visible_stride;
    for (std::int64_t r = 0; r < call.n_kv; r += 64) {
      const std::int64_t left = call.n_kv - r;
      const std::uint64_t mask = left >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
      rows += std::popcount(words[r / 64] & mask);
    }
  }
  return static_cast<double>(rows) * call.q_heads;
}

struct GgmlAttention::Impl {
  ggml_backend_t cpu = nullptr;
};

GgmlAttention::GgmlAttention(int threads) : impl_(std::make_unique<Impl>()) {
  impl_->cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  if (impl_->cpu == nullptr) return;
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(impl_->cpu));
  auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
  if (set_threads != nullptr) set_threads(impl_->cpu, threads);
}

GgmlAttention::~GgmlAttention() {
  if (impl_->cpu != nullptr) ggml_backend_free(impl_->cpu);
}

std::vector<float> GgmlAttention::Compute(const scsa_attention_call& call) const {
  const auto* node = static_cast<const ggml_tensor*>(call.node);
  if (impl_->cpu == nullptr || node == nullptr || node->op != GGML_OP_FLASH_ATTN_EXT) return {};
  ggml_init_params params = {
      .mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false),
      .mem_buffer = nullptr,
      .no_alloc = true,
  };
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(ggml_init(params), &ggml_free);
  // Leaves that share the data of the node's sources: the same bytes through the same strides, with no other node of
  // llama.cpp's graph attached.
  const auto share = [&](const ggml_tensor* source) {
    if (source == nullptr) return static_cast<ggml_tensor*>(nullptr);
    ggml_tensor* leaf = ggml_new_tensor(context.get(), source->type, GGML_MAX_DIMS, source->ne);
    std::copy(std::begin(source->nb), std::end(source->nb), std::begin(leaf->nb));
    leaf->data = source->data;
    leaf->buffer = source->buffer;
    return leaf;
  };
  ggml_tensor* result = ggml_flash_attn_ext(context.get(), share(node->src[0]), share(node->src[1]),
                                            share(node->src[2]), share(node->src[3]), 1.0f, 0.0f, 0.0f);
  std::copy(std::begin(node->op_params), std::end(node->op_params), std::begin(result->op_params));
  result->src[4] = share(node->src[4]);
  std::vector<float> out(static_cast<std::size_t>(ggml_nelements(result)));
  if (result->type != GGML_TYPE_F32 ||
      out.size() != static_cast<std::size_t>(call.n_q) * call.q_heads * call.head_dim) {
    return {};
  }
  result->data = out.data();
  ggml_cgraph* graph = ggml_new_graph_custom(context.get(), 8, false);
  ggml_build_forward_expand(graph, result);
  if (ggml_backend_graph_compute(impl_->cpu, graph) != GGML_STATUS_SUCCESS) return {};
  return out;
}

ReferenceProbe::ReferenceProbe(int threads, bool with_ggml)
    : threads_(threads), ggml_(with_ggml ? std::make_unique<GgmlAttention>(threads) : nullptr) {}

void ReferenceProbe::Observe(void* user, const scsa_attention_call* call) {
  auto& probe = *static_cast<ReferenceProbe*>(user);
  const std::vector<double> reference = ReferenceAttention(*call, probe.threads_);
  const std::vector<float> ggml = probe.ggml_ ? probe.ggml_->Compute(*call) : std::vector<float>();
  const auto dim = static_cast<std::size_t>(call->head_dim);
  for (int query = 0; query < call->n_q; ++query) {
    for (int head = 0; head < call->q_heads; ++head) {
      const std::size_t begin = (static_cast<std::size_t>(query) * call->q_heads + head) * dim;
      const std::span<const double> expected(reference.data() + begin, dim);
      probe.errors_.push_back(RelativeError(OutputHead(*call, query, head), expected));
      if (!ggml.empty()) probe.ggml_errors_.push_back(RelativeError({ggml.data() + begin, dim}, expected));
    }
  }
  probe.multiply_adds_ += VisiblePairs(*call) * 2.0 * call->head_dim;
}

}  // namespace scsa::tool
