// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>

#include "commands.h"
#include "machine.h"
#include "memory_limit.h"
#include "progress.h"
#include "report.h"
#include "scaling_bench.h"
#include "scsa/exact.h"
#include "scsa/target.h"
#include "shared_options.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

// Fewer rows may leave nothing to seal, more do not fit the operators' 32-bit row numbers.
constexpr int kMinRows = 1024;
constexpr int kMaxRows = 1 << 26;
constexpr float kSeedTau = 0.05f;

struct CommandOptions {
  std::string rows = "32768,131072,524288";
  std::string preset = "seed";
  float tau = -1.0f;
  float tolerance = -1.0f;
  ResultOptions results;
  ScalingOptions bench;
};

void CheckMemory(const ScalingOptions& bench, const std::vector<ScalingMode>& modes, std::int64_t rows) {
  const std::uint64_t cache = ScalingCacheBytes(bench.shape, rows);
  std::uint64_t plan = 0;
  for (const ScalingMode& mode : modes) plan = std::max(plan, ScalingPlanBytes(bench.shape, mode.config, rows));
  const auto available = AvailableMemory();
  if (!available || cache + plan <= *available) return;
  throw ToolError(fmt::format(
      "--rows: {} rows need {:.1f} GB of memory ({:.1f} for the cache, {:.1f} for the plan), {:.1f} GB are available: "
      "give fewer rows, fewer --kv-heads or a smaller --head-dim",
      rows, static_cast<double>(cache + plan) * 1e-9, static_cast<double>(cache) * 1e-9,
      static_cast<double>(plan) * 1e-9, static_cast<double>(*available) * 1e-9));
}

// Turns the command line into options of the measurement. Throws ToolError for values that go together with none.
ScalingOptions BenchOptions(const CommandOptions& options) {
  ScalingOptions bench = options.bench;
  if (!ParsePreset(options.preset, &bench.preset)) {
    throw ToolError(fmt::format("--preset: unknown preset \"{}\"; choose from seed, fast", options.preset));
  }
  if (const Status status = ValidateShape(bench.shape); !status.ok()) {
    throw ToolError("--q-heads, --kv-heads, --head-dim: " + status.message());
  }
  if (options.tau >= 0.0f && options.tolerance >= 0.0f) {
    throw ToolError("--tau gives the threshold, --tolerance calibrates it: give one of them");
  }
  if (options.tau >= 0.0f) {
    bench.tau = options.tau;
  } else if (options.tolerance >= 0.0f) {
    bench.tolerance = options.tolerance;
  } else if (bench.preset == Preset::kSeed) {
    bench.tau = kSeedTau;
  }
  bench.threads = ThreadsOf(bench.threads);
  return bench;
}

void AddSpread(Record& object, const std::string& name, const Spread& spread) {
  object[name] = spread.median;
  object[name + "_p10"] = spread.p10;
  object[name + "_p90"] = spread.p90;
}

std::vector<Record> RecordsOf(const ScalingOptions& bench, std::span<const ScalingResult> results) {
  const std::string cpu = CpuName();
  const std::string date = UtcDate();
  std::vector<Record> records;
  for (const ScalingResult& result : results) {
    Record object;
    object["rows"] = result.rows;
    object["mode"] = result.mode;
    object["preset"] = PresetName(bench.preset);
    object["tau"] = result.tau_mean;
    object["calibrated"] = !bench.tau;
    object["tolerance"] =
        bench.tau ? Record(nullptr) : Record(bench.tolerance.value_or(DefaultTolerance(bench.preset)));
    object["build_ms"] = result.build_ms;
    object["plan_bytes"] = result.plan_bytes;
    AddSpread(object, "selection_ms", result.selection_ms);
    object["selection_rows_read"] = result.selection_rows;
    AddSpread(object, "attend_ms", result.attend_ms);
    object["rows_read"] = result.attend_rows;
    object["attn_err_mean"] = RecordNumber(result.error_mean);
    AddSpread(object, "exact_ms", result.exact_ms);
    object["speedup_vs_exact"] = result.exact_ms.median / result.attend_ms.median;
    object["q_heads"] = bench.shape.q_heads;
    object["kv_heads"] = bench.shape.kv_heads;
    object["head_dim"] = bench.shape.head_dim;
    object["seed"] = bench.seed;
    object["repetitions"] = bench.repetitions;
    object["threads"] = bench.threads;
    object["simd_target"] = ActiveTarget();
    object["cpu"] = cpu;
    object["date"] = date;
    records.push_back(std::move(object));
  }
  return records;
}

