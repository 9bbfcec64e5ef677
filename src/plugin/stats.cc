// SPDX-License-Identifier: Apache-2.0
#include "plugin/stats.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "plugin/audit_log.h"
#include "plugin/immortal.h"
#include "plugin/layer_table.h"
#include "plugin/options.h"

namespace scsa::plugin {

Counters& GlobalCounters() { return Immortal<Counters>(); }

void NoteCrossover(std::uint64_t cells) {
  GlobalCounters().crossover.store(cells, std::memory_order_relaxed);
  Count(GlobalCounters().crossover_trials, 1);
}

void GetStats(scsa_plugin_stats* stats) {
  const Counters& c = GlobalCounters();
  const auto load = [](const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  scsa_plugin_stats all{};
  all.struct_size = stats->struct_size;
  all.attn_ns = load(c.attn_ns);
  all.attn_calls = load(c.attn_calls);
  all.set_rows_ns = load(c.set_rows_ns);
  all.sparse_calls = load(c.sparse_calls);
  all.exact_calls = load(c.exact_calls);
  all.calibration_calls = load(c.calibration_calls);
  all.limit_calls = load(c.limit_calls);
  all.rows_read = load(c.rows_read);
  all.rows_visible = load(c.rows_visible);
  all.bytes_read = load(c.bytes_read);
  all.plan_build_ns = load(c.plan_build_ns);
  all.rebuild_count = load(c.rebuild_count);
  all.dropped_blocks = load(c.dropped_blocks);
  all.failures = load(c.failures);
  all.calibrated_layers = load(c.calibrated_layers);
  all.audited_outputs = load(c.audited_outputs);
  all.recalibrated_heads = load(c.recalibrated_heads);
  all.audit_failures = load(c.audit_failures);
  all.audit_ns = load(c.audit_ns);
  all.prompt_rows = load(c.prompt_rows);
  all.prompt_ns = load(c.prompt_ns);
  all.prompt_tiles = load(c.prompt_tiles);
  all.prompt_sparse_tiles = load(c.prompt_sparse_tiles);
  all.prompt_measured_tiles = load(c.prompt_measured_tiles);
  all.prompt_rows_read = load(c.prompt_rows_read);
  all.prompt_rows_visible = load(c.prompt_rows_visible);
  all.prompt_audited_tiles = load(c.prompt_audited_tiles);
  all.prompt_error_millionths = load(c.prompt_error_millionths);
  const std::int64_t crossover = CurrentCrossover();
  all.crossover_trials = load(c.crossover_trials);
  all.crossover = crossover == kAutoCrossover ? load(c.crossover) : static_cast<std::uint64_t>(crossover);
  if (const auto budget = LayerTable::Get().Budget()) {
    all.plan_bytes = budget->used();
    all.evicted_blocks = budget->evicted_blocks();
    all.refused_blocks = budget->refused_blocks();
    all.max_mem = budget->limit();
  }
  std::memcpy(stats, &all, std::min(stats->struct_size, sizeof(all)));
}

namespace {

std::string CrossoverLine(const scsa_plugin_stats& s) {
  if (s.crossover == kNoCrossover) return "scsa: crossover not measured yet\n";
  char text[128];
  std::snprintf(text, sizeof(text), "scsa: crossover %llu visible cells (%s)\n",
                static_cast<unsigned long long>(s.crossover),
                CurrentCrossover() == kAutoCrossover ? "measured" : "set");
  return text;
}

// Where there is a limit.
std::string MemoryLine(const scsa_plugin_stats& s) {
  if (s.max_mem == kNoMemoryLimit) return {};
  char text[160];
  std::snprintf(text, sizeof(text), "scsa: memory: plans may hold %.1f MB; %llu blocks evicted, %llu refused\n",
                static_cast<double>(s.max_mem) / 1e6, static_cast<unsigned long long>(s.evicted_blocks),
                static_cast<unsigned long long>(s.refused_blocks));
  return text;
}

std::string AuditLine(const scsa_plugin_stats& s) {
  scsa_plugin_audit audit{};
  if (!AuditLog::Get().Figures(-1, &audit) || audit.samples == 0) return "scsa: audit: no output compared\n";
  char interval[64] = "too few for an interval";
  if (audit.observations >= SCSA_AUDIT_INTERVAL_FROM) {
    std::snprintf(interval, sizeof(interval), "95 %%: %.4f to %.4f", audit.median_low, audit.median_high);
  }
  char text[256];
  std::snprintf(text, sizeof(text),
                "scsa: audit: %llu outputs in %.1f ms, error median %.4f (%s), p99 %.4f, %llu heads recalibrated\n",
                static_cast<unsigned long long>(s.audited_outputs), static_cast<double>(s.audit_ns) / 1e6, audit.median,
                interval, audit.p99, static_cast<unsigned long long>(s.recalibrated_heads));
  return text;
}

// Nothing where prompts are exact.
std::string PromptLine(const scsa_plugin_stats& s) {
  if (s.prompt_tiles == 0) return {};
  char error[64] = "error not measured yet";
  if (s.prompt_audited_tiles > 0) {
    std::snprintf(error, sizeof(error), "mean error %.4f in %llu tiles",
                  1e-6 * static_cast<double>(s.prompt_error_millionths) / static_cast<double>(s.prompt_audited_tiles),
                  static_cast<unsigned long long>(s.prompt_audited_tiles));
  }
  char text[256];
  std::snprintf(text, sizeof(text), "scsa: prompts: %llu tiles (sparse %llu, measured %llu), rows read %.1f %%, %s\n",
                static_cast<unsigned long long>(s.prompt_tiles), static_cast<unsigned long long>(s.prompt_sparse_tiles),
                static_cast<unsigned long long>(s.prompt_measured_tiles),
                100.0 * static_cast<double>(s.prompt_rows_read) / static_cast<double>(s.prompt_rows_visible), error);
  return text;
}

}  // namespace

std::string StatsSummary() {
  scsa_plugin_stats s{};
  s.struct_size = sizeof(s);
  GetStats(&s);
  const auto ms = [](std::uint64_t ns) { return static_cast<double>(ns) / 1e6; };
  const double share =
      s.rows_visible == 0 ? 0.0 : 100.0 * static_cast<double>(s.rows_read) / static_cast<double>(s.rows_visible);
  char text[1024];
  std::snprintf(text, sizeof(text),
                "scsa: attention calls %llu (sparse %llu, exact %llu, calibration %llu, limit %llu) in %.1f ms\n"
                "scsa: rows read %.1f %% of %llu visible, %.1f MB; cache writes %.1f ms\n"
                "scsa: plans %.1f MB, %llu regions clustered in %.1f ms, %llu blocks dropped, %llu failures, "
                "%llu layers calibrated\n"
                "scsa: prompts: made ready for decoding in %.1f ms, %llu rows calibrated on\n",
                static_cast<unsigned long long>(s.attn_calls), static_cast<unsigned long long>(s.sparse_calls),
                static_cast<unsigned long long>(s.exact_calls), static_cast<unsigned long long>(s.calibration_calls),
                static_cast<unsigned long long>(s.limit_calls), ms(s.attn_ns), share,
                static_cast<unsigned long long>(s.rows_visible), static_cast<double>(s.bytes_read) / 1e6,
                ms(s.set_rows_ns), static_cast<double>(s.plan_bytes) / 1e6,
                static_cast<unsigned long long>(s.rebuild_count), ms(s.plan_build_ns),
                static_cast<unsigned long long>(s.dropped_blocks), static_cast<unsigned long long>(s.failures),
                static_cast<unsigned long long>(s.calibrated_layers), ms(s.prompt_ns),
                static_cast<unsigned long long>(s.prompt_rows));
  return text + CrossoverLine(s) + PromptLine(s) + MemoryLine(s) + AuditLine(s);
}

void Log(std::initializer_list<std::string_view> parts) noexcept {
  // In one piece, so that lines of several threads do not mix.
  char line[4096] = "scsa: ";
  constexpr std::size_t kRoom = sizeof(line) - 1;
  std::size_t length = std::strlen(line);
  for (const std::string_view part : parts) length += part.copy(line + length, kRoom - length);
  line[length++] = '\n';
  std::fwrite(line, 1, length, stderr);
}

void LogOnce(std::initializer_list<std::string_view> parts) noexcept {
  // A bound, for messages that hold numbers.
  constexpr std::size_t kMessages = 64;
  static std::mutex mutex;
  static std::array<std::uint64_t, kMessages> seen{};
  static std::size_t n_seen = 0;
  // FNV-1a.
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::string_view part : parts) {
    for (const char c : part) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  {
    const std::lock_guard lock(mutex);
    const auto end = seen.begin() + static_cast<std::ptrdiff_t>(n_seen);
    if (n_seen == kMessages || std::find(seen.begin(), end, hash) != end) return;
    seen[n_seen++] = hash;
  }
  Log(parts);
}

}  // namespace scsa::plugin
