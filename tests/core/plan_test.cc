// SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "core/cluster.h"
#include "core/fingerprint.h"
#include "core/kernels.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::DotOf;
using test::OnEveryTarget;
using test::SyntheticCache;
using test::Vector;

std::vector<float> RandomKeys(int n, int head_dim, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> keys(std::size_t{1} * n * head_dim);
  for (float& x : keys) x = normal(random);
  return keys;
}

std::vector<Vector> Rows(const std::vector<float>& keys, int head_dim) {
  std::vector<Vector> rows;
  for (std::size_t at = 0; at < keys.size(); at += head_dim) rows.push_back(test::ToDouble(keys.data() + at, head_dim));
  return rows;
}

Vector MeanOf(const std::vector<Vector>& rows, const std::vector<int>& members) {
  Vector mean(rows[0].size(), 0.0);
  for (const int i : members) {
    for (std::size_t d = 0; d < mean.size(); ++d) mean[d] += rows[i][d] / static_cast<double>(members.size());
  }
  return mean;
}

// The splitting rule of cluster.h, restated in double.
void PlainSplit(const std::vector<Vector>& rows, std::vector<int> members, int cluster_size,
                std::vector<std::vector<int>>* leaves) {
  std::ranges::sort(members);
  if (std::ssize(members) <= cluster_size) {
    leaves->push_back(members);
    return;
  }
  const Vector mean = MeanOf(rows, members);
  int farthest = -1;
  double longest = -1;
  for (const int i : members) {
    double distance = 0;
    for (std::size_t d = 0; d < mean.size(); ++d) distance += (rows[i][d] - mean[d]) * (rows[i][d] - mean[d]);
    if (distance > longest) {
      longest = distance;
      farthest = i;
    }
  }
  Vector direction = rows[farthest];
  for (std::size_t d = 0; d < mean.size(); ++d) direction[d] -= mean[d];
  std::ranges::stable_sort(members, {}, [&](int i) { return DotOf(direction, rows[i]); });
  const auto middle = members.begin() + std::ssize(members) / 2;
  PlainSplit(rows, {members.begin(), middle}, cluster_size, leaves);
  PlainSplit(rows, {middle, members.end()}, cluster_size, leaves);
}

std::vector<std::vector<int>> Leaves(const Partition& partition) {
  std::vector<std::vector<int>> leaves;
  for (std::size_t c = 0; c + 1 < partition.offsets.size(); ++c) {
    leaves.emplace_back(partition.members.begin() + partition.offsets[c],
                        partition.members.begin() + partition.offsets[c + 1]);
  }
  return leaves;
}

TEST(SplitFarthestDirection, MatchesThePlainRule) {
  OnEveryTarget([] {
    for (const int n : {1, 7, 8, 9, 100, 333}) {
      const std::vector<float> keys = RandomKeys(n, 24, 5);
      std::vector<int> all(n);
      std::iota(all.begin(), all.end(), 0);
      std::vector<std::vector<int>> expected;
      PlainSplit(Rows(keys, 24), all, 8, &expected);
      EXPECT_EQ(Leaves(SplitFarthestDirection(keys.data(), n, 24, 8)), expected) << n;
    }
  });
}

// Neither a chain of ever farther outliers nor equal keys may degrade the halving.
TEST(SplitFarthestDirection, IsBalancedOnAnyData) {
  constexpr int kRows = 1000;
  std::vector<float> chain(kRows * 8, 0.0f);
  for (int i = 0; i < kRows; ++i) chain[i * 8] = std::pow(1.08f, static_cast<float>(i));
  const std::vector<float> equal(kRows * 8, 3.0f);
  for (const std::vector<float>* keys : std::initializer_list<const std::vector<float>*>{&chain, &equal}) {
    const std::vector<std::vector<int>> leaves = Leaves(SplitFarthestDirection(keys->data(), kRows, 8, 128));
    ASSERT_EQ(leaves.size(), 8u);
    std::set<int> seen;
    for (const std::vector<int>& leaf : leaves) {
      EXPECT_EQ(leaf.size(), 125u);
      EXPECT_TRUE(std::ranges::is_sorted(leaf));
      seen.insert(leaf.begin(), leaf.end());
    }
    EXPECT_EQ(seen.size(), std::size_t{kRows});
  }
}

