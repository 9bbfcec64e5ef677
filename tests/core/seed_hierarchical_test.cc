// SPDX-License-Identifier: Apache-2.0
//
// Hierarchical selection of preset `seed`: outputs, decisions, calibration, memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cluster_walk.h"
#include "core/layer_impl.h"
#include "core/seed_method.h"
#include "scsa/layer.h"
#include "scsa/memory_budget.h"
#include "scsa/state.h"
#include "tests/core/seed_layers.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::DotOf;
using test::HeadOf;
using test::NewLayer;
using test::SeedRegions;
using test::SetAllTaus;
using test::SyntheticCache;
using test::Vector;

Config SmallConfig(Selection selection = Selection::kHierarchical) { return test::SmallSeedConfig(selection); }

// Decode steps over one cache, each with a query of its own.
class Decoder {
 public:
  explicit Decoder(const Shape& shape, float query_size = 1.0f) : shape_(shape), query_size_(query_size) {
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  }
  std::vector<float> Attend(Layer& layer, const KvView& kv, std::uint32_t query = 1, const VisibleSets& visible = {},
                            int n_threads = 2) {
    q = test::RandomQueries(shape_, query, query_size_);
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape_);
    EXPECT_TRUE(
        layer.Attend(test::ViewQueries(q, shape_), kv, visible, params, Verify::kFull, n_threads, workspace_, view)
            .ok());
    return out;
  }
  std::vector<float> Exact(const KvView& kv, std::uint32_t query = 1) {
    q = test::RandomQueries(shape_, query, query_size_);
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape_);
    EXPECT_TRUE(ExactAttention(shape_, test::ViewQueries(q, shape_), kv, {}, params, 1, workspace_, view).ok());
    return out;
  }

  LogitParams params;
  std::vector<float> q;  // of the last call

 private:
  Shape shape_;
  float query_size_;
  Workspace workspace_;
};

// A cluster as the plan has it.
struct PlainCluster {
  const Block* block;
  int index;
  std::vector<std::int64_t> rows;
};

// A member of the tree, its moments taken from the rows themselves.
struct PlainMember {
  std::vector<int> clusters;
  double log_tail = 0;
  double priority = 0;
  Vector value_mean;
};

