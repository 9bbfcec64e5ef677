// SPDX-License-Identifier: Apache-2.0
#include "core/step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <new>
#include <string>

#include "core/kernels.h"
#include "core/parallel.h"
#include "core/softmax_state.h"
#include "core/step_parts.h"
#include "core/workspace.h"

namespace scsa {

using namespace step_parts;

namespace {

constexpr std::int64_t kExactPieceRows = 256;  // a multiple of 64

bool IsVisible(const VisibleSets& visible, std::int64_t row) {
  return visible.words == nullptr || ((visible.words[row / 64] >> (row % 64)) & 1) != 0;
}

// A fixed share of the sweep: n_rows rows of the runs of one KV head from row `offset` of run `run` on.
struct SweepPiece {
  int kv_head = 0;
  std::int64_t run = 0;
  std::int64_t offset = 0;
  std::int64_t n_rows = 0;
};

void AttendCacheRun(const StepArgs& args, const Prepared& prepared, int kv_head, const CacheRun& run,
                    const std::uint64_t* const* visible, const SoftmaxState& state) {
  RunArgs rows;
  rows.head_dim = prepared.head_dim;
  rows.n = prepared.group;
  rows.q = prepared.qs + std::int64_t{kv_head} * prepared.group * prepared.head_dim;
  rows.k = args.kv.KRow(run.begin, kv_head);
  rows.v = args.kv.VRow(run.begin, kv_head);
  rows.k_stride = args.kv.k_row_stride;
  rows.v_stride = args.kv.v_row_stride;
  rows.k_type = args.kv.k_type;
  rows.v_type = args.kv.v_type;
  rows.n_rows = run.n_rows;
  if (run.masked) {
    rows.visible = visible;
    rows.first_bit = run.begin;
  }
  AttendRun(rows, state);
}

double LogExactMass(const SoftmaxState& exact, float sink) {
  const double gauge = std::max(exact.max[0], sink);
  if (gauge == -std::numeric_limits<double>::infinity()) return gauge;
  return gauge + std::log(std::exp(exact.max[0] - gauge) * exact.sum[0] + std::exp(sink - gauge));
}

}  // namespace

Status step_parts::Prepare(const StepArgs& args, Prepared* out) {
  const int q_heads = args.shape.q_heads;
  const int kv_heads = args.shape.kv_heads;
  const int head_dim = args.shape.head_dim;
  const int group = args.shape.group();
  const int rank = args.config.rank;
  const int n_clusters = Root(args.regions).end;
  const int n_estimated = args.hierarchical ? 0 : n_clusters;
  const std::int64_t n_runs = std::ssize(args.exact_runs);
  const std::int64_t n_estimated_regions = args.hierarchical ? 0 : std::ssize(args.regions);
  const int blocks_per_q = (head_dim + kQ8BlockSize - 1) / kQ8BlockSize;
  const bool quantize = args.config.packed_format == PackedFormat::kQ8_0;

  Prepared p;
  SoftmaxState pieces;
  std::int8_t* quantized_values = nullptr;
  float* quantized_scales = nullptr;
  float* scratch = nullptr;
  const std::uint64_t** visible = nullptr;
  const auto lay_out = [&](void* memory) {
    ScratchLayout layout(memory);
    p.qs = layout.Take<float>(std::size_t{1} * q_heads * head_dim);
    p.qs_squared = layout.Take<float>(std::size_t{1} * q_heads * head_dim);
    p.quantized = quantize ? layout.Take<QuantizedQuery>(q_heads) : nullptr;
    quantized_values = layout.Take<std::int8_t>(std::size_t{1} * q_heads * blocks_per_q * kQ8BlockSize);
    quantized_scales = layout.Take<float>(std::size_t{1} * q_heads * blocks_per_q);
    p.estimates.log_tail = layout.Take<float>(std::size_t{1} * q_heads * n_estimated);
    p.estimates.priority = layout.Take<float>(std::size_t{1} * q_heads * n_estimated);
    p.estimates.stride = n_estimated;
    scratch = layout.Take<float>(EstimateScratch(q_heads, n_estimated, rank));
    p.exact = TakeStates(layout, q_heads, head_dim);
    p.log_exact_mass = layout.Take<double>(q_heads);
    pieces = TakeStates(layout, n_runs * q_heads, head_dim);
    visible = layout.Take<const std::uint64_t*>(group);
    return layout.bytes();
  };
  void* memory = Reserve(args, ScratchUser::kLayer, lay_out(nullptr));
  if (memory == nullptr) return OutOfMemory();
  lay_out(memory);
  p.group = group;
  p.head_dim = head_dim;
  p.n_clusters = n_clusters;

  for (int h = 0; h < q_heads; ++h) {
    const float* q = args.q.data + h * args.q.head_stride;
    float* qs = p.qs + std::int64_t{h} * head_dim;
    for (int d = 0; d < head_dim; ++d) {
      qs[d] = args.params.scale * q[d];
      p.qs_squared[std::int64_t{h} * head_dim + d] = qs[d] * qs[d];
    }
    if (quantize) {
      std::int8_t* values = quantized_values + std::int64_t{h} * blocks_per_q * kQ8BlockSize;
      float* scales = quantized_scales + std::int64_t{h} * blocks_per_q;
      QuantizeQuery(q, head_dim, args.params.scale, values, scales);
      p.quantized[h] = {values, scales};
    }
  }
  std::fill_n(visible, group, args.visible.words);

  // Tasks: every exact run and every block of every KV head.
  const std::int64_t per_head = n_runs + n_estimated_regions;
  ParallelFor(args.n_threads, per_head * kv_heads, [&](std::int64_t task, int) {
    const int kv_head = static_cast<int>(task / per_head);
    const std::int64_t item = task % per_head;
    const std::int64_t first_q = std::int64_t{kv_head} * group;
    if (item < n_runs) {
      const SoftmaxState state = At(pieces, (kv_head * n_runs + item) * group, head_dim);
      ClearStates(state, group, head_dim);
      AttendCacheRun(args, p, kv_head, args.exact_runs[item], visible, state);
      return;
    }
    const Region& region = args.regions[item - n_runs];
    const std::int64_t cluster = region.first_cluster;
    const std::int64_t at = first_q * n_clusters + cluster;
    const Estimates estimates{p.estimates.log_tail + at, p.estimates.priority + at, n_clusters};
    EstimateBlock(region.heads[kv_head], head_dim, rank, group, p.qs + first_q * head_dim,
                  p.qs_squared + first_q * head_dim, estimates,
                  scratch + EstimateScratch(group, kv_head * n_clusters + static_cast<int>(cluster), rank));
  });

  ClearStates(p.exact, q_heads, head_dim);
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const SoftmaxState state = At(p.exact, std::int64_t{kv_head} * group, head_dim);
    for (std::int64_t run = 0; run < n_runs; ++run) {
      MergeStates(head_dim, group, At(pieces, (kv_head * n_runs + run) * group, head_dim), state);
    }
  }
  for (int h = 0; h < q_heads; ++h) {
    p.log_exact_mass[h] = LogExactMass(At(p.exact, h, head_dim), SinkLogit(args.params, h));
  }
  *out = p;
  return Status::Ok();
}

