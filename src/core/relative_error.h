// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

namespace scsa {

// |output - exact| / |exact| in double, `output(d)` being value d of head_dim. 0 / 0 counts as 0, anything that is not
// a number as infinity.
template <class Output>
float RelativeErrorOf(Output&& output, const float* exact, int head_dim) {
  double difference = 0;
  double norm = 0;
  for (int d = 0; d < head_dim; ++d) {
    const double delta = output(d) - exact[d];
    difference += delta * delta;
    norm += static_cast<double>(exact[d]) * exact[d];
  }
  if (difference == 0) return 0;
  const double error = std::sqrt(difference / norm);
  return std::isnan(error) ? std::numeric_limits<float>::infinity() : static_cast<float>(error);
}

inline float RelativeError(const float* output, const float* exact, int head_dim) {
  return RelativeErrorOf([output](int d) { return static_cast<double>(output[d]); }, exact, head_dim);
}

}  // namespace scsa
