// SPDX-License-Identifier: Apache-2.0
#include "core/block_summaries.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace scsa {
namespace {

constexpr int kHeadDims[] = {8, 24, 64, 136, 512};
constexpr int kSlotCounts[] = {8, 24, 32};

// Marks the bytes of an array inside `record` as used, one count per use.
template <class T>
void Use(const std::vector<std::byte>& record, const T* array, std::size_t count, std::vector<int>& uses) {
  const std::ptrdiff_t first = reinterpret_cast<const std::byte*>(array) - record.data();
  for (std::size_t i = 0; i < count * sizeof(T); ++i) ++uses.at(first + i);
}

TEST(SummaryLayoutTest, ArraysFillAKeyRecordWithoutOverlap) {
  for (const int head_dim : kHeadDims) {
    for (const int slots : kSlotCounts) {
      const SummaryLayout layout(head_dim, slots);
      const std::vector<std::byte> record(layout.key_bytes());
      std::vector<int> uses(record.size(), 0);
      const ConstKeyRecord keys = layout.Keys(record.data());
      for (const float* array : {keys.mean, keys.step, keys.shape}) Use(record, array, head_dim, uses);
      Use(record, keys.largest_step, 8, uses);
      for (const float* array : {keys.log_counts, keys.counts, keys.half_traces}) Use(record, array, slots, uses);
      for (int c = 0; c < slots; ++c) {
        for (int d = 0; d < head_dim; ++d) Use(record, keys.centroids + layout.CentroidAt(c, d), 1, uses);
      }
      EXPECT_EQ(uses, std::vector<int>(record.size(), 1)) << head_dim << " dimensions, " << slots << " slots";
    }
  }
}

TEST(SummaryLayoutTest, ArraysFillAValueRecordWithoutOverlap) {
  for (const int head_dim : kHeadDims) {
    for (const int slots : kSlotCounts) {
      const SummaryLayout layout(head_dim, slots);
      const std::vector<std::byte> record(layout.value_bytes());
      std::vector<int> uses(record.size(), 0);
      const ConstValueRecord values = layout.Values(record.data());
      for (const float* array : {values.mean, values.step}) Use(record, array, head_dim, uses);
      for (int c = 0; c < slots; ++c) {
        for (int d = 0; d < head_dim; ++d) Use(record, values.means + layout.ValueAt(c, d), 1, uses);
      }
      EXPECT_EQ(uses, std::vector<int>(record.size(), 1)) << head_dim << " dimensions, " << slots << " slots";
    }
  }
}

TEST(SummaryLayoutTest, WritersAndReadersSeeTheSamePlaces) {
  const SummaryLayout layout(24, 16);
  std::vector<std::byte> record(layout.key_bytes());
  const std::byte* read_only = record.data();
  const KeyRecord keys = layout.Keys(record.data());
  const ConstKeyRecord const_keys = layout.Keys(read_only);
  EXPECT_EQ(keys.mean, const_keys.mean);
  EXPECT_EQ(keys.step, const_keys.step);
  EXPECT_EQ(keys.shape, const_keys.shape);
  EXPECT_EQ(keys.largest_step, const_keys.largest_step);
  EXPECT_EQ(keys.log_counts, const_keys.log_counts);
  EXPECT_EQ(keys.counts, const_keys.counts);
  EXPECT_EQ(keys.half_traces, const_keys.half_traces);
  EXPECT_EQ(keys.centroids, const_keys.centroids);
  const ValueRecord values = layout.Values(record.data());
  const ConstValueRecord const_values = layout.Values(read_only);
  EXPECT_EQ(values.mean, const_values.mean);
  EXPECT_EQ(values.step, const_values.step);
  EXPECT_EQ(values.means, const_values.means);
}

// The header gives the order as [slots / 8][head_dim / 2][8][2].
TEST(SummaryLayoutTest, CentroidsAreInterleavedInGroupsOfEight) {
  constexpr int kHeadDim = 24;
  constexpr int kSlots = 24;
  const SummaryLayout layout(kHeadDim, kSlots);
  std::size_t at = 0;
  for (int group = 0; group < kSlots / 8; ++group) {
    for (int pair = 0; pair < kHeadDim / 2; ++pair) {
      for (int c = 0; c < 8; ++c) {
        for (int d = 0; d < 2; ++d) EXPECT_EQ(layout.CentroidAt(group * 8 + c, pair * 2 + d), at++);
      }
    }
  }
}

// The header gives the order as [slots / 2][head_dim][2].
TEST(SummaryLayoutTest, ValueMeansAreInterleavedInPairs) {
  constexpr int kHeadDim = 24;
  constexpr int kSlots = 16;
  const SummaryLayout layout(kHeadDim, kSlots);
  std::size_t at = 0;
  for (int pair = 0; pair < kSlots / 2; ++pair) {
    for (int d = 0; d < kHeadDim; ++d) {
      for (int c = 0; c < 2; ++c) EXPECT_EQ(layout.ValueAt(pair * 2 + c, d), at++);
    }
  }
}

// The vectors of one block, and what is stored of them as keys or as values.
struct Stored {
  int head_dim = 0;
  std::vector<float> mean, step;
  std::vector<int> integers;  // [slots][head_dim]

