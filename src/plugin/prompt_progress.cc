// SPDX-License-Identifier: Apache-2.0
#include "plugin/prompt_progress.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>

#include "plugin/stats.h"

namespace scsa::plugin {
namespace {

using Clock = std::chrono::steady_clock;

struct Prompt {
  std::mutex mutex;
  int layer = 0;
  std::uint64_t rows = 0;  // read before the batch at work
  int in_batch = 0;
  std::uint64_t tiles_read = 0;  // counters when the prompt began
  std::uint64_t tiles_visible = 0;
  Clock::time_point start;
};

Prompt& ThePrompt() {
  static Prompt* prompt = new Prompt;
  return *prompt;
}

// Whether there is a line, so that decode steps need not take the lock.
std::atomic<bool> g_reading{false};

void Show(const Prompt& prompt, std::uint64_t visible) {
  const double seconds = std::chrono::duration<double>(Clock::now() - prompt.start).count();
  char speed[48] = "";
  if (prompt.rows > 0 && seconds > 0) {
    std::snprintf(speed, sizeof(speed), ", %.1f tok/s", static_cast<double>(prompt.rows) / seconds);
  }
  const Counters& counters = GlobalCounters();
  const std::uint64_t tiles_visible =
      counters.prompt_rows_visible.load(std::memory_order_relaxed) - prompt.tiles_visible;
  char share[48] = "";
  if (tiles_visible > 0) {
    const std::uint64_t read = counters.prompt_rows_read.load(std::memory_order_relaxed) - prompt.tiles_read;
    std::snprintf(share, sizeof(share), ", rows read %.1f %%",
                  100.0 * static_cast<double>(read) / static_cast<double>(tiles_visible));
  }
  std::fprintf(stderr, "\r\033[Kscsa: reading the prompt: %llu tokens%s%s", static_cast<unsigned long long>(visible),
               speed, share);
  std::fflush(stderr);
}

}  // namespace

void ShowPromptBatch(int layer, int n_q, std::uint64_t visible) {
  static const bool on_terminal = isatty(STDERR_FILENO) != 0;
  if (!on_terminal) return;
  Prompt& prompt = ThePrompt();
  std::lock_guard lock(prompt.mutex);
  if (!g_reading.load(std::memory_order_relaxed)) {
    prompt.layer = layer;
    prompt.rows = 0;
    prompt.in_batch = 0;
    prompt.tiles_read = GlobalCounters().prompt_rows_read.load(std::memory_order_relaxed);
    prompt.tiles_visible = GlobalCounters().prompt_rows_visible.load(std::memory_order_relaxed);
    prompt.start = Clock::now();
    g_reading.store(true, std::memory_order_relaxed);
  }
  if (layer != prompt.layer) return;
  prompt.rows += static_cast<std::uint64_t>(prompt.in_batch);
  prompt.in_batch = n_q;
  Show(prompt, visible);
}

void EndPromptProgress() {
  if (!g_reading.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(ThePrompt().mutex);
  if (!g_reading.exchange(false)) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

}  // namespace scsa::plugin