void step_parts::AttendPacked(const StepArgs& args, int head_dim, int n, const float* q,
                              const QuantizedQuery* quantized, const Block& block, std::int64_t begin, std::int64_t end,
                              const SoftmaxState& state) {
  const DType type = PackedType(args.config.packed_format);
  const std::int64_t row_bytes = static_cast<std::int64_t>(RowBytes(type, head_dim));
  RunArgs rows;
  rows.head_dim = head_dim;
  rows.n = n;
  rows.q = q;
  rows.quantized = quantized;
  rows.k = block.packed_k.get() + begin * row_bytes;
  rows.v = block.packed_v.get() + begin * row_bytes;
  rows.k_stride = row_bytes;
  rows.v_stride = row_bytes;
  rows.k_type = type;
  rows.v_type = type;
  rows.n_rows = end - begin;
  AttendRun(rows, state);
}

namespace {

// The same by any set of heads. state holds the whole group.
void AttendPackedBySet(const StepArgs& args, const Prepared& p, int kv_head, const PackedRun& run, std::int64_t begin,
                       std::int64_t end, const SoftmaxState& state, const Gathered& gathered) {
  const std::int64_t first_q = std::int64_t{kv_head} * p.group;
  const int n = static_cast<int>(run.heads.count());
  int first = 0;
  while (!run.heads.test(first)) ++first;
  int last = p.group - 1;
  while (!run.heads.test(last)) --last;
  const QuantizedQuery* quantized = p.quantized == nullptr ? nullptr : p.quantized + first_q;
  const float* q = p.qs + first_q * p.head_dim;
  if (last - first + 1 == n) {
    AttendPacked(args, p.head_dim, n, q + std::int64_t{first} * p.head_dim,
                 quantized == nullptr ? nullptr : quantized + first, *run.block, begin, end,
                 At(state, first, p.head_dim));
    return;
  }
  const auto copy = [&](const SoftmaxState& from, std::int64_t i, const SoftmaxState& to, std::int64_t j) {
    to.max[j] = from.max[i];
    to.sum[j] = from.sum[i];
    std::copy_n(from.num + i * p.head_dim, p.head_dim, to.num + j * p.head_dim);
  };
  int j = 0;
  for (int h = first; h <= last; ++h) {
    if (!run.heads.test(h)) continue;
    std::copy_n(q + std::int64_t{h} * p.head_dim, p.head_dim, gathered.q + std::int64_t{j} * p.head_dim);
    if (quantized != nullptr) gathered.quantized[j] = quantized[h];
    copy(state, h, gathered.state, j++);
  }
  AttendPacked(args, p.head_dim, n, gathered.q, quantized == nullptr ? nullptr : gathered.quantized, *run.block, begin,
               end, gathered.state);
  j = 0;
  for (int h = first; h <= last; ++h) {
    if (run.heads.test(h)) copy(gathered.state, j++, state, h);
  }
}

std::uint64_t SummaryBytes(std::span<const Region> regions, int kv_head) {
  std::uint64_t bytes = 0;
  for (const Region& region : regions) bytes += region.heads[kv_head].SummaryBytes();
  return bytes;
}

void SelectForKvHead(const StepArgs& args, const Prepared& p, std::span<const float> taus, int kv_head, HeadSet* opened,
                     std::int32_t* order, double* mass, const Selected& out) {
  const std::int64_t first_q = std::int64_t{kv_head} * p.group;
  std::fill_n(opened, p.n_clusters, HeadSet());
  for (int h = 0; h < p.group; ++h) {
    std::int32_t count = 0;
    const std::int64_t at = (first_q + h) * p.n_clusters;
    OpenBestFirst(p.estimates.priority + at, p.estimates.log_tail + at, p.n_clusters, p.log_exact_mass[first_q + h],
                  taus.subspan(first_q + h, 1), order, mass, std::span(&count, 1));
    for (std::int32_t i = 0; i < count; ++i) opened[order[i]].set(h);
  }
  for (int h = 0; h < p.group; ++h) {
    const SoftmaxState state = At(out.tail, first_q + h, p.head_dim);
    ClearStates(state, 1, p.head_dim);
    FoldTail(args.regions, kv_head, p.head_dim, h, p.estimates.log_tail + (first_q + h) * p.n_clusters, opened, state);
  }

  for (const Region& region : args.regions) {
    const Block& block = region.heads[kv_head];
    for (int c = 0; c < block.n_clusters; ++c) {
      const HeadSet& heads = opened[region.first_cluster + c];
      if (heads.any()) AddOpened(p, kv_head, block, c, heads, out);
    }
  }
  out.scored[kv_head] = std::int64_t{p.n_clusters} * p.group;
  out.summary_bytes[kv_head] = SummaryBytes(args.regions, kv_head);
}

Status Select(const StepArgs& args, const Prepared& p, std::span<const float> taus, Selected* out) {
  const int kv_heads = args.shape.kv_heads;
  const std::size_t clusters = static_cast<std::size_t>(p.n_clusters);
  const std::size_t flat_clusters = args.hierarchical ? 0 : clusters;
  Selected s;
  HeadSet* opened = nullptr;
  std::int32_t* order = nullptr;
  double* mass = nullptr;
  ClusterWalk::Scratch walks;
  const auto lay_out = [&](void* memory) {
    ScratchLayout layout(memory);
    s.runs = layout.Take<PackedRun>(clusters * kv_heads);
    s.n_runs = layout.Take<std::int64_t>(kv_heads);
    s.union_rows = layout.Take<std::int64_t>(kv_heads);
    s.opened_rows = layout.Take<std::int64_t>(kv_heads);
    s.scored = layout.Take<std::int64_t>(kv_heads);
    s.summary_bytes = layout.Take<std::uint64_t>(kv_heads);
    s.tail = TakeStates(layout, args.shape.q_heads, p.head_dim);
    opened = layout.Take<HeadSet>(flat_clusters * kv_heads);
    order = layout.Take<std::int32_t>(flat_clusters * kv_heads);
    mass = layout.Take<double>(flat_clusters * kv_heads);
    if (args.hierarchical) walks = ClusterWalk::Take(layout, static_cast<std::size_t>(args.shape.q_heads), clusters);
    s.gathered = layout.Take<Gathered>(args.n_threads);
    for (int thread = 0; thread < args.n_threads; ++thread) {
      Gathered gathered;
      gathered.q = layout.Take<float>(std::size_t{1} * p.group * p.head_dim);
      gathered.quantized = layout.Take<QuantizedQuery>(p.group);
      gathered.state = TakeStates(layout, p.group, p.head_dim);
      if (memory != nullptr) s.gathered[thread] = gathered;
    }
    return layout.bytes();
  };
  void* memory = Reserve(args, ScratchUser::kSelect, lay_out(nullptr));
  if (memory == nullptr) return OutOfMemory();
  lay_out(memory);
  for (int h = 0; h < kv_heads; ++h) s.n_runs[h] = s.union_rows[h] = s.opened_rows[h] = 0;
  *out = s;
  if (args.hierarchical) {
    SelectByWalk(args, p, taus, walks, s);
    return Status::Ok();
  }
  ParallelFor(args.n_threads, kv_heads, [&](std::int64_t kv_head, int) {
    const std::size_t at = clusters * static_cast<std::size_t>(kv_head);
    SelectForKvHead(args, p, taus, static_cast<int>(kv_head), opened + at, order + at, mass + at, s);
  });
  return Status::Ok();
}

// Rows per piece of the sweep: about 32 pieces, within bounds that keep a piece worth a task. Depends on the opened set
// alone.
std::int64_t PieceRows(std::int64_t total_rows) {
  return std::clamp<std::int64_t>((total_rows / 32 + 63) / 64 * 64, 128, 1024);
}

void AttendPiece(const StepArgs& args, const Prepared& p, const Selected& selected, const SweepPiece& piece,
                 const SoftmaxState& state, const Gathered& gathered) {
  const PackedRun* run = selected.runs + std::int64_t{piece.kv_head} * p.n_clusters + piece.run;
  std::int64_t begin = run->begin + piece.offset;
  for (std::int64_t left = piece.n_rows; left > 0;) {
    const std::int64_t end = std::min(run->end, begin + left);
    AttendPackedBySet(args, p, piece.kv_head, *run, begin, end, state, gathered);
    left -= end - begin;
    if (left > 0) begin = (++run)->begin;
  }
}

}  // namespace

