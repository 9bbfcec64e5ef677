// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "core/kernels.h"
#include "core/softmax_state.h"
#include "core/workspace.h"

namespace scsa {

// `count` softmax states of n vectors each, one after the other in scratch memory.
class StateArray {
 public:
  StateArray() = default;
  StateArray(ScratchLayout& layout, std::size_t count, int n, int head_dim)
      : n_(n),
        head_dim_(head_dim),
        max_(layout.Take<float>(count * n)),
        sum_(layout.Take<float>(count * n)),
        num_(layout.Take<float>(count * n * head_dim)) {}

  SoftmaxState operator[](std::size_t i) const {
    const std::size_t first = i * n_;
    return {max_ + first, sum_ + first, num_ + first * head_dim_};
  }
  SoftmaxState Cleared(std::size_t i) const {
    ClearStates((*this)[i], n_, head_dim_);
    return (*this)[i];
  }

 private:
  int n_ = 0;
  int head_dim_ = 0;
  float* max_ = nullptr;
  float* sum_ = nullptr;
  float* num_ = nullptr;
};

}  // namespace scsa
