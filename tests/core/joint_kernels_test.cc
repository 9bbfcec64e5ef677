// SPDX-License-Identifier: Apache-2.0
//
// The kernels over block summaries against plain double-precision code, on every SIMD target that this machine can run.
#include "core/joint_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/core/synthetic.h"

namespace scsa {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();
constexpr double kRound = 0x1p-24;  // of f32, relative
constexpr int kHeadDims[] = {8, 24, 64, 136, 512};
constexpr int kSlotCounts[] = {8, 16, 24, 32, 128};
constexpr int kMaxHeads = 9;
constexpr float kSentinel = 12345.0f;

// The summaries of a few blocks in plain arrays, and the records that hold the same. The records end with the last
// byte, so that a sanitizer sees every read beyond it.
struct Summaries {
  struct Block {
    std::vector<float> key_mean, key_step, shape, counts, half_traces, value_mean, value_step;
    std::vector<int> centroids, value_means;  // [slots][head_dim]
  };

  Summaries(int head_dim, int slots, std::vector<std::uint8_t> usable_blocks, std::uint32_t seed)
      : layout(head_dim, slots), usable(std::move(usable_blocks)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    const auto draw = [&](std::size_t n, auto&& value) {
      std::vector<float> out(n);
      for (float& x : out) x = value();
      return out;
    };
    const auto integers = [&](std::size_t n) {
      std::vector<int> out(n);
      for (int& x : out) x = static_cast<int>(random() % 255) - 127;
      out.front() = -127;
      out.back() = 127;
      return out;
    };
    const auto dims = static_cast<std::size_t>(head_dim);
    for (std::size_t b = 0; b < usable.size(); ++b) {
      Block block;
      block.key_mean = draw(dims, [&] { return normal(random); });
      block.key_step = draw(dims, [&] { return 0.02f * uniform(random); });
      block.key_step[b % dims] = 0.0f;  // a constant dimension
      block.key_step[(b + 3) % dims] = 0.1f;
      block.shape = draw(dims, [&] { return 2.0f * uniform(random) / static_cast<float>(dims); });
      block.counts = draw(static_cast<std::size_t>(slots), [&] { return static_cast<float>(1 + random() % 16); });
      for (int c = static_cast<int>(b); c < slots; c += 7) block.counts[c] = 0.0f;
      block.half_traces = draw(static_cast<std::size_t>(slots), [&] { return 2.0f * uniform(random); });
      block.value_mean = draw(dims, [&] { return normal(random); });
      block.value_step = draw(dims, [&] { return 0.02f * uniform(random); });
      block.centroids = integers(static_cast<std::size_t>(slots) * dims);
      block.value_means = integers(static_cast<std::size_t>(slots) * dims);
      blocks.push_back(std::move(block));
    }
    Write();
  }

  // Brings the records in line with the arrays.
  void Write() {
    records.assign(blocks.size(), std::vector<std::byte>(layout.key_bytes() + layout.value_bytes()));
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const Block& block = blocks[b];
      const KeyRecord keys = layout.Keys(records[b].data());
      std::ranges::copy(block.key_mean, keys.mean);
      std::ranges::copy(block.key_step, keys.step);
      std::ranges::copy(block.shape, keys.shape);
      std::fill_n(keys.largest_step, 8, *std::ranges::max_element(block.key_step));
      std::ranges::copy(block.counts, keys.counts);
      std::ranges::copy(block.half_traces, keys.half_traces);
      const ValueRecord values = layout.Values(records[b].data() + layout.key_bytes());
      std::ranges::copy(block.value_mean, values.mean);
      std::ranges::copy(block.value_step, values.step);
      for (int c = 0; c < layout.slots(); ++c) {
        keys.log_counts[c] = block.counts[c] > 0 ? std::log(block.counts[c]) : kEmpty;
        for (int d = 0; d < layout.head_dim(); ++d) {
          const std::size_t at = static_cast<std::size_t>(c) * layout.head_dim() + d;
          keys.centroids[layout.CentroidAt(c, d)] = static_cast<std::int8_t>(block.centroids[at]);
          values.means[layout.ValueAt(c, d)] = static_cast<std::int8_t>(block.value_means[at]);
        }
      }
    }
    data.resize(blocks.size());
    for (std::size_t b = 0; b < blocks.size(); ++b) data[b] = usable[b] != 0 ? records[b].data() : nullptr;
  }

