// SPDX-License-Identifier: Apache-2.0
//
// A Qwen3 model with random weights in the attention shape of the 0.6B one: 16 query heads, 8 KV heads, head size 128,
// QK norm. Few layers, a small feed-forward part, and the vocabulary of another model's file.
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace scsa::plugin_test {

inline void WriteQwen3(const std::string& vocabulary_file, const std::string& path) {
  constexpr int kLayers = 3;
  constexpr int kEmbd = 256;
  constexpr int kFf = 512;
  constexpr int kHeads = 16;
  constexpr int kKvHeads = 8;
  constexpr int kHeadDim = 128;

  gguf_context* source = gguf_init_from_file(vocabulary_file.c_str(), {true, nullptr});
  if (source == nullptr) throw std::runtime_error("cannot read " + vocabulary_file);
  gguf_context* file = gguf_init_empty();
  gguf_set_kv(file, source);
  const std::int64_t tokens = gguf_find_key(source, "tokenizer.ggml.tokens");
  const auto n_vocab = static_cast<std::int64_t>(gguf_get_arr_n(source, tokens));
  gguf_free(source);
  gguf_set_val_str(file, "general.architecture", "qwen3");
  gguf_set_val_u32(file, "qwen3.block_count", kLayers);
  gguf_set_val_u32(file, "qwen3.context_length", 40960);
  gguf_set_val_u32(file, "qwen3.embedding_length", kEmbd);
  gguf_set_val_u32(file, "qwen3.feed_forward_length", kFf);
  gguf_set_val_u32(file, "qwen3.attention.head_count", kHeads);
  gguf_set_val_u32(file, "qwen3.attention.head_count_kv", kKvHeads);
  gguf_set_val_u32(file, "qwen3.attention.key_length", kHeadDim);
  gguf_set_val_u32(file, "qwen3.attention.value_length", kHeadDim);
  gguf_set_val_f32(file, "qwen3.attention.layer_norm_rms_epsilon", 1e-6f);
  gguf_set_val_f32(file, "qwen3.rope.freq_base", 1e6f);

  ggml_context* c = ggml_init({std::size_t{128} << 20, nullptr, false});
  std::mt19937 random(11);
  const auto add = [&](const std::string& name, std::int64_t n0, std::int64_t n1, float mean, float sigma) {
    ggml_tensor* t = n1 > 0 ? ggml_new_tensor_2d(c, GGML_TYPE_F32, n0, n1) : ggml_new_tensor_1d(c, GGML_TYPE_F32, n0);
    std::normal_distribution<float> normal(mean, sigma);
    for (std::int64_t i = 0; i < ggml_nelements(t); ++i) static_cast<float*>(t->data)[i] = normal(random);
    ggml_set_name(t, name.c_str());
    gguf_add_tensor(file, t);
  };
  add("token_embd.weight", kEmbd, n_vocab, 0.0f, 0.02f);
  add("output_norm.weight", kEmbd, 0, 1.0f, 0.1f);
  for (int i = 0; i < kLayers; ++i) {
    const std::string blk = std::string("blk.").append(std::to_string(i)).append(".");
    add(blk + "attn_norm.weight", kEmbd, 0, 1.0f, 0.1f);
    add(blk + "attn_q.weight", kEmbd, kHeads * kHeadDim, 0.0f, 0.06f);
    add(blk + "attn_k.weight", kEmbd, kKvHeads * kHeadDim, 0.0f, 0.06f);
    add(blk + "attn_v.weight", kEmbd, kKvHeads * kHeadDim, 0.0f, 0.06f);
    add(blk + "attn_output.weight", kHeads * kHeadDim, kEmbd, 0.0f, 0.02f);
    add(blk + "attn_q_norm.weight", kHeadDim, 0, 1.5f, 0.3f);
    add(blk + "attn_k_norm.weight", kHeadDim, 0, 1.5f, 0.3f);
    add(blk + "ffn_norm.weight", kEmbd, 0, 1.0f, 0.1f);
    add(blk + "ffn_gate.weight", kEmbd, kFf, 0.0f, 0.06f);
    add(blk + "ffn_up.weight", kEmbd, kFf, 0.0f, 0.06f);
    add(blk + "ffn_down.weight", kFf, kEmbd, 0.0f, 0.04f);
  }
  const bool written = gguf_write_to_file(file, path.c_str(), false);
  gguf_free(file);
  ggml_free(c);
  if (!written) throw std::runtime_error("cannot write " + path);
}

}  // namespace scsa::plugin_test
