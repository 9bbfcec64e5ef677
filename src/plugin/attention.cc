// SPDX-License-Identifier: Apache-2.0
#include "plugin/attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>

#include "core/parallel.h"
#include "plugin/crossover.h"
#include "plugin/layer_table.h"
#include "plugin/mask.h"
#include "plugin/node.h"
#include "plugin/options.h"
#include "plugin/prompt_progress.h"
#include "plugin/stats.h"

namespace scsa::plugin {
namespace {

enum Path { kExact = 0, kSparse = 1, kCalibration = 2, kLimit = 3 };

struct Observer {
  scsa_plugin_observer_t function = nullptr;
  void* user = nullptr;
};
Observer g_observer;

// Adds the wall time of its life to a counter.
class Timer {
 public:
  explicit Timer(std::atomic<std::uint64_t>& counter) : counter_(counter) {}
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    Count(counter_, static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count()));
  }

 private:
  std::atomic<std::uint64_t>& counter_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Leaves a node to ggml, as if the plugin had not taken it.
ggml_status ComputeOnCpu(BackendState& state, ggml_tensor* node) {
  return state.cpu.Compute({&node, 1}, state.n_threads);
}

// Mask rows per task: decoding reads its mask on the calling thread.
constexpr int kMaskRows = 16;

// The bitmaps of all query rows of a stream. False when the mask holds biases.
bool ReadMask(const AttentionNode& a, int stream, std::int64_t words, int n_threads, std::uint64_t* visible) {
  const std::uint16_t* mask = a.Mask(stream);
  std::atomic<bool> plain{true};
  ParallelFor(n_threads, (a.n_q + kMaskRows - 1) / kMaskRows, [&](std::int64_t task, int /*thread*/) {
    const int end = std::min(a.n_q, static_cast<int>(task + 1) * kMaskRows);
    for (int i = static_cast<int>(task) * kMaskRows; i < end; ++i) {
      std::uint64_t* row = visible + i * words;
      if (mask != nullptr) {
        if (!MaskToBitmap(mask + i * a.mask_row_stride, a.n_kv, row)) plain.store(false, std::memory_order_relaxed);
        continue;
      }
      std::memset(row, 0xFF, static_cast<std::size_t>(words) * sizeof(*row));
      if (a.n_kv % 64 != 0) row[words - 1] = (std::uint64_t{1} << (a.n_kv % 64)) - 1;
    }
  });
  return plain.load(std::memory_order_relaxed);
}

// Rows that some query row of the call sees.
std::uint64_t CountVisible(const std::uint64_t* visible, int n_q, std::int64_t words) {
  std::uint64_t count = 0;
  for (std::int64_t w = 0; w < words; ++w) {
    std::uint64_t any = 0;
    for (int i = 0; i < n_q; ++i) any |= visible[i * words + w];
    count += static_cast<std::uint64_t>(std::popcount(any));
  }
  return count;
}

void Observe(const AttentionNode& a, int stream, Path path, const std::uint64_t* visible, std::int64_t words) {
  if (g_observer.function == nullptr) return;
  const QueryView q = a.Query(stream);
  const KvView kv = a.Kv(stream);
  const OutView out = a.Out(stream);
  scsa_attention_call call{};
  call.layer = a.layer;
  call.path = path;
  call.q_heads = a.shape.q_heads;
  call.kv_heads = a.shape.kv_heads;
  call.head_dim = a.shape.head_dim;
  call.n_q = a.n_q;
  call.n_kv = a.n_kv;
  call.q = q.data;
  call.q_row_stride = q.row_stride;
  call.q_head_stride = q.head_stride;
  call.k = kv.k;
  call.v = kv.v;
  call.k_type = a.node->src[1]->type;
  call.v_type = a.node->src[2]->type;
  call.k_row_stride = kv.k_row_stride;
  call.k_head_stride = kv.k_head_stride;
  call.v_row_stride = kv.v_row_stride;
  call.v_head_stride = kv.v_head_stride;
  call.visible = visible;
  call.visible_stride = words;
  call.scale = a.params.scale;
  call.softcap = a.params.softcap;
  call.sinks = a.params.sinks;
  call.out = out.data;
  call.out_row_stride = out.row_stride;
  call.out_head_stride = out.head_stride;
  call.node = a.node;
  g_observer.function(g_observer.user, &call);
}

void CountCall(const AttentionNode& a, Path path, std::uint64_t visible, std::uint64_t rows_read,
               std::uint64_t bytes_read) {
  Counters& c = GlobalCounters();
  Count(path == kSparse        ? c.sparse_calls
        : path == kCalibration ? c.calibration_calls
        : path == kLimit       ? c.limit_calls
                               : c.exact_calls,
        1);
  Count(c.rows_visible, visible * static_cast<std::uint64_t>(a.shape.kv_heads));
  Count(c.rows_read, rows_read);
  Count(c.bytes_read, bytes_read);
}

// Most query rows that decoding has: parallel sequences and speculative drafts. More are a prompt.
constexpr int kMaxDecodeRows = 16;

// Whether plans may serve this cache at all; the operator itself still has the last word.
bool SparseEligible(const AttentionNode& a, Mode mode, std::uint64_t visible) {
  if (mode != Mode::kAuto || a.params.softcap != 0.0f) return false;
  const std::int64_t crossover = CurrentCrossover();
  if (visible < (crossover == kAutoCrossover ? Crossover::kFirst : static_cast<std::uint64_t>(crossover))) return false;
  LayerTable& table = LayerTable::Get();
  return table.Tracked(a.k_root) && table.Tracked(a.v_root);
}

// Calls work(layer) with the layer of a stream, which is locked meanwhile.
template <class Work>
Status WithLayer(BackendState& state, const AttentionNode& a, int stream, Work&& work) {
  try {
    std::shared_ptr<CachedLayer> layer;
    if (Status status = LayerTable::Get().FindOrCreate(&state, a, stream, &layer); !status.ok()) return status;
    const std::lock_guard lock(layer->mutex());
    return work(*layer);
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("out of memory");
  }
}

// Uses the rows of a prompt, which were answered, to make the layer ready. Nothing depends on whether that succeeds.
void PrepareDecoding(BackendState& state, const AttentionNode& a, int stream) {
  const Status status = WithLayer(state, a, stream, [&](CachedLayer& layer) {
    const Timer timer(GlobalCounters().prompt_ns);
    return layer.Prefill(a, stream, state.visible.data(), state.n_threads, state.workspace);
  });
  if (status.ok()) return;
  LogOnce({"a prompt could not make the sparse operator ready (", status.message(), ")"});
  Count(GlobalCounters().failures, 1);
}

// The rows of a prompt where the user allows sparse answers, and whether blocks served them. Empty: not answered.
std::optional<Path> AttendPrompt(BackendState& state, const AttentionNode& a, int stream) {
  std::optional<Path> path;
  const Status status = WithLayer(state, a, stream, [&](CachedLayer& layer) {
    if (!layer.sparse_prompts()) return Status::Ok();
    bool sparse = false;
    Status answered = layer.AttendPrompt(a, stream, state.visible.data(), state.n_threads, state.workspace, &sparse);
    if (answered.ok()) path = sparse ? kSparse : kExact;
    return answered;
  });
  if (status.ok()) return path;
  LogOnce({"the sparse operator failed on a prompt (", status.message(), "); answering exactly"});
  Count(GlobalCounters().failures, 1);
  return std::nullopt;
}

// Attention of one stream. After an error nothing was written.
Status ComputeStream(BackendState& state, const AttentionNode& a, int stream, Mode mode) {
  const std::int64_t words = (a.n_kv + 63) / 64;
  const std::uint64_t visible = CountVisible(state.visible.data(), a.n_q, words);
  const auto kv_heads = static_cast<std::uint64_t>(a.shape.kv_heads);
  const std::uint64_t row_bytes = RowBytes(a.k_type, a.shape.head_dim) + RowBytes(a.v_type, a.shape.head_dim);

  const bool prompt = a.n_q > kMaxDecodeRows;
  if (CurrentProgress()) {
    if (prompt) {
      ShowPromptBatch(a.layer, a.n_q, visible);
    } else {
      EndPromptProgress();
    }
  }
  const bool eligible = SparseEligible(a, mode, visible);
  if (eligible && a.n_q == 1) {
    CachedLayer::Outcome outcome;
    const Status status = WithLayer(state, a, stream, [&](CachedLayer& layer) {
      return layer.Attend(a, stream, state.visible.data(), visible, state.n_threads, state.workspace, &outcome);
    });
    if (status.ok()) {
      const bool sparse = outcome.path == kSparse;
      const std::uint64_t rows = sparse ? outcome.rows_read : visible * kv_heads;
      CountCall(a, static_cast<Path>(outcome.path), visible, rows, sparse ? outcome.bytes_read : rows * row_bytes);
      Observe(a, stream, static_cast<Path>(outcome.path), state.visible.data(), words);
      return Status::Ok();
    }
    LogOnce({"the sparse operator failed (", status.message(), "); answering exactly"});
    Count(GlobalCounters().failures, 1);
  }

  std::optional<Path> path;
  if (eligible && prompt) path = AttendPrompt(state, a, stream);
  if (!path) {
    const VisibleSets sets{state.visible.data(), words};
    if (Status status = ExactAttention(a.shape, a.Query(stream), a.Kv(stream), sets, a.params, state.n_threads,
                                       state.workspace, a.Out(stream));
        !status.ok()) {
      return status;
    }
    path = kExact;
  }
  if (*path == kSparse) {
    CountCall(a, kSparse, 0, 0, 0);  // the rows of a sparse prompt are counted by tile
  } else {
    CountCall(a, kExact, visible, visible * kv_heads, visible * kv_heads * row_bytes);
  }
  Observe(a, stream, *path, state.visible.data(), words);
  if (eligible && prompt) PrepareDecoding(state, a, stream);
  return Status::Ok();
}

ggml_status Compute(BackendState& state, ggml_tensor* node) {
  const Mode mode = CurrentMode();
  const auto a = ReadAttentionNode(node);
  if (!a || mode == Mode::kOff) return ComputeOnCpu(state, node);

  const std::int64_t words = (a->n_kv + 63) / 64;
  const auto needed = static_cast<std::size_t>(words * a->n_q);
  if (state.visible.size() < needed) state.visible.resize(needed);
  if (mode == Mode::kLimit) {
    for (int s = 0; s < a->n_streams; ++s) {
      const OutView out = a->Out(s);
      std::memset(out.data, 0, static_cast<std::size_t>(a->n_q) * node->nb[2]);
      CountCall(*a, kLimit, 0, 0, 0);
      if (g_observer.function != nullptr) ReadMask(*a, s, words, state.n_threads, state.visible.data());
      Observe(*a, s, kLimit, state.visible.data(), words);
    }
    return GGML_STATUS_SUCCESS;
  }
  for (int s = 0; s < a->n_streams; ++s) {
    if (!ReadMask(*a, s, words, state.n_threads, state.visible.data())) {
      LogOnce({"an attention mask with biases is left to ggml"});
      return ComputeOnCpu(state, node);
    }
    if (const Status status = ComputeStream(state, *a, s, mode); !status.ok()) {
      LogOnce({"the exact kernel failed (", status.message(), "); leaving the node to ggml"});
      Count(GlobalCounters().failures, 1);
      return ComputeOnCpu(state, node);
    }
  }
  return GGML_STATUS_SUCCESS;
}

}  // namespace

ggml_status ComputeAttention(BackendState& state, ggml_tensor* node) {
  const Timer timer(GlobalCounters().attn_ns);
  Count(GlobalCounters().attn_calls, 1);
  try {
    return Compute(state, node);
  } catch (const std::bad_alloc&) {
    LogOnce({"out of memory in an attention node; leaving it to ggml"});
    Count(GlobalCounters().failures, 1);
  }
  return ComputeOnCpu(state, node);
}

void SetObserver(scsa_plugin_observer_t observer, void* user) { g_observer = {observer, user}; }

}  // namespace scsa::plugin
