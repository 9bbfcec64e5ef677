// SPDX-License-Identifier: Apache-2.0
//
// The plugin as a program sees it, and a small cache with attention over it built as llama.cpp builds it.
#pragma once

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "scsa/plugin.h"

namespace scsa::plugin_test {

class Plugin {
 public:
  static Plugin& Get() {
    static Plugin plugin;
    return plugin;
  }
  ggml_backend_dev_t device() const { return ggml_backend_reg_dev_get(reg_, 0); }
  void Set(const char* name, const char* value) const {
    const char* error = set_(name, value);
    ASSERT_EQ(error, nullptr) << error;
  }
  scsa_plugin_stats Stats() const {
    scsa_plugin_stats stats{};
    stats.struct_size = sizeof(stats);
    get_stats_(&stats);
    return stats;
  }
  // What scsa_plugin_get_taus gives, read in two calls.
  std::string Taus() const {
    const std::size_t size = get_taus_(nullptr, 0);
    std::string text(size + 1, '?');
    EXPECT_EQ(get_taus_(text.data(), text.size()), size);
    EXPECT_EQ(text.back(), size > 0 ? '\0' : '?');
    text.resize(size);
    return text;
  }
  scsa_plugin_get_taus_t get_taus() const { return get_taus_; }
  scsa_plugin_set_observer_t set_observer() const { return set_observer_; }
  scsa_plugin_set_t set() const { return set_; }

 private:
  Plugin() {
    ggml_backend_load_all();
    reg_ = ggml_backend_load(SCSA_PLUGIN_FILE);
    if (reg_ == nullptr) throw std::runtime_error("cannot load " SCSA_PLUGIN_FILE);
    set_ = reinterpret_cast<scsa_plugin_set_t>(ggml_backend_reg_get_proc_address(reg_, SCSA_PLUGIN_SET));
    get_stats_ =
        reinterpret_cast<scsa_plugin_get_stats_t>(ggml_backend_reg_get_proc_address(reg_, SCSA_PLUGIN_GET_STATS));
    get_taus_ = reinterpret_cast<scsa_plugin_get_taus_t>(ggml_backend_reg_get_proc_address(reg_, SCSA_PLUGIN_GET_TAUS));
    set_observer_ =
        reinterpret_cast<scsa_plugin_set_observer_t>(ggml_backend_reg_get_proc_address(reg_, SCSA_PLUGIN_SET_OBSERVER));
  }
  ggml_backend_reg_t reg_ = nullptr;
  scsa_plugin_set_t set_ = nullptr;
  scsa_plugin_get_stats_t get_stats_ = nullptr;
  scsa_plugin_get_taus_t get_taus_ = nullptr;
  scsa_plugin_set_observer_t set_observer_ = nullptr;
};

struct BackendDeleter {
  void operator()(ggml_backend_t b) const { ggml_backend_free(b); }
};
struct SchedDeleter {
  void operator()(ggml_backend_sched_t s) const { ggml_backend_sched_free(s); }
};
struct ContextDeleter {
  void operator()(ggml_context* c) const { ggml_free(c); }
};
struct BufferDeleter {
  void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); }
};
using BackendPtr = std::unique_ptr<ggml_backend, BackendDeleter>;
using SchedPtr = std::unique_ptr<ggml_backend_sched, SchedDeleter>;
using ContextPtr = std::unique_ptr<ggml_context, ContextDeleter>;
using BufferPtr = std::unique_ptr<ggml_backend_buffer, BufferDeleter>;

inline ContextPtr MakeContext() { return ContextPtr(ggml_init({std::size_t{1} << 20, nullptr, true})); }

// The backends of one llama.cpp context: the plugin's (if wanted) before the CPU's.
class Session {
 public:
  explicit Session(bool with_plugin) {
    if (with_plugin) backends_.emplace_back(ggml_backend_dev_init(Plugin::Get().device(), nullptr));
    backends_.emplace_back(ggml_backend_cpu_init());
    std::vector<ggml_backend_t> raw;
    for (auto& b : backends_) {
      raw.push_back(b.get());
      // As llama_context does it.
      ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(b.get()));
      reinterpret_cast<ggml_backend_set_n_threads_t>(
          ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))(b.get(), 2);
    }
    sched_.reset(ggml_backend_sched_new(raw.data(), nullptr, static_cast<int>(raw.size()), 256, false, false));
  }
  ggml_backend_sched_t sched() const { return sched_.get(); }
  // The plugin's backend where there is one.
  ggml_backend_t first_backend() const { return backends_.front().get(); }

 private:
  std::vector<BackendPtr> backends_;
  SchedPtr sched_;
};