// One query head, restated: the tree by halving lists, sums added up anew at every step.
class PlainWalk {
 public:
  PlainWalk(std::span<const Region> regions, const SyntheticCache& cache, const Shape& shape, int rank, int kv_head,
            const Vector& qs, double exact_mass)
      : cache_(cache), shape_(shape), rank_(rank), kv_head_(kv_head), qs_(qs), exact_mass_(exact_mass) {
    for (const Region& region : regions) {
      std::vector<int>& of_region = by_region_.emplace_back();
      const Block& block = region.heads[kv_head];
      for (int c = 0; c < block.n_clusters; ++c) {
        of_region.push_back(static_cast<int>(clusters.size()));
        PlainCluster& cluster = clusters.emplace_back(PlainCluster{&block, c, {}});
        for (int i = block.partition.offsets[c]; i < block.partition.offsets[c + 1]; ++i) {
          cluster.rows.push_back(block.begin + block.partition.members[i]);
        }
      }
    }
    std::vector<int> all(clusters.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
    Add(all);
  }

  void Run(double tau) {
    while (!closed.empty()) {
      double closed_mass = 0;
      double captured = exact_mass_;
      for (const PlainMember& member : closed) closed_mass += std::exp(member.priority);
      for (const int c : opened) captured += std::exp(Score({c}).log_tail);
      if (closed_mass / (closed_mass + captured) < tau) return;
      std::size_t best = 0;
      for (std::size_t i = 1; i < closed.size(); ++i) {
        const double lead = closed[i].priority - closed[best].priority;
        if (lead > 0 || (lead == 0 && closed[i].clusters.front() < closed[best].clusters.front())) best = i;
      }
      const std::vector<int> members = closed[best].clusters;
      closed.erase(closed.begin() + static_cast<std::ptrdiff_t>(best));
      if (members.size() == 1) {
        opened.push_back(members.front());
        continue;
      }
      const std::vector<int> lower = LowerHalf(members);
      Add(lower);
      Add({members.begin() + std::ssize(lower), members.end()});
    }
  }

  std::vector<PlainCluster> clusters;
  std::vector<PlainMember> closed;
  std::vector<int> opened;
  std::vector<std::pair<int, int>> scored;  // first and last cluster

 private:
  // Half of the regions, or half of the clusters of one.
  std::vector<int> LowerHalf(const std::vector<int>& members) const {
    std::vector<std::vector<int>> parts;
    for (const std::vector<int>& region : by_region_) {
      if (region.front() >= members.front() && region.back() <= members.back()) parts.push_back(region);
    }
    std::vector<int> lower;
    if (parts.size() > 1) {
      for (std::size_t i = 0; i < parts.size() / 2; ++i) lower.insert(lower.end(), parts[i].begin(), parts[i].end());
    } else {
      lower.assign(members.begin(), members.begin() + std::ssize(members) / 2);
    }
    return lower;
  }

  void Add(const std::vector<int>& members) {
    closed.push_back(Score(members));
    scored.emplace_back(members.front(), members.back());
  }

  PlainMember Score(const std::vector<int>& members) const {
    const int head_dim = shape_.head_dim;
    PlainMember out;
    out.clusters = members;
    double variance = 0;
    if (members.size() == 1) {
      const Block& block = *clusters[members[0]].block;
      const int c = clusters[members[0]].index;
      out.value_mean = test::ToDouble(block.value_means.data() + c * head_dim, head_dim);
      out.log_tail = DotOf(qs_, test::ToDouble(block.centroids.data() + c * head_dim, head_dim)) +
                     std::log(static_cast<double>(block.RowsOf(c)));
      for (int j = 0; j < rank_; ++j) {
        const double x = DotOf(qs_, test::ToDouble(block.directions.data() + (c * rank_ + j) * head_dim, head_dim));
        variance += x * x;
      }
      for (int d = 0; d < head_dim; ++d) variance += qs_[d] * qs_[d] * block.residuals[c * head_dim + d];
    } else {
      double m = 0;
      Vector mean(head_dim);
      out.value_mean = Vector(head_dim);
      for (const int c : members) {
        m += static_cast<double>(clusters[c].rows.size());
        for (const std::int64_t row : clusters[c].rows) {
          const Vector key = cache_.DecodedKey(row, kv_head_);
          const Vector value = cache_.DecodedValue(row, kv_head_);
          for (int d = 0; d < head_dim; ++d) {
            mean[d] += key[d];
            out.value_mean[d] += value[d];
          }
        }
      }
      for (int d = 0; d < head_dim; ++d) {
        mean[d] /= m;
        out.value_mean[d] /= m;
      }
      // Inside the clusters what the plan keeps of them, and between them.
      for (const int i : members) {
        const Block& block = *clusters[i].block;
        const int c = clusters[i].index;
        const double share = static_cast<double>(block.RowsOf(c)) / m;
        for (int d = 0; d < head_dim; ++d) {
          const double apart = block.centroids[c * head_dim + d] - mean[d];
          double diagonal = block.residuals[c * head_dim + d];
          for (int j = 0; j < rank_; ++j) {
            const double x = block.directions[(c * rank_ + j) * head_dim + d];
            diagonal += x * x;
          }
          variance += share * qs_[d] * qs_[d] * (diagonal + apart * apart);
        }
      }
      out.log_tail = DotOf(qs_, mean) + std::log(m);
    }
    out.priority = out.log_tail + variance / 2;
    return out;
  }

  const SyntheticCache& cache_;
  const Shape& shape_;
  int rank_;
  int kv_head_;
  Vector qs_;
  double exact_mass_;
  std::vector<std::vector<int>> by_region_;
};

struct PlainHead {
  std::uint64_t opened_rows = 0;
  std::vector<std::pair<int, int>> scored;
  Vector output;
};

PlainHead PlainSparse(const Layer& layer, const SyntheticCache& cache, const std::vector<bool>& visible, const float* q,
                      int h, const LogitParams& params) {
  const Shape& shape = layer.shape();
  test::PlainQuery query = test::ReadExactRows(layer, cache, visible, q, h, params);
  PlainWalk walk(SeedRegions(layer), cache, shape, layer.config().rank, h / shape.group(), query.qs, query.exact_mass);
  walk.Run(layer.taus()[h]);
  PlainHead out;
  out.scored = walk.scored;
  for (const int i : walk.opened) {
    out.opened_rows += walk.clusters[i].rows.size();
    test::AddPackedRows(layer, *walk.clusters[i].block, walk.clusters[i].index, &query);
  }
  for (const PlainMember& member : walk.closed) query.softmax.Add(member.log_tail, member.value_mean);
  out.output = params.sinks == nullptr ? query.softmax.Output() : query.softmax.Output(params.sinks[h]);
  return out;
}

// Compares a step with the restatement, and the decisions through the counters.
void ExpectPlain(const Layer& layer, const LayerStats& before, const SyntheticCache& cache,
                 const std::vector<bool>& visible, const Decoder& decoder, const std::vector<float>& out) {
  const Shape& shape = layer.shape();
  std::uint64_t opened_rows = 0;
  std::uint64_t scored = 0;
  std::set<std::tuple<int, int, int>> looked_at;  // of each KV head
  for (int h = 0; h < shape.q_heads; ++h) {
    const PlainHead plain = PlainSparse(layer, cache, visible, decoder.q.data(), h, decoder.params);
    EXPECT_LT(test::RelativeL2(HeadOf(out, shape, h), plain.output), 2e-5) << h;
    opened_rows += plain.opened_rows;
    scored += plain.scored.size();
    for (const auto& [first, last] : plain.scored) looked_at.emplace(h / shape.group(), first, last);
  }
  EXPECT_EQ(layer.stats().sparse_steps, before.sparse_steps + 1);
  EXPECT_EQ(layer.stats().stat_opened_rows - before.stat_opened_rows, opened_rows);
  EXPECT_EQ(layer.stats().stat_scored - before.stat_scored, scored);
  // Rows of the cache and packed ones. Of a cluster 3 + rank vectors and log m, of a node 3 vectors, once per KV head.
  const std::uint64_t union_rows = layer.stats().union_rows - before.union_rows;
  const auto exact_rows = (layer.stats().stat_exact_rows - before.stat_exact_rows) / shape.group();
  const KvView kv = cache.View();
  std::uint64_t bytes =
      exact_rows * (RowBytes(kv.k_type, shape.head_dim) + RowBytes(kv.v_type, shape.head_dim)) +
      (union_rows - exact_rows) * 2 * RowBytes(PackedType(layer.config().packed_format), shape.head_dim);
  for (const auto& [kv_head, first, last] : looked_at) {
    bytes += first == last ? (3 + layer.config().rank) * shape.head_dim * 4 + 4 : 3 * shape.head_dim * 4;
  }
  EXPECT_EQ(layer.stats().bytes_read - before.bytes_read, bytes);
}

TEST(SeedWalk, MatchesTheFormulas) {
  const Shape shapes[] = {{3, 1, 64}, {6, 2, 40}, {4, 4, 16}, {8, 1, 24}, {2, 2, 136}};
  const DType types[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kQ8_0, DType::kF16};
  test::OnEveryTarget([&] {
    for (int i = 0; i < 5; ++i) {
      const Shape& shape = shapes[i];
      const PackedFormat format = i % 2 == 0 ? PackedFormat::kQ8_0 : PackedFormat::kF16;
      const std::int64_t n = 420 + 211 * i;
      const SyntheticCache cache(shape, n, types[i], 30 + i);
      Config config = SmallConfig();
      config.packed_format = format;
      config.rank = i;
      auto layer = NewLayer(shape, config);
      for (int h = 0; h < shape.q_heads; ++h) ASSERT_TRUE(layer->SetTau(h, kTauGrid[(2 * h) % kTauGridSize]).ok());
      Decoder decoder(shape);
      std::vector<float> sinks(shape.q_heads, 2.0f);
      if (i % 2 == 1) decoder.params.sinks = sinks.data();
      const std::vector<float> out = decoder.Attend(*layer, cache.View());
      ExpectPlain(*layer, {}, cache, std::vector<bool>(n, true), decoder, out);
      // Some clusters open, and some nodes stay closed, or nothing was tested.
      const auto clusters = static_cast<std::uint64_t>(Root(SeedRegions(*layer)).end);
      EXPECT_GT(layer->stats().stat_opened_rows, 0u);
      EXPECT_LT(layer->stats().stat_scored, (2 * clusters - 1) * shape.q_heads);
    }
  });
}

// Rows behind a hole are attended exactly; what is invisible is not attended at all.
TEST(SeedWalk, HonoursVisibleSets) {
  const Shape shape{4, 2, 32};
  constexpr std::int64_t kRows = 1030;
  const SyntheticCache cache(shape, kRows, DType::kF16, 70);
  std::mt19937 random(5);
  for (const std::int64_t prefix : {400, 511, 901}) {
    std::vector<bool> visible(kRows, false);
    std::fill(visible.begin(), visible.begin() + prefix, true);
    for (std::int64_t r = prefix + 1; r < kRows; ++r) visible[r] = random() % 3 == 0;
    const std::vector<std::uint64_t> words = test::Bitmap(visible);
    auto layer = NewLayer(shape, SmallConfig());
    SetAllTaus(*layer, 0.1f);
    Decoder decoder(shape);
    const std::vector<float> out = decoder.Attend(*layer, cache.View(), 3, {words.data(), std::ssize(words)});
    EXPECT_EQ(layer->sealed_end(), prefix - 32);
    ExpectPlain(*layer, {}, cache, visible, decoder, out);
  }
}

TEST(SeedWalk, AtTauZeroIsFlatSelectionBitForBit) {
  const Shape shape{6, 2, 40};
  const SyntheticCache cache(shape, 1100, DType::kF16, 41);
  auto walks = NewLayer(shape, SmallConfig());
  auto flat = NewLayer(shape, SmallConfig(Selection::kFlat));
  Decoder decoder(shape, 2.0f);
  for (const std::int64_t n : {150, 400, 1100}) {
    SetAllTaus(*walks, 0.0f);
    SetAllTaus(*flat, 0.0f);
    walks->ResetStats();
    EXPECT_EQ(decoder.Attend(*walks, cache.View(n), 5), decoder.Attend(*flat, cache.View(n), 5));
    EXPECT_EQ(walks->stats().union_rows, walks->stats().visible_rows);
    // With others it is something else.
    SetAllTaus(*walks, 0.2f);
    SetAllTaus(*flat, 0.2f);
    EXPECT_NE(decoder.Attend(*walks, cache.View(n), 5), decoder.Attend(*flat, cache.View(n), 5));
  }
}

TEST(SeedWalk, AtTauOneLooksAtTheRootAlone) {
  const Shape shape{6, 2, 40};
  const SyntheticCache cache(shape, 1100, DType::kF16, 42);
  auto layer = NewLayer(shape, SmallConfig());
  SetAllTaus(*layer, 1.0f);
  // Sharp queries: the estimate of the root is many orders of magnitude above the exact mass, next to which a share
  // would be rounded to 1.
  for (const float size : {1.0f, 25.0f}) {
    Decoder decoder(shape, size);
    const LayerStats before = layer->stats();
    const std::vector<float> out = decoder.Attend(*layer, cache.View());
    const LayerStats stats = layer->stats();
    EXPECT_EQ(stats.stat_scored - before.stat_scored, 6u);
    EXPECT_EQ(stats.stat_opened_rows, 0u);
    // f16 rows of K and V of the rows that are always exact; three vectors of a node for each KV head.
    const std::uint64_t exact_rows = 4 + (1100 - layer->sealed_end());
    EXPECT_EQ(stats.bytes_read - before.bytes_read, 2 * exact_rows * 2 * 40 * 2 + 2 * 3 * 40 * 4);
  }
}

// Nothing is dropped: with the same value everywhere, the weights must sum to one whatever is opened.
TEST(SeedWalk, DropsNoKey) {
  const Shape shape{6, 2, 40};
  SyntheticCache cache(shape, 1000, DType::kF16, 50);
  std::vector<float> value(40);
  for (int d = 0; d < 40; ++d) value[d] = 0.25f * static_cast<float>(d - 20);
  for (std::int64_t r = 0; r < 1000; ++r) {
    for (int h = 0; h < 2; ++h) cache.SetValue(r, h, value.data());
  }
  Config config = SmallConfig();
  config.packed_format = PackedFormat::kF16;
  for (const float tau : {0.0f, 0.001f, 0.03f, 0.3f, 0.7f, 1.0f}) {
    auto layer = NewLayer(shape, config);
    SetAllTaus(*layer, tau);
    Decoder decoder(shape, 3.0f);
    for (const std::int64_t n : {150, 400, 1000}) {
      const std::vector<float> out = decoder.Attend(*layer, cache.View(n), 5);
      for (int h = 0; h < 6; ++h) {
        for (int d = 0; d < 40; ++d) EXPECT_NEAR(out[h * 40 + d], value[d], 1e-5 * 5) << tau << " " << n;
      }
    }
    EXPECT_EQ(layer->stats().sparse_steps, 3u) << tau;
  }
}

TEST(SeedWalk, HasTheSameBitsForAnyThreadsAndSerial) {
  const Shape shape{14, 2, 64};
  const SyntheticCache cache(shape, 3000, DType::kF16, 60);
  Config config = SmallConfig();
  config.block_size = 512;
  const auto run = [&](int n_threads, bool serial, std::vector<float>* errors) {
    auto layer = NewLayer(shape, config);
    layer->set_serial(serial);
    Decoder decoder(shape);
    std::vector<float> all;
    EXPECT_TRUE(layer->StartCalibration(0.1f).ok());
    for (std::uint32_t step = 0; step < 6; ++step) {
      if (step == 3) {
        for (int h = 0; h < shape.q_heads; ++h) {
          for (int g = 0; g < kTauGridSize; ++g) {
            const auto recorded = layer->CalibrationErrors(h, g);
            errors->insert(errors->end(), recorded.begin(), recorded.end());
          }
        }
        EXPECT_TRUE(layer->FinishCalibration().ok());
      }
      const std::vector<float> out = decoder.Attend(*layer, cache.View(2900 + 20 * step), step, {}, n_threads);
      all.insert(all.end(), out.begin(), out.end());
    }
    EXPECT_EQ(layer->stats().sparse_steps, 3u);
    EXPECT_EQ(layer->stats().calibration_steps, 3u);
    return all;
  };
  std::vector<float> errors;
  const std::vector<float> expected = run(1, false, &errors);
  EXPECT_EQ(errors.size(), 3u * 14 * kTauGridSize);
  for (const int n_threads : {2, 3, 7}) {
    std::vector<float> other;
    EXPECT_EQ(run(n_threads, false, &other), expected) << n_threads;
    EXPECT_EQ(other, errors);
  }
  std::vector<float> other;
  EXPECT_EQ(run(4, true, &other), expected);
  EXPECT_EQ(other, errors);
}

// Each recorded error is what really stopping there produces, or stopping at the last threshold that is in play.
TEST(SeedWalk, ReplayEqualsReallyStopping) {
  constexpr float kTolerance = 0.05f;
  constexpr std::uint32_t kSteps = 6;
  constexpr std::uint32_t kProbeSteps = 4;
  int out_of_play = 0;
  for (const PackedFormat format : {PackedFormat::kQ8_0, PackedFormat::kF16}) {
    const Shape shape{6, 2, 64};
    const SyntheticCache cache(shape, 1300, DType::kF16, 100);
    Config config = SmallConfig();
    config.packed_format = format;
    auto layer = NewLayer(shape, config);
    auto stopping = NewLayer(shape, config);
    Decoder decoder(shape, 1.5f);
    std::vector<float> sinks(shape.q_heads, 1.0f);
    if (format == PackedFormat::kF16) decoder.params.sinks = sinks.data();
    ASSERT_TRUE(layer->StartCalibration(kTolerance).ok());
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      const KvView kv = cache.View(1290 + step);
      EXPECT_EQ(decoder.Attend(*layer, kv, step), decoder.Exact(kv, step));
    }
    EXPECT_EQ(layer->calibration_steps(), static_cast<int>(kSteps));
    // The first threshold at which more than half of the steps before are within half the tolerance.
    const auto last_in_play = [&](int h, std::uint32_t step) {
      if (step < kProbeSteps) return kTauGridSize - 1;
      for (int g = 0; g < kTauGridSize; ++g) {
        const std::span<const float> before = layer->CalibrationErrors(h, g).first(step);
        if (2 * std::ranges::count_if(before, [=](float e) { return e <= kTolerance / 2; }) > step) return g;
      }
      return kTauGridSize - 1;
    };
    bool differs = false;
    for (int g = 0; g < kTauGridSize; ++g) {
      SetAllTaus(*stopping, kTauGrid[g]);
      for (std::uint32_t step = 0; step < kSteps; ++step) {
        const KvView kv = cache.View(1290 + step);
        const std::vector<float> out = decoder.Attend(*stopping, kv, step);
        const std::vector<float> exact = decoder.Exact(kv, step);
        for (int h = 0; h < shape.q_heads; ++h) {
          const double error = test::RelativeL2(HeadOf(out, shape, h), HeadOf(exact, shape, h));
          const std::span<const float> recorded = layer->CalibrationErrors(h, g);
          ASSERT_EQ(recorded.size(), kSteps);
          if (const int last = last_in_play(h, step); g > last) {
            EXPECT_EQ(recorded[step], layer->CalibrationErrors(h, last)[step]);
            ++out_of_play;
            continue;
          }
          EXPECT_NEAR(recorded[step], error, 1e-5 + 1e-4 * error) << g << " " << h;
          differs = differs || (g > 0 && recorded[step] != layer->CalibrationErrors(h, 0)[step]);
        }
      }
    }
    EXPECT_TRUE(differs);
  }
  EXPECT_GT(out_of_play, 0);
}

