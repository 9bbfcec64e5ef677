// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "scsa/plugin.h"

namespace scsa::plugin {

inline constexpr std::uint64_t kNoCrossover = std::numeric_limits<std::uint64_t>::max();

// Totals of the process, the crossover aside; one counter per field of scsa_plugin_stats but those of the memory
// budget. Lock-free, so that they can be read while other threads compute and when the program exits.
struct Counters {
  std::atomic<std::uint64_t> attn_ns{0}, attn_calls{0}, set_rows_ns{0};
  std::atomic<std::uint64_t> sparse_calls{0}, exact_calls{0}, calibration_calls{0}, limit_calls{0};
  std::atomic<std::uint64_t> rows_read{0}, rows_visible{0}, bytes_read{0};
  std::atomic<std::uint64_t> plan_build_ns{0}, rebuild_count{0}, dropped_blocks{0}, failures{0};
  std::atomic<std::uint64_t> calibrated_layers{0};
  std::atomic<std::uint64_t> audited_outputs{0}, recalibrated_heads{0}, audit_failures{0}, audit_ns{0};
  std::atomic<std::uint64_t> prompt_rows{0}, prompt_ns{0};
  std::atomic<std::uint64_t> prompt_tiles{0}, prompt_sparse_tiles{0}, prompt_measured_tiles{0};
  std::atomic<std::uint64_t> prompt_rows_read{0}, prompt_rows_visible{0};
  std::atomic<std::uint64_t> prompt_audited_tiles{0}, prompt_error_millionths{0};
  std::atomic<std::uint64_t> crossover_trials{0}, crossover{kNoCrossover};  // the latter of the trial that ended last
};
Counters& GlobalCounters();

inline void Count(std::atomic<std::uint64_t>& counter, std::uint64_t amount) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

// A trial of some context is over, and gave this crossover.
void NoteCrossover(std::uint64_t cells);

// See scsa_plugin_get_stats_t.
void GetStats(scsa_plugin_stats* stats);

// The lines that SCSA_STATS=1 prints at exit.
std::string StatsSummary();

// One line on stderr, with the plugin's name in front, put together from the parts. Takes no memory: what is to be said
// is often that there is none.
void Log(std::initializer_list<std::string_view> parts) noexcept;
// The same, but each distinct message once.
void LogOnce(std::initializer_list<std::string_view> parts) noexcept;

}  // namespace scsa::plugin
