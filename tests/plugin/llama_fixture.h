// SPDX-License-Identifier: Apache-2.0
//
// libllama with the plugin, for tests on real models.
#pragma once

#include <ggml-backend.h>
#include <gtest/gtest.h>
#include <llama.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "scsa/plugin.h"

namespace scsa::plugin_test {

struct ModelDeleter {
  void operator()(llama_model* m) const { llama_model_free(m); }
};
struct LlamaContextDeleter {
  void operator()(llama_context* c) const { llama_free(c); }
};
using ModelPtr = std::unique_ptr<llama_model, ModelDeleter>;
using LlamaContextPtr = std::unique_ptr<llama_context, LlamaContextDeleter>;

inline constexpr int kThreads = 2;

class LoadedPlugin {
 public:
  static LoadedPlugin& Get() {
    static LoadedPlugin plugin;
    return plugin;
  }
  void Set(const char* name, const std::string& value) const {
    const char* error = set_(name, value.c_str());
    if (error != nullptr) throw std::runtime_error(error);
  }
  scsa_plugin_stats Stats() const {
    scsa_plugin_stats stats{};
    stats.struct_size = sizeof(stats);
    get_stats_(&stats);
    return stats;
  }
  scsa_plugin_audit Audit(int layer = -1) const {
    scsa_plugin_audit audit{};
    audit.struct_size = sizeof(audit);
    if (get_audit_(layer, &audit) != 1) throw std::runtime_error("no memory for the audit");
    return audit;
  }
  std::string AuditJson() const {
    std::string text(get_audit_json_(nullptr, 0) + 1, '\0');
    text.resize(get_audit_json_(text.data(), text.size()));
    return text;
  }
  void ResetAudit() const { reset_audit_(); }
  std::string Taus() const {
    std::string text(get_taus_(nullptr, 0) + 1, '\0');
    text.resize(get_taus_(text.data(), text.size()));
    return text;
  }
  void SetObserver(scsa_plugin_observer_t observer, void* user) const { set_observer_(observer, user); }

 private:
  LoadedPlugin() {
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
          if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
    ggml_backend_load_all();
    ggml_backend_reg_t reg = ggml_backend_load(SCSA_PLUGIN_FILE);
    if (reg == nullptr) throw std::runtime_error("cannot load " SCSA_PLUGIN_FILE);
    set_ = reinterpret_cast<scsa_plugin_set_t>(ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_SET));
    get_stats_ =
        reinterpret_cast<scsa_plugin_get_stats_t>(ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_GET_STATS));
    get_taus_ = reinterpret_cast<scsa_plugin_get_taus_t>(ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_GET_TAUS));
    get_audit_ =
        reinterpret_cast<scsa_plugin_get_audit_t>(ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_GET_AUDIT));
    get_audit_json_ = reinterpret_cast<scsa_plugin_get_audit_json_t>(
        ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_GET_AUDIT_JSON));
    reset_audit_ =
        reinterpret_cast<scsa_plugin_reset_audit_t>(ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_RESET_AUDIT));
    set_observer_ =
        reinterpret_cast<scsa_plugin_set_observer_t>(ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_SET_OBSERVER));
  }
  scsa_plugin_set_t set_ = nullptr;
  scsa_plugin_get_stats_t get_stats_ = nullptr;
  scsa_plugin_get_taus_t get_taus_ = nullptr;
  scsa_plugin_get_audit_t get_audit_ = nullptr;
  scsa_plugin_get_audit_json_t get_audit_json_ = nullptr;
  scsa_plugin_reset_audit_t reset_audit_ = nullptr;
  scsa_plugin_set_observer_t set_observer_ = nullptr;
};

inline std::string ModelPath(const std::string& file) { return std::string(SCSA_MODEL_DIR) + "/" + file; }

