// SPDX-License-Identifier: Apache-2.0
//
// Summaries of one block's clusters for one KV head, as preset `fast` stores and streams them: a key record, which is
// read to choose clusters, and a value record, which is read for the tail of the closed ones. The records of a KV head
// follow each other in memory, block by block.
//
// A centroid is stored in 8 bits relative to its block: value = mean_d + step_d * stored_d, stored_d in [-127, 127],
// step_d the largest deviation of any of the block's centroids in dimension d / 127. Keys often have a few large
// channels that hardly vary inside a block: a frame per dimension keeps them from coarsening the others. With a query
// q,
//   q . centroid = q . mean + sum_d (q_d step_d) stored_d
// so that the frame costs once per block and not once per cluster. Value means are stored in the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace scsa {

// Clusters whose centroids are interleaved: one vector of 32-bit sums serves that many.
inline constexpr int kClusterGroup = 8;

template <class Float, class Int8>
struct KeyRecordOf {
  Float* mean;          // [head_dim]
  Float* step;          // [head_dim]
  Float* shape;         // [head_dim]: mean within-cluster variance per dimension, sum 1 (0 where there is none)
  Float* largest_step;  // [1], the largest of `step`, and padding
  Float* log_counts;    // [slots]: log(members), -inf for an empty slot
  Float* counts;        // [slots]: members
  Float* half_traces;   // [slots]: half the trace of the members' key covariance
  Int8* centroids;      // [slots / 8][head_dim / 2][8][2]: pairs of dimensions of 8 clusters
};
using KeyRecord = KeyRecordOf<float, std::int8_t>;
using ConstKeyRecord = KeyRecordOf<const float, const std::int8_t>;

template <class Float, class Int8>
struct ValueRecordOf {
  Float* mean;  // [head_dim]
  Float* step;  // [head_dim]
  Int8* means;  // [slots / 2][head_dim][2]: pairs of clusters
};
using ValueRecord = ValueRecordOf<float, std::int8_t>;
using ConstValueRecord = ValueRecordOf<const float, const std::int8_t>;

// Where the parts of a record lie. head_dim and slots: multiples of 8.
class SummaryLayout {
 public:
  SummaryLayout(int head_dim, int slots) : head_dim_(head_dim), slots_(slots) {}

  int head_dim() const { return head_dim_; }
  int slots() const { return slots_; }
  std::size_t key_bytes() const { return (3 * Dims() + kPadded + 3 * Slots()) * sizeof(float) + Slots() * Dims(); }
  std::size_t value_bytes() const { return value_frame_bytes() + Slots() * Dims(); }
  std::size_t value_frame_bytes() const { return 2 * Dims() * sizeof(float); }  // mean and step, at the beginning

  KeyRecord Keys(std::byte* record) const { return KeysOf<float, std::int8_t>(record); }
  ConstKeyRecord Keys(const std::byte* record) const { return KeysOf<const float, const std::int8_t>(record); }
  ValueRecord Values(std::byte* record) const { return ValuesOf<float, std::int8_t>(record); }
  ConstValueRecord Values(const std::byte* record) const { return ValuesOf<const float, const std::int8_t>(record); }

  // Place of dimension `dim` of cluster `slot` in KeyRecord::centroids.
  std::size_t CentroidAt(int slot, int dim) const {
    return (static_cast<std::size_t>(slot / kClusterGroup) * (Dims() / 2) + static_cast<std::size_t>(dim / 2)) * 2 *
               kClusterGroup +
           static_cast<std::size_t>(slot % kClusterGroup * 2 + dim % 2);
  }

  // Place of dimension `dim` of cluster `slot` in ValueRecord::means.
  std::size_t ValueAt(int slot, int dim) const {
    return (static_cast<std::size_t>(slot / 2) * Dims() + static_cast<std::size_t>(dim)) * 2 +
           static_cast<std::size_t>(slot % 2);
  }

 private:
  static constexpr std::size_t kPadded = 8;  // floats, so that later parts keep their alignment

  std::size_t Dims() const { return static_cast<std::size_t>(head_dim_); }
  std::size_t Slots() const { return static_cast<std::size_t>(slots_); }

  template <class Float, class Int8, class Byte>
  KeyRecordOf<Float, Int8> KeysOf(Byte* record) const {
    auto* f = reinterpret_cast<Float*>(record);
    const std::size_t dims = Dims();
    const std::size_t slots = Slots();
    Float* slot_data = f + 3 * dims + kPadded;
    return {f,         f + dims,          f + 2 * dims,          f + 3 * dims,
            slot_data, slot_data + slots, slot_data + 2 * slots, reinterpret_cast<Int8*>(slot_data + 3 * slots)};
  }
  template <class Float, class Int8, class Byte>
  ValueRecordOf<Float, Int8> ValuesOf(Byte* record) const {
    auto* f = reinterpret_cast<Float*>(record);
    return {f, f + Dims(), reinterpret_cast<Int8*>(f + 2 * Dims())};
  }

  int head_dim_;
  int slots_;
};

// Store the vectors of all slots, `vectors` being [slots][head_dim]. The frame is chosen over the slots with members;
// vectors of the others are stored as the frame's mean. Finite values only.
void StoreCentroids(const SummaryLayout& layout, const float* vectors, std::span<const float> counts,
                    const KeyRecord& record);
void StoreValueMeans(const SummaryLayout& layout, const float* vectors, std::span<const float> counts,
                     const ValueRecord& record);

}  // namespace scsa