  BlockRange Range() const {
    return {.layout = &layout,
            .blocks = data.data(),
            .keys_at = 0,
            .values_at = layout.key_bytes(),
            .n_blocks = static_cast<int>(data.size())};
  }
  int n_clusters() const { return static_cast<int>(blocks.size()) * layout.slots(); }
  const Block& BlockOf(int cluster) const { return blocks[cluster / layout.slots()]; }
  double Count(int cluster) const { return BlockOf(cluster).counts[cluster % layout.slots()]; }
  bool Counts(int cluster) const { return usable[cluster / layout.slots()] != 0 && Count(cluster) > 0; }

  SummaryLayout layout;
  std::vector<std::uint8_t> usable;
  std::vector<Block> blocks;
  std::vector<std::vector<std::byte>> records;  // of each block: key record, value record
  std::vector<const std::byte*> data;           // nullptr where a block is not usable
};

std::vector<float> RandomQuery(int n, int head_dim, std::uint32_t seed, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<std::size_t>(n) * head_dim);
  for (float& x : q) x = size * normal(random);
  return q;
}

// What EstimateClusters's header says about one query and one cluster, in double, and how far f32 may be from it.
struct Expected {
  double logit = 0;     // a + log m
  double half_var = 0;  // s
  double error = 0;     // bound on the difference of a computed exponent
};

// For each query of `q` and each cluster.
std::vector<Expected> ExpectedExponents(const Summaries& summaries, const std::vector<float>& q) {
  const int head_dim = summaries.layout.head_dim();
  const int slots = summaries.layout.slots();
  std::vector<Expected> expected;
  for (std::size_t i = 0; i < q.size() / head_dim; ++i) {
    const test::Vector query = test::ToDouble(q.data() + i * head_dim, head_dim);
    for (const Summaries::Block& block : summaries.blocks) {
      double offset = 0;
      double offset_size = 0;
      double spread = 0;
      double largest_query = 0;
      double largest_step = 0;
      std::vector<double> products(head_dim);
      for (int d = 0; d < head_dim; ++d) {
        offset += query[d] * block.key_mean[d];
        offset_size += std::fabs(query[d] * block.key_mean[d]);
        spread += query[d] * query[d] * block.shape[d];
        products[d] = query[d] * block.key_step[d];
        largest_query = std::max(largest_query, std::fabs(query[d]));
        largest_step = std::max<double>(largest_step, block.key_step[d]);
      }
      const double largest = largest_query * largest_step;
      for (int c = 0; c < slots; ++c) {
        double dot = 0;
        double stored_size = 0;
        for (int d = 0; d < head_dim; ++d) {
          const int stored = block.centroids[c * head_dim + d];
          dot += products[d] * stored;
          stored_size += std::abs(stored);
        }
        Expected e;
        e.logit = std::log(static_cast<double>(block.counts[c])) + offset + dot;
        e.half_var = block.half_traces[c] * spread;
        // A query of 15 bits: each product is off by half of the bound / 16383 (and by its own rounding). A query so
        // small that this is subnormal counts as zero.
        e.error = (0.501 * largest / 16383 + 2 * kRound * largest) * stored_size;
        if (largest < 1e-32) e.error = largest * stored_size;
        // Rounding of the f32 sums over dimensions, and of those that make up the exponent.
        const double exponent_size = std::fabs(offset) + std::fabs(dot) + e.half_var + 3;
        e.error += kRound * (head_dim * (offset_size + e.half_var) + 8 * exponent_size);
        expected.push_back(e);
      }
    }
  }
  return expected;
}

// exp(x) of an exponent that may be off by `error`: a weight relative to the gauge, between 0 and 1 times `factor`.
void ExpectWeight(float actual, double x, double error, double factor, const std::string& what) {
  constexpr double kExp = 1e-6;    // relative error of exp and of the product
  constexpr double kTiny = 3e-38;  // weights below e^-87.3 are 0
  const double low = factor * std::exp(std::min(0.0, x - error)) * (1 - kExp);
  const double high = factor * std::exp(std::min(0.0, x + error)) * (1 + kExp);
  EXPECT_GE(actual, low - factor * kTiny) << what;
  EXPECT_LE(actual, high + factor * kTiny) << what;
}

struct Estimates {
  std::vector<float> estimates, tails;
  std::vector<EstimateSums> sums;
};

constexpr std::int64_t kGap = 5;  // between the rows of two query heads: rows are not aligned
constexpr std::int64_t kSumsStride = 3;

