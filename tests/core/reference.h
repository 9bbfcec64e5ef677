// SPDX-License-Identifier: Apache-2.0
//
// Double-precision oracle of attention and of the row formats, written plainly and sharing no code with the library.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "scsa/types.h"

namespace scsa::testing {

// Value of an f16 or bf16 bit pattern.
double F16Value(std::uint16_t bits);
double BF16Value(std::uint16_t bits);

// The head_dim values of an encoded row.
std::vector<double> DecodeReference(const std::byte* row, DType type, int head_dim);

// Appends an encoded row of the given values to `bytes`. Rounds by search over the candidates, not by bit tricks; q8_0
// as ggml's reference does.
void EncodeReference(const std::vector<float>& values, DType type, std::vector<std::byte>* bytes);

// How the rows of a test cache lie in memory.
enum class Layout : std::uint8_t {
  kRowMajor,   // ggml: all heads of a row together
  kHeadMajor,  // all rows of a head together
  kPadded,     // row-major with a gap behind every row
};

// Owns random keys and values and the view of them. The vectors end with the last row, so that a sanitizer sees every
// read beyond it.
class TestCache {
 public:
  // misalign: bytes to shift both arrays by (a multiple of the element size).
  TestCache(const Shape& shape, DType k_type, DType v_type, std::int64_t n_kv, Layout layout, unsigned seed,
            int misalign = 0);

  const KvView& view() const { return view_; }
  // Overwrites one row of one head.
  void SetKey(std::int64_t row, int kv_head, const std::vector<float>& values);
  void SetValue(std::int64_t row, int kv_head, const std::vector<float>& values);

 private:
  Shape shape_;
  std::vector<std::byte> k_;
  std::vector<std::byte> v_;
  KvView view_;
};

std::vector<float> RandomVector(std::size_t count, float deviation, std::mt19937* generator);

bool Sees(const VisibleSets& visible, int query_row, std::int64_t row);

// Attention in double precision, [n_q][q_heads][head_dim]. Zeros for a query row that sees nothing.
std::vector<double> AttentionReference(const Shape& shape, const QueryView& q, const KvView& kv,
                                       const VisibleSets& visible, const LogitParams& params);

// L2 norm of the difference over that of `expected`; the largest over `vectors` equally long vectors.
double WorstRelativeError(const std::vector<float>& actual, const std::vector<double>& expected, std::size_t vectors);

}  // namespace scsa::testing
