// SPDX-License-Identifier: Apache-2.0
//
// What a FLASH_ATTN_EXT node asks for, in the terms of the operator.
#pragma once

#include <cstdint>
#include <optional>

#include "plugin/ggml_compat.h"
#include "scsa/types.h"

namespace scsa::plugin {

// Most query rows per stream that the plugin takes.
inline constexpr std::int64_t kMaxQueryRows = 1 << 16;

std::optional<DType> ToDType(ggml_type type);

struct AttentionNode {
  const ggml_tensor* node = nullptr;
  const ggml_tensor* k_root = nullptr;  // the cache tensors that K and V look into
  const ggml_tensor* v_root = nullptr;
  int layer = -1;
  Shape shape;
  DType k_type = DType::kF16;
  DType v_type = DType::kF16;
  int n_q = 0;
  int n_streams = 0;
  std::int64_t n_kv = 0;
  LogitParams params;

  QueryView Query(int stream) const;
  KvView Kv(int stream) const;
  OutView Out(int stream) const;
  // The mask of a stream's first query row, or nullptr when everything is seen; rows are `mask_row_stride` values
  // apart.
  const std::uint16_t* Mask(int stream) const;
  std::int64_t mask_row_stride = 0;
};

// Reads the node. nullopt when it is not attention over llama.cpp's cache in a shape that the operator handles.
// Pointers into tensors may still be null (a graph that is only measured): HasHostData tells.
std::optional<AttentionNode> ReadAttentionNode(const ggml_tensor* node);

}  // namespace scsa::plugin
