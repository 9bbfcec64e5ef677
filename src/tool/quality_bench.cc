// SPDX-License-Identifier: Apache-2.0
#include "quality_bench.h"

#include <fmt/format.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <span>

#include "core/parallel.h"
#include "peers.h"
#include "scsa/config.h"
#include "scsa/exact.h"
#include "scsa/layer.h"
#include "stats.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

// What the operator itself is measured as.
struct OwnFacts {
  const char* name;
  Preset preset;
  scsa::Selection selection = scsa::Selection::kFlat;
  std::optional<PackedFormat> packed = std::nullopt;  // otherwise the preset's
};
constexpr std::array kOwn = {
    OwnFacts{"fast", Preset::kFast},
    OwnFacts{"fast-int8", Preset::kFast, scsa::Selection::kFlat, PackedFormat::kInt8},
    OwnFacts{"hierarchical", Preset::kFast, scsa::Selection::kHierarchical},
    OwnFacts{"seed", Preset::kSeed},
    OwnFacts{"seed-hierarchical", Preset::kSeed, scsa::Selection::kHierarchical},
};
constexpr std::size_t kBudgetOf = 0;        // whose bytes the other methods get
constexpr std::array kShares = {0.1, 0.2};  // fixed budgets, of exact attention's bytes

enum class Peer { kStreaming, kQuest, kTopK };
struct PeerFacts {
  Peer peer;
  const char* name;
};
constexpr std::array kPeers = {PeerFacts{Peer::kStreaming, "streaming"}, PeerFacts{Peer::kQuest, "quest"},
                               PeerFacts{Peer::kTopK, "top-k"}};
constexpr std::size_t kBudgets = 1 + kShares.size();

void Check(const Status& status) {
  if (!status.ok()) throw ToolError(fmt::format("the capture cannot be measured: {}", status.message()));
}

// What one method read and how wrong it was.
struct Tally {
  double rows = 0.0;  // each once per KV head
  double bytes = 0.0;
  std::vector<double> errors;

  void Add(const Tally& other) {
    rows += other.rows;
    bytes += other.bytes;
    errors.insert(errors.end(), other.errors.begin(), other.errors.end());
  }
};
using PeerTallies = std::array<std::array<Tally, kPeers.size()>, kBudgets>;

constexpr int kAuditSteps = 64;           // of a window in which the interval is checked
constexpr int kAuditRuns = 3;             // audits of the same outputs
constexpr int kAuditSeedStride = 100000;  // between their random numbers: beyond the number of any layer

// An audit that keeps every sample and recalibrates nothing: the errors stay those of the run without it.
AuditConfig AuditOf(double share, int seed) {
  AuditConfig config;
  config.share = share;
  config.seed = static_cast<std::uint64_t>(seed);
  config.capacity = 1 << 17;
  config.drift_factor = 1e30f;
  return config;
}

class LayerMeasurement {
 public:
  LayerMeasurement(const Capture& capture, const CapturedLayer& layer, int threads)
      : capture_(capture), layer_(layer), shape_(capture.shape), threads_(threads), exact_(Values()) {
    std::vector<float> step(StepValues());
    for (int s = 0; s < MeasuredSteps(); ++s) {
      Check(ExactAttention(shape_, Query(kQualityCalibrationSteps + s), Rows(kQualityCalibrationSteps + s), {},
                           Logits(), threads_, workspace_, Out(step)));
      std::copy(step.begin(), step.end(), exact_.begin() + s * StepValues());
    }
  }

  // Also leaves the bytes per measured step in `step_bytes`, and the samples of an audit in `audited`. The audit
  // changes no output and no count.
  Tally MeasureOwn(const OwnFacts& own, float tolerance, const AuditConfig& audit, std::vector<double>& step_bytes,
                   std::vector<AuditSample>& audited) {
    Config config = ConfigFor(own.preset);
    config.selection = own.selection;
    if (own.packed) config.packed_format = *own.packed;
    if (own.preset == Preset::kFast) config.seal_delay = layer_.layer % kSealStagger;
    std::unique_ptr<Layer> layer;
    Check(Layer::Create(shape_, config, &layer));
    Check(layer->StartCalibration(tolerance));
    std::vector<float> out(StepValues());
    Tally tally;
    for (int step = 0; step < capture_.steps; ++step) {
      if (step == kQualityCalibrationSteps) {
        Check(layer->FinishCalibration());
        Check(layer->SetAudit(audit));
      }
      const LayerStats before = layer->stats();
      // Nothing else writes to these rows: there is nothing to verify.
      Check(layer->Attend(Query(step), Rows(step), {}, Logits(), Verify::kNone, threads_, workspace_, Out(out)));
      if (step < kQualityCalibrationSteps) continue;
      const LayerStats after = layer->stats();
      // A call that no plan applied to was answered exactly, and reads everything.
      const bool sparse = after.sparse_steps > before.sparse_steps;
      tally.rows += sparse ? static_cast<double>(after.union_rows - before.union_rows) : ExactRows(step);
      step_bytes.push_back(sparse ? static_cast<double>(after.bytes_read - before.bytes_read) : ExactBytes(step));
      tally.bytes += step_bytes.back();
      for (int head = 0; head < shape_.q_heads; ++head) {
        tally.errors.push_back(ErrorOf(out.data() + head * shape_.head_dim, step, head));
      }
    }
    audited.assign(layer->AuditSamples().begin(), layer->AuditSamples().end());
    return tally;
  }

