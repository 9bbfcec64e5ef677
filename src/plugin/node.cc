// SPDX-License-Identifier: Apache-2.0
#include "plugin/node.h"

#include "scsa/exact.h"

namespace scsa::plugin {
namespace {

std::int64_t Floats(std::size_t bytes) { return static_cast<std::int64_t>(bytes / sizeof(float)); }

const std::byte* Stream(const ggml_tensor* tensor, int stream) {
  return static_cast<const std::byte*>(tensor->data) + static_cast<std::size_t>(stream) * tensor->nb[3];
}

// Rows of head_dim values, dense in themselves, that whole q8_0 blocks make up.
bool DenseRows(const ggml_tensor* tensor, DType type) {
  const std::size_t element = type == DType::kQ8_0 ? kQ8BlockBytes : RowBytes(type, 1);
  return tensor->nb[0] == element && (type != DType::kQ8_0 || tensor->ne[0] % kQ8BlockSize == 0);
}

// A view of whole cells from the first one of a stream on, as the cache tensor [row, cell, stream] stores them.
bool CoversStreams(const ggml_tensor* view, const ggml_tensor* root) {
  const std::size_t stream_bytes = root->nb[1] * static_cast<std::size_t>(root->ne[1]);
  return view->nb[1] == root->nb[1] && root->nb[2] == stream_bytes && root->ne[3] == 1 && view->ne[1] <= root->ne[1] &&
         (view == root || view->view_offs % stream_bytes == 0) && (view->ne[3] == 1 || view->nb[3] == stream_bytes);
}

bool WholeFloats(const ggml_tensor* tensor) {
  for (int i = 1; i < 4; ++i) {
    if (tensor->nb[i] % sizeof(float) != 0) return false;
  }
  return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float);
}

}  // namespace

std::optional<DType> ToDType(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return DType::kF32;
    case GGML_TYPE_F16:
      return DType::kF16;
    case GGML_TYPE_BF16:
      return DType::kBF16;
    case GGML_TYPE_Q8_0:
      return DType::kQ8_0;
    default:
      return std::nullopt;
  }
}

std::optional<AttentionNode> ReadAttentionNode(const ggml_tensor* node) {
  const ggml_tensor* q = node->src[0];
  const ggml_tensor* k = node->src[1];
  const ggml_tensor* v = node->src[2];
  const ggml_tensor* mask = node->src[3];
  const ggml_tensor* sinks = node->src[4];
  if (node->op != GGML_OP_FLASH_ATTN_EXT || q == nullptr || k == nullptr || v == nullptr) return std::nullopt;

  AttentionNode a;
  a.node = node;
  a.k_root = Root(k);
  a.v_root = Root(v);
  const CacheName k_name = ParseCacheName(a.k_root->name);
  const CacheName v_name = ParseCacheName(a.v_root->name);
  if (k_name.kind != CacheName::Kind::kKey || v_name.kind != CacheName::Kind::kValue) return std::nullopt;
  a.layer = k_name.layer;

  const auto k_type = ToDType(k->type);
  const auto v_type = ToDType(v->type);
  if (!k_type || !v_type || k->type != a.k_root->type || v->type != a.v_root->type) return std::nullopt;
  a.k_type = *k_type;
  a.v_type = *v_type;
  if (!DenseRows(k, a.k_type) || !DenseRows(v, a.v_type) || !WholeFloats(q) || !WholeFloats(node)) return std::nullopt;
  // A transposed V cache (flash attention off) has its rows along another dimension.
  if (k->nb[1] < k->nb[2] || v->nb[1] < v->nb[2]) return std::nullopt;

  if (!CoversStreams(k, a.k_root) || !CoversStreams(v, a.v_root) || a.k_root->ne[1] != a.v_root->ne[1]) {
    return std::nullopt;
  }

  const std::int64_t head_dim = k->ne[0];
  if (q->ne[0] != head_dim || v->ne[0] != head_dim || v->ne[1] != k->ne[1] || v->ne[2] != k->ne[2]) return std::nullopt;
  if (q->ne[3] != k->ne[3] || q->ne[3] != v->ne[3]) return std::nullopt;
  if (q->ne[2] > kMaxQHeads || k->ne[2] > kMaxKvHeads || head_dim > kMaxHeadDim) return std::nullopt;
  a.shape = {static_cast<int>(q->ne[2]), static_cast<int>(k->ne[2]), static_cast<int>(head_dim)};
  if (!ValidateShape(a.shape).ok()) return std::nullopt;
  if (q->ne[1] < 1 || q->ne[1] > kMaxQueryRows || k->ne[1] < 1) return std::nullopt;
  a.n_q = static_cast<int>(q->ne[1]);
  a.n_streams = static_cast<int>(q->ne[3]);
  a.n_kv = k->ne[1];

  if (mask != nullptr) {
    if (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] < a.n_kv || mask->ne[1] < a.n_q ||
        mask->ne[2] != 1 || (mask->ne[3] != 1 && mask->ne[3] != a.n_streams) || mask->nb[1] % 2 != 0) {
      return std::nullopt;
    }
    a.mask_row_stride = static_cast<std::int64_t>(mask->nb[1] / 2);
  }
  const FlashAttnParams params = FlashAttnParamsOf(node);
  if (params.max_bias != 0.0f) return std::nullopt;
  a.params.scale = params.scale;
  a.params.softcap = params.softcap;
  if (sinks != nullptr) {
    if (sinks->type != GGML_TYPE_F32 || sinks->nb[0] != sizeof(float) || sinks->ne[0] != q->ne[2]) return std::nullopt;
    a.params.sinks = static_cast<const float*>(sinks->data);
  }
  return a;
}

QueryView AttentionNode::Query(int stream) const {
  const ggml_tensor* q = node->src[0];
  return {reinterpret_cast<const float*>(Stream(q, stream)), Floats(q->nb[1]), Floats(q->nb[2]), n_q};
}

KvView AttentionNode::Kv(int stream) const {
  const ggml_tensor* k = node->src[1];
  const ggml_tensor* v = node->src[2];
  KvView view;
  view.k = Stream(k, stream);
  view.v = Stream(v, stream);
  view.k_type = k_type;
  view.v_type = v_type;
  view.k_row_stride = static_cast<std::int64_t>(k->nb[1]);
  view.k_head_stride = static_cast<std::int64_t>(k->nb[2]);
  view.v_row_stride = static_cast<std::int64_t>(v->nb[1]);
  view.v_head_stride = static_cast<std::int64_t>(v->nb[2]);
  view.n_kv = n_kv;
  return view;
}

OutView AttentionNode::Out(int stream) const {
  // ggml's result is [head_dim, head, query row, stream].
  float* data =
      reinterpret_cast<float*>(static_cast<std::byte*>(node->data) + static_cast<std::size_t>(stream) * node->nb[3]);
  return {data, Floats(node->nb[2]), Floats(node->nb[1])};
}

const std::uint16_t* AttentionNode::Mask(int stream) const {
  const ggml_tensor* mask = node->src[3];
  if (mask == nullptr) return nullptr;
  return reinterpret_cast<const std::uint16_t*>(mask->ne[3] == 1 ? static_cast<const std::byte*>(mask->data)
                                                                 : Stream(mask, stream));
}

}  // namespace scsa::plugin
