// SPDX-License-Identifier: Apache-2.0
//
// The operator's layers of all contexts, found by the cache tensors that they belong to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "plugin/cell_witness.h"
#include "plugin/crossover.h"
#include "plugin/node.h"
#include "plugin/options.h"
#include "scsa/layer.h"

namespace scsa::plugin {

// Identity of a layer: one stream of one pair of cache tensors. A context that is freed may leave its addresses to
// another one, so shapes, types, strides and the buffers are part of it.
struct LayerKey {
  const void* k_root = nullptr;
  const void* v_root = nullptr;
  const void* k_buffer = nullptr;
  const void* v_buffer = nullptr;
  const void* k = nullptr;  // first row of the stream
  const void* v = nullptr;
  Shape shape;
  DType k_type = DType::kF16;
  DType v_type = DType::kF16;
  std::int64_t k_row_stride = 0;
  std::int64_t v_row_stride = 0;
  std::int64_t rows = 0;       // cells per stream
  std::int64_t first_row = 0;  // the stream's first cell, counted over all streams

  bool operator==(const LayerKey& other) const;
};
LayerKey KeyOf(const AttentionNode& node, int stream);

// One layer and what the plugin knows about its cells.
class CachedLayer {
 public:
  // What the layers of one stream of a cache share.
  struct Stream {
    explicit Stream(std::int64_t cells) : witness(cells) {}
    CellWitness witness;
    Crossover crossover;
  };

  // index: of the attention layer in its model, or -1.
  CachedLayer(const LayerKey& key, int index, std::shared_ptr<Stream> stream)
      : key_(key), index_(index), stream_(std::move(stream)), witness_(stream_->witness) {}
  ~CachedLayer();

  // Makes the operator with the given options. With thresholds (one per head) it is sparse at once; otherwise a
  // calibration window is opened. Call once before Attend.
  // budget: what the plan is counted in.
  Status Init(const Options& options, std::span<const float> taus, std::shared_ptr<MemoryBudget> budget);
  // Gives up thresholds that were not to be used here and starts over without any. Call with the mutex held.
  Status StartOver(const Options& options);

  // Held while the layer is used; contexts may share a cache.
  std::mutex& mutex() { return mutex_; }
  const LayerKey& key() const { return key_; }
  int index() const { return index_; }
  const std::shared_ptr<Stream>& stream() const { return stream_; }
  // Whether thresholds are frozen: calibrated or from a file. The others with the mutex held.
  bool calibrated() const { return calibrated_; }
  const Layer& layer() const { return *layer_; }
  std::optional<float> tolerance() const { return tolerance_; }  // behind frozen thresholds

  // Cells that are about to be written. Call with the mutex held.
  void NoteWrites(std::span<const std::int64_t> rows);
  // Cells changed in a way that was not seen: every plan is dropped at the next step. Lock-free.
  void MarkStale() { stale_.store(true, std::memory_order_release); }

  struct Outcome {
    int path = 0;                  // as scsa_attention_call::path
    std::uint64_t rows_read = 0;   // each once per KV head
    std::uint64_t bytes_read = 0;  // 0 when the step was exact: the caller knows
    std::uint64_t build_ns = 0;    // of the step's time, spent on building blocks
  };
  // Attention of one query row that sees n_visible cells, sparse unless measurements of the crossover are against it.
  // `visible` has ceil(n_kv / 64) words. Call with the mutex held.
  Status Attend(const AttentionNode& node, int stream, const std::uint64_t* visible, std::uint64_t n_visible,
                int n_threads, Workspace& workspace, Outcome* outcome);
  // Whether prompts are answered sparsely.
  bool sparse_prompts() const { return sparse_prompts_; }
  // Attention of the query rows of a prompt, sparse where that pays. `visible` has ceil(n_kv / 64) words per row.
  // *sparse: whether blocks served it. Call with the mutex held.
  Status AttendPrompt(const AttentionNode& node, int stream, const std::uint64_t* visible, int n_threads,
                      Workspace& workspace, bool* sparse);
  // Makes ready for decoding with the query rows of a prompt, which were answered already: builds the blocks that they
  // complete, and calibrates on some of them where that was not done yet at such a length. `visible` has ceil(n_kv /
  // 64) words per row. Call with the mutex held. Throws std::bad_alloc.
  Status Prefill(const AttentionNode& node, int stream, const std::uint64_t* visible, int n_threads,
                 Workspace& workspace);