  // How often the interval held the true median in windows of the measured steps, with one audit after another.
  // `errors`: of a run whose every measured step was sparse, [steps][q_heads].
  AuditCoverage MeasureAudit(const OwnFacts& own, float tolerance, double share, std::span<const double> errors) {
    AuditCoverage coverage;
    const auto heads = static_cast<std::size_t>(shape_.q_heads);
    for (int run = 0; run < kAuditRuns; ++run) {
      std::vector<double> step_bytes;
      std::vector<AuditSample> audited;
      MeasureOwn(own, tolerance, AuditOf(share, layer_.layer + kAuditSeedStride * run), step_bytes, audited);
      for (int begin = 0; begin + kAuditSteps <= MeasuredSteps(); begin += kAuditSteps) {
        std::vector<AuditSample> window;
        std::copy_if(audited.begin(), audited.end(), std::back_inserter(window), [&](const AuditSample& sample) {
          return sample.call >= static_cast<std::uint64_t>(begin) &&
                 sample.call < static_cast<std::uint64_t>(begin + kAuditSteps);
        });
        AuditSummary summary;
        Check(SummarizeAudit(window, &summary));
        const double median = Quantile(errors.subspan(begin * heads, kAuditSteps * heads), 0.5);
        ++coverage.windows;
        coverage.held += summary.median_low <= median && median <= summary.median_high ? 1 : 0;
      }
    }
    return coverage;
  }

  // The other methods on one KV head. fast_bytes: per measured step, of all KV heads. Runs on the calling thread.
  PeerTallies MeasurePeers(int kv_head, std::span<const double> fast_bytes) const {
    const int dim = shape_.head_dim;
    const int group = shape_.group();
    const std::size_t offset = static_cast<std::size_t>(kv_head) * capture_.rows() * dim;
    std::vector<float> keys(static_cast<std::size_t>(capture_.rows()) * dim);
    ggml_fp16_to_fp32_row(layer_.k.data() + offset, keys.data(), static_cast<std::int64_t>(keys.size()));
    const QuestPages pages(keys, dim);
    const auto page_bytes = static_cast<double>(QuestPages::kPageRows * RowBytesOf(dim));

    PeerTallies tallies;
    // What a budget left over, less than a row or a page, is spent in the next step.
    std::array<std::array<double, kPeers.size()>, kBudgets> left_over{};
    Workspace workspace;
    std::vector<float> out(static_cast<std::size_t>(group) * dim);
    std::vector<std::uint64_t> visible;
    for (int step = kQualityCalibrationSteps; step < capture_.steps; ++step) {
      const std::int64_t n = capture_.n_kv + step;
      const float* q = layer_.q.data() + step * StepValues() + static_cast<std::size_t>(kv_head) * group * dim;
      const std::span<const float> queries(q, static_cast<std::size_t>(group) * dim);
      const std::vector<float> weights =
          SoftmaxWeights(queries, std::span(keys).first(static_cast<std::size_t>(n) * dim), dim, capture_.scale);
      for (std::size_t b = 0; b < kBudgets; ++b) {
        const double budget = b == 0 ? fast_bytes[step - kQualityCalibrationSteps] / shape_.kv_heads
                                     : kShares[b - 1] * static_cast<double>(n * RowBytesOf(dim));
        for (std::size_t p = 0; p < kPeers.size(); ++p) {
          const double available = budget + left_over[b][p];
          const Selection selection =
              Select(kPeers[p].peer, queries, weights, pages, n, static_cast<std::int64_t>(available));
          left_over[b][p] = std::min(available - static_cast<double>(selection.bytes), page_bytes);
          AttendRows(kv_head, step, selection.rows, visible, workspace, out);
          Tally& tally = tallies[b][p];
          tally.rows += static_cast<double>(selection.rows.size());
          tally.bytes += static_cast<double>(selection.bytes);
          for (int h = 0; h < group; ++h) {
            tally.errors.push_back(ErrorOf(out.data() + h * dim, step, kv_head * group + h));
          }
        }
      }
    }
    return tallies;
  }