inline const void* EncodeRows(ggml_type type, const std::vector<float>& values, std::vector<std::uint8_t>* bytes,
                              std::int64_t row) {
  bytes->resize(ggml_row_size(type, row) * (values.size() / static_cast<std::size_t>(row)));
  ggml_quantize_chunk(type, values.data(), bytes->data(), 0, static_cast<std::int64_t>(values.size()) / row, row,
                      nullptr);
  return bytes->data();
}

// A KV cache of one layer as llama.cpp lays it out: [head_dim * kv_heads, cells, streams].
struct Cache {
  int head_dim, kv_heads;
  std::int64_t cells;
  int streams;
  ContextPtr context = MakeContext();
  BufferPtr buffer;
  ggml_tensor* k;
  ggml_tensor* v;

  Cache(int head_dim_, int kv_heads_, std::int64_t cells_, int streams_, ggml_type k_type, ggml_type v_type,
        const char* k_name = "cache_k_l3", const char* v_name = "cache_v_l3")
      : head_dim(head_dim_), kv_heads(kv_heads_), cells(cells_), streams(streams_) {
    const std::int64_t row = static_cast<std::int64_t>(head_dim) * kv_heads;
    k = ggml_new_tensor_3d(context.get(), k_type, row, cells, streams);
    v = ggml_new_tensor_3d(context.get(), v_type, row, cells, streams);
    ggml_set_name(k, k_name);
    ggml_set_name(v, v_name);
    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type()));
    ggml_backend_buffer_clear(buffer.get(), 0);
  }
  static void Fill(ggml_tensor* t, const std::vector<float>& values) {
    std::vector<std::uint8_t> bytes;
    EncodeRows(t->type, values, &bytes, t->ne[0]);
    ASSERT_EQ(bytes.size(), ggml_nbytes(t));
    std::memcpy(t->data, bytes.data(), bytes.size());
  }
  static std::vector<float> Decode(const ggml_tensor* t) {
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(t)));
    if (t->type == GGML_TYPE_F32) {
      std::memcpy(values.data(), t->data, ggml_nbytes(t));
    } else {
      ggml_get_type_traits(t->type)->to_float(t->data, values.data(), ggml_nelements(t));
    }
    return values;
  }
  // The view that build_attn_mha makes: [head_dim, n_kv, kv_heads, streams].
  ggml_tensor* View(ggml_context* graph_context, ggml_tensor* t, std::int64_t n_kv) const {
    const std::size_t row = ggml_row_size(t->type, t->ne[0]);
    ggml_tensor* view = ggml_view_4d(graph_context, t, head_dim, kv_heads, n_kv, streams,
                                     ggml_row_size(t->type, head_dim), row, row * static_cast<std::size_t>(cells), 0);
    return ggml_permute(graph_context, view, 0, 2, 1, 3);
  }
};

struct AttentionInputs {
  int q_heads = 0;
  int n_q = 1;
  std::int64_t n_kv = 0;
  float scale = 0.125f;
  float max_bias = 0.0f;
  float softcap = 0.0f;
  std::vector<float> q;           // [stream][row][head][dim]
  std::vector<ggml_fp16_t> mask;  // [stream][row][n_kv]; empty: no mask
  std::vector<float> sinks;       // [head]; empty: none
};

