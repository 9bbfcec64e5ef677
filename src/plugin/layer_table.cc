// SPDX-License-Identifier: Apache-2.0
#include "plugin/layer_table.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <map>
#include <new>
#include <utility>

#include "core/coverage.h"
#include "plugin/audit_log.h"
#include "plugin/immortal.h"
#include "plugin/reads_log.h"
#include "plugin/stats.h"

namespace scsa::plugin {
namespace {

// Layers of all contexts together; far more than any program decodes with at a time.
constexpr std::size_t kMaxLayers = 65536;
// A prompt calibrates again when this many times as many rows are visible as the last time.
constexpr std::uint64_t kCalibrateAgainAt = 2;

std::size_t Words(std::int64_t rows) { return static_cast<std::size_t>((rows + 63) / 64); }

}  // namespace

bool LayerKey::operator==(const LayerKey& o) const {
  return k_root == o.k_root && v_root == o.v_root && k_buffer == o.k_buffer && v_buffer == o.v_buffer && k == o.k &&
         v == o.v && shape.q_heads == o.shape.q_heads && shape.kv_heads == o.shape.kv_heads &&
         shape.head_dim == o.shape.head_dim && k_type == o.k_type && v_type == o.v_type &&
         k_row_stride == o.k_row_stride && v_row_stride == o.v_row_stride && rows == o.rows && first_row == o.first_row;
}

LayerKey KeyOf(const AttentionNode& node, int stream) {
  const KvView kv = node.Kv(stream);
  LayerKey key;
  key.k_root = node.k_root->data;
  key.v_root = node.v_root->data;
  key.k_buffer = node.k_root->buffer;
  key.v_buffer = node.v_root->buffer;
  key.k = kv.k;
  key.v = kv.v;
  key.shape = node.shape;
  key.k_type = kv.k_type;
  key.v_type = kv.v_type;
  key.k_row_stride = kv.k_row_stride;
  key.v_row_stride = kv.v_row_stride;
  key.rows = node.k_root->ne[1];
  key.first_row = (static_cast<const std::byte*>(kv.k) - static_cast<const std::byte*>(key.k_root)) / kv.k_row_stride;
  return key;
}

CachedLayer::~CachedLayer() { SetCalibrated(false); }

Status CachedLayer::Init(const Options& options, std::span<const float> taus, std::shared_ptr<MemoryBudget> budget) {
  Status status = Layer::Create(key_.shape, options.config, &layer_);
  if (!status.ok()) return status;
  status = layer_->SetBudget(std::move(budget));
  if (!status.ok()) return status;
  logged_.assign(layer_->head_reads().begin(), layer_->head_reads().end());
  seen_.assign(Words(key_.rows), 0);
  written_.assign(Words(key_.rows), 0);
  any_visible_.assign(Words(key_.rows), 0);
  if (options.prompt_tolerance > 0) {
    PromptConfig prompt;
    prompt.tolerance = options.prompt_tolerance;
    if (status = layer_->SetPrompt(prompt); !status.ok()) return status;
    sparse_prompts_ = true;
  }
  if (taus.empty()) return StartOver(options);
  if (const TausFile& file = options.taus->file; !file.bare) {
    if (status = layer_->SetSelection(file.config.selection); !status.ok()) return status;
  }
  for (std::size_t head = 0; head < taus.size(); ++head) {
    status = layer_->SetTau(static_cast<int>(head), taus[head]);
    if (!status.ok()) return status;
  }
  tolerance_ = options.taus->file.tolerance;
  // A bare map of thresholds says nothing about the error that it allows: its heads are measured, not tested.
  StartAudit(options.audit, tolerance_.value_or(0.0f));
  SetCalibrated(true);
  return Status::Ok();
}

Status CachedLayer::StartOver(const Options& options) {
  SetCalibrated(false);
  tolerance_ = options.tolerance;
  calibrate_ = options.calibrate;
  // Without a window the thresholds are fixed by the user's choice, so heads are measured, not tested.
  StartAudit(options.audit, 0.0f);
  if (calibrate_ > 0) return layer_->StartCalibration(options.tolerance);
  for (std::size_t head = 0; head < layer_->taus().size(); ++head) {
    const Status status = layer_->SetTau(static_cast<int>(head), options.config.tau_default);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

void CachedLayer::StartAudit(double share, float tolerance) {
  AuditConfig audit;
  audit.share = share;
  audit.seed = static_cast<std::uint64_t>(index_);
  audit.capacity = kAuditCapacity;
  audit.tolerance = tolerance;
  const Status status = layer_->SetAudit(audit);
  if (status.ok()) return;
  Count(GlobalCounters().audit_failures, 1);
  LogOnce({status.message(), "; its error is not measured"});
}

void CachedLayer::LogAudit(const LayerStats& before, const LayerStats& after) {
  Counters& counters = GlobalCounters();
  const std::uint64_t outputs = after.audited_outputs - before.audited_outputs;
  const std::uint64_t recalibrated = after.recalibrated_heads - before.recalibrated_heads;
  Count(counters.audited_outputs, outputs);
  Count(counters.recalibrated_heads, recalibrated);
  Count(counters.audit_failures, after.audit_failures - before.audit_failures);
  Count(counters.audit_ns, after.audit_ns - before.audit_ns);
  if (outputs == 0 && recalibrated == 0) return;
  const std::span<const AuditSample> samples = layer_->AuditSamples();
  try {
    AuditLog::Get().Add(index_, samples.last(std::min<std::size_t>(outputs, samples.size())), recalibrated);
  } catch (const std::bad_alloc&) {
    Count(counters.audit_failures, 1);
  }
}

void CachedLayer::LogReads() {
  const std::span<const HeadReads> now = layer_->head_reads();
  try {
    ReadsLog::Get().Add(index_, now, logged_);
  } catch (const std::bad_alloc&) {
    return;  // logged with the next call
  }
  std::copy(now.begin(), now.end(), logged_.begin());
}

void CachedLayer::SetCalibrated(bool calibrated) {
  if (calibrated == calibrated_) return;
  calibrated_ = calibrated;
  Count(GlobalCounters().calibrated_layers, calibrated ? 1 : std::uint64_t{0} - 1);
}

void CachedLayer::NoteWrites(std::span<const std::int64_t> rows) {
  for (std::int64_t row : rows) {
    std::uint64_t& word = written_[static_cast<std::size_t>(row / 64)];
    const std::uint64_t bit = std::uint64_t{1} << (row % 64);
    n_written_ += (word & bit) == 0;
    word |= bit;
  }
  layer_->NotifyWrites(rows);
}

std::span<const std::uint64_t> CachedLayer::AnyVisible(const VisibleSets& sets, int n_q, std::int64_t n_kv) {
  const std::size_t words = Words(n_kv);
  if (n_q == 1) return {sets.words, words};
  std::fill_n(any_visible_.begin(), words, 0);
  for (int i = 0; i < n_q; ++i) {
    const std::uint64_t* row = sets.words + i * sets.row_stride;
    for (std::size_t w = 0; w < words; ++w) any_visible_[w] |= row[w];
  }
  return {any_visible_.data(), words};
}

// Rows that become visible were written just before, through the plugin. If others do, or if many vanish (state
// loads, copies between sequences, truncation), the cells may hold something else by now. A row that was visible and is
// written anew had vanished in between: the same, even where later tokens have filled the gap.
bool CachedLayer::Jumped(std::span<const std::uint64_t> visible) {
  bool unexpected = false;
  std::uint64_t vanished = 0;
  for (std::size_t w = 0; w < seen_.size(); ++w) {
    const std::uint64_t now = w < visible.size() ? visible[w] : 0;
    unexpected = unexpected || (now & ~seen_[w] & ~written_[w]) != 0 || (seen_[w] & written_[w]) != 0;
    vanished += static_cast<std::uint64_t>(std::popcount(seen_[w] & ~now));
    seen_[w] = now;
    written_[w] = 0;
  }
  return unexpected || vanished > n_written_;
}

Verify CachedLayer::BeginStep(const VisibleSets& sets, int n_q, std::int64_t n_kv) {
  if (stale_.exchange(false, std::memory_order_acq_rel)) layer_->DropPlans();
  if (!CurrentChecks()) {
    unchecked_ = true;
    return Verify::kNone;
  }
  const std::span<const std::uint64_t> visible = AnyVisible(sets, n_q, n_kv);
  // Steps without checks may have missed anything.
  bool full = unchecked_;
  if (witness_.IsWitness(index_)) {
    const CellWitness::Keys keys{static_cast<const std::byte*>(key_.k), key_.k_row_stride,
                                 RowBytes(key_.k_type, key_.shape.head_dim)};
    const bool changed = witness_.Look(keys, visible, seen_, written_);
    // Cells that it did not see before it cannot judge; a layer that missed the last step would not know.
    full = Jumped(visible) || full;
    witness_.Report(changed || full);
  } else {
    // Every graph writes before it attends: without a write this is the graph of the last step. In another one the
    // witness should have come first; where it failed, it says nothing.
    full = full || (n_written_ > 0 && witness_.reports() == reports_);
    full = Jumped(visible) || full;
  }
  full = full || witness_.alarms() != alarms_;
  n_written_ = 0;
  reports_ = witness_.reports();
  alarms_ = witness_.alarms();
  unchecked_ = false;
  return full ? Verify::kFull : Verify::kSample;
}

void CachedLayer::CountBuilding(const LayerStats& before, const LayerStats& after) {
  Counters& counters = GlobalCounters();
  Count(counters.plan_build_ns, after.build_ns - before.build_ns);
  Count(counters.rebuild_count, after.rebuild_count - before.rebuild_count);
  // Writes and position shifts dropped some before this step.
  Count(counters.dropped_blocks, after.dropped_blocks - dropped_blocks_);
  dropped_blocks_ = after.dropped_blocks;
  Count(counters.failures, after.build_failures - before.build_failures);
  Count(counters.failures, after.step_failures - before.step_failures);
  if (after.build_failures != before.build_failures) {
    LogOnce({"a plan could not be built (out of memory?); answering exactly"});
  }
  if (after.step_failures != before.step_failures) LogOnce({"no memory for a sparse step; answering exactly"});
}

Status CachedLayer::Step(const QueryView& q, const KvView& kv, const VisibleSets& sets, const LogitParams& params,
                         int n_threads, Workspace& workspace, const OutView& out, Outcome* outcome) {
  const Verify verify = BeginStep(sets, q.n_q, kv.n_kv);
  const LayerStats before = layer_->stats();
  const Status status = layer_->Attend(q, kv, sets, params, verify, n_threads, workspace, out);
  const LayerStats after = layer_->stats();

  CountBuilding(before, after);
  LogAudit(before, after);
  if (!status.ok()) return status;

  outcome->path = 0;
  outcome->build_ns = after.build_ns - before.build_ns;
  if (after.sparse_steps != before.sparse_steps) {
    outcome->path = 1;
    LogReads();
    outcome->rows_read = after.union_rows - before.union_rows;
    outcome->bytes_read = after.bytes_read - before.bytes_read;
  } else if (after.calibration_steps != before.calibration_steps) {
    outcome->path = 2;
  }
  if (layer_->calibrating() && layer_->calibration_steps() >= calibrate_) {
    const Status finished = layer_->FinishCalibration();
    if (finished.ok()) {
      SetCalibrated(true);
    } else {
      // The window stays open, and the next step tries again.
      Count(GlobalCounters().failures, 1);
      LogOnce({finished.message(), "; answering exactly"});
    }
  }
  return status;
}

Status CachedLayer::Attend(const AttentionNode& node, int stream, const std::uint64_t* visible, std::uint64_t n_visible,
                           int n_threads, Workspace& workspace, Outcome* outcome) {
  const VisibleSets sets{visible, static_cast<std::int64_t>(Words(node.n_kv))};
  if (CurrentCrossover() == kAutoCrossover) {
    return Choose(node, stream, sets, n_visible, n_threads, workspace, outcome);
  }
  return Step(node.Query(stream), node.Kv(stream), sets, node.params, n_threads, workspace, node.Out(stream), outcome);
}

// A step that is answered exactly leaves the plan as it is, as steps below a fixed crossover do: what is written
// meanwhile is noted, and the next sparse step builds what is due then.
Status CachedLayer::Choose(const AttentionNode& node, int stream, const VisibleSets& sets, std::uint64_t n_visible,
                           int n_threads, Workspace& workspace, Outcome* outcome) {
  Crossover& crossover = stream_->crossover;
  if (witness_.IsWitness(index_)) {
    const int trials = crossover.trials();
    crossover.BeginStep(n_visible, !layer_->calibrating() || layer_->calibration_steps() > 0);
    if (crossover.trials() != trials) NoteCrossover(*crossover.bound());
  }
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  *outcome = {};
  const Status status = crossover.sparse() ? Step(node.Query(stream), node.Kv(stream), sets, node.params, n_threads,
                                                  workspace, node.Out(stream), outcome)
                                           : ExactAttention(node.shape, node.Query(stream), node.Kv(stream), sets,
                                                            node.params, n_threads, workspace, node.Out(stream));
  Crossover::Answer answer = Crossover::Answer::kOther;
  if (status.ok() && outcome->path == 0) answer = Crossover::Answer::kExact;
  if (status.ok() && outcome->path == 1) answer = Crossover::Answer::kSparse;
  // Blocks are built in a few steps out of many, for all of them.
  const Clock::duration elapsed = Clock::now() - start - std::chrono::nanoseconds(outcome->build_ns);
  crossover.Add(answer, std::chrono::duration<double>(elapsed).count());
  return status;
}

Status CachedLayer::AttendPrompt(const AttentionNode& node, int stream, const std::uint64_t* visible, int n_threads,
                                 Workspace& workspace, bool* sparse) {
  const VisibleSets sets{visible, static_cast<std::int64_t>(Words(node.n_kv))};
  const Verify verify = BeginStep(sets, node.n_q, node.n_kv);
  const LayerStats before = layer_->stats();
  // What the KV heads did so far, together.
  const auto sum = [this](auto field) {
    auto total = decltype(PromptHead{}.*field){};
    for (const PromptHead& head : layer_->prompt_heads()) total += head.*field;
    return total;
  };
  struct Total {
    std::uint64_t PromptHead::*field;
    std::atomic<std::uint64_t>& counter;
    std::uint64_t before = 0;
  };
  Counters& counters = GlobalCounters();
  Total totals[] = {{&PromptHead::tiles, counters.prompt_tiles},
                    {&PromptHead::sparse, counters.prompt_sparse_tiles},
                    {&PromptHead::measured, counters.prompt_measured_tiles},
                    {&PromptHead::audited, counters.prompt_audited_tiles},
                    {&PromptHead::rows_read, counters.prompt_rows_read},
                    {&PromptHead::rows_visible, counters.prompt_rows_visible}};
  for (Total& total : totals) total.before = sum(total.field);
  const double errors_before = sum(&PromptHead::error_sum);
  const Status status = layer_->AttendPrompt(node.Query(stream), node.Kv(stream), sets, node.params, verify, n_threads,
                                             workspace, node.Out(stream));
  CountBuilding(before, layer_->stats());
  *sparse = sum(&PromptHead::tiles) != totals[0].before;
  for (const Total& total : totals) Count(total.counter, sum(total.field) - total.before);
  Count(counters.prompt_error_millionths,
        static_cast<std::uint64_t>(std::lround(1e6 * (sum(&PromptHead::error_sum) - errors_before))));
  return status;
}

Status CachedLayer::Prefill(const AttentionNode& node, int stream, const std::uint64_t* visible, int n_threads,
                            Workspace& workspace) {
  const std::size_t words = Words(node.n_kv);
  const std::uint64_t n_visible = CountVisible(visible + static_cast<std::size_t>(node.n_q - 1) * words, 0, node.n_kv);
  // Thresholds serve other lengths too, but not any.
  if (calibrate_ > 0 && calibrated_ && !layer_->calibrating() && n_visible >= kCalibrateAgainAt * calibrated_at_) {
    if (const Status status = layer_->StartCalibration(*tolerance_); !status.ok()) return status;
  }
  if (layer_->calibrating() && layer_->calibration_steps() == 0) calibrated_at_ = n_visible;

  // Rows far from each other say more than neighbours do.
  const int wanted = layer_->calibrating() ? calibrate_ - layer_->calibration_steps() : 1;
  const int rows = std::clamp(wanted, 1, node.n_q);
  const int distance = node.n_q / rows;
  // Preset `seed` answers one row at a time.
  const int rows_per_step = layer_->config().preset == Preset::kFast ? rows : 1;
  const auto row_size = static_cast<std::size_t>(node.shape.q_heads) * static_cast<std::size_t>(node.shape.head_dim);
  discarded_.resize(row_size * static_cast<std::size_t>(rows_per_step));
  const OutView out{discarded_.data(), static_cast<std::int64_t>(row_size), node.shape.head_dim};
  for (int i = 0; i < rows; i += rows_per_step) {
    const int first = node.n_q - 1 - (rows - 1 - i) * distance;
    QueryView q = node.Query(stream);
    q.data += first * q.row_stride;
    q.row_stride *= distance;
    q.n_q = rows_per_step;
    const VisibleSets sets{visible + static_cast<std::size_t>(first) * words,
                           static_cast<std::int64_t>(words) * distance};
    Outcome outcome;
    const Status status = Step(q, node.Kv(stream), sets, node.params, n_threads, workspace, out, &outcome);
    if (!status.ok()) return status;
    if (outcome.path == 2) Count(GlobalCounters().prompt_rows, static_cast<std::uint64_t>(rows_per_step));
  }
  return Status::Ok();
}

LayerTable& LayerTable::Get() { return Immortal<LayerTable>(); }

Status LayerTable::FindOrCreate(const void* owner, const AttentionNode& node, int stream,
                                std::shared_ptr<CachedLayer>* layer) {
  const LayerKey key = KeyOf(node, stream);
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.owner != owner || entry.layer->key().k != key.k) continue;
    if (entry.layer->key() == key) {
      *layer = entry.layer;
      return Status::Ok();
    }
    // The same cells, but other dimensions: the memory belongs to something else now. Two layers of a model that read
    // one cache with different query heads share K; they keep an operator each.
    if (entry.layer->key().v != key.v || entry.layer->key().k_buffer != key.k_buffer ||
        entry.layer->key().rows != key.rows || entry.layer->key().k_row_stride != key.k_row_stride) {
      Remove(i--);
    }
  }
  try {
    if (budget_ == nullptr) return Status::OutOfMemory("no memory for plans");
    if (entries_.size() >= kMaxLayers) return {StatusCode::kUnsupported, "too many attention layers in use"};
    auto made = std::make_shared<CachedLayer>(key, node.layer, StreamOf(owner, key));
    Options options = CurrentOptions();
    options.config.seal_delay = std::max(node.layer, 0) % kSealStagger;
    Status status = made->Init(options, GivenTaus(owner, node, options), budget_);
    if (!status.ok()) return status;
    entries_.push_back({owner, made});
    try {
      by_root_.emplace(key.k_root, made.get());
      by_root_.emplace(key.v_root, made.get());
    } catch (const std::bad_alloc&) {
      // A layer that hears of no writes must not be used.
      Remove(entries_.size() - 1);
      throw;
    }
    made->stream()->witness.Join(node.layer);
    *layer = std::move(made);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory for a layer");
  }
}

std::shared_ptr<CachedLayer::Stream> LayerTable::StreamOf(const void* owner, const LayerKey& key) const {
  for (const Entry& entry : entries_) {
    const LayerKey& other = entry.layer->key();
    // A context has a cache for each kind of layer (sliding window or not), and each has a buffer of its own.
    if (entry.owner == owner && other.k_buffer == key.k_buffer && other.first_row == key.first_row &&
        other.rows == key.rows) {
      return entry.layer->stream();
    }
  }
  return std::make_shared<CachedLayer::Stream>(key.rows);
}

// The thresholds that the user gave for this layer; empty where there are none that fit.
std::vector<float> LayerTable::GivenTaus(const void* owner, const AttentionNode& node, const Options& options) {
  std::vector<float> taus;
  if (options.taus == nullptr || refused_.contains(owner)) return taus;
  std::string misfit = TausMisfit(options);
  if (misfit.empty()) {
    const Status status = TausOfLayer(options.taus->file, node.layer, node.shape, options.config.preset, &taus);
    if (status.ok()) return taus;
    misfit = "\"" + options.taus->path + "\": " + status.message();
  }
  LogOnce({misfit, "; calibrating instead"});
  refused_.insert(owner);
  for (const Entry& entry : entries_) {
    if (entry.owner != owner) continue;
    std::lock_guard lock(entry.layer->mutex());
    if (const Status status = entry.layer->StartOver(options); !status.ok()) LogOnce({status.message()});
  }
  return taus;
}

TausFile LayerTable::Thresholds() {
  TausFile file;
  file.config = CurrentOptions().config;
  std::map<int, std::vector<float>> layers;
  std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    std::lock_guard layer_lock(entry.layer->mutex());
    const Layer& layer = entry.layer->layer();
    if (entry.layer->index() < 0 || !entry.layer->calibrated() || !CheckTausConfig(file, layer.config()).ok()) continue;
    if (layers.empty()) file.config.selection = layer.selection();
    if (layer.selection() != file.config.selection) continue;
    // One figure for all of them, or none.
    if (layers.empty()) file.tolerance = entry.layer->tolerance();
    if (file.tolerance != entry.layer->tolerance()) file.tolerance.reset();
    layers[entry.layer->index()].assign(layer.taus().begin(), layer.taus().end());
  }
  for (const auto& [index, taus] : layers) {
    for (std::size_t head = 0; head < taus.size(); ++head) {
      file.taus.push_back({index, static_cast<int>(head), taus[head]});
    }
  }
  return file;
}

