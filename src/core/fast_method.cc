// SPDX-License-Identifier: Apache-2.0
//
// Preset `fast`: a BlockPlan of small blocks at fixed places, one opened set for all query heads of a KV head.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/block_plan.h"
#include "core/block_tree.h"
#include "core/coverage.h"
#include "core/joint_operator.h"
#include "core/kernels.h"
#include "core/method.h"
#include "core/plan_memory.h"
#include "core/prompt_operator.h"

namespace scsa {
namespace {

// Whether the squares of all scaled queries, and so every estimate of a cluster's logit, are finite.
bool QueriesAreFinite(const Shape& shape, const LayerCall& call) {
  for (int row = 0; row < call.q.n_q; ++row) {
    for (int h = 0; h < shape.q_heads; ++h) {
      const float* q = call.q.data + row * call.q.row_stride + h * call.q.head_stride;
      if (!std::isfinite(Dot(q, q, shape.head_dim) * call.params.scale * call.params.scale)) return false;
    }
  }
  return true;
}

class FastMethod final : public SparseMethod {
 public:
  FastMethod(const Shape& shape, const Config& config, PlanMemory& memory)
      : shape_(shape),
        config_(config),
        memory_(memory),
        plan_(shape, config, &memory),
        tree_(shape),
        operator_(shape, config),
        prompt_(shape, config),
        reads_(shape.kv_heads) {
    if (config.selection == Selection::kHierarchical) walks_ = plan_.CountTree(true);
  }

  bool Prepare(const LayerCall& call, LayerStats* stats) override {
    // First, whatever the query: the next call need not ask for the same check. Only samples can wait for the threads
    // that Attend starts anyway.
    const bool later = call.verify == Verify::kSample && call.attends && call.q.n_q == 1;
    const int changed = plan_.DropChanged(call.kv, later ? Verify::kNone : call.verify, call.n_threads);
    sample_ = later ? std::optional(plan_.NextSample()) : std::nullopt;
    stats->dropped_blocks += changed;
    // A centroid's logit says nothing about the capped logits of its members.
    if (call.params.softcap > 0 || !QueriesAreFinite(shape_, call)) return false;
    try {
      SetVisible(call);
      // Rows that were just found to have changed may still be changing: this call attends to them exactly.
      if (changed == 0) BuildDue(call, stats);
      for (int row = 0; row < call.q.n_q; ++row) {
        if (HasUsableBlock(plan_, call.kv.n_kv, visible_ + row * visible_stride_)) return true;
      }
    } catch (const std::bad_alloc&) {
      ++stats->step_failures;
    }
    return false;
  }

  Status Attend(const LayerCall& call, std::span<const float> taus, const OutView& out, LayerStats* stats) override {
    LayerStats counted = *stats;
    std::ranges::fill(reads_, HeadReads{});
    opened_.clear();
    try {
      if (memory_.limited()) opened_.resize(static_cast<std::size_t>(plan_.n_blocks()));
      if (walks_) tree_.Update(plan_, call.n_threads);
      for (int row = 0; row < call.q.n_q; ++row) {
        const Status status = operator_.Attend(plan_, Query(call, row), taus, call.n_threads, call.workspace,
                                               out.data + row * out.row_stride, out.head_stride, counted);
        if (status.code() == StatusCode::kFailedPrecondition) {
          stats->dropped_blocks += plan_.DropChanged(call.kv, *sample_);
        }
        if (!status.ok()) return status;
        NoteUse(operator_.coverage());
      }
    } catch (const std::bad_alloc&) {
      return Status::OutOfMemory("no memory for a sparse attention step");
    }
    ++counted.sparse_steps;
    *stats = counted;
    for (int h = 0; h < shape_.kv_heads; ++h) call.reads[h].Add(reads_[h]);
    return Status::Ok();
  }