  double ExactRows(int step) const { return static_cast<double>((capture_.n_kv + step) * shape_.kv_heads); }
  double ExactBytes(int step) const { return ExactRows(step) * static_cast<double>(RowBytesOf(shape_.head_dim)); }

 private:
  int MeasuredSteps() const { return capture_.steps - kQualityCalibrationSteps; }
  std::size_t StepValues() const { return static_cast<std::size_t>(shape_.q_heads) * shape_.head_dim; }
  std::size_t Values() const { return static_cast<std::size_t>(MeasuredSteps()) * StepValues(); }

  QueryView Query(int step) const {
    return {.data = layer_.q.data() + step * StepValues(),
            .row_stride = static_cast<std::int64_t>(StepValues()),
            .head_stride = shape_.head_dim,
            .n_q = 1};
  }

  // The rows that a step sees, from `kv_head` on.
  KvView Rows(int step, int kv_head = 0) const {
    const auto row_bytes = static_cast<std::int64_t>(RowBytes(DType::kF16, shape_.head_dim));
    const std::int64_t head_bytes = capture_.rows() * row_bytes;
    const std::size_t offset = static_cast<std::size_t>(kv_head) * capture_.rows() * shape_.head_dim;
    return {.k = layer_.k.data() + offset,
            .v = layer_.v.data() + offset,
            .k_type = DType::kF16,
            .v_type = DType::kF16,
            .k_row_stride = row_bytes,
            .k_head_stride = head_bytes,
            .v_row_stride = row_bytes,
            .v_head_stride = head_bytes,
            .n_kv = capture_.n_kv + step};
  }

  LogitParams Logits() const { return {.scale = capture_.scale, .softcap = 0.0f, .sinks = nullptr}; }

  OutView Out(std::vector<float>& out) const {
    return {.data = out.data(), .row_stride = static_cast<std::int64_t>(out.size()), .head_stride = shape_.head_dim};
  }

  Selection Select(Peer peer, std::span<const float> q, std::span<const float> weights, const QuestPages& pages,
                   std::int64_t n, std::int64_t budget) const {
    switch (peer) {
      case Peer::kStreaming:
        return SelectStreaming(n, shape_.head_dim, budget);
      case Peer::kQuest:
        return pages.Select(q, n, budget);
      case Peer::kTopK:
        return SelectTopK(weights, n, shape_.head_dim, budget);
    }
    return {};
  }

  // Attention of one KV head's query heads over the given rows alone: out is [group][head_dim].
  void AttendRows(int kv_head, int step, std::span<const std::int64_t> rows, std::vector<std::uint64_t>& visible,
                  Workspace& workspace, std::vector<float>& out) const {
    const KvView kv = Rows(step, kv_head);
    visible.assign(static_cast<std::size_t>((kv.n_kv + 63) / 64), 0);
    for (const std::int64_t r : rows) visible[r / 64] |= std::uint64_t{1} << (r % 64);
    QueryView q = Query(step);
    q.data += static_cast<std::int64_t>(kv_head) * shape_.group() * shape_.head_dim;
    Check(ExactAttention({.q_heads = shape_.group(), .kv_heads = 1, .head_dim = shape_.head_dim}, q, kv,
                         {.words = visible.data(), .row_stride = static_cast<std::int64_t>(visible.size())}, Logits(),
                         1, workspace, Out(out)));
  }

  double ErrorOf(const float* out, int step, int q_head) const {
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const float* expected = exact_.data() + (step - kQualityCalibrationSteps) * StepValues() + q_head * dim;
    const std::vector<double> exact(expected, expected + dim);
    return RelativeError({out, dim}, exact);
  }

  const Capture& capture_;
  const CapturedLayer& layer_;
  Shape shape_;
  int threads_;
  Workspace workspace_;
  std::vector<float> exact_;  // of the measured steps: [steps][q_heads][head_dim]
};

// All KV heads of a layer, shared out over the threads.
PeerTallies MeasureAllHeads(const LayerMeasurement& layer, int kv_heads, std::span<const double> fast_bytes,
                            int threads) {
  std::vector<PeerTallies> heads(kv_heads);
  std::vector<std::exception_ptr> failures(kv_heads);
  ParallelFor(threads, kv_heads, [&](std::int64_t head, int /*thread*/) {
    try {
      heads[head] = layer.MeasurePeers(static_cast<int>(head), fast_bytes);
    } catch (...) {
      failures[head] = std::current_exception();
    }
  });
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  for (int head = 1; head < kv_heads; ++head) {
    for (std::size_t b = 0; b < kBudgets; ++b) {
      for (std::size_t p = 0; p < kPeers.size(); ++p) heads[0][b][p].Add(heads[head][b][p]);
    }
  }
  return std::move(heads[0]);
}