void LayerTable::Remove(std::size_t index) {
  const CachedLayer* layer = entries_[index].layer.get();
  std::erase_if(by_root_, [layer](const auto& item) { return item.second == layer; });
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(index));
}

void LayerTable::SetMaxMem(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (budget_ != nullptr) {
    budget_->SetLimit(bytes);
  } else if (const Status status = MemoryBudget::Create(bytes, &budget_); !status.ok()) {
    LogOnce({status.message(), "; answering exactly"});
  }
}

std::shared_ptr<const MemoryBudget> LayerTable::Budget() {
  std::lock_guard lock(mutex_);
  return budget_;
}

void LayerTable::FreeOwner(const void* owner) {
  std::lock_guard lock(mutex_);
  refused_.erase(owner);
  for (std::size_t i = entries_.size(); i-- > 0;) {
    if (entries_[i].owner == owner) Forget(i);
  }
}

void LayerTable::FreeBuffer(const void* buffer) {
  std::lock_guard lock(mutex_);
  for (std::size_t i = entries_.size(); i-- > 0;) {
    const LayerKey& key = entries_[i].layer->key();
    if (key.k_buffer != buffer && key.v_buffer != buffer) continue;
    // What the user's thresholds did not fit may have been this model.
    refused_.erase(entries_[i].owner);
    Forget(i);
  }
}