// nullptr when the file is not there.
inline ModelPtr LoadModel(const std::string& path) {
  LoadedPlugin::Get();
  if (!std::filesystem::exists(path)) return nullptr;
  return ModelPtr(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
}

struct ContextOptions {
  ggml_type k_type = GGML_TYPE_F16;
  ggml_type v_type = GGML_TYPE_F16;
  llama_flash_attn_type flash_attn = LLAMA_FLASH_ATTN_TYPE_AUTO;
  int n_ctx = 2048;
  int n_seq = 1;
  bool unified = true;
  int threads = kThreads;
  ggml_backend_sched_eval_callback on_node = nullptr;  // with its user data
  void* on_node_user = nullptr;
};

inline LlamaContextPtr MakeLlama(llama_model* model, const ContextOptions& o) {
  llama_context_params p = llama_context_default_params();
  p.n_ctx = static_cast<std::uint32_t>(o.n_ctx);
  p.n_batch = 2048;
  p.n_seq_max = static_cast<std::uint32_t>(o.n_seq);
  p.kv_unified = o.unified;
  p.n_threads = o.threads;
  p.n_threads_batch = o.threads;
  p.type_k = o.k_type;
  p.type_v = o.v_type;
  p.flash_attn_type = o.flash_attn;
  p.cb_eval = o.on_node;
  p.cb_eval_user_data = o.on_node_user;
  p.no_perf = true;
  LlamaContextPtr context(llama_init_from_model(model, p));
  if (!context) throw std::runtime_error("cannot create a context");
  return context;
}

// n tokens of a text, natural unless another file is named.
inline std::vector<llama_token> TextTokens(const llama_model* model, std::size_t n, std::size_t skip_bytes = 0,
                                           const char* path = SCSA_TEXT_FILE) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  const std::string part = text.str().substr(skip_bytes, n * 8);
  std::vector<llama_token> tokens(part.size() + 8);
  const int count = llama_tokenize(llama_model_get_vocab(model), part.data(), static_cast<std::int32_t>(part.size()),
                                   tokens.data(), static_cast<std::int32_t>(tokens.size()), true, false);
  if (count < static_cast<int>(n)) throw std::runtime_error("the text is too short");
  tokens.resize(n);
  return tokens;
}

// Runs tokens at positions pos, pos + 1, ...; logits of the last one.
inline std::vector<float> Decode(llama_context* context, const std::vector<llama_token>& tokens, llama_pos pos,
                                 llama_seq_id seq = 0) {
  const std::size_t chunk = 512;
  for (std::size_t begin = 0; begin < tokens.size(); begin += chunk) {
    const std::size_t n = std::min(chunk, tokens.size() - begin);
    llama_batch batch = llama_batch_init(static_cast<std::int32_t>(n), 0, 1);
    batch.n_tokens = static_cast<std::int32_t>(n);
    for (std::size_t i = 0; i < n; ++i) {
      batch.token[i] = tokens[begin + i];
      batch.pos[i] = pos + static_cast<llama_pos>(begin + i);
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = seq;
      batch.logits[i] = begin + i + 1 == tokens.size();
    }
    const int status = llama_decode(context, batch);
    llama_batch_free(batch);
    if (status != 0) throw std::runtime_error("llama_decode failed");
  }
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
  const float* logits = llama_get_logits_ith(context, -1);
  return std::vector<float>(logits, logits + n_vocab);
}

// How far a is from b, relative to the length of b.
inline double RelativeDifference(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    squares += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(squares / norm);
}

// KL(softmax(a) || softmax(b)) in nats.
inline double KlDivergence(const std::vector<float>& a, const std::vector<float>& b) {
  const auto log_sum = [](const std::vector<float>& x) {
    double top = -INFINITY;
    for (float v : x) top = std::max<double>(top, v);
    double sum = 0;
    for (float v : x) sum += std::exp(v - top);
    return top + std::log(sum);
  };
  const double za = log_sum(a);
  const double zb = log_sum(b);
  double kl = 0;
  for (std::size_t i = 0; i < a.size(); ++i) kl += std::exp(a[i] - za) * ((a[i] - za) - (b[i] - zb));
  return kl;
}

}  // namespace scsa::plugin_test