Estimates Estimate(const Summaries& summaries, const std::vector<float>& q, int n, float tail_shrink,
                   const FetchHint* hints = nullptr) {
  EstimateArgs args;
  args.n = n;
  args.q = q.data();
  args.tail_shrink = tail_shrink;
  args.stride = summaries.n_clusters() + kGap;
  args.sums_stride = kSumsStride;
  if (hints != nullptr) std::copy_n(hints, 2, args.next);
  Estimates out;
  out.estimates.assign(static_cast<std::size_t>(n * args.stride), kSentinel);
  out.tails = out.estimates;
  out.sums.assign(static_cast<std::size_t>(n * kSumsStride), {kSentinel, kSentinel});
  EstimateClusters(summaries.Range(), args, out.estimates.data(), out.tails.data(), out.sums.data());
  return out;
}

void ExpectEstimates(const Summaries& summaries, const std::vector<Expected>& expected, int n, float tail_shrink,
                     const Estimates& out) {
  const int clusters = summaries.n_clusters();
  const std::int64_t stride = clusters + kGap;
  for (int i = 0; i < n; ++i) {
    double gauge = -std::numeric_limits<double>::infinity();
    double gauge_error = 0;
    for (int c = 0; c < clusters; ++c) {
      const Expected& e = expected[i * clusters + c];
      if (!summaries.Counts(c)) continue;
      gauge = std::max(gauge, e.logit + e.half_var);
      gauge_error = std::max(gauge_error, e.error);
    }
    const EstimateSums& sums = out.sums[i * kSumsStride];
    ASSERT_NEAR(sums.gauge, gauge, gauge_error);
    double sum = 0;
    float largest = 0;
    for (int c = 0; c < clusters; ++c) {
      const float estimate = out.estimates[i * stride + c];
      const float tail = out.tails[i * stride + c];
      if (!summaries.Counts(c)) {
        EXPECT_EQ(estimate, 0.0f) << c;
        EXPECT_EQ(tail, 0.0f) << c;
        continue;
      }
      const Expected& e = expected[i * clusters + c];
      const std::string what = "query " + std::to_string(i) + " cluster " + std::to_string(c);
      ExpectWeight(estimate, e.logit + e.half_var - sums.gauge, e.error, 1, what);
      ExpectWeight(tail, e.logit - sums.gauge, e.error,
                   1 + static_cast<double>(tail_shrink) * e.half_var * (1 + 600 * kRound), what);
      sum += estimate;
      largest = std::max(largest, estimate);
    }
    EXPECT_NEAR(sums.sum, sum, clusters * kRound * sum);
    EXPECT_NEAR(largest, 1.0f, 1e-6f);  // of the cluster that sets the gauge
    for (std::int64_t k = 0; k < kGap; ++k) {
      EXPECT_EQ(out.estimates[i * stride + clusters + k], kSentinel);
      EXPECT_EQ(out.tails[i * stride + clusters + k], kSentinel);
    }
    for (std::int64_t k = 1; k < kSumsStride; ++k) {
      EXPECT_EQ(out.sums[i * kSumsStride + k].gauge, kSentinel);
      EXPECT_EQ(out.sums[i * kSumsStride + k].sum, kSentinel);
    }
  }
}

TEST(EstimateClustersTest, FollowsTheFormulasOnEveryTarget) {
  for (const int head_dim : kHeadDims) {
    for (const int slots : kSlotCounts) {
      const Summaries summaries(head_dim, slots, {1, 0, 1, 1},
                                static_cast<std::uint32_t>(head_dim) * 1000u + static_cast<std::uint32_t>(slots));
      const std::vector<float> q = RandomQuery(kMaxHeads, head_dim, 17, 3.0f / std::sqrt(static_cast<float>(head_dim)));
      const std::vector<Expected> expected = ExpectedExponents(summaries, q);
      test::OnEveryTarget([&] {
        for (int n = 1; n <= kMaxHeads; ++n) {
          SCOPED_TRACE(std::to_string(head_dim) + " dimensions, " + std::to_string(slots) + " slots, " +
                       std::to_string(n) + " heads");
          ExpectEstimates(summaries, expected, n, 0.5f, Estimate(summaries, q, n, 0.5f));
          if (::testing::Test::HasFailure()) return;
        }
      });
    }
  }
}

TEST(EstimateClustersTest, ManyBlocksShareOneGauge) {
  const Summaries summaries(64, 32, {0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0}, 5);
  const std::vector<float> q = RandomQuery(kMaxHeads, 64, 18, 2.0f);
  const std::vector<Expected> expected = ExpectedExponents(summaries, q);
  test::OnEveryTarget([&] {
    for (const float tail_shrink : {0.0f, 1.0f}) {
      ExpectEstimates(summaries, expected, kMaxHeads, tail_shrink, Estimate(summaries, q, kMaxHeads, tail_shrink));
    }
  });
}