  double Decoded(int slot, int dim) const {
    return static_cast<double>(mean[dim]) + static_cast<double>(step[dim]) * Integer(slot, dim);
  }
  int Integer(int slot, int dim) const { return integers[slot * head_dim + dim]; }
};

enum class Kind : std::uint8_t { kKeys, kValues };

Stored Store(Kind kind, int head_dim, const std::vector<float>& vectors, const std::vector<float>& counts) {
  const int slots = static_cast<int>(counts.size());
  const SummaryLayout layout(head_dim, slots);
  Stored stored;
  stored.head_dim = head_dim;
  const auto copy = [&](const float* mean, const float* step) {
    stored.mean.assign(mean, mean + head_dim);
    stored.step.assign(step, step + head_dim);
  };
  if (kind == Kind::kKeys) {
    // Bytes that must all be replaced, beside arrays that must be left alone.
    std::vector<std::byte> record(layout.key_bytes(), std::byte{0x5A});
    const KeyRecord keys = layout.Keys(record.data());
    StoreCentroids(layout, vectors.data(), counts, keys);
    copy(keys.mean, keys.step);
    EXPECT_EQ(keys.largest_step[0], *std::ranges::max_element(stored.step));
    for (int c = 0; c < slots; ++c) {
      for (int d = 0; d < head_dim; ++d) stored.integers.push_back(keys.centroids[layout.CentroidAt(c, d)]);
    }
    const std::vector<std::byte> untouched(record.size(), std::byte{0x5A});
    for (const float* array : {keys.log_counts, keys.counts, keys.half_traces}) {
      EXPECT_EQ(std::memcmp(array, untouched.data(), slots * sizeof(float)), 0);
    }
    EXPECT_EQ(std::memcmp(keys.shape, untouched.data(), head_dim * sizeof(float)), 0);
  } else {
    std::vector<std::byte> record(layout.value_bytes(), std::byte{0x5A});
    const ValueRecord values = layout.Values(record.data());
    StoreValueMeans(layout, vectors.data(), counts, values);
    copy(values.mean, values.step);
    for (int c = 0; c < slots; ++c) {
      for (int d = 0; d < head_dim; ++d) stored.integers.push_back(values.means[layout.ValueAt(c, d)]);
    }
  }
  return stored;
}

class StoreTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, ::testing::Values(Kind::kKeys, Kind::kValues),
                         [](const auto& param) { return param.param == Kind::kKeys ? "Keys" : "Values"; });

// Half a step, and what dividing in f32 may add to it.
constexpr double kHalfStep = 0.5 + 1e-4;

TEST_P(StoreTest, FrameAndRoundingAreAsDocumented) {
  for (const int head_dim : kHeadDims) {
    for (const int slots : kSlotCounts) {
      SCOPED_TRACE(std::to_string(head_dim) + " dimensions, " + std::to_string(slots) + " slots");
      std::mt19937 random(static_cast<std::uint32_t>(head_dim * 100 + slots));
      std::normal_distribution<float> normal;
      std::vector<float> vectors(static_cast<std::size_t>(slots) * head_dim);
      std::vector<float> counts(slots);
      for (int c = 0; c < slots; ++c) {
        counts[c] = static_cast<float>((c * 5 + 3) % 17);  // slot 10 of 24 and 27 of 32 are empty
        for (int d = 0; d < head_dim; ++d) {
          // Sizes from 1e-3 to 1e4. What lies in an empty slot must not matter.
          vectors[c * head_dim + d] =
              counts[c] == 0 ? 1e6f : std::pow(10.0f, static_cast<float>(d % 8 - 3)) * (normal(random) + 1.0f);
        }
      }
      const Stored stored = Store(GetParam(), head_dim, vectors, counts);
      for (int d = 0; d < head_dim; ++d) {
        double mean = 0;
        double members = 0;
        double size = 0;
        for (int c = 0; c < slots; ++c) {
          mean += static_cast<double>(counts[c]) * vectors[c * head_dim + d];
          members += counts[c];
          if (counts[c] > 0) size = std::max(size, std::fabs(static_cast<double>(vectors[c * head_dim + d])));
        }
        mean /= members;
        EXPECT_NEAR(stored.mean[d], mean, 1e-5 * size) << d;
        double largest = 0;
        for (int c = 0; c < slots; ++c) {
          if (counts[c] > 0) largest = std::max(largest, std::fabs(vectors[c * head_dim + d] - mean));
        }
        EXPECT_NEAR(stored.step[d], largest / 127, 1e-5 * largest) << d;
        int extreme = 0;
        for (int c = 0; c < slots; ++c) {
          extreme = std::max(extreme, std::abs(stored.Integer(c, d)));
          if (counts[c] == 0) {
            EXPECT_EQ(stored.Integer(c, d), 0) << c << " " << d;
          } else {
            EXPECT_NEAR(stored.Decoded(c, d), vectors[c * head_dim + d], kHalfStep * stored.step[d]) << c << " " << d;
          }
        }
        EXPECT_EQ(extreme, 127) << d;  // the whole range is used
      }
    }
  }
}

