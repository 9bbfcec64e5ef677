// SPDX-License-Identifier: Apache-2.0
#include "scaling_bench.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <span>

#include "core/block_summaries.h"
#include "scsa/exact.h"
#include "scsa/layer.h"
#include "timing.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr int kCalibrationSteps = 16;
constexpr std::uint64_t kFirstTimedQuery = 1 << 20;  // queries that calibration has not seen

enum Arm : int { kSelection, kAttend, kExact, kArms };

void Require(const Status& status) {
  if (!status.ok()) throw ToolError("the operator failed: " + status.message());
}

// One layer with its queries and outputs.
class Bench {
 public:
  Bench(const ScalingOptions& options, const ScalingMode& mode, const SyntheticCache& cache, std::int64_t rows)
      : options_(options), cache_(cache), kv_(cache.View(rows)), out_(OutputSize()), exact_(OutputSize()) {
    params_.scale = 1.0f / std::sqrt(static_cast<float>(options.shape.head_dim));
    Require(Layer::Create(options.shape, mode.config, &layer_));
  }

  void Attend(const std::vector<float>& q) {
    Require(layer_->Attend(View(q), kv_, {}, params_, Verify::kNone, options_.threads, workspace_, Out(out_)));
  }
  void Exact(const std::vector<float>& q) {
    Require(ExactAttention(options_.shape, View(q), kv_, {}, params_, options_.threads, workspace_, Out(exact_)));
  }
  void SetTaus(std::span<const float> taus) {
    for (std::size_t h = 0; h < taus.size(); ++h) Require(layer_->SetTau(static_cast<int>(h), taus[h]));
  }
  std::vector<float> Query(std::uint64_t index) const { return cache_.Query(index); }
  Layer& layer() { return *layer_; }

  // Mean over the query heads of |out - exact| / |exact| of the last calls.
  double Error() const {
    const auto head_dim = static_cast<std::size_t>(options_.shape.head_dim);
    double sum = 0.0;
    for (std::size_t at = 0; at < out_.size(); at += head_dim) {
      const std::vector<double> exact(exact_.begin() + static_cast<std::ptrdiff_t>(at),
                                      exact_.begin() + static_cast<std::ptrdiff_t>(at + head_dim));
      sum += RelativeError(std::span(out_).subspan(at, head_dim), exact);
    }
    return sum / options_.shape.q_heads;
  }

 private:
  std::size_t OutputSize() const { return static_cast<std::size_t>(options_.shape.q_heads) * options_.shape.head_dim; }
  QueryView View(const std::vector<float>& q) const { return {q.data(), 0, options_.shape.head_dim, 1}; }
  OutView Out(std::vector<float>& out) const { return {out.data(), 0, options_.shape.head_dim}; }

  const ScalingOptions& options_;
  const SyntheticCache& cache_;
  KvView kv_;
  LogitParams params_;
  Workspace workspace_;
  std::unique_ptr<Layer> layer_;
  std::vector<float> out_;
  std::vector<float> exact_;
};

// The heads' thresholds: the given one, or those of a calibration window.
std::vector<float> ChooseTaus(const ScalingOptions& options, Bench& bench, Progress& progress,
                              const std::string& label) {
  Layer& layer = bench.layer();
  if (options.tau) return std::vector<float>(layer.taus().size(), *options.tau);
  Require(layer.StartCalibration(options.tolerance.value_or(DefaultTolerance(options.preset))));
  for (int step = 0; step < kCalibrationSteps; ++step) {
    progress.Show(fmt::format("{}: calibrating, step {} of {}", label, step + 1, kCalibrationSteps));
    bench.Attend(bench.Query(static_cast<std::uint64_t>(step)));
  }
  Require(layer.FinishCalibration());
  return {layer.taus().begin(), layer.taus().end()};
}

double RowShare(const LayerStats& before, const LayerStats& after) {
  const auto visible = static_cast<double>(after.visible_rows - before.visible_rows);
  return visible > 0.0 ? static_cast<double>(after.union_rows - before.union_rows) / visible : 0.0;
}

Spread Milliseconds(std::span<const double> seconds) {
  const Spread spread = SpreadOf(seconds);
  return {.median = 1e3 * spread.median, .p10 = 1e3 * spread.p10, .p90 = 1e3 * spread.p90};
}

}  // namespace