TEST(EstimateClustersTest, ExtremeQueriesKeepTheirBounds) {
  const Summaries summaries(24, 16, {1, 1, 0, 1}, 6);
  for (const float size : {0.0f, 1e-38f, 1e-30f, 1e-10f, 1e3f, 1e6f, 1e15f}) {
    const std::vector<float> q = RandomQuery(kMaxHeads, 24, 19, size);
    const std::vector<Expected> expected = ExpectedExponents(summaries, q);
    test::OnEveryTarget([&] {
      SCOPED_TRACE("queries of " + std::to_string(size));
      ExpectEstimates(summaries, expected, kMaxHeads, 0.5f, Estimate(summaries, q, kMaxHeads, 0.5f));
    });
  }
}

// 127 in every place and a query that points the same way: the largest sums of integers there are.
TEST(EstimateClustersTest, IntegerSumsDoNotOverflow) {
  for (const int head_dim : {64, 512}) {
    Summaries summaries(head_dim, 16, {1}, 7);
    Summaries::Block& block = summaries.blocks[0];
    std::ranges::fill(block.key_step, 0.25f);
    std::ranges::fill(block.centroids, 127);
    for (int d = 0; d < head_dim; ++d) block.centroids[3 * head_dim + d] = -127;
    summaries.Write();
    for (const float sign : {1.0f, -1.0f}) {
      const std::vector<float> q(static_cast<std::size_t>(kMaxHeads) * head_dim, sign / static_cast<float>(head_dim));
      const std::vector<Expected> expected = ExpectedExponents(summaries, q);
      test::OnEveryTarget(
          [&] { ExpectEstimates(summaries, expected, kMaxHeads, 0.5f, Estimate(summaries, q, kMaxHeads, 0.5f)); });
    }
  }
}

TEST(EstimateClustersTest, BlocksWithoutDeviationsCount) {
  Summaries summaries(64, 32, {1, 1}, 8);
  for (Summaries::Block& block : summaries.blocks) {
    std::ranges::fill(block.key_step, 0.0f);
    std::ranges::fill(block.half_traces, 0.0f);
    std::ranges::fill(block.shape, 0.0f);
  }
  summaries.Write();
  const std::vector<float> q = RandomQuery(kMaxHeads, 64, 20, 0.5f);
  const std::vector<Expected> expected = ExpectedExponents(summaries, q);
  test::OnEveryTarget(
      [&] { ExpectEstimates(summaries, expected, kMaxHeads, 0.5f, Estimate(summaries, q, kMaxHeads, 0.5f)); });
}

TEST(EstimateClustersTest, NothingThatCountsWeighsNothing) {
  Summaries empty(24, 16, {1, 1}, 9);
  for (Summaries::Block& block : empty.blocks) std::ranges::fill(block.counts, 0.0f);
  empty.Write();
  const Summaries unusable(24, 16, {0, 0}, 9);
  const std::vector<float> q = RandomQuery(kMaxHeads, 24, 21, 1.0f);
  test::OnEveryTarget([&] {
    for (const Summaries* summaries : {static_cast<const Summaries*>(&empty), &unusable}) {
      const Estimates out = Estimate(*summaries, q, kMaxHeads, 0.5f);
      for (int i = 0; i < kMaxHeads; ++i) {
        EXPECT_EQ(out.sums[i * kSumsStride].gauge, kEmpty);
        EXPECT_EQ(out.sums[i * kSumsStride].sum, 0.0f);
        for (int c = 0; c < 32; ++c) {
          EXPECT_EQ(out.estimates[i * (32 + kGap) + c], 0.0f);
          EXPECT_EQ(out.tails[i * (32 + kGap) + c], 0.0f);
        }
      }
    }
  });
}

// Hints of several shapes: dense, strided, at places, larger than the work to hide them behind, and none.
std::vector<std::array<FetchHint, 2>> Hints(const std::vector<std::byte>& memory,
                                            const std::vector<const std::byte*>& places) {
  const FetchHint dense = {.data = memory.data(), .row_bytes = std::ssize(memory)};
  const FetchHint strided = {.data = memory.data(), .row_bytes = 100, .stride = 200, .n_rows = 40};
  const FetchHint scattered = {.row_bytes = 136, .n_rows = std::ssize(places), .places = places.data()};
  const FetchHint no_rows = {.data = memory.data(), .row_bytes = 64, .stride = 64, .n_rows = 0};
  // Pieces of memory some of which are missing, the last one too.
  static std::array<const std::byte*, 5> pieces;
  pieces = {nullptr, memory.data(), nullptr, memory.data() + 64, nullptr};
  const FetchHint listed = {.row_bytes = 100, .stride = 8, .n_rows = std::ssize(pieces), .places = pieces.data()};
  return {{dense, FetchHint()}, {FetchHint(), strided}, {scattered, dense}, {no_rows, listed}};
}

