// SPDX-License-Identifier: Apache-2.0
#include "core/joint_scoring.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "hwy/cache_control.h"

namespace scsa {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int kChunkBlocks = 8;
// Contexts with more blocks than this many chunks get larger chunks: each costs a merge per query head.
constexpr int kMaxChunks = 64;
// Rows that one part reads exactly: those of a block and what goes with them.
constexpr std::int64_t kRowsPerPart = 320;

FetchHint RecordsOf(const BlockRange& range, std::size_t bytes, std::size_t at) {
  return {.row_bytes = static_cast<std::int64_t>(bytes),
          .stride = static_cast<std::int64_t>(at),
          .n_rows = range.n_blocks,
          .places = range.blocks};
}

std::int64_t DivCeil(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

// Gathers the exact rows into parts of about kRowsPerPart; longer runs are cut.
void JointScoring::CutExactRuns() {
  pieces_.clear();
  exact_parts_.clear();
  std::int64_t in_part = 0;
  for (const auto& [first, end] : coverage_.exact_runs) {
    for (std::int64_t at = first; at < end; at += kRowsPerPart) {
      const std::int64_t n = std::min(kRowsPerPart, end - at);
      if (exact_parts_.empty() || in_part + n > kRowsPerPart) {
        exact_parts_.push_back({pieces_.size(), pieces_.size()});
        in_part = 0;
      }
      pieces_.emplace_back(at, at + n);
      ++exact_parts_.back().end_run;
      in_part += n;
    }
  }
}

Status JointScoring::Prepare(const BlockPlan& plan, const JointQuery& query, Workspace& workspace) {
  plan_ = &plan;
  query_ = &query;
  coverage_.Find(plan, query.kv->n_kv, query.sees_all ? nullptr : query.visible);
  CutExactRuns();
  // A walk begins when the last part is done: there is one, be it empty.
  if (query.tree != nullptr && exact_parts_.empty()) exact_parts_.push_back({0, 0});
  n_blocks_ = query.tree != nullptr ? 0 : coverage_.n_blocks();
  chunk_blocks_ = std::max(kChunkBlocks, static_cast<int>(DivCeil(n_blocks_, kMaxChunks)));
  n_clusters_ = std::int64_t{n_blocks_} * plan.slots();
  n_chunks_ = static_cast<int>(DivCeil(n_blocks_, chunk_blocks_));
  n_exact_ = static_cast<int>(exact_parts_.size());
  n_exact_states_ = std::max(1, n_exact_);
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  const auto lay_out = [&](void* block) {
    ScratchLayout layout(block);
    const auto q_heads = static_cast<std::size_t>(shape_.q_heads);
    const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
    blocks_ = layout.Take<const std::byte*>(static_cast<std::size_t>(n_blocks_));
    qs_ = layout.Take<float>(q_heads * head_dim);
    estimates_ = layout.Take<float>(q_heads * n_clusters_);
    tails_ = layout.Take<float>(q_heads * n_clusters_);
    sums_ = layout.Take<EstimateSums>(q_heads * n_chunks_);
    shares_ = layout.Take<float>(kv_heads * n_clusters_);
    keys_ = layout.Take<float>(kv_heads * n_clusters_);
    block_shares_ = layout.Take<float>(kv_heads * n_blocks_);
    visible_ = layout.Take<const std::uint64_t*>(group);
    exact_ = StateArray(layout, kv_heads * n_exact_states_, group, head_dim);
    return layout.bytes();
  };
  void* block = workspace.impl().Reserve(ScratchUser::kLayer, lay_out(nullptr));
  if (block == nullptr) return {StatusCode::kOutOfMemory, std::string()};
  lay_out(block);

  for (int b = 0; b < n_blocks_; ++b) blocks_[b] = coverage_.usable[b] != 0 ? plan.data(b) : nullptr;
  for (int h = 0; h < shape_.q_heads; ++h) {
    const float* from = query.q + h * query.head_stride;
    for (int d = 0; d < head_dim; ++d) qs_[h * head_dim + d] = from[d] * query.params.scale;
  }
  for (int i = 0; i < group; ++i) visible_[i] = query.visible;
  if (n_exact_ == 0) {
    for (int h = 0; h < shape_.kv_heads; ++h) exact_.Cleared(h);
  }
  return Status::Ok();
}

BlockRange JointScoring::Range(int kv_head, int first_block, int n_blocks) const {
  BlockRange range;
  range.layout = &plan_->layout();
  range.blocks = blocks_ + first_block;
  range.keys_at = plan_->KeysAt(kv_head);
  range.values_at = plan_->ValuesAt(kv_head);
  range.n_blocks = n_blocks;
  return range;
}

BlockRange JointScoring::ChunkRange(int kv_head, int chunk) const {
  const int first = chunk * chunk_blocks_;
  return Range(kv_head, first, std::min(chunk_blocks_, n_blocks_ - first));
}

RunArgs JointScoring::ExactRun(int kv_head, std::pair<std::int64_t, std::int64_t> rows) const {
  const KvView& kv = *query_->kv;
  RunArgs args;
  args.head_dim = shape_.head_dim;
  args.n = shape_.group();
  args.q = queries(kv_head);
  args.softcap = query_->params.softcap;
  args.k = kv.KRow(rows.first, kv_head);
  args.v = kv.VRow(rows.first, kv_head);
  args.k_stride = kv.k_row_stride;
  args.v_stride = kv.v_row_stride;
  args.k_type = kv.k_type;
  args.v_type = kv.v_type;
  args.n_rows = rows.second - rows.first;
  args.visible = visible_;
  args.first_bit = rows.first;
  return args;
}

// What a part reads first: its longest stretch of exact rows, or its summaries.
std::pair<FetchHint, FetchHint> JointScoring::FirstReads(int kv_head, int part) const {
  if (part < n_exact_) {
    if (exact_parts_[part].first_run == exact_parts_[part].end_run) return {};
    const auto longest =
        std::max_element(pieces_.begin() + static_cast<std::ptrdiff_t>(exact_parts_[part].first_run),
                         pieces_.begin() + static_cast<std::ptrdiff_t>(exact_parts_[part].end_run),
                         [](const auto& a, const auto& b) { return a.second - a.first < b.second - b.first; });
    const RunArgs run = ExactRun(kv_head, *longest);
    return {{run.k, static_cast<std::int64_t>(RowBytes(run.k_type, run.head_dim)), run.k_stride, run.n_rows},
            {run.v, static_cast<std::int64_t>(RowBytes(run.v_type, run.head_dim)), run.v_stride, run.n_rows}};
  }
  const BlockRange range = ChunkRange(kv_head, part - n_exact_);
  return {RecordsOf(range, range.layout->key_bytes(), range.keys_at), {}};
}

void JointScoring::FetchOffsets(int kv_head, int block) const {
  const auto* offsets = reinterpret_cast<const std::byte*>(plan_->offsets(kv_head, block));
  const std::size_t bytes = static_cast<std::size_t>(plan_->slots() + 1) * sizeof(std::uint16_t);
  for (std::size_t at = 0; at < bytes; at += 64) hwy::Prefetch(offsets + at);
}

void JointScoring::Run(int kv_head, int part, int next_kv_head, int next_part) const {
  std::pair<FetchHint, FetchHint> next;
  if (next_part >= 0) next = FirstReads(next_kv_head, next_part);
  if (part < n_exact_) {
    const SoftmaxState state = exact_.Cleared(static_cast<std::size_t>(kv_head) * n_exact_states_ + part);
    const ExactPart& runs = exact_parts_[part];
    for (std::size_t r = runs.first_run; r < runs.end_run; ++r) {
      RunArgs args = ExactRun(kv_head, pieces_[r]);
      if (r + 1 == runs.end_run) {
        args.next_k = next.first;
        args.next_v = next.second;
      }
      AttendRun(args, state);
    }
    return;
  }
  const int chunk = part - n_exact_;
  const int first_head = kv_head * shape_.group();
  const BlockRange range = ChunkRange(kv_head, chunk);
  EstimateArgs args;
  args.n = shape_.group();
  args.q = qs_ + std::int64_t{first_head} * shape_.head_dim;
  args.tail_shrink = config_.tail_shrink;
  args.stride = n_clusters_;
  args.sums_stride = n_chunks_;
  args.next[0] = next.first;
  // Of most blocks little more than the mean value will be read.
  args.next[1] = RecordsOf(range, range.layout->value_frame_bytes(), range.values_at);
  // Whoever decides what opens looks up where the rows of clusters are.
  for (int b = 0; b < range.n_blocks; ++b) {
    if (range.blocks[b] != nullptr) FetchOffsets(kv_head, chunk * chunk_blocks_ + b);
  }
  const std::int64_t at = first_head * n_clusters_ + FirstCluster(chunk);
  EstimateClusters(range, args, estimates_ + at, tails_ + at, &Sums(first_head, chunk));
}

void JointScoring::Finish(int kv_head) const {
  const int group = shape_.group();
  const SoftmaxState total_exact = exact(kv_head);
  for (int part = 1; part < n_exact_; ++part) {
    MergeStates(shape_.head_dim, group, exact_[static_cast<std::size_t>(kv_head) * n_exact_states_ + part],
                total_exact);
  }
  const int first_head = kv_head * group;
  bool overflow = false;
  float factors[kMaxQHeads];
  float gauges[kMaxQHeads];
  for (int i = 0; i < group; ++i) {
    const int q_head = first_head + i;
    const float sink = query_->params.sinks != nullptr ? query_->params.sinks[q_head] : kNothing;
    float gauge = std::max(total_exact.max[i], sink);
    for (int c = 0; c < n_chunks_; ++c) gauge = std::max(gauge, Sums(q_head, c).gauge);
    gauges[i] = gauge;
    factors[i] = 0.0f;
    if (!(gauge > kNothing)) continue;
    float total = total_exact.sum[i] * std::exp(total_exact.max[i] - gauge) + std::exp(sink - gauge);
    for (int c = 0; c < n_chunks_; ++c) total += Sums(q_head, c).sum * std::exp(Sums(q_head, c).gauge - gauge);
    overflow |= !std::isfinite(total);
    factors[i] = 1.0f / (total * static_cast<float>(group));
  }
  for (int c = 0; c < n_chunks_; ++c) {
    float chunk_factors[kMaxQHeads];
    for (int i = 0; i < group; ++i) {
      const float chunk_gauge = Sums(first_head + i, c).gauge;
      chunk_factors[i] = chunk_gauge > kNothing ? factors[i] * std::exp(chunk_gauge - gauges[i]) : 0.0f;
    }
    const std::int64_t at = FirstCluster(c);
    SharesAndKeys(ChunkRange(kv_head, c), group, estimates_ + first_head * n_clusters_ + at, n_clusters_, chunk_factors,
                  shares_ + kv_head * n_clusters_ + at, keys_ + kv_head * n_clusters_ + at,
                  BlockShares(kv_head) + c * chunk_blocks_);
  }
  if (!overflow) return;
  // A query or a row whose logits overflow says nothing about masses: every cluster opens.
  float* shares = shares_ + kv_head * n_clusters_;
  float* keys = keys_ + kv_head * n_clusters_;
  for (std::int64_t c = 0; c < n_clusters_; ++c) {
    const int block = static_cast<int>(c / plan_->slots());
    const bool can_open = blocks_[block] != nullptr &&
                          plan_->layout().Keys(plan_->key_record(kv_head, block)).counts[c % plan_->slots()] > 0.0f;
    shares[c] = can_open ? 1.0f : 0.0f;
    keys[c] = can_open ? 1.0f : -1.0f;
  }
}

int JointScoring::FoldTail(int kv_head, int chunk, const float* weights, std::pair<FetchHint, FetchHint> next,
                           const SoftmaxState& state) const {
  const int group = shape_.group();
  const int first_head = kv_head * group;
  TailArgs args;
  args.n = group;
  args.weights = weights + FirstCluster(chunk);
  args.weights_stride = n_clusters_;
  args.block_shares = BlockShares(kv_head) + chunk * chunk_blocks_;
  args.next[0] = next.first;
  args.next[1] = next.second;
  const int read = FoldValueMeans(ChunkRange(kv_head, chunk), args, state.sum, state.num);
  for (int i = 0; i < group; ++i) {
    // A chunk without closed clusters stays empty: its gauge may belong to an estimate that overflowed.
    if (state.sum[i] > 0.0f) state.max[i] = Sums(first_head + i, chunk).gauge;
  }
  return read;
}

void JointScoring::FoldTailOf(int kv_head, std::span<const std::int32_t> clusters, float* scratch,
                              const SoftmaxState& state) const {
  const int group = shape_.group();
  const std::int64_t chunk_clusters = std::int64_t{chunk_blocks_} * plan_->slots();
  for (int i = 0; i < group; ++i) {
    const int q_head = kv_head * group + i;
    const float* tails = tails_ + q_head * n_clusters_;
    // Chunks with none of the clusters have no say: a gauge may belong to an estimate that overflowed.
    bool counts[kMaxChunks] = {};
    for (const std::int32_t c : clusters) counts[c / chunk_clusters] |= tails[c] > 0.0f;
    float gauge = kNothing;
    for (int chunk = 0; chunk < n_chunks_; ++chunk) {
      if (counts[chunk]) gauge = std::max(gauge, Sums(q_head, chunk).gauge);
    }
    float factors[kMaxChunks];
    for (int chunk = 0; chunk < n_chunks_; ++chunk) {
      factors[chunk] = counts[chunk] ? std::exp(Sums(q_head, chunk).gauge - gauge) : 0.0f;
    }
    float* weights = scratch + i * std::ssize(clusters);
    float sum = 0.0f;
    for (std::size_t j = 0; j < clusters.size(); ++j) {
      weights[j] = tails[clusters[j]] * factors[clusters[j] / chunk_clusters];
      sum += weights[j];
    }
    state.max[i] = gauge;
    state.sum[i] = sum;
  }
  AddValueMeans(Range(kv_head, 0, n_blocks_), clusters, group, scratch, BlockShares(kv_head), state.num);
}

}  // namespace scsa