struct Moments {
  Vector centroid;
  std::vector<Vector> directions;
  Vector residual;
};

Moments ComputeMoments(const std::vector<float>& keys, const std::vector<std::int32_t>& members, int head_dim, int rank,
                       int iterations) {
  MomentScratch scratch;
  std::vector<float> centroid(head_dim), directions(std::size_t{1} * rank * head_dim), residual(head_dim);
  ClusterMoments(keys.data(), members, head_dim, rank, iterations, scratch, centroid.data(), directions.data(),
                 residual.data());
  Moments out{test::ToDouble(centroid.data(), head_dim), {}, test::ToDouble(residual.data(), head_dim)};
  for (int j = 0; j < rank; ++j) out.directions.push_back(test::ToDouble(directions.data() + j * head_dim, head_dim));
  return out;
}

std::vector<Vector> Covariance(const std::vector<Vector>& rows, const std::vector<int>& members, const Vector& mean) {
  const std::size_t n = mean.size();
  std::vector<Vector> out(n, Vector(n, 0.0));
  for (const int i : members) {
    for (std::size_t a = 0; a < n; ++a) {
      for (std::size_t b = 0; b < n; ++b) {
        out[a][b] += (rows[i][a] - mean[a]) * (rows[i][b] - mean[b]) / static_cast<double>(members.size());
      }
    }
  }
  return out;
}

// All eigenpairs of a symmetric matrix by Jacobi rotations, largest eigenvalue first.
void Jacobi(std::vector<Vector> a, Vector* values, std::vector<Vector>* vectors) {
  const std::size_t n = a.size();
  std::vector<Vector> v(n, Vector(n, 0.0));
  for (std::size_t i = 0; i < n; ++i) v[i][i] = 1;
  for (int sweep = 0; sweep < 60; ++sweep) {
    for (std::size_t p = 0; p < n; ++p) {
      for (std::size_t q = p + 1; q < n; ++q) {
        if (std::abs(a[p][q]) < 1e-300) continue;
        const double theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
        const double t = (theta >= 0 ? 1 : -1) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1);
        const double s = t * c;
        for (std::size_t i = 0; i < n; ++i) {
          const double x = a[i][p];
          a[i][p] = c * x - s * a[i][q];
          a[i][q] = s * x + c * a[i][q];
        }
        for (std::size_t i = 0; i < n; ++i) {
          const double x = a[p][i];
          a[p][i] = c * x - s * a[q][i];
          a[q][i] = s * x + c * a[q][i];
          const double y = v[p][i];
          v[p][i] = c * y - s * v[q][i];
          v[q][i] = s * y + c * v[q][i];
        }
      }
    }
  }
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(order, [&](std::size_t x, std::size_t y) { return a[x][x] > a[y][y]; });
  for (const std::size_t i : order) {
    values->push_back(a[i][i]);
    vectors->push_back(v[i]);
  }
}

// Keys with standard deviations 3, 2, 1.2 along three random directions and 0.3 elsewhere.
std::vector<float> SpikedKeys(int n, int head_dim, std::uint32_t seed) {
  std::vector<float> keys = RandomKeys(n, head_dim, seed);
  const std::vector<float> axes = RandomKeys(3, head_dim, seed + 1);
  std::mt19937 random(seed + 2);
  std::normal_distribution<float> normal;
  const float sizes[3] = {3.0f, 2.0f, 1.2f};
  for (int i = 0; i < n; ++i) {
    for (int d = 0; d < head_dim; ++d) keys[i * head_dim + d] = 0.3f * keys[i * head_dim + d] + 2.0f;
    for (int j = 0; j < 3; ++j) {
      const float along = sizes[j] * normal(random) / std::sqrt(static_cast<float>(head_dim));
      for (int d = 0; d < head_dim; ++d) keys[i * head_dim + d] += along * axes[j * head_dim + d];
    }
  }
  return keys;
}

// Members are a subset of the rows, so that indexing is seen too.
std::vector<std::int32_t> EveryOther(int n) {
  std::vector<std::int32_t> members;
  for (int i = 1; i < n; i += 2) members.push_back(i);
  return members;
}