TEST(EstimateClustersTest, FetchingAheadChangesNothing) {
  const std::vector<std::byte> memory(10000);
  std::vector<const std::byte*> places;
  for (const int row : {3, 0, 71, 70, 12}) places.push_back(memory.data() + row * 136);
  test::OnEveryTarget([&] {
    for (const int slots : {8, 32}) {
      for (const std::vector<std::uint8_t>& usable : {std::vector<std::uint8_t>{1}, {1, 0, 1, 1}, {0, 0}}) {
        const Summaries summaries(24, slots, usable, 10);
        const std::vector<float> q = RandomQuery(kMaxHeads, 24, 22, 1.0f);
        for (const int n : {1, kMaxHeads}) {
          const Estimates without = Estimate(summaries, q, n, 0.5f);
          for (const auto& hints : Hints(memory, places)) {
            const Estimates with = Estimate(summaries, q, n, 0.5f, hints.data());
            EXPECT_EQ(with.estimates, without.estimates);
            EXPECT_EQ(with.tails, without.tails);
            for (std::size_t i = 0; i < with.sums.size(); ++i) {
              EXPECT_EQ(with.sums[i].gauge, without.sums[i].gauge);
              EXPECT_EQ(with.sums[i].sum, without.sums[i].sum);
            }
          }
        }
      }
    }
  });
}

TEST(SharesAndKeysTest, FollowsTheFormulasOnEveryTarget) {
  for (const int slots : kSlotCounts) {
    const Summaries summaries(24, slots, {1, 0, 1, 1, 0}, 11);
    const int clusters = summaries.n_clusters();
    const std::int64_t stride = clusters + kGap;
    std::mt19937 random(static_cast<std::uint32_t>(slots));
    std::uniform_real_distribution<float> uniform;
    std::vector<float> estimates(static_cast<std::size_t>(kMaxHeads * stride), kSentinel);
    for (int i = 0; i < kMaxHeads; ++i) {
      for (int c = 0; c < clusters; ++c) {
        // As EstimateClusters leaves them where clusters have no members; blocks that are not usable may hold anything.
        estimates[i * stride + c] = summaries.Count(c) > 0 ? uniform(random) : 0.0f;
      }
    }
    std::vector<float> factors(kMaxHeads);
    for (float& factor : factors) factor = uniform(random);
    factors[2] = 0.0f;
    test::OnEveryTarget([&] {
      for (int n = 1; n <= kMaxHeads; ++n) {
        SCOPED_TRACE(std::to_string(slots) + " slots, " + std::to_string(n) + " heads");
        std::vector<float> shares(static_cast<std::size_t>(clusters + kGap), kSentinel);
        std::vector<float> keys = shares;
        const std::size_t n_blocks = summaries.usable.size();
        std::vector<float> block_shares(n_blocks + 1, kSentinel);
        SharesAndKeys(summaries.Range(), n, estimates.data(), stride, factors.data(), shares.data(), keys.data(),
                      block_shares.data());
        std::vector<double> of_block(n_blocks, 0.0);
        for (int c = 0; c < clusters; ++c) of_block[static_cast<std::size_t>(c / slots)] += shares[c];
        for (std::size_t b = 0; b < n_blocks; ++b) {
          EXPECT_NEAR(block_shares[b], of_block[b], slots * kRound * of_block[b]) << b;
        }
        EXPECT_EQ(block_shares[n_blocks], kSentinel);
        for (int c = 0; c < clusters; ++c) {
          if (!summaries.Counts(c)) {
            EXPECT_EQ(shares[c], 0.0f) << c;
            EXPECT_EQ(keys[c], -1.0f) << c;
            continue;
          }
          double share = 0;
          for (int i = 0; i < n; ++i) share += static_cast<double>(factors[i]) * estimates[i * stride + c];
          EXPECT_NEAR(shares[c], share, (n + 1) * kRound * share) << c;
          EXPECT_NEAR(keys[c], share / summaries.Count(c), (n + 3) * kRound * share / summaries.Count(c)) << c;
        }
        for (int c = clusters; c < clusters + kGap; ++c) {
          EXPECT_EQ(shares[c], kSentinel);
          EXPECT_EQ(keys[c], kSentinel);
        }
      }
    });
  }
}