void LayerTable::Forget(std::size_t index) {
  tracked_.erase(entries_[index].layer->key().k_root);
  tracked_.erase(entries_[index].layer->key().v_root);
  Remove(index);
}

void LayerTable::NoteWrites(const ggml_tensor* root, std::span<const std::int64_t> rows) {
  std::lock_guard lock(mutex_);
  const auto [first, last] = by_root_.equal_range(root->data);
  if (first == last) return;
  static thread_local std::vector<std::int64_t> local;
  for (auto it = first; it != last; ++it) {
    CachedLayer& layer = *it->second;
    local.clear();
    try {
      for (std::int64_t row : rows) {
        const std::int64_t in_stream = row - layer.key().first_row;
        if (in_stream >= 0 && in_stream < layer.key().rows) local.push_back(in_stream);
      }
    } catch (const std::bad_alloc&) {
      layer.MarkStale();
      continue;
    }
    if (local.empty()) continue;
    std::lock_guard layer_lock(layer.mutex());
    layer.NoteWrites(local);
  }
}

void LayerTable::MarkStale(const ggml_tensor* root) {
  std::lock_guard lock(mutex_);
  const auto [first, last] = by_root_.equal_range(root->data);
  for (auto it = first; it != last; ++it) it->second->MarkStale();
}

bool LayerTable::SetTracked(const ggml_tensor* root, bool tracked) {
  std::lock_guard lock(mutex_);
  if (tracked) {
    // Roots of contexts that never had a layer stay behind: forgetting all of them only delays the sparse path until
    // the next graph.
    if (tracked_.size() >= 2 * kMaxLayers) tracked_.clear();
    try {
      tracked_.insert(root->data);
      return true;
    } catch (const std::bad_alloc&) {
      LogOnce({"no memory to follow the writes into a cache; leaving them to ggml"});
    }
  }
  tracked_.erase(root->data);
  const auto [first, last] = by_root_.equal_range(root->data);
  for (auto it = first; it != last; ++it) it->second->MarkStale();
  return false;
}

bool LayerTable::Tracked(const ggml_tensor* root) {
  std::lock_guard lock(mutex_);
  return tracked_.contains(root->data);
}

}  // namespace scsa::plugin