double ToleranceOf(Preset preset, const QualityOptions& options) {
  // Through text: 0.015f is 0.0149999997 as a double.
  return options.tolerance.value_or(std::stod(fmt::format("{}", DefaultTolerance(preset))));
}

}  // namespace

std::vector<QualityResult> MeasureQuality(const Capture& capture, const QualityOptions& options, Progress& progress) {
  if (capture.steps <= kQualityCalibrationSteps) {
    throw ToolError(
        fmt::format("the capture has {} steps, more than {} are needed: the first {} calibrate, the others "
                    "are measured; record more with 'scsa capture -n'",
                    capture.steps, kQualityCalibrationSteps, kQualityCalibrationSteps));
  }
  std::array<Tally, kOwn.size()> own;
  std::array<AuditCoverage, kOwn.size()> audits;
  PeerTallies peers;
  double exact_rows = 0.0;
  double exact_bytes = 0.0;
  for (std::size_t i = 0; i < capture.layers.size(); ++i) {
    const CapturedLayer& captured = capture.layers[i];
    const auto show = [&](const char* what) {
      progress.Show(
          fmt::format("{}, layer {} ({}/{}): {}", capture.model, captured.layer, i + 1, capture.layers.size(), what));
    };
    show("exact attention");
    LayerMeasurement layer(capture, captured, options.threads);
    std::vector<double> fast_bytes;
    for (std::size_t p = 0; p < kOwn.size(); ++p) {
      show(kOwn[p].name);
      std::vector<double> step_bytes;
      std::vector<AuditSample> none;
      const auto tolerance = static_cast<float>(ToleranceOf(kOwn[p].preset, options));
      const Tally tally = layer.MeasureOwn(kOwn[p], tolerance, AuditOf(0.0, 0), step_bytes, none);
      own[p].Add(tally);
      if (options.audit > 0.0) {
        show("audit");
        const AuditCoverage coverage = layer.MeasureAudit(kOwn[p], tolerance, options.audit, tally.errors);
        audits[p].windows += coverage.windows;
        audits[p].held += coverage.held;
      }
      if (p == kBudgetOf) fast_bytes = std::move(step_bytes);
    }
    show("other methods");
    const PeerTallies of_layer = MeasureAllHeads(layer, capture.shape.kv_heads, fast_bytes, options.threads);
    for (std::size_t b = 0; b < kBudgets; ++b) {
      for (std::size_t p = 0; p < kPeers.size(); ++p) peers[b][p].Add(of_layer[b][p]);
    }
    for (int step = kQualityCalibrationSteps; step < capture.steps; ++step) {
      exact_rows += layer.ExactRows(step);
      exact_bytes += layer.ExactBytes(step);
    }
  }
  progress.Clear();

  std::vector<QualityResult> results;
  const auto add = [&](std::string method, std::string budget, const Tally& tally) -> QualityResult& {
    return results.emplace_back(QualityResult{
        .method = std::move(method),
        .budget = std::move(budget),
        .tolerance = std::nullopt,
        .rows_read = tally.rows / exact_rows,
        .bytes_read = tally.bytes / (capture.steps - kQualityCalibrationSteps),
        .bytes_share = tally.bytes / exact_bytes,
        .err_mean = Mean(tally.errors),
        .err_median = Quantile(tally.errors, 0.5),
        .err_p90 = Quantile(tally.errors, 0.9),
        .err_p99 = Quantile(tally.errors, 0.99),
    });
  };
  for (std::size_t p = 0; p < kOwn.size(); ++p) {
    const double tolerance = ToleranceOf(kOwn[p].preset, options);
    QualityResult& result = add(kOwn[p].name, fmt::format("tolerance {}", tolerance), own[p]);
    result.tolerance = tolerance;
    if (audits[p].windows > 0) result.audit = audits[p];
  }
  for (std::size_t b = 0; b < kBudgets; ++b) {
    const std::string budget =
        b == 0 ? fmt::format("as {}", kOwn[kBudgetOf].name) : fmt::format("{:.0f} %", 100.0 * kShares[b - 1]);
    for (std::size_t p = 0; p < kPeers.size(); ++p) add(kPeers[p].name, budget, peers[b][p]);
  }
  return results;
}

}  // namespace scsa::tool