// Weights of n heads over the clusters, and where num starts from.
struct TailProblem {
  TailProblem(const Summaries& summaries, std::uint32_t seed) : stride(summaries.n_clusters() + kGap) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform;
    const int clusters = summaries.n_clusters();
    weights.assign(static_cast<std::size_t>(kMaxHeads * stride), std::numeric_limits<float>::quiet_NaN());
    for (int c = 0; c < clusters; ++c) {
      // Some clusters are opened, some weigh next to nothing.
      const std::uint32_t kind = random() % 8;
      for (int i = 0; i < kMaxHeads; ++i) {
        weights[i * stride + c] = kind == 3 ? 0.0f : uniform(random) * (kind == 2 ? 1e-9f : 1.0f);
      }
    }
    num.resize(static_cast<std::size_t>(kMaxHeads * summaries.layout.head_dim()));
    for (float& x : num) x = uniform(random) - 0.5f;
  }

  std::int64_t stride;
  std::vector<float> weights;
  std::vector<float> num;
};

struct Tail {
  std::vector<float> sums, num;
  int read = 0;
};

Tail Fold(const Summaries& summaries, const TailProblem& problem, int n, const FetchHint* hints = nullptr,
          const float* block_shares = nullptr) {
  TailArgs args;
  args.n = n;
  args.weights = problem.weights.data();
  args.weights_stride = problem.stride;
  args.block_shares = block_shares;
  if (hints != nullptr) std::copy_n(hints, 2, args.next);
  Tail out;
  out.sums.assign(static_cast<std::size_t>(n + kGap), kSentinel);
  out.num = problem.num;
  std::fill(out.num.begin() + std::ptrdiff_t{n} * summaries.layout.head_dim(), out.num.end(), kSentinel);
  out.read = FoldValueMeans(summaries.Range(), args, out.sums.data(), out.num.data());
  return out;
}

void ExpectTail(const Summaries& summaries, const TailProblem& problem, int n, const Tail& out) {
  const int head_dim = summaries.layout.head_dim();
  const int slots = summaries.layout.slots();
  for (int i = 0; i < n; ++i) {
    double sum = 0;
    test::Vector num = test::ToDouble(problem.num.data() + std::ptrdiff_t{i} * head_dim, head_dim);
    test::Vector size(head_dim, 1.0);
    test::Vector rounding(head_dim, 0.0);  // half a step of the weights, for each deviation
    for (int c = 0; c < summaries.n_clusters(); ++c) {
      if (summaries.usable[c / slots] == 0) continue;
      const float* block_weights = problem.weights.data() + i * problem.stride + c / slots * slots;
      const double half_step = 0.5 * *std::max_element(block_weights, block_weights + slots) / 32767;
      const double weight = problem.weights[i * problem.stride + c];
      sum += weight;
      const Summaries::Block& block = summaries.BlockOf(c);
      for (int d = 0; d < head_dim; ++d) {
        const double deviation = static_cast<double>(block.value_step[d]) * block.value_means[c % slots * head_dim + d];
        size[d] += weight * (std::fabs(static_cast<double>(block.value_mean[d])) + std::fabs(deviation));
        num[d] += weight * (block.value_mean[d] + deviation);
        rounding[d] += half_step * std::fabs(deviation);
      }
    }
    EXPECT_NEAR(out.sums[i], sum, summaries.n_clusters() * kRound * sum) << i;
    for (int d = 0; d < head_dim; ++d) {
      EXPECT_NEAR(out.num[i * head_dim + d], num[d], 1.001 * rounding[d] + 64 * kRound * size[d]) << i << " " << d;
    }
  }
  for (std::size_t i = n; i < out.sums.size(); ++i) EXPECT_EQ(out.sums[i], kSentinel);
  for (std::size_t i = static_cast<std::size_t>(n) * head_dim; i < out.num.size(); ++i) {
    EXPECT_EQ(out.num[i], kSentinel);
  }
}

TEST(FoldValueMeansTest, FollowsTheFormulasOnEveryTarget) {
  for (const int head_dim : kHeadDims) {
    for (const int slots : kSlotCounts) {
      const Summaries summaries(head_dim, slots, {1, 0, 1},
                                static_cast<std::uint32_t>(head_dim) * 1000u + static_cast<std::uint32_t>(slots));
      const TailProblem problem(summaries, 30);
      test::OnEveryTarget([&] {
        for (int n = 1; n <= kMaxHeads; ++n) {
          SCOPED_TRACE(std::to_string(head_dim) + " dimensions, " + std::to_string(slots) + " slots, " +
                       std::to_string(n) + " heads");
          ExpectTail(summaries, problem, n, Fold(summaries, problem, n));
          if (::testing::Test::HasFailure()) return;
        }
      });
    }
  }
}