  Status Record(const LayerCall& call, const OutView& exact_output, CalibrationWindow* window) override {
    opened_.clear();
    try {
      errors_.resize(static_cast<std::size_t>(shape_.q_heads) * kTauGridSize);
      if (walks_) tree_.Update(plan_, call.n_threads);
      in_play_.resize(static_cast<std::size_t>(shape_.kv_heads));
      const auto group = static_cast<std::size_t>(shape_.group());
      for (int row = 0; row < call.q.n_q; ++row) {
        for (std::size_t h = 0; h < in_play_.size(); ++h) {
          in_play_[h] = window->ThresholdsInPlay(config_.statistic, h * group, group);
        }
        const Status status = operator_.Replay(plan_, Query(call, row), window->grid(), in_play_,
                                               exact_output.data + row * exact_output.row_stride,
                                               exact_output.head_stride, call.n_threads, call.workspace, errors_);
        if (!status.ok()) return status;
        NoteUse(operator_.coverage());
        window->BeginStep();
        for (int h = 0; h < shape_.q_heads; ++h) window->Record(h, errors_.data() + h * kTauGridSize);
      }
    } catch (const std::bad_alloc&) {
      return Status::OutOfMemory("no memory to record a calibration step");
    }
    return Status::Ok();
  }

  Selection selection() const override { return walks_ ? Selection::kHierarchical : Selection::kFlat; }
  bool SetSelection(Selection selection) override {
    const bool walks = selection == Selection::kHierarchical;
    if (!plan_.CountTree(walks)) return false;
    if (!walks) tree_.Clear();
    walks_ = walks;
    return true;
  }
  void ChooseSelection(const LayerCall& call) override {
    if (config_.selection != Selection::kAutomatic) return;
    std::int64_t rows = 0;
    for (int b = 0; b < plan_.n_blocks() && plan_.EndRow(b) <= call.kv.n_kv; ++b) {
      if (plan_.built(b)) rows += plan_.EndRow(b) - plan_.FirstRow(b);
    }
    // Without room for a tree the selection stays flat.
    if (!SetSelection(rows >= kHierarchicalRows ? Selection::kHierarchical : Selection::kFlat)) {
      SetSelection(Selection::kFlat);
    }
  }

  Status AttendPrompt(const LayerCall& call, PromptThresholds* thresholds, const OutView& out) override {
    try {
      const VisibleSets visible{visible_, visible_stride_};
      const PromptQuery query{call.q, call.kv, visible, call.params};
      Status status = prompt_.Attend(plan_, query, *thresholds, call.n_threads, call.workspace, out);
      if (!memory_.limited()) return status;
      // What the last row sees as a whole served the prompt.
      opened_.clear();
      coverage_.Find(plan_, call.kv.n_kv, visible_ + (call.q.n_q - 1) * visible_stride_);
      NoteUse(coverage_);
      return status;
    } catch (const std::bad_alloc&) {
      return Status::OutOfMemory("no memory for the sparse attention of a prompt");
    }
  }

  Status Seal(const KvView& kv, std::int64_t end_row, int n_threads, LayerStats* stats) override {
    try {
      due_.clear();
      for (int b = plan_.first_gap(); plan_.EndRow(b) <= std::min(end_row, kv.n_kv); ++b) {
        if (!plan_.built(b) && plan_.MayBuild(b)) due_.push_back(b);
      }
      return Build(kv, n_threads, stats);
    } catch (const std::bad_alloc&) {
      return Status::OutOfMemory("no memory for the plan of an attention layer");
    }
  }

  int DropWritten(std::span<const std::int64_t> rows) override { return plan_.DropWritten(rows); }
  int DropAll() override {
    tree_.Clear();
    return plan_.DropAll();
  }
  std::size_t PlanBytes() const override { return plan_.Bytes(); }
  Candidate LeastUseful() const override { return plan_.LeastUseful(); }
  std::uint64_t Evict(int block, std::uint64_t not_before) override {
    tree_.Release(block);
    return plan_.Evict(block, not_before);
  }
  std::int64_t sealed_end() const override {
    const int n = plan_.first_gap();
    return n == 0 ? config_.sink : plan_.EndRow(n - 1);
  }

 private:
  JointQuery Query(const LayerCall& call, int row) {
    return {.q = call.q.data + row * call.q.row_stride,
            .head_stride = call.q.head_stride,
            .kv = &call.kv,
            .visible = visible_ + row * visible_stride_,
            .sees_all = call.visible.words == nullptr,
            .params = call.params,
            .reads = reads_.data(),
            .sample = sample_,
            .tree = walks_ ? &tree_ : nullptr};
  }