// Regions that came, were cut off, written anew and given up leave the plan that a late start builds.
TEST(SeedWalk, GrowingStepByStepGivesTheSameBitsAsStartingLate) {
  const Shape shape{4, 2, 32};
  const SyntheticCache cache(shape, 1500, DType::kF16, 91);
  auto layer = NewLayer(shape, SmallConfig());
  SetAllTaus(*layer, 0.1f);
  Decoder decoder(shape);
  for (std::int64_t n = 104; n <= 1376; n += 8) {
    decoder.Attend(*layer, cache.View(n));
    const std::int64_t rows[] = {n / 2};
    if (n % 200 == 0) layer->NotifyWrites(rows);
    if (n % 304 == 0) decoder.Attend(*layer, cache.View(n - 150));
  }
  EXPECT_GT(layer->stats().dropped_blocks, 5u);
  // Two frozen regions are left, and nothing is due. Then all that follows is sealed, but for the recent rows.
  decoder.Attend(*layer, cache.View(600));
  ASSERT_EQ(layer->sealed_end(), 4 + 2 * 256);
  const std::vector<float> grown = decoder.Attend(*layer, cache.View(1380), 3);
  ASSERT_EQ(layer->sealed_end(), 1380 - 32);
  auto fresh = NewLayer(shape, SmallConfig());
  SetAllTaus(*fresh, 0.1f);
  EXPECT_EQ(decoder.Attend(*fresh, cache.View(1380), 3, {}, 3), grown);
  EXPECT_EQ(fresh->stats().plan_bytes, layer->stats().plan_bytes);
}

