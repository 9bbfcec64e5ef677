// SPDX-License-Identifier: Apache-2.0
//
// Made-up keys, values and queries of one attention layer, for measurements that no model is long enough for.
//
// Each KV head has kCentres key centres and as many value centres, every coordinate of which is a standard normal
// number. Row r belongs to a centre z(r): with probability 1 / kMeanRun it is drawn anew, else it is that of row r - 1,
// so that rows of a kind come in runs, as those of a text do. Then
//     key(r) = centre[z(r)] + kKeyNoise e(r),     value(r) = value_centre[z(r)] + kValueNoise e'(r)
// with e and e' standard normal in every coordinate. A query looks for one centre, drawn anew for every query head and
// query:
//     q = sharpness(h) centre + kQueryNoise e
// Query heads differ in how much they concentrate: sharpness(h) rises evenly from kMinSharpness for the first query
// head of a group to kMaxSharpness for the last one (a group of one takes turns over the KV heads).
//
// e and e' are stretches of a fixed table of standard normal numbers, from a random place for each row: the table is
// long enough that rows do not resemble each other beyond chance, and a row costs no more than adding it up. Everything
// follows from the seed, whatever the number of threads and of rows: a shorter cache is a prefix of a longer one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "scsa/types.h"

namespace scsa::tool {

class SyntheticCache {
 public:
  static constexpr int kCentres = 64;
  static constexpr int kMeanRun = 16;
  static constexpr float kKeyNoise = 0.4f;
  static constexpr float kValueNoise = 0.7f;
  static constexpr float kQueryNoise = 0.3f;
  static constexpr float kMinSharpness = 0.6f;
  static constexpr float kMaxSharpness = 1.0f;

  // f16 rows in ggml's layout: the KV heads of a row are neighbours. Throws std::bad_alloc.
  SyntheticCache(const Shape& shape, std::int64_t n_rows, std::uint64_t seed, int n_threads);

  // The first n_kv rows, at most n_rows. Valid as long as this object.
  KvView View(std::int64_t n_kv) const;
  // Query number `index`: [q_heads][head_dim].
  std::vector<float> Query(std::uint64_t index) const;
  // The centre that a row was made from, and the one that a query head looks for.
  int CentreOfRow(std::int64_t row, int kv_head) const { return labels_[row * shape_.kv_heads + kv_head]; }
  int CentreOfQuery(std::uint64_t index, int q_head) const;
  // [head_dim]
  const float* KeyCentre(int kv_head, int centre) const;
  const float* ValueCentre(int kv_head, int centre) const;
  float Sharpness(int q_head) const;

  // Bytes that a cache of n_rows rows takes, labels included.
  static std::uint64_t Bytes(const Shape& shape, std::int64_t n_rows);

 private:
  void FillRows(std::int64_t first, std::int64_t end, int kv_head, std::uint64_t seed);

  Shape shape_;
  std::int64_t n_rows_;
  std::uint64_t seed_;
  std::vector<float> noise_;
  std::vector<float> centres_;  // [kv_heads][key, value][kCentres][head_dim]
  std::vector<std::uint8_t> labels_;
  std::unique_ptr<std::byte[]> k_;
  std::unique_ptr<std::byte[]> v_;
};

}  // namespace scsa::tool
