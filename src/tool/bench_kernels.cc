// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>

#include "commands.h"
#include "kernel_bench.h"
#include "kernel_cases.h"
#include "machine.h"
#include "memory_limit.h"
#include "progress.h"
#include "report.h"
#include "scsa/exact.h"
#include "scsa/target.h"
#include "shared_options.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr int kMinRows = 1024;
constexpr int kMaxRows = 1 << 22;

struct CommandOptions {
  std::string targets;
  std::string primitives;
  std::string heads = "1,3,4,7";
  int threads = 0;
  int rows = 8192;
  int head_dim = 128;
  int repetitions = 11;
  ResultOptions results;
};

// Names as AvailableTargets gives them.
std::vector<std::string> ParseTargets(const std::string& text) {
  if (text.empty()) return AvailableTargets();
  std::vector<std::string> targets;
  for (const std::string& name : SplitList(text, "--targets")) {
    if (const Status status = ForceTarget(name); !status.ok()) throw ToolError("--targets: " + status.message());
    if (std::ranges::find(targets, ActiveTarget()) == targets.end()) targets.push_back(ActiveTarget());
  }
  if (const Status status = ForceTarget(""); !status.ok()) throw ToolError(status.message());
  return targets;
}

std::vector<std::string> ParsePrimitives(const std::string& text) {
  if (text.empty()) return PrimitiveNames();
  std::vector<std::string> primitives = SplitList(text, "--primitives");
  for (const std::string& name : primitives) {
    if (std::ranges::find(PrimitiveNames(), name) != PrimitiveNames().end()) continue;
    throw ToolError(
        fmt::format("--primitives: unknown primitive \"{}\"; choose from {}", name, fmt::join(PrimitiveNames(), ", ")));
  }
  return primitives;
}

KernelSetup SetupOf(const CommandOptions& options) {
  KernelSetup setup;
  setup.head_dim = options.head_dim;
  setup.rows = options.rows;
  setup.threads = ThreadsOf(options.threads);
  setup.heads = ParseIntList(options.heads, "--heads", 1, kMaxBenchHeads);
  setup.caches = CoreCaches();
  if (const Status status = ValidateShape({1, 1, setup.head_dim}); !status.ok()) {
    throw ToolError("--head-dim: " + status.message());
  }
  if (setup.rows < kMinRows || setup.rows > kMaxRows) {
    throw ToolError(fmt::format("--rows: {} is not from {} to {}", setup.rows, kMinRows, kMaxRows));
  }
  const std::uint64_t needed = CaseSetBytes(setup);
  if (const auto available = AvailableMemory(); available && needed > *available) {
    throw ToolError(fmt::format("{:.1f} GB of memory are needed, {:.1f} GB are available: use a smaller --rows",
                                static_cast<double>(needed) * 1e-9, static_cast<double>(*available) * 1e-9));
  }
  return setup;
}

double Share(double rate, double limit) { return limit > 0.0 ? rate / limit : 0.0; }

std::optional<double> ArithmeticShare(const KernelResult& result, const MachineRates& limits) {
  if (!result.multiply_adds_s) return std::nullopt;
  return Share(*result.multiply_adds_s, limits.multiply_add_rate);
}

std::vector<Record> RecordsOf(const KernelSetup& setup, int repetitions, const MachineRates& limits,
                              std::span<const KernelResult> results) {
  const std::string cpu = CpuName();
  const std::string date = UtcDate();
  std::vector<Record> records;
  for (const KernelResult& result : results) {
    Record object;
    object["primitive"] = result.label.primitive;
    object["format"] = result.label.format;
    object["heads"] = result.label.heads > 0 ? Record(result.label.heads) : Record(nullptr);
    object["cache"] = CacheStateName(result.cache);
    object["simd_target"] = result.target;
    object["rows_s"] = result.rows_s.median;
    object["rows_s_p10"] = result.rows_s.p10;
    object["rows_s_p90"] = result.rows_s.p90;
    object["bytes_s"] = result.bytes_s;
    object["bandwidth_share"] = Share(result.bytes_s, limits.bandwidth);
    object["multiply_adds_s"] = RecordNumber(result.multiply_adds_s);
    object["arithmetic_share"] = RecordNumber(ArithmeticShare(result, limits));
    object["read_bandwidth"] = limits.bandwidth;
    object["multiply_add_rate"] = limits.multiply_add_rate;
    object["head_dim"] = setup.head_dim;
    object["rows"] = setup.rows;
    object["repetitions"] = repetitions;
    object["threads"] = setup.threads;
    object["cpu"] = cpu;
    object["date"] = date;
    records.push_back(std::move(object));
  }
  return records;
}