TEST_P(StoreTest, NothingIsStoredOfEmptySlots) {
  for (const int slots : kSlotCounts) {
    const std::vector<float> vectors(static_cast<std::size_t>(slots) * 24, 3.0f);
    const Stored stored = Store(GetParam(), 24, vectors, std::vector<float>(slots, 0.0f));
    EXPECT_EQ(stored.mean, std::vector<float>(24, 0.0f));
    EXPECT_EQ(stored.step, std::vector<float>(24, 0.0f));
    EXPECT_EQ(stored.integers, std::vector<int>(vectors.size(), 0));
  }
}

TEST_P(StoreTest, OneSlotWithMembersIsItsOwnFrame) {
  std::vector<float> vectors(std::size_t{8} * 24, -7.0f);
  std::vector<float> counts(8, 0.0f);
  counts[5] = 3.0f;
  for (int d = 0; d < 24; ++d) vectors[5 * 24 + d] = 0.1f * static_cast<float>(d) - 1.0f;
  const Stored stored = Store(GetParam(), 24, vectors, counts);
  for (int d = 0; d < 24; ++d) {
    EXPECT_EQ(stored.mean[d], vectors[5 * 24 + d]);
    EXPECT_EQ(stored.step[d], 0.0f);
  }
  EXPECT_EQ(stored.integers, std::vector<int>(vectors.size(), 0));
}

TEST_P(StoreTest, ConstantDimensionsKeepTheirValue) {
  for (const int slots : kSlotCounts) {
    for (const float members : {1.0f, 7.0f}) {
      std::vector<float> vectors(static_cast<std::size_t>(slots) * 8);
      std::vector<float> counts(slots, members);
      for (int c = 0; c < slots; ++c) {
        const float varying = static_cast<float>(c);
        const float dims[8] = {0.0f, 0.3f, -12.5f, 4096.0f, varying, -varying, 0.0f, 1e-3f};
        std::copy_n(dims, 8, vectors.begin() + std::ptrdiff_t{c} * 8);
      }
      const Stored stored = Store(GetParam(), 8, vectors, counts);
      for (int c = 0; c < slots; ++c) {
        for (const int d : {0, 1, 2, 3, 6, 7}) {
          const double value = vectors[c * 8 + d];
          EXPECT_NEAR(stored.Decoded(c, d), value, 1e-6 * std::fabs(value)) << slots << " " << c << " " << d;
        }
      }
      for (const int d : {0, 6}) {
        EXPECT_EQ(stored.step[d], 0.0f);
        for (int c = 0; c < slots; ++c) EXPECT_EQ(stored.Integer(c, d), 0);
      }
      if (slots == 24) continue;
      // Weights of a power of two and values of few bits: even the mean is exact, and no deviation is left.
      for (const int d : {2, 3}) {
        EXPECT_EQ(stored.mean[d], vectors[d]) << d;
        EXPECT_EQ(stored.step[d], 0.0f) << d;
      }
    }
  }
}

// Stored as q8_0, the 32 dimensions around the large channel would share steps of 1000 / 127.
TEST_P(StoreTest, ALargeBiasDoesNotCoarsenOtherDimensions) {
  constexpr int kHeadDim = 64;
  constexpr int kSlots = 32;
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> vectors(std::size_t{kSlots} * kHeadDim);
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    const bool large = i % kHeadDim == 3;
    vectors[i] = large ? 1000.0f + 0.1f * uniform(random) : uniform(random);
  }
  const Stored stored = Store(GetParam(), kHeadDim, vectors, std::vector<float>(kSlots, 8.0f));
  for (int c = 0; c < kSlots; ++c) {
    for (int d = 0; d < kHeadDim; ++d) {
      // Deviations are at most 2, or 0.2 and the rounding of a mean of 1000 in the large channel.
      EXPECT_NEAR(stored.Decoded(c, d), vectors[c * kHeadDim + d], (d == 3 ? 0.21 : 2.0) / 127 / 2 * 1.001);
    }
  }
}

TEST_P(StoreTest, TheLargestValuesOfAPlanFit) {
  constexpr float kLargest = 65504.0f * 127.0f;  // what BlockPlan::Build accepts
  std::vector<float> vectors(std::size_t{8} * 8, kLargest);
  for (int c = 0; c < 8; c += 2) std::fill_n(vectors.begin() + std::ptrdiff_t{c} * 8, 8, -kLargest);
  const Stored stored = Store(GetParam(), 8, vectors, std::vector<float>(8, 16.0f));
  for (int c = 0; c < 8; ++c) {
    for (int d = 0; d < 8; ++d) EXPECT_EQ(stored.Integer(c, d), c % 2 == 0 ? -127 : 127);
  }
}

}  // namespace
}  // namespace scsa