// Beside a cluster of weight 1, one of weight 1e-6 rounds to nothing: it counts in the sum, and in num at the mean.
TEST(FoldValueMeansTest, WhatRoundsToNothingCountsAtTheMeanOfTheBlock) {
  Summaries summaries(8, 8, {1}, 13);
  Summaries::Block& block = summaries.blocks[0];
  std::ranges::fill(block.value_mean, 3.0f);
  std::ranges::fill(block.value_step, 0.5f);
  std::ranges::fill(block.value_means, 100);
  std::fill_n(block.value_means.begin(), 8, 2);
  summaries.Write();
  TailProblem problem(summaries, 32);
  std::fill_n(problem.weights.begin(), 8, 0.0f);
  problem.weights[0] = 1.0f;
  problem.weights[5] = 1e-6f;
  std::ranges::fill(problem.num, 0.0f);
  test::OnEveryTarget([&] {
    const Tail out = Fold(summaries, problem, 1);
    EXPECT_FLOAT_EQ(out.sums[0], 1.000001f);
    for (int d = 0; d < 8; ++d) EXPECT_FLOAT_EQ(out.num[d], 4.0f + 3e-6f);
  });
}

// Light blocks count at their mean, as if no cluster's value deviated from it.
TEST(FoldValueMeansTest, LightBlocksCountAtTheirMeanOnEveryTarget) {
  for (const int head_dim : kHeadDims) {
    for (const int slots : kSlotCounts) {
      const Summaries summaries(head_dim, slots, {1, 1, 0, 1}, static_cast<std::uint32_t>(head_dim + slots));
      Summaries flat = summaries;
      for (const std::size_t b : {0, 3}) std::ranges::fill(flat.blocks[b].value_means, 0);
      const TailProblem problem(summaries, 34);
      const std::vector<float> shares = {4.9e-4f, 5e-4f, 0.0f, 1e-9f};
      test::OnEveryTarget([&] {
        for (const int n : {1, 4, kMaxHeads}) {
          const Tail out = Fold(summaries, problem, n, nullptr, shares.data());
          EXPECT_EQ(out.read, 1);
          ExpectTail(flat, problem, n, out);
          if (::testing::Test::HasFailure()) return;
        }
      });
      EXPECT_EQ(Fold(summaries, problem, 1).read, 3);
    }
  }
}

TEST(FoldValueMeansTest, FetchingAheadChangesNothing) {
  const std::vector<std::byte> memory(10000);
  std::vector<const std::byte*> places;
  for (const int row : {3, 0, 71, 70, 12}) places.push_back(memory.data() + row * 136);
  test::OnEveryTarget([&] {
    for (const std::vector<std::uint8_t>& usable : {std::vector<std::uint8_t>{1}, {1, 0, 1, 1}, {0, 0}}) {
      const Summaries summaries(136, 32, usable, 14);
      const TailProblem problem(summaries, 33);
      for (const int n : {1, kMaxHeads}) {
        const Tail without = Fold(summaries, problem, n);
        for (const auto& hints : Hints(memory, places)) {
          const Tail with = Fold(summaries, problem, n, hints.data());
          EXPECT_EQ(with.sums, without.sums);
          EXPECT_EQ(with.num, without.num);
        }
      }
    }
  });
}

TEST(AddValueMeansTest, AddsTheListedClustersOnEveryTarget) {
  for (const int head_dim : kHeadDims) {
    for (const int slots : kSlotCounts) {
      const Summaries summaries(head_dim, slots, {1, 0, 1}, static_cast<std::uint32_t>(head_dim + slots));
      const TailProblem problem(summaries, 31);
      // Of either block, odd and even places, one twice, in no order.
      const std::vector<std::int32_t> clusters = {3, 2 * slots + 6, 0, 3, slots - 1, 2 * slots};
      test::OnEveryTarget([&] {
        for (const int n : {1, 2, 3, kMaxHeads}) {
          std::vector<float> weights;
          for (int i = 0; i < n; ++i) {
            for (const std::int32_t c : clusters) weights.push_back(problem.weights[i * problem.stride + c]);
          }
          std::vector<float> num = problem.num;
          std::fill(num.begin() + std::ptrdiff_t{n} * head_dim, num.end(), kSentinel);
          // Every other time the last block is light.
          const bool light = n % 2 == 0;
          const std::vector<float> shares = {1.0f, 1.0f, light ? 1e-4f : 1.0f};
          AddValueMeans(summaries.Range(), clusters, n, weights.data(), n == 1 ? nullptr : shares.data(), num.data());
          for (int i = 0; i < n; ++i) {
            for (int d = 0; d < head_dim; ++d) {
              double expected = problem.num[i * head_dim + d];
              double size = std::fabs(expected);
              for (const std::int32_t c : clusters) {
                const Summaries::Block& block = summaries.BlockOf(c);
                const double weight = problem.weights[i * problem.stride + c];
                const double deviation = light && c / slots == 2 ? 0.0
                                                                 : static_cast<double>(block.value_step[d]) *
                                                                       block.value_means[c % slots * head_dim + d];
                expected += weight * (block.value_mean[d] + deviation);
                size += weight * (std::fabs(static_cast<double>(block.value_mean[d])) + std::fabs(deviation));
              }
              EXPECT_NEAR(num[i * head_dim + d], expected, 16 * kRound * size) << i << " " << d;
            }
          }
          for (std::size_t i = static_cast<std::size_t>(n * head_dim); i < num.size(); ++i)
            EXPECT_EQ(num[i], kSentinel);
          if (::testing::Test::HasFailure()) return;
        }
      });
    }
  }
}