std::string Header(const KernelSetup& setup, const MachineRates& limits) {
  return fmt::format("{}, {} thread{}, head size {} | memory {:.1f} GB/s, arithmetic {:.1f} G multiply-adds/s | {}\n",
                     CpuName(), setup.threads, setup.threads == 1 ? "" : "s", setup.head_dim, limits.bandwidth * 1e-9,
                     limits.multiply_add_rate * 1e-9, UtcDate());
}

// One line per case: the first target in full, of the others the rows per second. `results` holds n_targets results of
// a case one after the other.
std::string Table(std::span<const KernelResult> results, std::span<const std::string> targets,
                  const MachineRates& limits) {
  std::vector<std::string> head = {"primitive",         "rows", "heads",  "cache",
                                   targets[0] + " M/s", "GB/s", "memory", "arithmetic"};
  for (const std::string& target : targets.subspan(1)) head.push_back(target + " M/s");
  std::vector<std::vector<std::string>> lines = {head};
  for (std::size_t at = 0; at < results.size(); at += targets.size()) {
    const KernelResult& first = results[at];
    const auto arithmetic = ArithmeticShare(first, limits);
    std::vector<std::string> line = {first.label.primitive,
                                     first.label.format,
                                     first.label.heads > 0 ? fmt::format("{}", first.label.heads) : "-",
                                     std::string(CacheStateName(first.cache)),
                                     fmt::format("{:.3g}", first.rows_s.median * 1e-6),
                                     fmt::format("{:.1f}", first.bytes_s * 1e-9),
                                     fmt::format("{:.0f} %", 100.0 * Share(first.bytes_s, limits.bandwidth)),
                                     arithmetic ? fmt::format("{:.0f} %", 100.0 * *arithmetic) : "-"};
    for (std::size_t t = 1; t < targets.size(); ++t) {
      line.push_back(fmt::format("{:.3g}", results[at + t].rows_s.median * 1e-6));
    }
    lines.push_back(std::move(line));
  }
  return AlignedTable(lines, 2);
}

void Run(const CommandOptions& options) {
  options.results.CheckStreams();
  const std::vector<std::string> targets = ParseTargets(options.targets);
  const std::vector<std::string> primitives = ParsePrimitives(options.primitives);
  const KernelSetup setup = SetupOf(options);
  options.results.CheckFile();

  Progress progress;
  progress.Show("measuring memory bandwidth and arithmetic");
  MachineRates limits = MeasureMachineRates(setup.threads);
  const std::vector<CaseSet> sets = CaseSets(setup, primitives);
  std::vector<KernelResult> results;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    const std::string label = fmt::format("{} of {}, {}", i + 1, sets.size(), sets[i].name);
    progress.Show(label + ": preparing");
    const std::vector<KernelCase> cases = sets[i].make();
    const auto measured = MeasureCases(cases, targets, options.repetitions, [&](int round) {
      progress.Show(fmt::format("{}: round {} of {}", label, round + 1, options.repetitions));
    });
    results.insert(results.end(), measured.begin(), measured.end());
  }
  // Sets share data, the report goes by primitive.
  const auto rank = [](const KernelResult& result) {
    return std::ranges::find(PrimitiveNames(), result.label.primitive) - PrimitiveNames().begin();
  };
  std::ranges::stable_sort(results, {}, rank);
  // Once more: a neighbour on the machine may have been busy the first time.
  const MachineRates again = MeasureMachineRates(setup.threads);
  limits = {.bandwidth = std::max(limits.bandwidth, again.bandwidth),
            .multiply_add_rate = std::max(limits.multiply_add_rate, again.multiply_add_rate)};
  progress.Clear();

  if (options.results.PrintsTable()) fmt::print("{}\n{}", Header(setup, limits), Table(results, targets, limits));
  options.results.Write(RecordsOf(setup, options.repetitions, limits, results));
}

}  // namespace

void AddBenchKernelsCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand(
      "kernels", "Measure the operator's primitives on each SIMD target, beside memory bandwidth and arithmetic");
  app->add_option("--targets", options->targets, "SIMD targets, separated by commas (default: all of this CPU)")
      ->type_name("LIST")
      ->envname("SCSA_TARGET");
  app->add_option("--primitives", options->primitives,
                  fmt::format("What to measure (default: all): {}", fmt::join(PrimitiveNames(), ", ")))
      ->type_name("LIST");
  app->add_option("--heads", options->heads, "Query heads per KV head, separated by commas")
      ->type_name("LIST")
      ->capture_default_str();
  app->add_option("--rows", options->rows, "Rows of a KV head that one cold pass reads")
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--head-dim", options->head_dim, "Values of a row")->type_name("D")->capture_default_str();
  app->add_option("--repetitions", options->repetitions, "Samples of each case and target")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 16).description(""))
      ->capture_default_str();
  AddThreadsOption(*app, &options->threads);
  options->results.AddTo(*app);
  app->footer(
      "Examples:\n"
      "  scsa bench kernels --json kernels.json\n"
      "  scsa bench kernels --primitives attend,score --targets AVX2 --threads 1");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
