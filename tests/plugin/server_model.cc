// SPDX-License-Identifier: Apache-2.0
//
// Writes the model of server_test.py and rpc_test.py: server_model FILE [LAYERS]. Two layers where the number is not
// given, random weights; a decode takes less than a millisecond.
#include <cstdlib>
#include <exception>
#include <iostream>

#include "tests/plugin/qwen3_model.h"

int main(int argc, char** argv) try {
  const int layers = argc == 3 ? std::atoi(argv[2]) : 2;
  if (argc < 2 || argc > 3 || layers < 1) {
    std::cerr << "usage: server_model FILE [LAYERS]\n";
    return 2;
  }
  scsa::plugin_test::Qwen3Size size;
  size.layers = layers;
  size.embd = 64;
  size.ff = 64;
  size.heads = 4;
  size.kv_heads = 2;
  size.head_dim = 32;
  size.token_sigma = 0.1f;
  size.vocab = scsa::plugin_test::kFirstWord + 253;
  size.words = true;
  scsa::plugin_test::WriteQwen3(argv[1], size);
  return 0;
} catch (const std::exception& error) {
  std::cerr << "server_model: " << error.what() << '\n';
  return 1;
}