// A graph of one attention node, kept alive so that it can be computed again as llama.cpp reuses graphs.
class AttentionGraph {
 public:
  AttentionGraph(const Session& session, const Cache& cache, const AttentionInputs& in)
      : session_(session), context_(MakeContext()) {
    ggml_context* c = context_.get();
    q_ = ggml_new_tensor_4d(c, GGML_TYPE_F32, cache.head_dim, in.q_heads, in.n_q, cache.streams);
    ggml_set_input(q_);
    if (!in.mask.empty()) {
      mask_ = ggml_new_tensor_4d(c, GGML_TYPE_F16, in.n_kv, in.n_q, 1, cache.streams);
      ggml_set_input(mask_);
    }
    if (!in.sinks.empty()) {
      sinks_ = ggml_new_tensor_1d(c, GGML_TYPE_F32, in.q_heads);
      ggml_set_input(sinks_);
    }
    out_ = ggml_flash_attn_ext(c, ggml_permute(c, q_, 0, 2, 1, 3), cache.View(c, cache.k, in.n_kv),
                               cache.View(c, cache.v, in.n_kv), mask_, in.scale, in.max_bias, in.softcap);
    ggml_flash_attn_ext_add_sinks(out_, sinks_);
    ggml_prec_set_acc(out_, GGML_PREC_F32);
    ggml_set_output(out_);
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, out_);
    ggml_backend_sched_reset(session.sched());
    if (!ggml_backend_sched_alloc_graph(session.sched(), graph_)) throw std::runtime_error("no memory for a graph");
    on_plugin_ = std::string(ggml_backend_name(ggml_backend_sched_get_tensor_backend(session.sched(), out_))) == "SCSA";
  }
  bool on_plugin() const { return on_plugin_; }
  // Output as [stream][row][head][dim].
  std::vector<float> Compute(const AttentionInputs& in) {
    std::vector<float> out;
    EXPECT_EQ(TryCompute(in, &out), GGML_STATUS_SUCCESS);
    return out;
  }
  ggml_status TryCompute(const AttentionInputs& in, std::vector<float>* out) {
    ggml_backend_tensor_set(q_, in.q.data(), 0, ggml_nbytes(q_));
    if (mask_ != nullptr) ggml_backend_tensor_set(mask_, in.mask.data(), 0, ggml_nbytes(mask_));
    if (sinks_ != nullptr) ggml_backend_tensor_set(sinks_, in.sinks.data(), 0, ggml_nbytes(sinks_));
    const ggml_status status = ggml_backend_sched_graph_compute(session_.sched(), graph_);
    out->resize(static_cast<std::size_t>(ggml_nelements(out_)));
    ggml_backend_tensor_get(out_, out->data(), 0, ggml_nbytes(out_));
    return status;
  }

 private:
  const Session& session_;
  ContextPtr context_;
  ggml_tensor* q_ = nullptr;
  ggml_tensor* mask_ = nullptr;
  ggml_tensor* sinks_ = nullptr;
  ggml_tensor* out_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  bool on_plugin_ = false;
};

inline std::vector<float> Normal(std::size_t n, unsigned seed, float sigma = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(n);
  for (float& x : values) x = normal(random);
  return values;
}

// softmax(scale q K^T) V in double precision, from the decoded cache.
inline std::vector<double> Reference(const Cache& cache, const AttentionInputs& in) {
  const std::vector<float> k = Cache::Decode(cache.k);
  const std::vector<float> v = Cache::Decode(cache.v);
  const int d = cache.head_dim;
  std::vector<double> out(in.q.size(), 0.0);
  for (int s = 0; s < cache.streams; ++s) {
    for (int i = 0; i < in.n_q; ++i) {
      for (int h = 0; h < in.q_heads; ++h) {
        const int g = h / (in.q_heads / cache.kv_heads);
        const std::size_t at = ((static_cast<std::size_t>(s) * in.n_q + i) * in.q_heads + h) * d;
        std::vector<double> logits(static_cast<std::size_t>(in.n_kv), -INFINITY);
        double top = -INFINITY;
        for (std::int64_t r = 0; r < in.n_kv; ++r) {
          const std::size_t m = (static_cast<std::size_t>(s) * in.n_q + i) * in.n_kv + r;
          if (!in.mask.empty() && ggml_fp16_to_fp32(in.mask[m]) == -INFINITY) continue;
          const std::size_t row = ((static_cast<std::size_t>(s) * cache.cells + r) * cache.kv_heads + g) * d;
          double x = 0;
          for (int j = 0; j < d; ++j) x += static_cast<double>(in.q[at + j]) * k[row + j];
          x *= in.scale;
          if (in.softcap != 0) x = in.softcap * std::tanh(x / in.softcap);
          logits[static_cast<std::size_t>(r)] = x;
          top = std::max(top, x);
        }
        if (top == -INFINITY) continue;
        double sum = in.sinks.empty() ? 0.0 : std::exp(in.sinks[static_cast<std::size_t>(h)] - top);
        for (std::int64_t r = 0; r < in.n_kv; ++r) {
          const double w = std::exp(logits[static_cast<std::size_t>(r)] - top);
          if (w == 0) continue;
          sum += w;
          const std::size_t row = ((static_cast<std::size_t>(s) * cache.cells + r) * cache.kv_heads + g) * d;
          for (int j = 0; j < d; ++j) out[at + j] += w * v[row + j];
        }
        for (int j = 0; j < d; ++j) out[at + j] /= sum;
      }
    }
  }
  return out;
}

inline double RelativeError(const std::vector<float>& a, const std::vector<double>& reference) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    error += (a[i] - reference[i]) * (a[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace scsa::plugin_test
