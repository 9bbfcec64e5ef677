// SPDX-License-Identifier: Apache-2.0
//
// Wall-clock times of alternatives that take turns, so that a disturbance of the machine meets all of them.
#pragma once

#include <functional>
#include <vector>

namespace scsa::tool {

double SecondsOf(const std::function<void()>& work);

// Runs every arm once per round; round r begins with arm r mod n_arms and goes on cyclically. Times of arm a in round
// r: [a][r], in seconds.
std::vector<std::vector<double>> TimeInterleaved(int n_arms, int rounds,
                                                 const std::function<void(int arm, int round)>& run);

}  // namespace scsa::tool