 private:
  // The answer that measurements of the crossover choose, timed for them.
  Status Choose(const AttentionNode& node, int stream, const VisibleSets& sets, std::uint64_t n_visible, int n_threads,
                Workspace& workspace, Outcome* outcome);
  // Layer::Attend with what goes with it: verification, counters, the end of the calibration window.
  Status Step(const QueryView& q, const KvView& kv, const VisibleSets& sets, const LogitParams& params, int n_threads,
              Workspace& workspace, const OutView& out, Outcome* outcome);
  // Starts the audit anew. tolerance as in AuditConfig.
  void StartAudit(double share, float tolerance);
  // Adds what happened since `before` to the plugin's counters.
  void CountBuilding(const LayerStats& before, const LayerStats& after);
  void LogReads();
  void LogAudit(const LayerStats& before, const LayerStats& after);
  // Drops outdated plans, and says what is to be checked. `sets` of n_q query rows over n_kv cells.
  Verify BeginStep(const VisibleSets& sets, int n_q, std::int64_t n_kv);
  // The cells that some query row sees.
  std::span<const std::uint64_t> AnyVisible(const VisibleSets& sets, int n_q, std::int64_t n_kv);
  // Whether the visible cells are others than those of the last step and the writes since explain.
  bool Jumped(std::span<const std::uint64_t> visible);
  void SetCalibrated(bool calibrated);

  const LayerKey key_;
  const int index_;
  std::mutex mutex_;
  std::atomic<bool> stale_{false};
  std::unique_ptr<Layer> layer_;
  int calibrate_ = 0;  // steps of a window, 0: thresholds are given
  bool calibrated_ = false;
  bool sparse_prompts_ = false;
  std::uint64_t calibrated_at_ = 0;  // visible rows when the last window was opened
  std::optional<float> tolerance_;
  std::uint64_t dropped_blocks_ = 0;        // counted so far
  std::vector<HeadReads> logged_;           // what the operator had read, per KV head, when it was last logged
  std::vector<std::uint64_t> seen_;         // cells that some query row of the last step saw
  std::vector<std::uint64_t> written_;      // cells written since then
  std::vector<std::uint64_t> any_visible_;  // of the present step, where it has several query rows
  std::uint64_t n_written_ = 0;
  const std::shared_ptr<Stream> stream_;
  CellWitness& witness_;
  std::uint64_t reports_ = 0;     // of the witness, as of the last step
  std::uint64_t alarms_ = 0;      // likewise
  bool unchecked_ = false;        // whether the last step went without checks
  std::vector<float> discarded_;  // outputs of Prefill
};

class LayerTable {
 public:
  static LayerTable& Get();

  // The layer of a stream of a node, made when it is new. `owner` is the backend instance (one per context) whose end
  // frees it. Thresholds that the user gave are used unless they do not fit: then one line says so, and all layers of
  // this owner calibrate themselves. kOutOfMemory, kUnsupported.
  Status FindOrCreate(const void* owner, const AttentionNode& node, int stream, std::shared_ptr<CachedLayer>* layer);
  void FreeOwner(const void* owner);
  // The memory of a cache is given back while its owner lives on.
  void FreeBuffer(const void* buffer);

  // Bytes that the plans of all layers may hold together: in force at once. Without a budget (there was no memory for
  // one) no layer is made.
  void SetMaxMem(std::uint64_t bytes);
  // nullptr before SetMaxMem.
  std::shared_ptr<const MemoryBudget> Budget();

  // The frozen thresholds of all layers that were made with the parameters in force, with their origin but without the
  // model, which the plugin does not know. Where several contexts hold a layer, those of the one made last. Throws
  // std::bad_alloc.
  TausFile Thresholds();

  // Cells of a cache tensor, counted over all streams, that are about to be written.
  void NoteWrites(const ggml_tensor* root, std::span<const std::int64_t> rows);
  // Some node that the plugin does not run writes into this cache tensor.
  void MarkStale(const ggml_tensor* root);

  // Whether the writes of the present graph into a cache tensor go through the plugin. Without that no plan is made.
  // Returns whether the plugin is to take them: false, too, when there is no memory to remember it.
  bool SetTracked(const ggml_tensor* root, bool tracked);
  bool Tracked(const ggml_tensor* root);

 private:
  struct Entry {
    const void* owner;
    std::shared_ptr<CachedLayer> layer;
  };
  std::mutex mutex_;
  std::shared_ptr<MemoryBudget> budget_;
  std::vector<Entry> entries_;
  std::unordered_multimap<const void*, CachedLayer*> by_root_;  // by the data of either cache tensor
  std::unordered_set<const void*> tracked_;
  std::unordered_set<const void*> refused_;  // owners whose layers the user's thresholds do not fit

  // That of the other layers of the same stream, or a new one. Throws std::bad_alloc.
  std::shared_ptr<CachedLayer::Stream> StreamOf(const void* owner, const LayerKey& key) const;
  std::vector<float> GivenTaus(const void* owner, const AttentionNode& node, const Options& options);
  void Remove(std::size_t index);
  // Removes a layer whose cache is gone.
  void Forget(std::size_t index);
};

}  // namespace scsa::plugin
