// SPDX-License-Identifier: Apache-2.0
//
// Judges observed attention calls by the bytes that stand in the cache at that moment, however they came there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scsa/layer.h"
#include "scsa/plugin.h"

namespace scsa::plugin_test {

// Expects a preset `fast` whose thresholds are all 1: every cluster of a usable block stays closed, so that an answer
// consists of exact rows and of summaries alone. Then it is a sum over blocks. Each block gives either its rows' exact
// mass or the mass of its summaries, and nothing else: a plan that does not fit the cache as it is now matches no
// choice of blocks. The summaries that the cache deserves come from a plan of one block that is made anew whenever the
// block's bytes differ from those that it was made from.
//
// For caches of f16 keys and bf16 values, without attention sinks. Not thread-safe.
class AttentionOracle {
 public:
  struct Counts {
    std::uint64_t exact = 0;      // calls judged, by path
    std::uint64_t sparse = 0;     // of one query row
    std::uint64_t blocks = 0;     // usable blocks in the sparse ones
    std::uint64_t ambiguous = 0;  // sparse ones that cannot be judged: a cluster opened all the same, values are zero
    double worst_error = 0;
  };

  // Empty where the call is right. rows_read: what the plugin's counters say of this call, over all KV heads.
  std::string Check(const scsa_attention_call& call, std::uint64_t rows_read);
  const Counts& counts() const { return counts_; }

 private:
  // Softmax numerators [q_heads][head_dim] and masses [q_heads] of some rows, relative to exp(gauge of the head).
  struct Partial {
    std::vector<double> num, mass;
  };
  struct Block {
    std::vector<std::byte> k, v;  // the bytes that `layer` was made from
    std::unique_ptr<Layer> layer;
  };

  void ReadRows(const scsa_attention_call& call, const float* q, const std::uint64_t* visible);
  bool Summarise(const scsa_attention_call& call, const float* q, int b, Block& block, Partial* tail);
  double BestMatch(const scsa_attention_call& call, const float* out, const std::vector<int>& whole,
                   const std::vector<Partial>& tails, std::int64_t summarised, int* n_closed) const;
  Block& FreshBlock(const scsa_attention_call& call, int block);
  double Error(const scsa_attention_call& call, const float* out, const std::vector<const Partial*>& parts) const;

  Counts counts_;
  std::map<std::pair<const void*, int>, Block> blocks_;  // by the keys' address and the block
  Workspace workspace_;
  // Of the present call.
  std::vector<float> keys_, values_;
  std::vector<double> gauge_;       // [q_heads]
  std::vector<double> value_size_;  // [q_heads], root mean square length of the attended values
  std::vector<Partial> exact_;      // [blocks], and one of all rows outside whole blocks
};

}  // namespace scsa::plugin_test
