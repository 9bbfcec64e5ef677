// SPDX-License-Identifier: Apache-2.0
#include "capture_recorder.h"

#include <fmt/format.h>
#include <ggml.h>

#include <algorithm>
#include <cstring>

#include "tool_error.h"

namespace scsa::tool {
namespace {

// [kv_heads][rows][head_dim] from the strided rows of a cache.
std::vector<std::uint16_t> CopyRows(const void* data, std::int64_t row_stride, std::int64_t head_stride,
                                    const Shape& shape, std::int64_t rows) {
  std::vector<std::uint16_t> copy(static_cast<std::size_t>(shape.kv_heads * rows) * shape.head_dim);
  std::uint16_t* out = copy.data();
  for (int head = 0; head < shape.kv_heads; ++head) {
    const char* row = static_cast<const char*>(data) + head * head_stride;
    for (std::int64_t r = 0; r < rows; ++r, row += row_stride, out += shape.head_dim) {
      std::memcpy(out, row, sizeof(*out) * shape.head_dim);
    }
  }
  return copy;
}

}  // namespace

CaptureRecorder::CaptureRecorder(std::vector<int> layers, std::int64_t n_kv, int steps)
    : default_choice_(layers.empty()), wanted_(std::move(layers)) {
  capture_.n_kv = n_kv;
  capture_.steps = steps;
}

void CaptureRecorder::Observe(void* user, const scsa_attention_call* call) {
  static_cast<CaptureRecorder*>(user)->Record(*call);
}

bool CaptureRecorder::SeesAllRows(const scsa_attention_call& call) const {
  const std::int64_t rows = capture_.n_kv + step_;
  if (call.n_kv < rows) return false;
  if (call.visible == nullptr) return call.n_kv == rows;
  for (std::int64_t r = 0; r < call.n_kv; ++r) {
    const bool visible = ((call.visible[r / 64] >> (r % 64)) & 1) != 0;
    if (visible != (r < rows)) return false;
  }
  return true;
}

std::string CaptureRecorder::ProblemOf(const scsa_attention_call& call) const {
  if (call.k_type != GGML_TYPE_F16 || call.v_type != GGML_TYPE_F16) return "its cached rows are not f16";
  if (call.softcap > 0.0f) return "it caps its logits";
  if (call.sinks != nullptr) return "it has attention sinks";
  if (call.n_q != 1 || !SeesAllRows(call)) return "it does not see all cached rows (a sliding window?)";
  if (capture_.layers.empty()) return "";
  const Shape& shape = capture_.shape;
  if (call.q_heads != shape.q_heads || call.kv_heads != shape.kv_heads || call.head_dim != shape.head_dim ||
      call.scale != capture_.scale) {
    return fmt::format("its shape or scale is not that of layer {}", capture_.layers.front().layer);
  }
  return "";
}

void CaptureRecorder::Choose(const scsa_attention_call& call) {
  const bool candidate =
      default_choice_ ? call.layer >= next_ : std::binary_search(wanted_.begin(), wanted_.end(), call.layer);
  if (!candidate) return;
  const std::string problem = ProblemOf(call);
  if (!problem.empty()) {
    (default_choice_ ? rejected_ : problem_) = fmt::format("layer {} cannot be recorded: {}", call.layer, problem);
    return;
  }
  if (capture_.layers.empty()) {
    capture_.shape = {.q_heads = call.q_heads, .kv_heads = call.kv_heads, .head_dim = call.head_dim};
    capture_.scale = call.scale;
  }
  capture_.layers.emplace_back().layer = call.layer;
  while (next_ <= call.layer) next_ += kLayerInterval;
}

void CaptureRecorder::Record(const scsa_attention_call& call) {
  if (call.layer < 0 || !problem_.empty() || done_.count(call.layer) != 0) return;
  if (step_ == 0 && seen_.insert(call.layer).second) Choose(call);
  const auto layer = std::find_if(capture_.layers.begin(), capture_.layers.end(),
                                  [&](const CapturedLayer& chosen) { return chosen.layer == call.layer; });
  if (layer == capture_.layers.end()) return;
  if (const std::string problem = ProblemOf(call); !problem.empty()) {
    problem_ = fmt::format("layer {} cannot be recorded in step {}: {}", call.layer, step_ + 1, problem);
    return;
  }
  done_.insert(call.layer);
  const Shape& shape = capture_.shape;
  for (int head = 0; head < shape.q_heads; ++head) {
    const float* q = call.q + head * call.q_head_stride;
    layer->q.insert(layer->q.end(), q, q + shape.head_dim);
  }
  // Rows do not change once they are written: those of the last step hold all earlier ones.
  if (step_ + 1 == capture_.steps) {
    layer->k = CopyRows(call.k, call.k_row_stride, call.k_head_stride, shape, capture_.rows());
    layer->v = CopyRows(call.v, call.v_row_stride, call.v_head_stride, shape, capture_.rows());
  }
}

void CaptureRecorder::EndStep() {
  if (!problem_.empty()) throw ToolError(fmt::format("{}: choose other --layers", problem_));
  if (seen_.empty()) throw ToolError("the plugin took over no attention layer of this model: nothing to record");
  if (capture_.layers.empty() && default_choice_) {
    throw ToolError(
        fmt::format("{}: name layers with --layers",
                    rejected_.empty() ? fmt::format("there is no layer after layer {}", *seen_.rbegin()) : rejected_));
  }
  for (const int layer : wanted_) {
    if (seen_.count(layer) != 0) continue;
    throw ToolError(fmt::format("--layers: there is no attention layer {}: choose from {} to {}", layer, *seen_.begin(),
                                *seen_.rbegin()));
  }
  if (done_.size() != capture_.layers.size()) {
    throw ToolError(fmt::format("the plugin did not take over all chosen layers in step {}", step_ + 1));
  }
  done_.clear();
  ++step_;
}

Capture CaptureRecorder::Take() { return std::move(capture_); }

}  // namespace scsa::tool
