// SPDX-License-Identifier: Apache-2.0
//
// What samples of an error say about the error itself.
#pragma once

#include <span>

#include "scsa/config.h"

namespace scsa {

// The rank l >= 1 of the order statistic that the median of a distribution falls below with a probability of at most
// `alpha`, n independent samples given: the largest l with P(Binomial(n, 1/2) < l) <= alpha. 0 when there is none.
// Exact, whatever the distribution.
int MedianLowerRank(int n, double alpha);

// Whether the recent errors of a head are above `limit` beyond chance: whether the lower confidence bound (one-sided,
// 99.9 %) of their mean (Student's t) or median (order statistics) is, over the last kDriftSpans[i] of them for any i.
// `errors`: oldest first. An error counts as kLargestDriftError at the most, so that one number that is infinite leaves
// a variance to compare with.
inline constexpr int kDriftSpans[] = {8, 16, 32};
inline constexpr int kMaxDriftSpan = 32;
inline constexpr float kLargestDriftError = 10.0f;
bool HasDrifted(std::span<const float> errors, CalibrationStatistic statistic, double limit);

}  // namespace scsa
