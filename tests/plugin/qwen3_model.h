// SPDX-License-Identifier: Apache-2.0
//
// Qwen3 models with random weights: QK norm, few layers, a small feed-forward part.
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace scsa::plugin_test {

// The attention shape is that of the 0.6B model unless said otherwise.
struct Qwen3Size {
  int layers = 3;
  int embd = 256;
  int ff = 512;
  int heads = 16;
  int kv_heads = 8;
  int head_dim = 128;
  float token_sigma = 0.02f;  // of the embeddings, which are the output matrix as well
  int vocab = 0;              // tokens without text; 0: the vocabulary of another model's file
  bool words = false;  // gives those tokens text: kFirstWord specials and bytes that are never chosen, then words
};

inline constexpr int kFirstWord = 3 + 256;

// A SentencePiece vocabulary of unknown, begin, end, every byte, and words for the other tokens.
inline void SetWords(gguf_context* file, int vocab) {
  enum Type : std::int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6 };
  std::vector<std::string> texts = {"<unk>", "<s>", "</s>"};
  std::vector<std::int32_t> types = {kUnknown, kControl, kControl};
  for (int byte = 0; byte < 256; ++byte) {
    char text[8];
    std::snprintf(text, sizeof(text), "<0x%02X>", static_cast<unsigned>(byte));
    texts.emplace_back(text);
    types.push_back(kByte);
  }
  for (int i = kFirstWord; i < vocab; ++i) {
    texts.push_back(" w" + std::to_string(i));
    types.push_back(kNormal);
  }
  std::vector<const char*> pointers;
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  const std::vector<float> scores(texts.size(), 0.0f);
  gguf_set_val_str(file, "tokenizer.ggml.model", "llama");
  gguf_set_arr_str(file, "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  gguf_set_arr_data(file, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
  gguf_set_arr_data(file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
  gguf_set_val_u32(file, "tokenizer.ggml.bos_token_id", 1);
  gguf_set_val_u32(file, "tokenizer.ggml.eos_token_id", 2);
  gguf_set_val_bool(file, "tokenizer.ggml.add_bos_token", false);
}

inline void WriteQwen3(const std::string& path, const Qwen3Size& size, const std::string& vocabulary_file = {}) {
  const int n_embd = size.embd;
  const int n_ff = size.ff;
  const int q_values = size.heads * size.head_dim;
  const int kv_values = size.kv_heads * size.head_dim;
  std::int64_t n_vocab = size.vocab;

  gguf_context* file = gguf_init_empty();
  if (n_vocab == 0) {
    gguf_context* source = gguf_init_from_file(vocabulary_file.c_str(), {true, nullptr});
    if (source == nullptr) throw std::runtime_error("cannot read " + vocabulary_file);
    gguf_set_kv(file, source);
    n_vocab = static_cast<std::int64_t>(gguf_get_arr_n(source, gguf_find_key(source, "tokenizer.ggml.tokens")));
    gguf_free(source);
  } else if (size.words) {
    SetWords(file, size.vocab);
  } else {
    gguf_set_val_str(file, "tokenizer.ggml.model", "no_vocab");
    gguf_set_val_u32(file, "qwen3.vocab_size", static_cast<std::uint32_t>(n_vocab));
  }
  gguf_set_val_str(file, "general.architecture", "qwen3");
  gguf_set_val_u32(file, "qwen3.block_count", static_cast<std::uint32_t>(size.layers));
  gguf_set_val_u32(file, "qwen3.context_length", 40960);
  gguf_set_val_u32(file, "qwen3.embedding_length", static_cast<std::uint32_t>(n_embd));
  gguf_set_val_u32(file, "qwen3.feed_forward_length", static_cast<std::uint32_t>(n_ff));
  gguf_set_val_u32(file, "qwen3.attention.head_count", static_cast<std::uint32_t>(size.heads));
  gguf_set_val_u32(file, "qwen3.attention.head_count_kv", static_cast<std::uint32_t>(size.kv_heads));
  gguf_set_val_u32(file, "qwen3.attention.key_length", static_cast<std::uint32_t>(size.head_dim));
  gguf_set_val_u32(file, "qwen3.attention.value_length", static_cast<std::uint32_t>(size.head_dim));
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
  add("token_embd.weight", n_embd, n_vocab, 0.0f, size.token_sigma);
  if (size.words) {
    // The embeddings are the output matrix: logits of 0, which the best word exceeds.
    auto* embeddings = static_cast<float*>(ggml_get_tensor(c, "token_embd.weight")->data);
    std::fill(embeddings, embeddings + std::ptrdiff_t{kFirstWord} * n_embd, 0.0f);
  }
  add("output_norm.weight", n_embd, 0, 1.0f, 0.1f);
  for (int i = 0; i < size.layers; ++i) {
    const std::string blk = std::string("blk.").append(std::to_string(i)).append(".");
    add(blk + "attn_norm.weight", n_embd, 0, 1.0f, 0.1f);
    add(blk + "attn_q.weight", n_embd, q_values, 0.0f, 0.06f);
    add(blk + "attn_k.weight", n_embd, kv_values, 0.0f, 0.06f);
    add(blk + "attn_v.weight", n_embd, kv_values, 0.0f, 0.06f);
    add(blk + "attn_output.weight", q_values, n_embd, 0.0f, 0.02f);
    add(blk + "attn_q_norm.weight", size.head_dim, 0, 1.5f, 0.3f);
    add(blk + "attn_k_norm.weight", size.head_dim, 0, 1.5f, 0.3f);
    add(blk + "ffn_norm.weight", n_embd, 0, 1.0f, 0.1f);
    add(blk + "ffn_gate.weight", n_embd, n_ff, 0.0f, 0.06f);
    add(blk + "ffn_up.weight", n_embd, n_ff, 0.0f, 0.06f);
    add(blk + "ffn_down.weight", n_ff, n_embd, 0.0f, 0.04f);
  }
  const bool written = gguf_write_to_file(file, path.c_str(), false);
  gguf_free(file);
  ggml_free(c);
  if (!written) throw std::runtime_error("cannot write " + path);
}

}  // namespace scsa::plugin_test