void step_parts::AddOpened(const Prepared& p, int kv_head, const Block& block, int c, const HeadSet& heads,
                           const Selected& out) {
  const std::int64_t begin = block.partition.offsets[c];
  const std::int64_t end = block.partition.offsets[c + 1];
  out.union_rows[kv_head] += end - begin;
  out.opened_rows[kv_head] += (end - begin) * static_cast<std::int64_t>(heads.count());
  PackedRun* next = out.runs + std::int64_t{kv_head} * p.n_clusters + out.n_runs[kv_head];
  if (out.n_runs[kv_head] > 0) {
    PackedRun& previous = next[-1];
    if (previous.block == &block && previous.end == begin && previous.heads == heads) {
      previous.end = end;
      return;
    }
  }
  *next = {&block, begin, end, heads};
  ++out.n_runs[kv_head];
}

void step_parts::WriteOutput(const SoftmaxState& state, float sink, int head_dim, float* out) {
  const float gauge = std::max(state.max[0], sink);
  const float factor = std::exp(state.max[0] - gauge);
  const float mass = factor * state.sum[0] + (sink == kNoMass ? 0.0f : std::exp(sink - gauge));
  for (int d = 0; d < head_dim; ++d) out[d] = factor * state.num[d] / mass;
}

std::int64_t VisiblePrefix(const VisibleSets& visible, std::int64_t n_kv) {
  if (visible.words == nullptr) return n_kv;
  std::int64_t row = 0;
  while (row < n_kv) {
    const int ones = std::countr_one(visible.words[row / 64]);
    row += ones;
    if (ones < 64) break;
  }
  return std::min(row, n_kv);
}