// Keys of n clusters, some of them without members, some equal, and shares that go with them.
struct KeyProblem {
  explicit KeyProblem(int n) {
    std::mt19937 random(static_cast<std::uint32_t>(n));
    std::lognormal_distribution<float> size(-8.0f, 4.0f);
    for (int c = 0; c < n; ++c) {
      const std::uint32_t kind = random() % 8;
      keys.push_back(kind == 0 ? -1.0f : kind == 1 ? 0.0f : kind == 2 ? 0.25f : size(random));
      shares.push_back(keys.back() > 0 ? keys.back() * static_cast<float>(1 + random() % 16) : 0.0f);
    }
  }
  // Thresholds that lie on keys, next to them, and outside.
  std::vector<float> Thresholds() const {
    std::vector<float> at = {-2.0f, -1.0f, 0.0f, 1e-45f, 0.25f, 1.0f, std::numeric_limits<float>::infinity()};
    for (std::size_t c = 0; c < keys.size(); c += 5) {
      at.push_back(keys[c]);
      at.push_back(std::nextafter(keys[c], 1e30f));
    }
    return at;
  }
  std::vector<float> keys, shares;
};

constexpr int kKeyCounts[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200, 1003};

TEST(MassBelowTest, AgreesWithPlainSumsOnEveryTarget) {
  for (const int n : kKeyCounts) {
    const KeyProblem problem(n);
    test::OnEveryTarget([&] {
      for (const float at : problem.Thresholds()) {
        double mass = 0;
        std::int64_t below = 0;
        for (int c = 0; c < n; ++c) {
          if (!(problem.keys[c] < at)) continue;
          mass += problem.shares[c];
          ++below;
        }
        const KeyMass actual = MassBelow(problem.keys.data(), problem.shares.data(), n, at);
        EXPECT_EQ(actual.below, below) << n << " keys, at " << at;
        // In double: JointSelector compares these sums with thresholds and with sums of its own.
        EXPECT_NEAR(actual.mass, mass, 1e-13 * mass) << n << " keys, at " << at;
      }
    });
  }
}

// A sum in f32 alone would lose the small shares behind a large one.
TEST(MassBelowTest, SumsOfManySmallSharesKeepThem) {
  constexpr int kCount = 100000;
  const std::vector<float> keys(kCount, 0.5f);
  std::vector<float> shares(kCount, 0x1p-30f);
  shares[0] = 0.5f;
  test::OnEveryTarget(
      [&] { EXPECT_EQ(MassBelow(keys.data(), shares.data(), kCount, 1.0f).mass, 0.5 + 0x1p-30 * (kCount - 1)); });
}

TEST(IndicesFromTest, AreTheIndicesInOrderOnEveryTarget) {
  for (const int n : kKeyCounts) {
    const KeyProblem problem(n);
    test::OnEveryTarget([&] {
      for (const float at : problem.Thresholds()) {
        std::vector<std::int32_t> expected;
        for (int c = 0; c < n; ++c) {
          if (problem.keys[c] >= at) expected.push_back(c);
        }
        std::vector<std::int32_t> indices(static_cast<std::size_t>(n) + 1, -7);
        const std::int64_t count = IndicesFrom(problem.keys.data(), n, at, indices.data());
        EXPECT_EQ(indices.back(), -7);
        ASSERT_EQ(count, std::ssize(expected)) << n << " keys, at " << at;
        indices.resize(static_cast<std::size_t>(count));
        EXPECT_EQ(indices, expected) << n << " keys, at " << at;
      }
    });
  }
}

}  // namespace
}  // namespace scsa
