// SPDX-License-Identifier: Apache-2.0
#include "core/fingerprint.h"

#include <bit>
#include <cstring>

namespace scsa {
namespace {

// Multiply-rotate lanes in the manner of xxHash64: four independent lanes keep the multiplier busy.
constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9u;

std::uint64_t LoadWord(const std::byte* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

std::uint64_t LoadTail(const std::byte* p, std::size_t bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, p, bytes);
  return word;
}

std::uint64_t Round(std::uint64_t lane, std::uint64_t word) { return std::rotl(lane + word * kPrime2, 31) * kPrime1; }

std::uint64_t Avalanche(std::uint64_t x) {
  x = (x ^ (x >> 33)) * kPrime2;
  x = (x ^ (x >> 29)) * kPrime3;
  return x ^ (x >> 32);
}

std::uint64_t HashBytes(const std::byte* p, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t a = seed + kPrime1 + kPrime2;
  std::uint64_t b = seed + kPrime2;
  std::uint64_t c = seed;
  std::uint64_t d = seed - kPrime1;
  std::size_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    a = Round(a, LoadWord(p + i));
    b = Round(b, LoadWord(p + i + 8));
    c = Round(c, LoadWord(p + i + 16));
    d = Round(d, LoadWord(p + i + 24));
  }
  std::uint64_t hash = bytes * kPrime3 + std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
  for (; i + 8 <= bytes; i += 8) hash = Round(hash, LoadWord(p + i));
  if (i < bytes) hash = Round(hash, LoadTail(p + i, bytes - i));
  return Avalanche(hash);
}

}  // namespace

std::uint32_t RowFingerprint(const std::byte* k, std::size_t k_bytes, const std::byte* v, std::size_t v_bytes) {
  // Independent of each other, so that they overlap in the pipeline.
  const std::uint64_t hash = HashBytes(k, k_bytes, 0) + std::rotl(HashBytes(v, v_bytes, kPrime3), 32);
  return static_cast<std::uint32_t>(hash ^ (hash >> 32));
}

std::uint32_t CacheFingerprint(const KvView& kv, std::int64_t row, int kv_head, int head_dim) {
  return RowFingerprint(kv.KRow(row, kv_head), RowBytes(kv.k_type, head_dim), kv.VRow(row, kv_head),
                        RowBytes(kv.v_type, head_dim));
}

}  // namespace scsa
