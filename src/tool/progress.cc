// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace scsa::tool {

Progress::Progress() : enabled_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { Clear(); }

void Progress::Show(const std::string& text) {
  if (!enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  if (shown_ && now - last_ < std::chrono::milliseconds(100)) return;
  fmt::print(stderr, "\r\033[K{}", text);
  std::fflush(stderr);
  shown_ = true;
  last_ = now;
}

void Progress::Clear() {
  if (!shown_) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

std::string RateText(int done, int total, double seconds) {
  if (done <= 0 || seconds <= 0.0) return fmt::format("{}/{} tokens", done, total);
  const double rate = done / seconds;
  return fmt::format("{}/{} tokens, {:.0f} tok/s, {:.0f} s left", done, total, rate, (total - done) / rate);
}

}  // namespace scsa::tool
