// SPDX-License-Identifier: Apache-2.0
#include "core/joint_operator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "core/joint_kernels.h"
#include "core/kernels.h"
#include "core/parallel.h"
#include "core/plan.h"
#include "core/softmax_state.h"

namespace scsa {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
// Sizes of the parallel tasks. They depend on the plan and on the opened set alone, never on the thread count.
constexpr int kScoreBlocks = 8;             // blocks whose clusters one task scores, or whose tail it folds
constexpr std::int64_t kRowsPerTask = 256;  // rows that one task reads exactly

std::int64_t DivCeil(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Status OutOfMemory() { return {StatusCode::kOutOfMemory, std::string()}; }

// `count` states of n vectors each, one after the other.
class StateArray {
 public:
  StateArray() = default;
  StateArray(ScratchLayout& layout, std::size_t count, int n, int head_dim)
      : n_(n),
        head_dim_(head_dim),
        max_(layout.Take<float>(count * n)),
        sum_(layout.Take<float>(count * n)),
        num_(layout.Take<float>(count * n * head_dim)) {}

  SoftmaxState operator[](std::size_t i) const {
    const std::size_t first = i * n_;
    return {max_ + first, sum_ + first, num_ + first * head_dim_};
  }
  SoftmaxState Cleared(std::size_t i) const {
    ClearStates((*this)[i], n_, head_dim_);
    return (*this)[i];
  }

 private:
  int n_ = 0;
  int head_dim_ = 0;
  float* max_ = nullptr;
  float* sum_ = nullptr;
  float* num_ = nullptr;
};

float Sum(const float* values, std::int64_t n) {
  float sum = 0.0f;
  for (std::int64_t i = 0; i < n; ++i) sum += values[i];
  return sum;
}

std::uint64_t CountVisible(const std::uint64_t* visible, std::int64_t first, std::int64_t end) {
  std::uint64_t count = 0;
  for (std::int64_t at = first; at < end; at += 64) {
    const std::int64_t n = end - at;
    const std::uint64_t mask = n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
    count += std::popcount(visible[at / 64] & mask);
  }
  return count;
}

// |output - exact| / |exact|. 0 / 0 counts as 0, anything that is not a number as infinity.
float RelativeError(const float* output, const float* exact, int head_dim) {
  double difference = 0;
  double norm = 0;
  for (int d = 0; d < head_dim; ++d) {
    const double delta = static_cast<double>(output[d]) - exact[d];
    difference += delta * delta;
    norm += static_cast<double>(exact[d]) * exact[d];
  }
  if (difference == 0) return 0;
  const double error = std::sqrt(difference / norm);
  return std::isnan(error) ? std::numeric_limits<float>::infinity() : static_cast<float>(error);
}

}  // namespace

// What the first phase leaves: exact states and cluster estimates. Query heads are numbered through the whole layer.
struct JointOperator::Scoring {
  int n_blocks = 0;  // blocks that take part: up to the last usable one
  std::int64_t n_clusters = 0;
  int n_chunks = 0;              // of kScoreBlocks blocks
  std::int64_t n_exact = 0;      // exact pieces per KV head
  float* qs = nullptr;           // [q_heads][head_dim], scaled
  float* estimates = nullptr;    // [q_heads][n_clusters], relative to the gauge of head and chunk
  float* tails = nullptr;        // the same
  EstimateSums* sums = nullptr;  // [q_heads][n_chunks]
  float* shares = nullptr;       // [kv_heads][n_clusters]
  float* counts = nullptr;       // the same: members, 0 in blocks that are not usable
  StateArray exact;              // [kv_heads][n_exact], merged into the first of each KV head
};

struct JointOperator::ReplayStates {
  StateArray opened;         // [kv_heads]
  StateArray closed;         // [kv_heads][segments]
  StateArray total;          // [kv_heads]
  float* weights = nullptr;  // [q_heads][n_clusters]
};

JointOperator::JointOperator(const Shape& shape, const Config& config)
    : shape_(shape), config_(config), heads_(shape.kv_heads) {}
JointOperator::~JointOperator() = default;

bool JointOperator::AnyUsable(const BlockPlan& plan, const JointQuery& query) {
  FindUsable(plan, query);
  return std::ranges::any_of(usable_, [](std::uint8_t usable) { return usable != 0; });
}

void JointOperator::FindUsable(const BlockPlan& plan, const JointQuery& query) {
  const std::int64_t n_kv = query.kv->n_kv;
  const int words_per_block = plan.block_rows() / 64;
  usable_.assign(plan.n_blocks(), 0);
  int last = 0;
  for (int b = 0; b < plan.n_blocks(); ++b) {
    if (!plan.built(b) || plan.EndRow(b) > n_kv) continue;
    std::uint64_t all = ~std::uint64_t{0};
    for (int w = 0; w < words_per_block; ++w) {
      std::uint64_t word = query.visible[static_cast<std::int64_t>(b) * words_per_block + w];
      // The block does not cover the first rows.
      const std::int64_t uncovered = plan.FirstRow(b) - (std::int64_t{b} * plan.block_rows() + std::int64_t{w} * 64);
      if (uncovered >= 64) {
        word = ~std::uint64_t{0};
      } else if (uncovered > 0) {
        word |= (std::uint64_t{1} << uncovered) - 1;
      }
      all &= word;
    }
    if (all == ~std::uint64_t{0}) {
      usable_[b] = 1;
      last = b + 1;
    }
  }
  usable_.resize(last);

  exact_runs_.clear();
  if (last > 0 && usable_[0] != 0 && plan.FirstRow(0) > 0) exact_runs_.emplace_back(0, plan.FirstRow(0));
  for (int b = 0; b < last;) {
    if (usable_[b] != 0) {
      ++b;
      continue;
    }
    int end = b;
    while (end < last && usable_[end] == 0) ++end;
    exact_runs_.emplace_back(std::int64_t{b} * plan.block_rows(), std::int64_t{end} * plan.block_rows());
    b = end;
  }
  const std::int64_t covered = std::int64_t{last} * plan.block_rows();
  if (covered < n_kv) exact_runs_.emplace_back(covered, n_kv);
}

Status JointOperator::Score(const BlockPlan& plan, const JointQuery& query, int n_threads, Workspace& workspace,
                            Scoring* scoring) {
  FindUsable(plan, query);
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  // Long runs are cut so that threads share them.
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (const auto& [first, end] : exact_runs_) {
    for (std::int64_t at = first; at < end; at += kRowsPerTask)
      pieces.emplace_back(at, std::min(end, at + kRowsPerTask));
  }

  Scoring s;
  s.n_blocks = static_cast<int>(usable_.size());
  s.n_clusters = std::int64_t{s.n_blocks} * plan.slots();
  s.n_chunks = static_cast<int>(DivCeil(s.n_blocks, kScoreBlocks));
  s.n_exact = std::max<std::int64_t>(1, std::ssize(pieces));
  float* squares = nullptr;
  float* spreads = nullptr;
  const std::uint64_t** visible = nullptr;
  const auto lay_out = [&](void* block) {
    ScratchLayout layout(block);
    const auto q_heads = static_cast<std::size_t>(shape_.q_heads);
    s.qs = layout.Take<float>(q_heads * head_dim);
    squares = layout.Take<float>(q_heads * head_dim);
    spreads = layout.Take<float>(q_heads * s.n_blocks);
    s.estimates = layout.Take<float>(q_heads * s.n_clusters);
    s.tails = layout.Take<float>(q_heads * s.n_clusters);
    s.sums = layout.Take<EstimateSums>(q_heads * s.n_chunks);
    s.shares = layout.Take<float>(shape_.kv_heads * s.n_clusters);
    s.counts = layout.Take<float>(shape_.kv_heads * s.n_clusters);
    visible = layout.Take<const std::uint64_t*>(group);
    s.exact = StateArray(layout, shape_.kv_heads * s.n_exact, group, head_dim);
    return layout.bytes();
  };
  void* block = workspace.impl().Reserve(ScratchUser::kLayer, lay_out(nullptr));
  if (block == nullptr) return OutOfMemory();
  lay_out(block);

  for (int h = 0; h < shape_.q_heads; ++h) {
    const float* from = query.q + h * query.head_stride;
    for (int d = 0; d < head_dim; ++d) {
      const float x = from[d] * query.params.scale;
      s.qs[h * head_dim + d] = x;
      squares[h * head_dim + d] = x * x;
    }
  }
  for (int i = 0; i < group; ++i) visible[i] = query.visible;

  const std::int64_t tasks_per_head = s.n_exact + s.n_chunks;
  ParallelFor(n_threads, tasks_per_head * shape_.kv_heads, [&](std::int64_t task, int) {
    const auto kv_head = static_cast<int>(task % shape_.kv_heads);
    const std::int64_t part = task / shape_.kv_heads;
    const float* qs = s.qs + std::int64_t{kv_head} * group * head_dim;
    if (part < s.n_exact) {
      const SoftmaxState state = s.exact.Cleared(kv_head * s.n_exact + part);
      if (part >= std::ssize(pieces)) return;
      const auto [first, end] = pieces[part];
      const KvView& kv = *query.kv;
      RunArgs args;
      args.head_dim = head_dim;
      args.n = group;
      args.q = qs;
      args.softcap = query.params.softcap;
      args.k = kv.KRow(first, kv_head);
      args.v = kv.VRow(first, kv_head);
      args.k_stride = kv.k_row_stride;
      args.v_stride = kv.v_row_stride;
      args.k_type = kv.k_type;
      args.v_type = kv.v_type;
      args.n_rows = end - first;
      args.visible = visible;
      args.first_bit = first;
      AttendRun(args, state);
      return;
    }
    const auto chunk = static_cast<int>(part - s.n_exact);
    const int first_block = chunk * kScoreBlocks;
    const int n_blocks = std::min(kScoreBlocks, s.n_blocks - first_block);
    const std::int64_t first_cluster = std::int64_t{first_block} * plan.slots();
    const HeadSummaries& summaries = plan.head(kv_head);
    const auto row_bytes = static_cast<std::int64_t>(RowBytes(DType::kQ8_0, head_dim));
    float* estimates = s.estimates + std::int64_t{kv_head} * group * s.n_clusters + first_cluster;
    ScoreRows(head_dim, group, qs, summaries.centroids.data() + first_cluster * row_bytes, row_bytes, DType::kQ8_0,
              std::int64_t{n_blocks} * plan.slots(), estimates, s.n_clusters);
    for (int i = 0; i < group; ++i) {
      const std::int64_t q_head = std::int64_t{kv_head} * group + i;
      float* head_spreads = spreads + q_head * s.n_blocks + first_block;
      for (int b = 0; b < n_blocks; ++b) {
        head_spreads[b] = Dot(summaries.shapes.data() + std::int64_t{first_block + b} * head_dim,
                              squares + q_head * head_dim, head_dim);
      }
      const EstimateArgs args{.n_blocks = n_blocks,
                              .slots = plan.slots(),
                              .usable = usable_.data() + first_block,
                              .spreads = head_spreads,
                              .log_counts = summaries.log_counts.data() + first_cluster,
                              .half_traces = summaries.half_traces.data() + first_cluster,
                              .tail_shrink = config_.tail_shrink};
      s.sums[q_head * s.n_chunks + chunk] =
          EstimateClusters(args, estimates + i * s.n_clusters, s.tails + q_head * s.n_clusters + first_cluster);
    }
  });
  *scoring = s;
  return Status::Ok();
}

// Fills scoring.shares and counts of the KV head. The exact pieces are merged into the first one on the way.
void JointOperator::Shares(const BlockPlan& plan, const JointQuery& query, int kv_head, const Scoring& s) {
  const int group = shape_.group();
  const SoftmaxState exact = s.exact[kv_head * s.n_exact];
  for (std::int64_t piece = 1; piece < s.n_exact; ++piece) {
    MergeStates(shape_.head_dim, group, s.exact[kv_head * s.n_exact + piece], exact);
  }
  float* counts = s.counts + kv_head * s.n_clusters;
  std::copy_n(plan.head(kv_head).counts.data(), s.n_clusters, counts);
  for (int b = 0; b < s.n_blocks; ++b) {
    if (usable_[b] == 0) std::fill_n(counts + std::int64_t{b} * plan.slots(), plan.slots(), 0.0f);
  }
  float* shares = s.shares + kv_head * s.n_clusters;
  std::fill_n(shares, s.n_clusters, 0.0f);
  for (int i = 0; i < group; ++i) {
    const std::int64_t q_head = std::int64_t{kv_head} * group + i;
    const EstimateSums* sums = s.sums + q_head * s.n_chunks;
    const float sink = query.params.sinks != nullptr ? query.params.sinks[q_head] : kNothing;
    float gauge = std::max(exact.max[i], sink);
    for (int c = 0; c < s.n_chunks; ++c) gauge = std::max(gauge, sums[c].gauge);
    if (!(gauge > kNothing)) continue;
    float total = exact.sum[i] * std::exp(exact.max[i] - gauge) + std::exp(sink - gauge);
    for (int c = 0; c < s.n_chunks; ++c) total += sums[c].sum * std::exp(sums[c].gauge - gauge);
    if (!std::isfinite(total)) {
      // A query or a row whose logits overflow says nothing about masses: every cluster opens.
      for (std::int64_t c = 0; c < s.n_clusters; ++c) shares[c] = counts[c] > 0.0f ? 1.0f : 0.0f;
      return;
    }
    for (int c = 0; c < s.n_chunks; ++c) {
      const std::int64_t first = std::int64_t{c} * kScoreBlocks * plan.slots();
      const std::int64_t n = std::min<std::int64_t>(std::int64_t{kScoreBlocks} * plan.slots(), s.n_clusters - first);
      const float factor = std::exp(sums[c].gauge - gauge) / (total * static_cast<float>(group));
      AddScaled(shares + first, s.estimates + q_head * s.n_clusters + first, factor, n);
    }
  }
}

// Appends the rows of the clusters: cache rows, or places in the packed copies.
void JointOperator::ExpandRows(const BlockPlan& plan, int kv_head, std::span<const std::int32_t> clusters,
                               std::vector<std::int32_t>& rows) const {
  const HeadSummaries& summaries = plan.head(kv_head);
  const bool packed = config_.packed_format != PackedFormat::kNone;
  for (const std::int32_t cluster : clusters) {
    const int block = cluster / plan.slots();
    const std::uint16_t* offsets =
        summaries.offsets.data() + std::int64_t{block} * (plan.slots() + 1) + cluster % plan.slots();
    const std::int32_t first = block * plan.block_rows();
    const std::uint16_t* members = summaries.members.data() + first;
    for (std::int32_t i = offsets[0]; i < offsets[1]; ++i) rows.push_back(first + (packed ? i : members[i]));
  }
}

RunArgs JointOperator::OpenedRun(const BlockPlan& plan, const JointQuery& query, int kv_head, const Scoring& s,
                                 std::span<const std::int32_t> rows) const {
  const KvView& kv = *query.kv;
  RunArgs args;
  args.head_dim = shape_.head_dim;
  args.n = shape_.group();
  args.q = s.qs + std::int64_t{kv_head} * shape_.group() * shape_.head_dim;
  args.softcap = query.params.softcap;
  if (config_.packed_format == PackedFormat::kNone) {
    args.k = kv.KRow(0, kv_head);
    args.v = kv.VRow(0, kv_head);
    args.k_stride = kv.k_row_stride;
    args.v_stride = kv.v_row_stride;
    args.k_type = kv.k_type;
    args.v_type = kv.v_type;
  } else {
    args.k_type = args.v_type = PackedType(config_.packed_format);
    args.k = plan.head(kv_head).packed_k.data();
    args.v = plan.head(kv_head).packed_v.data();
    args.k_stride = args.v_stride = static_cast<std::int64_t>(RowBytes(args.k_type, shape_.head_dim));
  }
  args.rows = rows.data();
  args.n_rows = std::ssize(rows);
  return args;
}

Status JointOperator::Attend(const BlockPlan& plan, const JointQuery& query, std::span<const float> taus, int n_threads,
                             Workspace& workspace, float* out, std::int64_t out_head_stride, LayerStats& stats) {
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  Scoring s;
  if (Status status = Score(plan, query, n_threads, workspace, &s); !status.ok()) return status;

  std::atomic<bool> out_of_memory{false};
  ParallelFor(n_threads, shape_.kv_heads, [&](std::int64_t task, int) {
    const auto kv_head = static_cast<int>(task);
    Head& head = heads_[kv_head];
    try {
      Shares(plan, query, kv_head, s);
      head.selector.Select({s.shares + kv_head * s.n_clusters, static_cast<std::size_t>(s.n_clusters)},
                           {s.counts + kv_head * s.n_clusters, static_cast<std::size_t>(s.n_clusters)}, taus[kv_head],
                           head.opened);
      head.rows.clear();
      ExpandRows(plan, kv_head, head.opened, head.rows);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
      return;
    }
    // Opened clusters have no tail.
    for (const std::int32_t cluster : head.opened) {
      for (int i = 0; i < group; ++i) s.tails[(std::int64_t{kv_head} * group + i) * s.n_clusters + cluster] = 0.0f;
    }
  });
  if (out_of_memory) return OutOfMemory();

  // Tasks of the second sweep: pieces of the opened rows, then chunks of the tail, KV head after KV head.
  std::int64_t n_tasks = 0;
  std::array<std::int64_t, kMaxKvHeads + 1> first_task{};
  for (int h = 0; h < shape_.kv_heads; ++h) {
    n_tasks += DivCeil(std::ssize(heads_[h].rows), kRowsPerTask) + s.n_chunks;
    first_task[h + 1] = n_tasks;
  }
  StateArray parts;
  const auto lay_out = [&](void* block) {
    ScratchLayout layout(block);
    parts = StateArray(layout, n_tasks, group, head_dim);
    return layout.bytes();
  };
  void* block = workspace.impl().Reserve(ScratchUser::kSelect, lay_out(nullptr));
  if (block == nullptr) return OutOfMemory();
  lay_out(block);

  ParallelFor(n_threads, n_tasks, [&](std::int64_t task, int) {
    int kv_head = 0;
    while (task >= first_task[kv_head + 1]) ++kv_head;
    const std::int64_t part = task - first_task[kv_head];
    const std::int64_t n_pieces = first_task[kv_head + 1] - first_task[kv_head] - s.n_chunks;
    const SoftmaxState state = parts.Cleared(task);
    if (part < n_pieces) {
      const std::span<const std::int32_t> rows(heads_[kv_head].rows);
      AttendRun(OpenedRun(plan, query, kv_head, s,
                          rows.subspan(part * kRowsPerTask,
                                       std::min<std::int64_t>(kRowsPerTask, std::ssize(rows) - part * kRowsPerTask))),
                state);
      return;
    }
    FoldTail(plan, kv_head, s, static_cast<int>(part - n_pieces), state);
  });

  for (int h = 0; h < shape_.kv_heads; ++h) {
    const SoftmaxState total = s.exact[h * s.n_exact];
    for (std::int64_t task = first_task[h]; task < first_task[h + 1]; ++task) {
      MergeStates(head_dim, group, parts[task], total);
    }
    for (int i = 0; i < group; ++i) {
      const std::int64_t q_head = std::int64_t{h} * group + i;
      WriteHeadOutput(total, i, head_dim, query.params.sinks == nullptr ? nullptr : query.params.sinks + q_head,
                      out + q_head * out_head_stride);
    }
  }
  Count(plan, query, s, stats);
  return Status::Ok();
}

// Folds the closed clusters of one chunk into an empty state of the KV head's query heads.
void JointOperator::FoldTail(const BlockPlan& plan, int kv_head, const Scoring& s, int chunk,
                             const SoftmaxState& state) const {
  const std::int64_t first = std::int64_t{chunk} * kScoreBlocks * plan.slots();
  const std::int64_t n = std::min<std::int64_t>(std::int64_t{kScoreBlocks} * plan.slots(), s.n_clusters - first);
  const int group = shape_.group();
  const float* tails = s.tails + std::int64_t{kv_head} * group * s.n_clusters + first;
  for (int i = 0; i < group; ++i) {
    state.sum[i] = Sum(tails + i * s.n_clusters, n);
    // A chunk without closed clusters stays empty: its gauge may belong to an estimate that overflowed.
    if (state.sum[i] > 0.0f) state.max[i] = s.sums[(std::int64_t{kv_head} * group + i) * s.n_chunks + chunk].gauge;
  }
  const auto row_bytes = static_cast<std::int64_t>(RowBytes(DType::kQ8_0, shape_.head_dim));
  AccumulateRows(shape_.head_dim, group, tails, s.n_clusters, plan.head(kv_head).value_means.data() + first * row_bytes,
                 row_bytes, DType::kQ8_0, nullptr, n, state.num);
}

// What one sparse call read, for the counters.
void JointOperator::Count(const BlockPlan& plan, const JointQuery& query, const Scoring& s, LayerStats& stats) const {
  const KvView& kv = *query.kv;
  std::uint64_t exact_rows = 0;
  for (const auto& [first, end] : exact_runs_) exact_rows += CountVisible(query.visible, first, end);
  std::uint64_t usable_rows = 0;
  std::uint64_t usable_blocks = 0;
  for (int b = 0; b < s.n_blocks; ++b) {
    if (usable_[b] == 0) continue;
    usable_rows += plan.EndRow(b) - plan.FirstRow(b);
    ++usable_blocks;
  }
  const std::uint64_t cache_row = RowBytes(kv.k_type, shape_.head_dim) + RowBytes(kv.v_type, shape_.head_dim);
  const std::uint64_t opened_row = config_.packed_format == PackedFormat::kNone
                                       ? cache_row
                                       : 2 * RowBytes(PackedType(config_.packed_format), shape_.head_dim);
  const auto group = static_cast<std::uint64_t>(shape_.group());
  for (const Head& head : heads_) {
    stats.stat_opened_rows += group * head.rows.size();
    stats.stat_exact_rows += group * exact_rows;
    stats.stat_scored += group * usable_blocks * plan.slots();
    stats.stat_calls += group;
    stats.union_rows += head.rows.size() + exact_rows;
    stats.visible_rows += exact_rows + usable_rows;
    stats.bytes_read +=
        head.rows.size() * opened_row + exact_rows * cache_row + usable_blocks * plan.SummaryBytesPerBlock();
  }
}

// The thresholds' opened sets are nested, so the clusters in opening order fall into segments: segment t is open from
// threshold t on, the last one never. Each is read once as opened rows and once as a tail.
void JointOperator::ReplayHead(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                               int kv_head, const Scoring& s, const ReplayStates& states, const float* exact,
                               std::int64_t exact_head_stride, std::span<float> errors) {
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  const auto n_thresholds = static_cast<std::int64_t>(thresholds.size());
  const std::int64_t n_segments = n_thresholds + 1;
  const HeadSummaries& summaries = plan.head(kv_head);
  Head& head = heads_[kv_head];
  Shares(plan, query, kv_head, s);
  head.counts.resize(n_segments);
  head.selector.Order({s.shares + kv_head * s.n_clusters, static_cast<std::size_t>(s.n_clusters)},
                      {s.counts + kv_head * s.n_clusters, static_cast<std::size_t>(s.n_clusters)}, thresholds,
                      head.opened, std::span(head.counts).first(n_thresholds));
  head.counts.back() = static_cast<std::int32_t>(head.opened.size());
  const std::span<const std::int32_t> order(head.opened);
  const auto segment = [&](std::int64_t t) {
    const std::int32_t begin = t == 0 ? 0 : head.counts[t - 1];
    return order.subspan(begin, head.counts[t] - begin);
  };

  const auto row_bytes = static_cast<std::int64_t>(RowBytes(DType::kQ8_0, head_dim));
  for (std::int64_t t = 0; t < n_segments; ++t) {
    const SoftmaxState closed = states.closed.Cleared(kv_head * n_segments + t);
    const std::span<const std::int32_t> clusters = segment(t);
    const std::int64_t n = std::ssize(clusters);
    if (n == 0) continue;
    float* weights = states.weights + std::int64_t{kv_head} * group * s.n_clusters;
    for (int i = 0; i < group; ++i) {
      const std::int64_t q_head = std::int64_t{kv_head} * group + i;
      const EstimateSums* sums = s.sums + q_head * s.n_chunks;
      const float* tails = s.tails + q_head * s.n_clusters;
      float gauge = kNothing;
      for (int c = 0; c < s.n_chunks; ++c) gauge = std::max(gauge, sums[c].gauge);
      closed.max[i] = gauge;
      for (std::int64_t j = 0; j < n; ++j) {
        const int chunk = clusters[j] / (kScoreBlocks * plan.slots());
        weights[i * n + j] = tails[clusters[j]] * std::exp(sums[chunk].gauge - gauge);
      }
      closed.sum[i] = Sum(weights + i * n, n);
    }
    AccumulateRows(head_dim, group, weights, n, summaries.value_means.data(), row_bytes, DType::kQ8_0, clusters.data(),
                   n, closed.num);
  }

  // `open` grows from the exact rows by one segment per threshold.
  const SoftmaxState open = states.opened[kv_head];
  ClearStates(open, group, head_dim);
  MergeStates(head_dim, group, s.exact[kv_head * s.n_exact], open);
  std::array<float, kMaxHeadDim> output;
  for (std::int64_t t = 0; t < n_thresholds; ++t) {
    head.rows.clear();
    ExpandRows(plan, kv_head, segment(t), head.rows);
    if (!head.rows.empty()) AttendRun(OpenedRun(plan, query, kv_head, s, head.rows), open);
    const SoftmaxState total = states.total.Cleared(kv_head);
    MergeStates(head_dim, group, open, total);
    for (std::int64_t later = t + 1; later < n_segments; ++later) {
      MergeStates(head_dim, group, states.closed[kv_head * n_segments + later], total);
    }
    for (int i = 0; i < group; ++i) {
      const std::int64_t q_head = std::int64_t{kv_head} * group + i;
      WriteHeadOutput(total, i, head_dim, query.params.sinks == nullptr ? nullptr : query.params.sinks + q_head,
                      output.data());
      errors[q_head * n_thresholds + t] = RelativeError(output.data(), exact + q_head * exact_head_stride, head_dim);
    }
  }
}

Status JointOperator::Replay(const BlockPlan& plan, const JointQuery& query, std::span<const float> thresholds,
                             const float* exact, std::int64_t exact_head_stride, int n_threads, Workspace& workspace,
                             std::span<float> errors) {
  const int group = shape_.group();
  const int head_dim = shape_.head_dim;
  const auto n_thresholds = static_cast<int>(thresholds.size());
  Scoring s;
  if (Status status = Score(plan, query, n_threads, workspace, &s); !status.ok()) return status;

  const int n_segments = n_thresholds + 1;
  ReplayStates states;
  const auto lay_out = [&](void* block) {
    ScratchLayout layout(block);
    const auto kv_heads = static_cast<std::size_t>(shape_.kv_heads);
    states.opened = StateArray(layout, kv_heads, group, head_dim);
    states.closed = StateArray(layout, kv_heads * n_segments, group, head_dim);
    states.total = StateArray(layout, kv_heads, group, head_dim);
    states.weights = layout.Take<float>(shape_.q_heads * s.n_clusters);
    return layout.bytes();
  };
  void* block = workspace.impl().Reserve(ScratchUser::kCalibration, lay_out(nullptr));
  if (block == nullptr) return OutOfMemory();
  lay_out(block);

  std::atomic<bool> out_of_memory{false};
  ParallelFor(n_threads, shape_.kv_heads, [&](std::int64_t task, int) {
    const auto kv_head = static_cast<int>(task);
    try {
      ReplayHead(plan, query, thresholds, kv_head, s, states, exact, exact_head_stride, errors);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  });
  return out_of_memory ? OutOfMemory() : Status::Ok();
}

}  // namespace scsa