TEST(ClusterMoments, EigenpairsMatchJacobi) {
  OnEveryTarget([] {
    for (const int head_dim : {8, 24, 64}) {
      const std::vector<float> keys = SpikedKeys(200, head_dim, 3);
      const std::vector<std::int32_t> members = EveryOther(200);
      const std::vector<int> ints(members.begin(), members.end());
      const std::vector<Vector> rows = Rows(keys, head_dim);
      const Vector mean = MeanOf(rows, ints);
      const std::vector<Vector> covariance = Covariance(rows, ints, mean);
      Vector values;
      std::vector<Vector> vectors;
      Jacobi(covariance, &values, &vectors);

      const Moments got = ComputeMoments(keys, members, head_dim, 2, 200);
      for (int d = 0; d < head_dim; ++d) EXPECT_NEAR(got.centroid[d], mean[d], 1e-5);
      for (int j = 0; j < 2; ++j) {
        const double length = std::sqrt(DotOf(got.directions[j], got.directions[j]));
        EXPECT_NEAR(length * length, values[j], 1e-4 * values[0]);
        // cos of the angle, so that an error of 1e-3 in the vector shows as 1e-6.
        EXPECT_NEAR(std::abs(DotOf(got.directions[j], vectors[j])) / length, 1.0, 1e-5);
      }
      for (int d = 0; d < head_dim; ++d) {
        const double expected =
            covariance[d][d] - values[0] * vectors[0][d] * vectors[0][d] - values[1] * vectors[1][d] * vectors[1][d];
        EXPECT_NEAR(got.residual[d], expected, 1e-3 * values[0]);
      }
    }
  });
}

// Few iterations do not converge, so what they compute is pinned down by restating them.
TEST(ClusterMoments, PowerIterationMatchesThePlainRule) {
  OnEveryTarget([] {
    constexpr int kHeadDim = 40;
    constexpr int kRank = 3;
    const std::vector<float> keys = SpikedKeys(120, kHeadDim, 8);
    const std::vector<std::int32_t> members = EveryOther(120);
    const std::vector<int> ints(members.begin(), members.end());
    const std::vector<Vector> rows = Rows(keys, kHeadDim);
    const Vector mean = MeanOf(rows, ints);
    const std::vector<Vector> covariance = Covariance(rows, ints, mean);
    const Moments got = ComputeMoments(keys, members, kHeadDim, kRank, 4);

    std::vector<Vector> units;
    const auto project_and_normalise = [&](Vector* x) {
      for (const Vector& u : units) {
        const double along = DotOf(*x, u);
        for (int d = 0; d < kHeadDim; ++d) (*x)[d] -= along * u[d];
      }
      const double length = std::sqrt(DotOf(*x, *x));
      for (double& value : *x) value /= length;
      return length;
    };
    const auto times_covariance = [&](const Vector& x) {
      Vector y;
      for (const Vector& row : covariance) y.push_back(DotOf(row, x));
      return y;
    };
    Vector residual;
    for (int d = 0; d < kHeadDim; ++d) residual.push_back(covariance[d][d]);
    for (int j = 0; j < kRank; ++j) {
      Vector unit;
      double longest = -1;
      for (const int i : ints) {
        Vector x = rows[i];
        for (int d = 0; d < kHeadDim; ++d) x[d] -= mean[d];
        const double length = project_and_normalise(&x);
        if (length > longest) {
          longest = length;
          unit = x;
        }
      }
      for (int step = 0; step < 4; ++step) {
        unit = times_covariance(unit);
        project_and_normalise(&unit);
      }
      const double lambda = DotOf(unit, times_covariance(unit));
      for (int d = 0; d < kHeadDim; ++d) {
        EXPECT_NEAR(got.directions[j][d], std::sqrt(lambda) * unit[d], 2e-4) << j << " " << d;
        residual[d] -= lambda * unit[d] * unit[d];
      }
      units.push_back(unit);
    }
    for (int d = 0; d < kHeadDim; ++d) EXPECT_NEAR(got.residual[d], std::max(0.0, residual[d]), 2e-4);
  });
}