TEST(SeedWalk, QueriesThatAreNoNumbersOpenEverything) {
  const Shape shape{2, 1, 16};
  const SyntheticCache cache(shape, 700, DType::kF16, 82);
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), 1e30f}) {
    auto layer = NewLayer(shape, SmallConfig());
    SetAllTaus(*layer, 0.9f);
    std::vector<float> q = test::RandomQueries(shape, 1);
    q[3] = bad;
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape);
    Workspace workspace;
    ASSERT_TRUE(
        layer->Attend(test::ViewQueries(q, shape), cache.View(), {}, {}, Verify::kFull, 2, workspace, view).ok());
    // The first head opens all, the other one is not affected.
    const std::uint64_t sealed = static_cast<std::uint64_t>(layer->sealed_end() - 4);
    EXPECT_GE(layer->stats().stat_opened_rows, sealed) << bad;
    EXPECT_LT(layer->stats().stat_opened_rows, 2 * sealed) << bad;
    for (int d = 0; d < 16; ++d) EXPECT_TRUE(std::isfinite(out[16 + d]));
  }
}

// One walk of one head over a plan.
class WalkTest : public testing::Test {
 protected:
  void Build(const SyntheticCache& cache, std::int64_t n_prefix) {
    int built = 0;
    ASSERT_TRUE(plan_.Extend(cache.View(n_prefix), n_prefix, 1, &built).ok());
    n_clusters_ = static_cast<std::size_t>(Root(plan_.regions()).end);
    members_.resize(2 * n_clusters_);
    queue_.resize(n_clusters_);
    opened_.resize(n_clusters_);
  }
  ClusterWalk Start(const std::vector<float>& q, double log_exact_mass) {
    squares_ = q;
    for (float& x : squares_) x *= x;
    return {plan_.regions(),
            16,
            2,
            {0, q.data(), squares_.data(), log_exact_mass},
            {members_.data(), queue_.data(), opened_.data()}};
  }
  static std::vector<std::int32_t> Opened(const ClusterWalk& walk) {
    return {walk.opened().begin(), walk.opened().end()};
  }