std::int64_t ListExactRuns(const VisibleSets& visible, std::int64_t n_kv, std::int64_t n_prefix, std::int64_t sink,
                           std::int64_t sealed_end, std::vector<CacheRun>* runs) {
  runs->clear();
  std::int64_t rows = 0;
  const auto add_plain = [&](std::int64_t begin, std::int64_t end) {
    rows += std::max<std::int64_t>(0, end - begin);
    for (; begin < end; begin += kExactPieceRows) {
      runs->push_back({begin, std::min(kExactPieceRows, end - begin), false});
    }
  };
  add_plain(0, std::min(sink, n_prefix));
  add_plain(sealed_end, n_prefix);
  if (visible.words == nullptr) return rows;

  // Behind the first hole: up to the next bitmap word in plain runs, then whole words.
  std::int64_t row = n_prefix;
  for (; row < n_kv && row % 64 != 0; ++row) {
    if (!IsVisible(visible, row)) continue;
    const std::int64_t begin = row;
    while (row + 1 < n_kv && (row + 1) % 64 != 0 && IsVisible(visible, row + 1)) ++row;
    add_plain(begin, row + 1);
  }
  while (row < n_kv) {
    const auto word = [&](std::int64_t at) {
      const std::uint64_t bits = visible.words[at / 64];
      return n_kv - at >= 64 ? bits : bits & ((std::uint64_t{1} << (n_kv - at)) - 1);
    };
    if (word(row) == 0) {
      row += 64;
      continue;
    }
    const std::int64_t end = std::min(n_kv, row + kExactPieceRows);
    runs->push_back({row, end - row, true});
    for (; row < end; row += 64) rows += std::popcount(word(row));
  }
  return rows;
}