TEST(ClusterMoments, DegenerateClusters) {
  const std::vector<float> keys = RandomKeys(3, 8, 4);
  // One member: no variance at all. Two members: one pair, exact, and nothing left.
  const Moments one = ComputeMoments(keys, {1}, 8, 2, 4);
  for (int d = 0; d < 8; ++d) {
    EXPECT_EQ(one.centroid[d], keys[8 + d]);
    EXPECT_EQ(one.directions[0][d], 0);
    EXPECT_EQ(one.directions[1][d], 0);
    EXPECT_EQ(one.residual[d], 0);
  }
  const Moments two = ComputeMoments(keys, {0, 2}, 8, 2, 4);
  for (int d = 0; d < 8; ++d) {
    EXPECT_NEAR(std::abs(two.directions[0][d]), std::abs(keys[d] - keys[16 + d]) / 2, 1e-6);
    EXPECT_EQ(two.directions[1][d], 0);
    EXPECT_NEAR(two.residual[d], 0, 1e-6);
    EXPECT_GE(two.residual[d], 0);
  }
  const Moments none = ComputeMoments(keys, {0, 1, 2}, 8, 0, 4);
  const std::vector<Vector> rows = Rows(keys, 8);
  const std::vector<Vector> covariance = Covariance(rows, {0, 1, 2}, MeanOf(rows, {0, 1, 2}));
  for (int d = 0; d < 8; ++d) EXPECT_NEAR(none.residual[d], covariance[d][d], 1e-6);
}

TEST(BuildBlock, SummariesAndPackedRowsDescribeTheirMembers) {
  const Shape shape{4, 2, 40};
  for (const PackedFormat format : {PackedFormat::kQ8_0, PackedFormat::kF16}) {
    for (const DType type : {DType::kF16, DType::kBF16, DType::kF32, DType::kQ8_0}) {
      SCOPED_TRACE(static_cast<int>(type));
      const SyntheticCache cache(shape, 200, type, 7);
      Config config;
      config.cluster_size = 32;
      config.packed_format = format;
      Block block;
      ASSERT_TRUE(BuildBlock(cache.View(), 1, shape.head_dim, 10, 190, config, &block).ok());
      ASSERT_EQ(block.n_clusters, 8);
      ASSERT_EQ(block.n_rows(), 180);
      const DType packed_type = PackedType(format);
      const std::size_t row_bytes = RowBytes(packed_type, shape.head_dim);
      for (int c = 0; c < block.n_clusters; ++c) {
        const double m = static_cast<double>(block.RowsOf(c));
        Vector key_mean(shape.head_dim, 0.0), value_mean(shape.head_dim, 0.0);
        for (int i = block.partition.offsets[c]; i < block.partition.offsets[c + 1]; ++i) {
          const std::int64_t row = 10 + block.partition.members[i];
          const Vector key = cache.DecodedKey(row, 1);
          const Vector value = cache.DecodedValue(row, 1);
          const Vector packed_key = test::DecodedRow(block.packed_k.get() + i * row_bytes, packed_type, shape.head_dim);
          const Vector packed_value =
              test::DecodedRow(block.packed_v.get() + i * row_bytes, packed_type, shape.head_dim);
          if (packed_type == type) {
            EXPECT_EQ(std::memcmp(block.packed_k.get() + i * row_bytes, cache.View().KRow(row, 1), row_bytes), 0);
            EXPECT_EQ(std::memcmp(block.packed_v.get() + i * row_bytes, cache.View().VRow(row, 1), row_bytes), 0);
          }
          // q8_0: half a step of the block's largest magnitude, which is below 6 here; f16: 2^-11 of the value.
          const double bound = packed_type == DType::kQ8_0 ? 0.51 * 6 / 127 : 6.0 / 2048;
          for (int d = 0; d < shape.head_dim; ++d) {
            EXPECT_NEAR(packed_key[d], key[d], bound);
            EXPECT_NEAR(packed_value[d], value[d], bound);
            key_mean[d] += key[d] / m;
            value_mean[d] += value[d] / m;
          }
        }
        EXPECT_NEAR(block.log_counts[c], std::log(m), 1e-6);
        for (int d = 0; d < shape.head_dim; ++d) {
          EXPECT_NEAR(block.centroids[c * shape.head_dim + d], key_mean[d], 1e-5);
          EXPECT_NEAR(block.value_means[c * shape.head_dim + d], value_mean[d], 1e-5);
        }
      }
    }
  }
}

