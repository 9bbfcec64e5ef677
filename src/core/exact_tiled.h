// SPDX-License-Identifier: Apache-2.0
//
// Exact attention of many query rows: tiles of query vectors, one KV head and range of query rows each.
#pragma once

#include "scsa/exact.h"

namespace scsa {

// Whether tiles are the faster way to answer a call of n_q query rows.
bool TilesPay(const Shape& shape, int n_q);

// ExactAttention of a call that was checked. The output bits do not depend on n_threads.
Status TiledAttention(const Shape& shape, const QueryView& q, const KvView& kv, const VisibleSets& visible,
                      const LogitParams& params, int n_threads, Workspace& workspace, const OutView& out);

}  // namespace scsa