  Shape shape_{1, 1, 16};
  Plan plan_{shape_, SmallConfig()};
  std::size_t n_clusters_ = 0;
  std::vector<ClusterWalk::Member> members_;
  std::vector<std::int32_t> queue_;
  std::vector<std::int32_t> opened_;
  std::vector<float> squares_;
};

TEST_F(WalkTest, OpensInThePlainOrder) {
  const SyntheticCache cache(shape_, 1200, DType::kF16, 12);
  Build(cache, 1111);
  for (const float size : {0.2f, 1.0f}) {
    for (const double exact_mass : {0.0, 1.0, 1000.0}) {
      const std::vector<float> q = test::RandomQueries(shape_, 5, size);
      ClusterWalk walk = Start(q, std::log(exact_mass));
      PlainWalk plain(plan_.regions(), cache, shape_, 2, 0, test::ToDouble(q.data(), 16), exact_mass);
      for (const float tau : kTauGrid) {
        walk.Run(tau);
        plain.Run(tau);
        EXPECT_EQ(Opened(walk), std::vector<std::int32_t>(plain.opened.begin(), plain.opened.end())) << tau;
        EXPECT_EQ(walk.members().size(), plain.scored.size());
      }
    }
  }
}

// Larger thresholds on the way change nothing.
TEST_F(WalkTest, GoesOnWhereItStopped) {
  const SyntheticCache cache(shape_, 1200, DType::kF16, 13);
  Build(cache, 1200);
  const std::vector<float> q = test::RandomQueries(shape_, 6);
  ClusterWalk walk = Start(q, 0.0);
  for (const float tau : kTauGrid) walk.Run(tau);
  const std::vector<std::int32_t> in_steps = Opened(walk);
  const std::size_t scored = walk.members().size();
  ClusterWalk at_once = Start(q, 0.0);
  at_once.Run(kTauGrid[kTauGridSize - 1]);
  EXPECT_EQ(Opened(at_once), in_steps);
  EXPECT_EQ(at_once.members().size(), scored);
  EXPECT_GT(in_steps.size(), 3u);
  EXPECT_LT(in_steps.size(), n_clusters_);
}

