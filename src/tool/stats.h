// SPDX-License-Identifier: Apache-2.0
//
// The statistics that the reports print. All arithmetic is in double precision.
#pragma once

#include <span>
#include <vector>

namespace scsa::tool {

double Mean(std::span<const double> values);  // 0 when empty

// Quantile p in [0, 1] with linear interpolation between order statistics (the definition of R's type 7 and NumPy's
// default). 0 when empty.
double Quantile(std::span<const double> values, double p);

// Of repeated measurements: the middle, and how far the values lie apart.
struct Spread {
  double median = 0.0;
  double p10 = 0.0;
  double p90 = 0.0;
};
Spread SpreadOf(std::span<const double> values);  // by Quantile; zeros when empty

// 95 % confidence interval (Wilson's) of a proportion of which `successes` of `trials` were seen; [0, 1] without
// trials.
struct Interval {
  double low = 0.0;
  double high = 1.0;
};
Interval WilsonInterval(int successes, int trials);

// log softmax(logits), with the maximum subtracted first.
std::vector<double> LogSoftmax(std::span<const float> logits);

// KL(p || q) in nats from log probabilities of equal length. Entries with p = 0 add nothing. Never negative.
double KlDivergence(std::span<const double> log_p, std::span<const double> log_q);

// Index of the largest value, the first one of equals.
int Argmax(std::span<const float> values);

// ||a - b|| / ||b||. Two zero vectors: 0; only b zero: infinity.
double RelativeError(std::span<const float> a, std::span<const double> b);

}  // namespace scsa::tool
