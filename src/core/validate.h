// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scsa/exact.h"

namespace scsa {

// Rows and formats of a cache view.
Status ValidateKv(const KvView& kv);

Status ValidateThreads(int n_threads);

// Everything that ExactAttention and Layer::Attend require of their arguments. The shape is
// checked by ValidateShape.
Status ValidateCall(const QueryView& q, const KvView& kv, const VisibleSets& visible, const LogitParams& params,
                    int n_threads, const OutView& out);

}  // namespace scsa