std::string Header(const ScalingOptions& bench) {
  return fmt::format("preset {}, {} query heads, {} KV heads, head size {}, f16 | {}, {}, {} thread{} | {}\n",
                     PresetName(bench.preset), bench.shape.q_heads, bench.shape.kv_heads, bench.shape.head_dim,
                     CpuName(), ActiveTarget(), bench.threads, bench.threads == 1 ? "" : "s", UtcDate());
}

std::string Table(std::span<const ScalingResult> results) {
  std::vector<std::vector<std::string>> lines = {{"mode", "rows", "build ms", "plan MB", "select ms", "tau",
                                                  "attend ms", "rows read", "error", "exact ms", "vs exact"}};
  for (const ScalingResult& result : results) {
    lines.push_back({result.mode, fmt::format("{}", result.rows), fmt::format("{:.0f}", result.build_ms),
                     fmt::format("{:.1f}", static_cast<double>(result.plan_bytes) * 1e-6),
                     fmt::format("{:.3f}", result.selection_ms.median), fmt::format("{:.3g}", result.tau_mean),
                     fmt::format("{:.2f}", result.attend_ms.median),
                     fmt::format("{:.2f} %", 100.0 * result.attend_rows), fmt::format("{:.2g}", result.error_mean),
                     fmt::format("{:.2f}", result.exact_ms.median),
                     fmt::format("{:.1f} x", result.exact_ms.median / result.attend_ms.median)});
  }
  return AlignedTable(lines, 1);
}

void Run(const CommandOptions& options) {
  options.results.CheckStreams();
  const std::vector<int> rows = ParseIntList(options.rows, "--rows", kMinRows, kMaxRows);
  const ScalingOptions bench = BenchOptions(options);
  if (const Status status = TargetFromEnvironment(); !status.ok()) throw ToolError(status.message());
  const std::vector<ScalingMode> modes = ScalingModes(bench.preset);
  CheckMemory(bench, modes, rows.back());
  options.results.CheckFile();

  Progress progress;
  progress.Show(fmt::format("making {} rows of keys and values", rows.back()));
  const SyntheticCache cache(bench.shape, rows.back(), bench.seed, bench.threads);
  std::vector<ScalingResult> results;
  for (const int n : rows) {
    for (const ScalingMode& mode : modes) results.push_back(MeasureScaling(bench, mode, cache, n, progress));
  }
  progress.Clear();

  if (options.results.PrintsTable()) fmt::print("{}\n{}", Header(bench), Table(results));
  options.results.Write(RecordsOf(bench, results));
}

}  // namespace

void AddBenchScalingCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand(
      "scaling", "Time plan build, selection and attention of one layer over synthetic caches of growing length");
  app->add_option("--rows", options->rows, "Cached rows, separated by commas")
      ->type_name("LIST")
      ->capture_default_str();
  app->add_option("--q-heads", options->bench.shape.q_heads, "Query heads")->type_name("N")->capture_default_str();
  app->add_option("--kv-heads", options->bench.shape.kv_heads, "KV heads")->type_name("N")->capture_default_str();
  app->add_option("--head-dim", options->bench.shape.head_dim, "Values of a row")
      ->type_name("D")
      ->capture_default_str();
  app->add_option("--preset", options->preset, "Preset of the sparse operator")
      ->type_name("NAME")
      ->capture_default_str();
  app->add_option("--tau", options->tau, "Threshold of every head (default: seed 0.05, fast calibrated)")
      ->type_name("X")
      ->check(CLI::Range(0.0, 1.0).description(""));
  app->add_option("--tolerance", options->tolerance, "Calibrate to this attention error in place of a given --tau")
      ->type_name("X")
      ->check(CLI::Range(1e-6, 1.0).description(""));
  app->add_option("--repetitions", options->bench.repetitions, "Timed queries of each length")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 16).description(""))
      ->capture_default_str();
  app->add_option("--seed", options->bench.seed, "Seed of the synthetic cache")->type_name("N")->capture_default_str();
  AddThreadsOption(*app, &options->bench.threads);
  options->results.AddTo(*app);
  app->footer(
      "Examples:\n"
      "  scsa bench scaling --rows 32768,131072 --preset seed\n"
      "  scsa bench scaling --rows 65536 --preset fast --tolerance 0.025 --json scaling.json");
  app->get_formatter()->column_width(34);
  options->bench.threads = 0;
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
