// SPDX-License-Identifier: Apache-2.0
#include "timing.h"

#include <chrono>

namespace scsa::tool {

double SecondsOf(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::vector<std::vector<double>> TimeInterleaved(int n_arms, int rounds,
                                                 const std::function<void(int arm, int round)>& run) {
  std::vector<std::vector<double>> seconds(n_arms);
  for (int round = 0; round < rounds; ++round) {
    for (int turn = 0; turn < n_arms; ++turn) {
      const int arm = (round + turn) % n_arms;
      seconds[arm].push_back(SecondsOf([&] { run(arm, round); }));
    }
  }
  return seconds;
}

}  // namespace scsa::tool