// Equal keys: all clusters of as many rows have the same estimate, and open from the first one on.
TEST_F(WalkTest, TheLowerClustersComeFirstAmongEquals) {
  SyntheticCache cache(shape_, 4 + 1024 + 32, DType::kF16, 14);
  const std::vector<float> key(16, 0.5f);
  for (std::int64_t r = 0; r < cache.n_rows(); ++r) cache.SetKey(r, 0, key.data());
  Build(cache, cache.n_rows());
  ASSERT_EQ(n_clusters_, 64u);
  const std::vector<float> q(16, 0.25f);
  ClusterWalk walk = Start(q, 0.0);
  walk.Run(0.5f);
  const std::vector<std::int32_t> opened = Opened(walk);
  ASSERT_GT(opened.size(), 10u);
  ASSERT_LT(opened.size(), 64u);
  for (std::size_t i = 0; i < opened.size(); ++i) EXPECT_EQ(opened[i], static_cast<std::int32_t>(i));
}

// An estimate of the root beyond anything that a double holds next to the exact mass is forgotten when it is refined.
TEST_F(WalkTest, KeepsTheSmallMassesBesideHugeEstimates) {
  SyntheticCache cache(shape_, 4 + 1024 + 32, DType::kF32, 15);
  // Two far groups of rows along the query, each of them tight: the root's variance is huge, the clusters have none.
  std::vector<float> key(16, 0.0f);
  for (std::int64_t r = 0; r < cache.n_rows(); ++r) {
    key[0] = r % 64 < 32 ? 0.0f : -60.0f;
    cache.SetKey(r, 0, key.data());
  }
  Build(cache, cache.n_rows());
  std::vector<float> q(16, 0.0f);
  q[0] = 1.0f;
  // Half of the 1,024 rows have logit 0, the others next to nothing; the exact mass is that of 512 rows.
  ClusterWalk walk = Start(q, std::log(512.0));
  EXPECT_GT(members_[0].priority, 400.0f);
  walk.Run(0.26f);
  // 32 clusters of 16 rows have all of the mass. A share of 0.26 is left below (1024 - 512 - 240) / 1024: 16 open.
  EXPECT_EQ(walk.opened().size(), 16u);
  const std::vector<std::int32_t> opened = Opened(walk);
  for (const std::int32_t cluster : opened) {
    const Region& region = plan_.regions()[cluster / 16];
    EXPECT_NEAR(region.heads[0].centroids[(cluster % 16) * 16], 0.0f, 1e-6);
  }
}