Status AttendSparse(const StepArgs& args, std::span<const float> taus, const OutView& out, LayerStats* stats) {
  const int kv_heads = args.shape.kv_heads;
  const int q_heads = args.shape.q_heads;
  const int head_dim = args.shape.head_dim;
  const int group = args.shape.group();
  Prepared p;
  if (Status status = Prepare(args, &p); !status.ok()) return status;
  Selected selected;
  if (Status status = Select(args, p, taus, &selected); !status.ok()) return status;

  std::int64_t total_rows = 0;
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) total_rows += selected.union_rows[kv_head];
  const std::int64_t piece_rows = PieceRows(total_rows);
  std::int64_t n_pieces = 0;
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    n_pieces += (selected.union_rows[kv_head] + piece_rows - 1) / piece_rows;
  }
  SweepPiece* pieces = nullptr;
  SoftmaxState states;
  const auto lay_out = [&](void* memory) {
    ScratchLayout layout(memory);
    pieces = layout.Take<SweepPiece>(n_pieces);
    states = TakeStates(layout, n_pieces * group, head_dim);
    return layout.bytes();
  };
  // A call either sweeps or calibrates, so that the two share a buffer.
  void* memory = Reserve(args, ScratchUser::kCalibration, lay_out(nullptr));
  if (memory == nullptr) return OutOfMemory();
  lay_out(memory);
  SweepPiece* next = pieces;
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const PackedRun* runs = selected.runs + std::int64_t{kv_head} * p.n_clusters;
    std::int64_t run = 0;
    std::int64_t offset = 0;
    for (std::int64_t left = selected.union_rows[kv_head]; left > 0;) {
      const std::int64_t n_rows = std::min(piece_rows, left);
      *next++ = {kv_head, run, offset, n_rows};
      left -= n_rows;
      offset += n_rows;
      while (left > 0 && offset >= runs[run].n_rows()) offset -= runs[run++].n_rows();
    }
  }

  ParallelFor(args.n_threads, n_pieces, [&](std::int64_t piece, int thread) {
    const SoftmaxState state = At(states, piece * group, head_dim);
    ClearStates(state, group, head_dim);
    AttendPiece(args, p, selected, pieces[piece], state, selected.gathered[thread]);
  });

  for (std::int64_t piece = 0; piece < n_pieces; ++piece) {
    MergeStates(head_dim, group, At(states, piece * group, head_dim),
                At(p.exact, std::int64_t{pieces[piece].kv_head} * group, head_dim));
  }
  MergeStates(head_dim, q_heads, selected.tail, p.exact);
  for (int h = 0; h < q_heads; ++h) {
    WriteOutput(At(p.exact, h, head_dim), SinkLogit(args.params, h), head_dim, out.data + h * out.head_stride);
  }

  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    stats->stat_opened_rows += selected.opened_rows[kv_head];
    stats->stat_scored += selected.scored[kv_head];
  }
  stats->stat_exact_rows += args.exact_rows * q_heads;
  stats->stat_calls += q_heads;
  const auto exact_rows = static_cast<std::uint64_t>(args.exact_rows);
  const std::uint64_t packed_row = 2 * RowBytes(PackedType(args.config.packed_format), head_dim);
  const std::uint64_t cache_row = RowBytes(args.kv.k_type, head_dim) + RowBytes(args.kv.v_type, head_dim);
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const auto packed_rows = static_cast<std::uint64_t>(selected.union_rows[kv_head]);
    const HeadReads reads = {
        .rows_read = packed_rows + exact_rows,
        .rows_visible = exact_rows + (args.regions.back().end - args.regions.front().begin),
        .bytes_read = packed_rows * packed_row + exact_rows * cache_row + selected.summary_bytes[kv_head]};
    stats->union_rows += reads.rows_read;
    stats->visible_rows += reads.rows_visible;
    stats->bytes_read += reads.bytes_read;
    if (args.reads != nullptr) args.reads[kv_head].Add(reads);
  }
  ++stats->sparse_steps;
  return Status::Ok();
}