TEST(BuildBlock, RefusesRowsThatItCannotPack) {
  const Shape shape{1, 1, 8};
  Config config;
  config.packed_format = PackedFormat::kF16;
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf(""), 1e6f}) {
    for (const bool in_key : {true, false}) {
      SyntheticCache cache(shape, 20, DType::kF32);
      std::vector<float> row(8, 1.0f);
      row[5] = -bad;
      if (in_key) {
        cache.SetKey(11, 0, row.data());
      } else {
        cache.SetValue(11, 0, row.data());
      }
      Block block;
      EXPECT_EQ(BuildBlock(cache.View(), 0, 8, 0, 20, config, &block).code(), StatusCode::kUnsupported);
      EXPECT_TRUE(BuildBlock(cache.View(), 0, 8, 0, 11, config, &block).ok());
    }
  }
}

TEST(RowFingerprint, SeesEveryByte) {
  for (const std::size_t bytes : {1u, 7u, 8u, 16u, 31u, 34u, 68u, 128u}) {
    std::vector<std::byte> k(bytes, std::byte{0}), v(bytes, std::byte{0});
    std::set<std::uint32_t> seen = {RowFingerprint(k.data(), bytes, v.data(), bytes)};
    for (std::vector<std::byte>* row : {&k, &v}) {
      for (std::byte& byte : *row) {
        for (int bit = 0; bit < 8; ++bit) {
          byte ^= std::byte{1} << bit;
          seen.insert(RowFingerprint(k.data(), bytes, v.data(), bytes));
          byte ^= std::byte{1} << bit;
        }
      }
    }
    EXPECT_EQ(seen.size(), 1 + 16 * bytes);
  }
}

TEST(SampledRows, VisitEveryRowInBoundedTime) {
  for (const std::int64_t n : {1, 2, 3, 5, 64, 511, 4096}) {
    std::set<std::int64_t> seen;
    for (std::uint64_t call = 1000; call < 1000 + static_cast<std::uint64_t>(n + 1) / kRotatingSamples; ++call) {
      const auto rows = SampledRows(n, call);
      EXPECT_EQ(rows[0], 0);
      EXPECT_EQ(rows[1], n - 1);
      seen.insert(rows.begin() + 2, rows.end());
    }
    EXPECT_EQ(std::ssize(seen), n);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), n - 1);
  }
}

using Ends = std::vector<std::int64_t>;

class PlanTest : public testing::Test {
 protected:
  PlanTest() {
    config_.cluster_size = 16;
    config_.rebuild_interval = 64;
    config_.block_size = 192;
  }

  int Extend(Plan& plan, std::int64_t n_prefix, int n_threads = 2) {
    int built = -1;
    EXPECT_TRUE(plan.Extend(cache_.View(n_prefix), n_prefix, n_threads, &built).ok());
    return built;
  }
  static Ends EndsOf(const Plan& plan) {
    Ends ends;
    for (const Region& region : plan.regions()) ends.push_back(region.end);
    return ends;
  }

  Shape shape_{4, 2, 16};
  Config config_;
  SyntheticCache cache_{Shape{4, 2, 16}, 1200, DType::kF16, 21};
};

TEST_F(PlanTest, SealsWhenAnIntervalIsDue) {
  Plan plan(shape_, config_);
  EXPECT_EQ(plan.sealed_end(), 4);
  EXPECT_EQ(Extend(plan, 4 + 32 + 63), 0);
  EXPECT_TRUE(plan.regions().empty());
  EXPECT_EQ(Extend(plan, 4 + 32 + 64), 1);
  EXPECT_EQ(EndsOf(plan), Ends({68}));
  EXPECT_EQ(Extend(plan, 4 + 32 + 127), 0);
  EXPECT_EQ(Extend(plan, 4 + 32 + 130), 1);
  EXPECT_EQ(EndsOf(plan), Ends({134}));
  // The growing region freezes at block_size = 192 rows, [4, 196); the rest opens a new one.
  EXPECT_EQ(Extend(plan, 4 + 32 + 195), 2);
  EXPECT_EQ(EndsOf(plan), Ends({196, 199}));
  EXPECT_EQ(Extend(plan, 4 + 32 + 260), 1);
  EXPECT_EQ(EndsOf(plan), Ends({196, 264}));
  // After a long prefill everything is built at once.
  Plan late(shape_, config_);
  EXPECT_EQ(Extend(late, 1200), 7);
  EXPECT_EQ(EndsOf(late), Ends({196, 388, 580, 772, 964, 1156, 1168}));
}