// Long enough for automatic selection to be hierarchical. Rows are small.
constexpr Shape kLongShape{1, 1, 8};
constexpr std::int64_t kLongRows = kHierarchicalRows + 200;

Config LongConfig() {
  Config config = ConfigFor(Preset::kSeed);
  config.selection = Selection::kAutomatic;
  config.rebuild_interval = 1;
  return config;
}

void Calibrate(Layer& layer, Decoder& decoder, const SyntheticCache& cache, std::int64_t n_kv) {
  ASSERT_TRUE(layer.StartCalibration(0.05f).ok());
  for (std::uint32_t step = 0; step < 2; ++step) decoder.Attend(layer, cache.View(n_kv), step);
  EXPECT_EQ(layer.calibration_steps(), 2);
  ASSERT_TRUE(layer.FinishCalibration().ok());
}

TEST(SeedSelection, IsDecidedWhenAWindowBegins) {
  const SyntheticCache cache(kLongShape, kLongRows, DType::kF16);
  auto layer = NewLayer(kLongShape, LongConfig());
  Decoder decoder(kLongShape);
  std::shared_ptr<MemoryBudget> budget;
  ASSERT_TRUE(MemoryBudget::Create(std::uint64_t{1} << 30, &budget).ok());
  ASSERT_TRUE(layer->SetBudget(budget).ok());
  decoder.Attend(*layer, cache.View());
  EXPECT_EQ(layer->selection(), Selection::kFlat);
  const std::uint64_t flat_bytes = budget->used();
  // No room for the tree: flat.
  budget->SetLimit(flat_bytes + 1000);
  Calibrate(*layer, decoder, cache, kLongRows);
  EXPECT_EQ(layer->selection(), Selection::kFlat);
  EXPECT_EQ(budget->used(), flat_bytes);
  budget->SetLimit(std::uint64_t{1} << 30);
  Calibrate(*layer, decoder, cache, kLongRows);
  EXPECT_EQ(layer->selection(), Selection::kHierarchical);
  const auto clusters = static_cast<std::uint64_t>(Root(SeedRegions(*layer)).end);
  EXPECT_EQ(budget->used(), flat_bytes + clusters * 3 * 8 * sizeof(float));
  SetAllTaus(*layer, 1.0f);
  const std::uint64_t scored = layer->stats().stat_scored;
  decoder.Attend(*layer, cache.View());
  EXPECT_EQ(layer->stats().stat_scored, scored + 1);  // the root
  decoder.Attend(*layer, cache.View(3000));
  EXPECT_EQ(layer->selection(), Selection::kHierarchical);  // what the thresholds are for
  Calibrate(*layer, decoder, cache, 3000);
  EXPECT_EQ(layer->selection(), Selection::kFlat);
  EXPECT_EQ(layer->stats().plan_bytes, budget->used());
}