std::vector<ScalingMode> ScalingModes(Preset preset) {
  std::vector<ScalingMode> modes = {{"flat", ConfigFor(preset)}, {"hierarchical", ConfigFor(preset)}};
  modes.back().config.selection = Selection::kHierarchical;
  return modes;
}

std::uint64_t ScalingCacheBytes(const Shape& shape, std::int64_t rows) { return SyntheticCache::Bytes(shape, rows); }

std::uint64_t ScalingPlanBytes(const Shape& shape, const Config& config, std::int64_t rows) {
  const auto head_rows = static_cast<std::uint64_t>(rows) * shape.kv_heads;
  const std::uint64_t packed_row = RowBytes(DType::kQ8_0, shape.head_dim);
  const std::uint64_t value = sizeof(float) * shape.head_dim;
  if (config.preset == Preset::kFast) {
    // Member and fingerprint of each row; two records and the members' offsets of each block.
    const SummaryLayout layout(shape.head_dim, config.block_size / config.cluster_size);
    // Three vectors of a node in the tree, and half of one more.
    const std::uint64_t node = config.selection == Selection::kFlat ? 0 : 9 * value / 2;
    return head_rows * 6 +
           head_rows / config.block_size *
               (layout.key_bytes() + layout.value_bytes() + 2 * (std::uint64_t{1} + layout.slots()) + node);
  }
  // Two packed rows, fingerprint and member index of each row; splitting halves, so that a cluster has more than half
  // of its most members. There is a node of three vectors for each cluster.
  const int vectors = config.rank + 3 + (config.selection == Selection::kFlat ? 0 : 3);
  return head_rows * (2 * packed_row + 8) + 2 * head_rows / config.cluster_size * vectors * value;
}

ScalingResult MeasureScaling(const ScalingOptions& options, const ScalingMode& mode, const SyntheticCache& cache,
                             std::int64_t rows, Progress& progress) {
  const std::string label = fmt::format("{} rows, {}", rows, mode.name);
  ScalingResult result;
  result.rows = rows;
  result.mode = mode.name;
  Bench bench(options, mode, cache, rows);
  Layer& layer = bench.layer();

  progress.Show(label + ": building the plan");
  bench.Attend(bench.Query(0));
  const LayerStats built = layer.stats();
  if (built.build_failures > 0) throw ToolError(fmt::format("{}: the plan could not be built: use fewer rows", label));
  if (built.sparse_steps == 0) throw ToolError(fmt::format("{}: too few rows for a plan: use more", label));
  result.build_ms = 1e-6 * static_cast<double>(built.build_ns);
  result.plan_bytes = built.plan_bytes;

  const std::vector<float> taus = ChooseTaus(options, bench, progress, label);
  const std::vector<float> nothing(taus.size(), 1.0f);
  for (const float tau : taus) result.tau_mean += tau / static_cast<double>(taus.size());

  std::vector<std::vector<float>> queries;
  for (int i = 0; i < options.repetitions; ++i) queries.push_back(bench.Query(kFirstTimedQuery + i));
  double error = 0.0;
  double selection_rows = 0.0;
  double attend_rows = 0.0;
  const auto counted = [&](const std::vector<float>& heads, const std::vector<float>& q) {
    bench.SetTaus(heads);
    const LayerStats before = layer.stats();
    bench.Attend(q);
    return RowShare(before, layer.stats());
  };
  // Untimed: what is read and how far off the answer is. Warms the caches and the scratch memory up, too.
  progress.Show(label + ": measuring the error");
  for (const std::vector<float>& q : queries) {
    selection_rows += counted(nothing, q);
    attend_rows += counted(taus, q);
    bench.Exact(q);
    error += bench.Error();
  }
  result.selection_rows = selection_rows / options.repetitions;
  result.attend_rows = attend_rows / options.repetitions;
  result.error_mean = error / options.repetitions;

  const auto seconds = TimeInterleaved(kArms, options.repetitions, [&](int arm, int round) {
    if (arm == kExact) {
      bench.Exact(queries[round]);
      return;
    }
    bench.SetTaus(arm == kSelection ? nothing : taus);  // some dozen stores
    bench.Attend(queries[round]);
  });
  result.selection_ms = Milliseconds(seconds[kSelection]);
  result.attend_ms = Milliseconds(seconds[kAttend]);
  result.exact_ms = Milliseconds(seconds[kExact]);
  return result;
}

}  // namespace scsa::tool