TEST_F(PlanTest, DefaultBoundaries) {
  const SyntheticCache cache(Shape{1, 1, 8}, 4800, DType::kF16, 2);
  Plan plan(Shape{1, 1, 8}, Config());
  int built = 0;
  for (std::int64_t n = 1; n <= 4800; ++n) {
    ASSERT_TRUE(plan.Extend(cache.View(n), n, 1, &built).ok());
    const std::int64_t sealed = std::max<std::int64_t>(0, n - 36) / 512 * 512;
    ASSERT_EQ(plan.sealed_end(), 4 + sealed) << n;
    ASSERT_EQ(std::ssize(plan.regions()), (sealed + 4095) / 4096) << n;
  }
  EXPECT_EQ(EndsOf(plan), Ends({4100, 4612}));
}

void ExpectSameBlock(const Block& a, const Block& b, std::size_t row_bytes) {
  EXPECT_EQ(a.begin, b.begin);
  EXPECT_EQ(a.end, b.end);
  EXPECT_EQ(a.partition.members, b.partition.members);
  EXPECT_EQ(a.partition.offsets, b.partition.offsets);
  EXPECT_EQ(a.centroids, b.centroids);
  EXPECT_EQ(a.value_means, b.value_means);
  EXPECT_EQ(a.directions, b.directions);
  EXPECT_EQ(a.residuals, b.residuals);
  EXPECT_EQ(a.log_counts, b.log_counts);
  EXPECT_EQ(a.fingerprints, b.fingerprints);
  EXPECT_EQ(std::memcmp(a.packed_k.get(), b.packed_k.get(), a.n_rows() * row_bytes), 0);
  EXPECT_EQ(std::memcmp(a.packed_v.get(), b.packed_v.get(), a.n_rows() * row_bytes), 0);
}

void ExpectSamePlan(const Plan& a, const Plan& b, std::size_t row_bytes) {
  ASSERT_EQ(a.regions().size(), b.regions().size());
  for (std::size_t r = 0; r < a.regions().size(); ++r) {
    for (std::size_t h = 0; h < a.regions()[r].heads.size(); ++h) {
      ExpectSameBlock(a.regions()[r].heads[h], b.regions()[r].heads[h], row_bytes);
    }
  }
}

// A plan that grew row by row is the plan of a fresh start, at every rebuild, for any number of threads.
TEST_F(PlanTest, GrowthEqualsAFreshPlan) {
  Plan grown(shape_, config_);
  int compared = 0;
  for (std::int64_t n = 1; n <= 700; ++n) {
    if (Extend(grown, n, 1) == 0) continue;
    Plan fresh(shape_, config_);
    Extend(fresh, n, 3);
    ExpectSamePlan(grown, fresh, RowBytes(DType::kQ8_0, 16));
    EXPECT_EQ(grown.sealed_end(), n - 32);
    ++compared;
  }
  EXPECT_EQ(compared, 10);
}

TEST_F(PlanTest, TruncationDropsWhatDoesNotFitAndReplans) {
  Plan plan(shape_, config_);
  Extend(plan, 700);
  EXPECT_EQ(EndsOf(plan), Ends({196, 388, 580, 668}));
  EXPECT_EQ(plan.DropBeyond(668), 0);
  EXPECT_EQ(plan.DropBeyond(667), 1);
  EXPECT_EQ(plan.DropBeyond(400), 1);
  EXPECT_EQ(EndsOf(plan), Ends({196, 388}));
  EXPECT_FALSE(plan.Due(388 + 32 + 63));
  EXPECT_TRUE(plan.Due(388 + 32 + 64));
  Extend(plan, 700);
  Plan fresh(shape_, config_);
  Extend(fresh, 700);
  ExpectSamePlan(plan, fresh, RowBytes(DType::kQ8_0, 16));
  EXPECT_EQ(plan.DropBeyond(0), 4);
  EXPECT_EQ(plan.sealed_end(), 4);
}

