// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "scsa/status.h"
#include "scsa/types.h"

namespace scsa {

// Grow-only scratch memory of the operators. Reusing one avoids allocation on the decode path.
// Not thread-safe: one workspace per calling thread (the operators' own worker threads share it safely).
class Workspace {
 public:
  Workspace();
  ~Workspace();
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// kInvalidArgument with a message when the shape is outside the limits that types.h documents.
Status ValidateShape(const Shape& shape);

// Exact attention of n_q decode queries over the visible rows:
//   out[i, h] = sum_r exp(x_r) v_r / (sum_r exp(x_r) + exp(sink_h)),   x_r as LogitParams says.
// Accumulates in f32. Each K and V row is read from memory once for all query heads of its KV head (and all query
// rows). Work is split over (KV head, range of rows) in pieces that depend on the shape alone, so the output bits do
// not depend on n_threads. Any mix of row types; strides as KvView says.
//
// n_threads: OpenMP threads to use, at least 1. Called from inside a parallel region it runs on one thread.
// Errors: kInvalidArgument (bad shape, view or parameter; `out` untouched), kOutOfMemory (`out` untouched).
Status ExactAttention(const Shape& shape, const QueryView& q, const KvView& kv, const VisibleSets& visible,
                      const LogitParams& params, int n_threads, Workspace& workspace, const OutView& out);

}  // namespace scsa