bool step_parts::BeginRecording(const StepArgs& args, CalibrationWindow* window, std::int32_t* in_play) {
  for (int h = 0; h < args.shape.q_heads; ++h) in_play[h] = window->ThresholdsInPlay(args.config.statistic, h, 1);
  try {
    window->BeginStep();
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

Status RecordStep(const StepArgs& args, const OutView& exact_output, CalibrationWindow* window) {
  if (args.hierarchical) return RecordWalk(args, exact_output, window);
  const int kv_heads = args.shape.kv_heads;
  const int q_heads = args.shape.q_heads;
  const int head_dim = args.shape.head_dim;
  const int group = args.shape.group();
  Prepared p;
  if (Status status = Prepare(args, &p); !status.ok()) return status;

  const std::size_t clusters = static_cast<std::size_t>(p.n_clusters);
  struct Counts {
    std::int32_t at[kTauGridSize];
  };
  SoftmaxState states;                  // [kv_heads][n_clusters][group]
  const Block** blocks = nullptr;       // [kv_heads][n_clusters]
  const float** value_means = nullptr;  // [kv_heads][n_clusters]
  std::int32_t* order = nullptr;        // [q_heads][n_clusters]
  Counts* counts = nullptr;             // [q_heads]
  std::int32_t* in_play = nullptr;      // [q_heads]
  double* mass = nullptr;               // [q_heads][n_clusters]
  HeadSet* opened = nullptr;            // [kv_heads][n_clusters]
  const auto lay_out = [&](void* memory) {
    ScratchLayout layout(memory);
    states = TakeStates(layout, p.n_clusters * std::int64_t{q_heads}, head_dim);
    blocks = layout.Take<const Block*>(clusters * kv_heads);
    value_means = layout.Take<const float*>(clusters * kv_heads);
    order = layout.Take<std::int32_t>(clusters * q_heads);
    counts = layout.Take<Counts>(q_heads);
    in_play = layout.Take<std::int32_t>(q_heads);
    mass = layout.Take<double>(clusters * q_heads);
    opened = layout.Take<HeadSet>(clusters * kv_heads);
    return layout.bytes();
  };
  void* memory = Reserve(args, ScratchUser::kCalibration, lay_out(nullptr));
  if (memory == nullptr) return OutOfMemory();
  lay_out(memory);

  if (!BeginRecording(args, window, in_play)) return OutOfMemory();

  ParallelFor(args.n_threads, q_heads, [&](std::int64_t h, int) {
    // Thresholds out of play share the error of the last one that is not.
    const std::span<std::int32_t> head_counts(counts[h].at);
    OpenBestFirst(p.estimates.priority + h * p.n_clusters, p.estimates.log_tail + h * p.n_clusters, p.n_clusters,
                  p.log_exact_mass[h], std::span(kTauGrid).first(in_play[h]), order + h * p.n_clusters,
                  mass + h * p.n_clusters, head_counts.first(in_play[h]));
    std::ranges::fill(head_counts.subspan(in_play[h]), head_counts[in_play[h] - 1]);
  });
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    std::int64_t at = std::int64_t{kv_head} * p.n_clusters;
    for (const Region& region : args.regions) {
      const Block& block = region.heads[kv_head];
      for (int c = 0; c < block.n_clusters; ++c, ++at) {
        blocks[at] = &block;
        value_means[at] = block.value_means.data() + std::int64_t{c} * head_dim;
        opened[at].reset();
      }
    }
  }
  for (int h = 0; h < q_heads; ++h) {
    HeadSet* of_kv_head = opened + std::int64_t{h / group} * p.n_clusters;
    const std::int32_t* clusters_of_head = order + std::int64_t{h} * p.n_clusters;
    for (std::int32_t i = 0; i < counts[h].at[kTauGridSize - 1]; ++i) of_kv_head[clusters_of_head[i]].set(h % group);
  }
  // What opening a cluster reads, for every cluster that some head opens: exactly the rows and the scoring of the
  // sparse sweep.
  ParallelFor(args.n_threads, std::int64_t{kv_heads} * p.n_clusters, [&](std::int64_t at, int) {
    if (opened[at].none()) return;
    const Block& block = *blocks[at];
    const std::int64_t c = (value_means[at] - block.value_means.data()) / head_dim;
    const std::int64_t first_q = at / p.n_clusters * group;
    const SoftmaxState state = At(states, at * group, head_dim);
    ClearStates(state, group, head_dim);
    AttendPacked(args, head_dim, group, p.qs + first_q * head_dim,
                 p.quantized == nullptr ? nullptr : p.quantized + first_q, block, block.partition.offsets[c],
                 block.partition.offsets[c + 1], state);
  });
  ParallelFor(args.n_threads, q_heads, [&](std::int64_t h, int) {
    const std::int64_t kv_head = h / group;
    ReplayInputs replay;
    replay.head_dim = head_dim;
    replay.n_clusters = p.n_clusters;
    replay.order = order + h * p.n_clusters;
    replay.counts = counts[h].at;
    replay.exact_rows = At(p.exact, h, head_dim);
    replay.sink = SinkLogit(args.params, static_cast<int>(h));
    replay.opened = At(states, kv_head * p.n_clusters * group + h % group, head_dim);
    replay.opened_stride = group;
    replay.log_tail = p.estimates.log_tail + h * p.n_clusters;
    replay.value_means = value_means + kv_head * p.n_clusters;
    replay.exact_output = exact_output.data + h * exact_output.head_stride;
    float errors[kTauGridSize];
    ReplayStops(replay, errors);
    window->Record(static_cast<int>(h), errors);
  });
  return Status::Ok();
}

}  // namespace scsa
