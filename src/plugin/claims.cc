// SPDX-License-Identifier: Apache-2.0
#include "plugin/claims.h"

#include <algorithm>

#include "plugin/layer_table.h"
#include "plugin/node.h"
#include "plugin/options.h"

namespace scsa::plugin {
namespace {

bool AnyByteSet(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(data);
  return std::any_of(begin, begin + bytes, [](unsigned char byte) { return byte != 0; });
}

// Some rows of the first stream-wide key rows hold something. A cache is zero when llama.cpp creates a context. Then it
// asks on which device flash attention would run and gives it up (-fa auto) unless it is the CPU: so nothing is taken
// from an empty cache.
bool CacheInUse(const AttentionNode& a) {
  const std::size_t bytes = RowBytes(a.k_type, a.shape.head_dim);
  for (int s = 0; s < a.n_streams; ++s) {
    if (AnyByteSet(a.Kv(s).KRow(0, 0), bytes)) return true;
  }
  return false;
}

bool ClaimsAttention(const ggml_tensor* node) {
  const auto a = ReadAttentionNode(node);
  if (!a || a->n_kv < kMinCachedRows) return false;
  for (int i = 1; i <= 2; ++i) {
    if (!HasHostData(node->src[i])) return false;
  }
  return CacheInUse(*a);
}

// A write into the cache: result is a view of the cache tensor, [row values, cells of all streams]. Not of f32, for
// llama.cpp casts such a cache to f16 before attention, which then is no attention over a cache.
bool CanWrite(const ggml_tensor* node) {
  const ggml_tensor* rows = node->src[0];
  const ggml_tensor* cells = node->src[1];
  return rows->type == GGML_TYPE_F32 && rows->nb[0] == sizeof(float) && ToDType(node->type).has_value() &&
         node->type != GGML_TYPE_F32 && node->ne[2] == 1 && node->ne[3] == 1 && rows->ne[2] == 1 && rows->ne[3] == 1 &&
         (cells->type == GGML_TYPE_I64 || cells->type == GGML_TYPE_I32) && node->data == Root(node)->data &&
         node->ne[0] == Root(node)->ne[0] && (node->type != GGML_TYPE_Q8_0 || node->ne[0] % kQ8BlockSize == 0) &&
         CpuRowEncoder(node->type) != nullptr;
}

bool ClaimsCacheWrite(const ggml_tensor* node) {
  const ggml_tensor* root = Root(node);
  if (!HasHostData(node) || !CanWrite(node)) return false;
  // Short caches have no plans that a write could touch: not splitting the graph for them costs nothing. The cell
  // tells: llama.cpp fills a cache from its first cell on, and zeroes it before.
  const std::int64_t cell = std::min(kMinCachedRows, root->ne[1]) - 1;
  for (std::int64_t s = 0; s < root->ne[2]; ++s) {
    const char* row = static_cast<const char*>(root->data) + static_cast<std::size_t>(s) * root->nb[2] +
                      static_cast<std::size_t>(cell) * root->nb[1];
    if (AnyByteSet(row, root->nb[1])) return true;
  }
  return false;
}

}  // namespace

bool ClaimsNode(const ggml_tensor* node) {
  if (IsViewOp(node->op)) return true;
  const bool off = CurrentMode() == Mode::kOff;
  if (node->op == GGML_OP_FLASH_ATTN_EXT) return !off && ClaimsAttention(node);
  const ggml_tensor* root = node->view_src;
  if (root == nullptr || root->data == nullptr || !IsCacheTensor(root)) return false;
  if (node->op == GGML_OP_SET_ROWS) {
    const bool claimed = !off && ClaimsCacheWrite(node);
    return LayerTable::Get().SetTracked(root, claimed);
  }
  // Something else changes cells in place: the position shift, an operation of a later llama.cpp.
  LayerTable::Get().MarkStale(root);
  return false;
}

}  // namespace scsa::plugin
