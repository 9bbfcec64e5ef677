// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

namespace scsa::tool {

// One status line on stderr that rewrites itself. Silent unless stderr is a terminal. The line is erased on
// destruction.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows `text`; calls that follow within a tenth of a second are skipped.
  void Show(const std::string& text);
  // Erases the line, so that other output can take its place.
  void Clear();

 private:
  bool enabled_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_;
};

// "4096/8000 tokens, 71 tok/s, 55 s left", for work that runs at a steady rate.
std::string RateText(int done, int total, double seconds);

}  // namespace scsa::tool
