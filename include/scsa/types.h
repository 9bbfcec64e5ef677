// SPDX-License-Identifier: Apache-2.0
//
// Views that every operator of the library shares. All of them are non-owning: the caller keeps the memory alive and
// unchanged for the length of the call that takes the view.
#pragma once

#include <cstddef>
#include <cstdint>

namespace scsa {

// Element formats of cached rows. kQ8_0 is ggml's block format: 32 signed 8-bit values behind one f16 scale (34 bytes).
enum class DType : std::uint8_t { kF32, kF16, kBF16, kQ8_0 };

inline constexpr int kQ8BlockSize = 32;   // values per q8_0 block
inline constexpr int kQ8BlockBytes = 34;  // bytes per q8_0 block
inline constexpr int kMaxHeadDim = 512;
inline constexpr int kMaxQHeads = 128;
inline constexpr int kMaxKvHeads = 64;

// Bytes of one row of `head_dim` values. For kQ8_0 a head_dim that is no multiple of 32 ends in a block that is padded
// with zeros.
constexpr std::size_t RowBytes(DType type, int head_dim) {
  switch (type) {
    case DType::kF32:
      return std::size_t{4} * head_dim;
    case DType::kF16:
    case DType::kBF16:
      return std::size_t{2} * head_dim;
    case DType::kQ8_0:
      return std::size_t{kQ8BlockBytes} * ((head_dim + kQ8BlockSize - 1) / kQ8BlockSize);
  }
  return 0;
}

// "f32", "f16", "bf16" or "q8_0".
constexpr const char* DTypeName(DType type) {
  switch (type) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kQ8_0:
      return "q8_0";
  }
  return "?";
}

// Head counts of one attention layer. Query head h reads KV head h / (q_heads / kv_heads).
struct Shape {
  int q_heads = 0;   // 1 ... kMaxQHeads, a multiple of kv_heads
  int kv_heads = 0;  // 1 ... kMaxKvHeads
  int head_dim = 0;  // a multiple of 8, 8 ... kMaxHeadDim; the same for K and V

  int group() const { return q_heads / kv_heads; }
};

// Cached keys and values of one layer. Row r of KV head h starts at k + r * k_row_stride + h * k_head_stride.
// Strides are in bytes. A row itself is dense. No alignment beyond that of the element type is needed.
struct KvView {
  const void* k = nullptr;
  const void* v = nullptr;
  DType k_type = DType::kF16;
  DType v_type = DType::kF16;
  std::int64_t k_row_stride = 0;
  std::int64_t k_head_stride = 0;
  std::int64_t v_row_stride = 0;
  std::int64_t v_head_stride = 0;
  std::int64_t n_kv = 0;  // rows that may be addressed

  const std::byte* KRow(std::int64_t row, int kv_head) const {
    return static_cast<const std::byte*>(k) + row * k_row_stride + kv_head * k_head_stride;
  }
  const std::byte* VRow(std::int64_t row, int kv_head) const {
    return static_cast<const std::byte*>(v) + row * v_row_stride + kv_head * v_head_stride;
  }
};

// Queries, f32. The vector of query row i and query head h starts at data + i * row_stride + h * head_stride (floats).
struct QueryView {
  const float* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  int n_q = 1;
};

// Attention output, f32, addressed like QueryView. Written completely for every (query row, query head).
struct OutView {
  float* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

// Which cache rows a query row may see: bit r % 64 of words[i * row_stride + r / 64] is set when query row i sees row
// r. Bits at and after n_kv are ignored. words == nullptr: every query row sees all n_kv rows. A query row that sees
// nothing gets zeros (and, with attention sinks, also zeros: the sink holds all the mass).
struct VisibleSets {
  const std::uint64_t* words = nullptr;
  std::int64_t row_stride = 0;  // words, at least ceil(n_kv / 64)
};

// How a key becomes a logit: x = scale * (q . k); with softcap > 0, x = softcap * tanh(x / softcap).
// sinks: nullptr, or q_heads logits, each of which takes part in its head's softmax normaliser with no value.
struct LogitParams {
  float scale = 1.0f;
  float softcap = 0.0f;
  const float* sinks = nullptr;
};

}  // namespace scsa