  void SetVisible(const LayerCall& call) {
    visible_ = call.visible.words;
    visible_stride_ = call.visible.row_stride;
    if (visible_ != nullptr) return;
    const auto words = static_cast<std::size_t>((call.kv.n_kv + 63) / 64);
    if (all_visible_.size() < words) all_visible_.assign(words, ~std::uint64_t{0});
    visible_ = all_visible_.data();
    visible_stride_ = 0;
  }

  // A block is due once a query row sees all of it and `recent + seal_delay` rows beyond. Layers with different delays
  // build in different steps.
  void BuildDue(const LayerCall& call, LayerStats* stats) {
    due_.clear();
    const int words_per_block = plan_.block_rows() / 64;
    for (int row = 0; row < call.q.n_q; ++row) {
      const std::uint64_t* words = visible_ + row * visible_stride_;
      std::int64_t end = call.kv.n_kv;
      while (end > 0 && (words[(end - 1) / 64] >> ((end - 1) % 64) & 1) == 0) --end;
      for (int b = plan_.first_gap(); plan_.EndRow(b) + config_.recent + config_.seal_delay <= end; ++b) {
        if (plan_.built(b) || !plan_.MayBuild(b)) continue;
        const std::uint64_t* first = words + std::int64_t{b} * words_per_block;
        const bool whole =
            std::all_of(first, first + words_per_block, [](std::uint64_t w) { return w == ~std::uint64_t{0}; });
        if (whole && std::ranges::find(due_, b) == due_.end()) due_.push_back(b);
      }
    }
    if (memory_.RefusalStands()) return;
    if (!Build(call.kv, call.n_threads, stats).ok()) ++stats->build_failures;
  }

  // The blocks that served the call that was just answered or replayed, for a budget to go by.
  void NoteUse(const Coverage& coverage) {
    if (!memory_.limited()) return;
    std::ranges::fill(opened_, 0);
    if (!opened_.empty()) operator_.AddOpenedRows(plan_, opened_);
    for (int b = 0; b < coverage.n_blocks(); ++b) {
      if (coverage.usable[static_cast<std::size_t>(b)] == 0) continue;
      plan_.NoteUse(b, memory_.now());
      if (opened_.empty()) continue;
      const auto rows = static_cast<float>((plan_.EndRow(b) - plan_.FirstRow(b)) * shape_.kv_heads);
      plan_.NoteRead(b, static_cast<float>(opened_[static_cast<std::size_t>(b)]) / rows);
    }
  }

  Status Build(const KvView& kv, int n_threads, LayerStats* stats) {
    if (due_.empty()) return Status::Ok();
    const auto start = std::chrono::steady_clock::now();
    BlockPlan::BuildResult result = plan_.Build(kv, due_, n_threads);
    stats->rebuild_count += static_cast<std::uint64_t>(result.built);
    memory_.CountRefused(static_cast<std::uint64_t>(result.refused));
    stats->build_ns +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
    return std::move(result.status);
  }

  Shape shape_;
  Config config_;
  PlanMemory& memory_;
  BlockPlan plan_;
  BlockTree tree_;  // in line with the plan while a call is answered by a walk
  JointOperator operator_;
  bool walks_ = false;  // hierarchical selection
  PromptOperator prompt_;
  Coverage coverage_;  // of a prompt's last row
  std::vector<int> due_;
  std::vector<float> errors_;
  std::vector<int> in_play_;                 // [kv_heads], thresholds that a window still looks at
  std::vector<HeadReads> reads_;             // [kv_heads], of the present call
  std::optional<BlockPlan::Sample> sample_;  // of the present call, not compared yet
  std::vector<std::int64_t> opened_;         // [blocks], rows that the present query row opened; empty: not counted
  std::vector<std::uint64_t> all_visible_;
  const std::uint64_t* visible_ = nullptr;  // of the present call
  std::int64_t visible_stride_ = 0;
};

}  // namespace

std::unique_ptr<SparseMethod> MakeFastMethod(const Shape& shape, const Config& config, PlanMemory& memory) {
  return std::make_unique<FastMethod>(shape, config, memory);
}

}  // namespace scsa