TEST(SeedSelection, OfShortContextsIsFlatBitForBit) {
  const Shape shape{6, 2, 32};
  const SyntheticCache cache(shape, 1500, DType::kF16, 3);
  auto automatic = NewLayer(shape, SmallConfig(Selection::kAutomatic));
  auto flat = NewLayer(shape, SmallConfig(Selection::kFlat));
  Decoder decoder(shape);
  Calibrate(*automatic, decoder, cache, 1300);
  Calibrate(*flat, decoder, cache, 1300);
  ASSERT_TRUE(std::ranges::equal(flat->taus(), automatic->taus()));
  for (std::int64_t n = 1400; n < 1410; ++n) {
    EXPECT_EQ(decoder.Attend(*automatic, cache.View(n)), decoder.Attend(*flat, cache.View(n)));
  }
  EXPECT_EQ(automatic->stats().plan_bytes, flat->stats().plan_bytes);
}

TEST(SeedSelection, CallersAndFilesSayWhatTheirThresholdsAreFor) {
  const Shape shape{6, 2, 32};
  const auto create = [&](Selection selection) {
    std::unique_ptr<State> state;
    EXPECT_TRUE(State::Create(2, shape, SmallConfig(selection), &state).ok());
    return state;
  };
  const auto hierarchical = create(Selection::kHierarchical);
  ASSERT_TRUE(hierarchical->layer(1).SetTau(5, 0.125f).ok());
  const std::string text = hierarchical->TausToJson();
  EXPECT_NE(text.find("\"selection\": \"hierarchical\""), std::string::npos) << text;
  const auto flat = create(Selection::kFlat);
  EXPECT_EQ(flat->TausToJson().find("selection"), std::string::npos);
  const Status refused = flat->LoadTausJson(text);
  EXPECT_NE(refused.message().find("selection hierarchical, here it is flat"), std::string::npos) << refused.message();
  EXPECT_FALSE(hierarchical->LoadTausJson(flat->TausToJson()).ok());
  EXPECT_FALSE(hierarchical->layer(0).SetSelection(Selection::kFlat).ok());

  const auto automatic = create(Selection::kAutomatic);
  const SyntheticCache cache(shape, 1000, DType::kF16, 3);
  Decoder decoder(shape);
  decoder.Attend(automatic->layer(1), cache.View());  // a plan that has no tree yet
  ASSERT_TRUE(automatic->LoadTausJson(text).ok());
  EXPECT_EQ(automatic->layer(1).selection(), Selection::kHierarchical);
  EXPECT_EQ(automatic->TausToJson(), text);
  const std::vector<float> out = decoder.Attend(automatic->layer(1), cache.View(), 2);
  EXPECT_EQ(out, decoder.Attend(hierarchical->layer(1), cache.View(), 2));
  ASSERT_TRUE(automatic->LoadTausJson(flat->TausToJson()).ok());
  EXPECT_EQ(automatic->layer(1).selection(), Selection::kFlat);
  EXPECT_EQ(decoder.Attend(automatic->layer(1), cache.View(), 2), decoder.Attend(flat->layer(1), cache.View(), 2));
}

}  // namespace
}  // namespace scsa