TEST_F(PlanTest, WrittenRowsDropTheirRegionAndLaterOnes) {
  Plan plan(shape_, config_);
  Extend(plan, 700);
  const std::int64_t outside[] = {0, 3, 668, 5000};
  EXPECT_EQ(plan.DropWritten(outside), 0);
  const std::int64_t inside[] = {668, 579, 580};
  EXPECT_EQ(plan.DropWritten(inside), 2);
  EXPECT_EQ(EndsOf(plan), Ends({196, 388}));
  const std::int64_t first[] = {4};
  EXPECT_EQ(plan.DropWritten(first), 2);
}

TEST_F(PlanTest, ChangedRowsAreFound) {
  for (const std::int64_t row : {4, 195, 196, 300, 387, 500, 667}) {
    for (const bool in_key : {true, false}) {
      std::byte& byte = in_key ? cache_.Key(row, 1)[7] : cache_.Value(row, 1)[7];
      const int region = static_cast<int>((row - 4) / 192);
      Plan plan(shape_, config_);
      Extend(plan, 700);
      EXPECT_EQ(plan.DropChanged(cache_.View(), Verify::kFull, 2), 0);
      EXPECT_EQ(plan.DropChanged(cache_.View(), Verify::kSample, 2), 0);
      byte ^= std::byte{1};
      EXPECT_EQ(plan.DropChanged(cache_.View(), Verify::kNone, 2), 0);
      int calls = 0;
      int dropped = 0;
      while (dropped == 0 && calls < 1000) {
        ++calls;
        dropped = plan.DropChanged(cache_.View(), Verify::kSample, 2);
      }
      EXPECT_EQ(dropped, 4 - region);
      EXPECT_LE(calls, 192 / kRotatingSamples);

      Plan full(shape_, config_);
      byte ^= std::byte{1};
      Extend(full, 700);
      byte ^= std::byte{1};
      EXPECT_EQ(full.DropChanged(cache_.View(), Verify::kFull, 2), 4 - region);
      byte ^= std::byte{1};
    }
  }
  // Another row format is another cache.
  Plan plan(shape_, config_);
  Extend(plan, 700);
  KvView kv = cache_.View();
  kv.v_type = DType::kBF16;
  EXPECT_EQ(plan.DropChanged(kv, Verify::kNone, 1), 4);
}

TEST_F(PlanTest, AFailedBuildChangesNothingAndIsNotRepeatedAtOnce) {
  Plan plan(shape_, config_);
  Extend(plan, 300);
  const Ends before = {196, 268};
  EXPECT_EQ(EndsOf(plan), before);
  const std::vector<std::uint16_t> infinite(16, 0x7C00);
  std::memcpy(cache_.Key(300, 0), infinite.data(), 32);
  int built = -1;
  EXPECT_EQ(plan.Extend(cache_.View(), 364, 2, &built).code(), StatusCode::kUnsupported);
  EXPECT_EQ(built, 0);
  EXPECT_EQ(EndsOf(plan), before);
  EXPECT_FALSE(plan.Due(364 + 63));
  EXPECT_TRUE(plan.Due(364 + 64));
}

TEST_F(PlanTest, CountsItsMemory) {
  Plan plan(shape_, config_);
  EXPECT_EQ(plan.Bytes(), 0u);
  Extend(plan, 4 + 32 + 192);
  // 192 rows, 2 KV heads: 16 clusters of 12 members; q8_0 rows of 34 bytes for K and V, member indices, fingerprints.
  const std::size_t per_head = 192 * (2 * 34 + 4 + 4) + 16 * (5 * 16 * 4 + 4);
  EXPECT_GE(plan.Bytes(), 2 * per_head);
  EXPECT_LE(plan.Bytes(), 2 * per_head + 2 * (sizeof(Block) + 200) + sizeof(Region));
}

}  // namespace
}  // namespace scsa
