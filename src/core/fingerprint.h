// SPDX-License-Identifier: Apache-2.0
//
// Row fingerprints: how a sealed block notices that a cached row changed behind the caller's back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scsa/types.h"

namespace scsa {

// Hash of the bytes of one cached row, key and value. Not cryptographic: it guards against accidents (a restored state,
// a reused slot), and a changed row goes unnoticed with probability 2^-32. The same bytes give the same value on every
// machine of the same byte order. Pointers need no alignment. Thread-safe.
std::uint32_t RowFingerprint(const std::byte* k, std::size_t k_bytes, const std::byte* v, std::size_t v_bytes);

// The same of row `row` of one KV head of a cache.
std::uint32_t CacheFingerprint(const KvView& kv, std::int64_t row, int kv_head, int head_dim);

}  // namespace scsa
