// SPDX-License-Identifier: Apache-2.0
//
// Small models with random weights, contexts of them, and how far apart two right answers may be.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama_fixture.h"
#include "qwen3_model.h"

namespace scsa::plugin_test {

using Tokens = std::vector<llama_token>;

inline constexpr int kVocab = 64;
inline constexpr int kKvHeads = 2;
inline constexpr int kFilled = 624;  // cells that tests fill first: more than the plugin leaves to ggml

// As in cache_lockstep.cc, whose models differ in the head size only: logits of attention have a standard deviation of
// 2.3 whatever it is.
inline constexpr double kPlain = 0x1p-7;

inline Tokens Text(unsigned seed, int n) {
  std::mt19937 random(seed);
  Tokens tokens(static_cast<std::size_t>(n));
  for (llama_token& t : tokens) t = static_cast<llama_token>(random() % kVocab);
  return tokens;
}

// A name that no other test has at the same time.
inline std::string TemporaryFile(const std::string& name) {
  return testing::TempDir() + "/scsa_" + std::to_string(getpid()) + "_" + name;
}

// Every head of a model of two layers gets this threshold.
inline void WriteTaus(const std::string& path, const char* tau) {
  std::ofstream file(path);
  for (int head = 0; head < 2 * kKvHeads; ++head) {
    file << (head == 0 ? "{\"" : ", \"") << head / kKvHeads << ':' << head % kKvHeads << "\": " << tau;
  }
  file << "}\n";
}

inline ModelPtr MakeModel(int layers) {
  const std::string path = TemporaryFile("small_model.gguf");
  Qwen3Size size;
  size.layers = layers;
  size.embd = 64;
  size.ff = 64;
  size.heads = 4;
  size.kv_heads = kKvHeads;
  size.head_dim = 64;  // the least that llama.cpp rotates in quantised caches
  size.token_sigma = 0.1f;
  size.vocab = kVocab;
  WriteQwen3(path, size);
  ModelPtr model = LoadModel(path);
  std::remove(path.c_str());
  if (model == nullptr) throw std::runtime_error("cannot load a model");
  return model;
}

inline ContextOptions SmallOptions() {
  ContextOptions o;
  // ggml sums the values of a bf16 cache in f32.
  o.v_type = GGML_TYPE_BF16;
  o.flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  o.threads = 1;
  return o;
}

}  // namespace scsa::plugin_test
