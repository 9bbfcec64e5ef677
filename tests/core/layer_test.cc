// SPDX-License-Identifier: Apache-2.0
#include "scsa/layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>

#include "core/layer_impl.h"
#include "core/seed_method.h"
#include "core/select.h"
#include "core/step.h"
#include "tests/core/seed_layers.h"
#include "tests/core/synthetic.h"

namespace {

// Allocations of at least this many bytes fail, as if memory were short.
std::atomic<std::size_t> fail_from{SIZE_MAX};

void* Allocate(std::size_t bytes) noexcept {
  return bytes >= fail_from.load() ? nullptr : std::malloc(std::max<std::size_t>(bytes, 1));
}

}  // namespace

// Every form that is used anywhere in the program, for sanitizers bring replacements of their own, which do not mix.
// Not inlined: GCC would take the malloc of one and the free of the other for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* p = Allocate(bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t align, const std::nothrow_t&) noexcept {
  const std::size_t step = static_cast<std::size_t>(align);
  return bytes >= fail_from.load() ? nullptr : std::aligned_alloc(step, (bytes + step - 1) / step * step);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }

namespace scsa {
namespace {

using test::DotOf;
using test::HeadOf;
using test::NewLayer;
using test::SeedRegions;
using test::SetAllTaus;
using test::SyntheticCache;
using test::Vector;

constexpr double kNone = -std::numeric_limits<double>::infinity();

Config SmallConfig() { return test::SmallSeedConfig(); }

// One decode step; query i of the same cache.
class Decoder {
 public:
  Decoder(const Shape& shape, float query_size = 1.0f) : shape_(shape), query_size_(query_size) {
    params_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  }

  std::vector<float> Attend(Layer& layer, const KvView& kv, std::uint32_t query = 1, Verify verify = Verify::kFull,
                            int n_threads = 2, const VisibleSets& visible = {}) {
    query_ = test::RandomQueries(shape_, query, query_size_);
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape_);
    const Status status =
        layer.Attend(test::ViewQueries(query_, shape_), kv, visible, params_, verify, n_threads, workspace_, view);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }
  std::vector<float> Exact(const KvView& kv, std::uint32_t query = 1, const VisibleSets& visible = {}) {
    query_ = test::RandomQueries(shape_, query, query_size_);
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape_);
    EXPECT_TRUE(
        ExactAttention(shape_, test::ViewQueries(query_, shape_), kv, visible, params_, 1, workspace_, view).ok());
    return out;
  }

  const std::vector<float>& query() const { return query_; }
  LogitParams& params() { return params_; }
  Workspace& workspace() { return workspace_; }

 private:
  Shape shape_;
  float query_size_;
  LogitParams params_;
  Workspace workspace_;
  std::vector<float> query_;
};

// The opened clusters and the output of one query head, restated from the clusters of the plan.
struct PlainHead {
  std::vector<int> opened;  // running index over the regions
  Vector output;
};

PlainHead PlainSparse(const Layer& layer, const SyntheticCache& cache, const std::vector<bool>& visible, const float* q,
                      int h, float tau, const LogitParams& params) {
  const Shape& shape = layer.shape();
  const Config& config = layer.config();
  const int kv_head = h / shape.group();
  const int head_dim = shape.head_dim;
  test::PlainQuery query = test::ReadExactRows(layer, cache, visible, q, h, params);
  const Vector& qs = query.qs;
  const std::span<const Region> regions = SeedRegions(layer);

  struct Cluster {
    const Block* block;
    int index;
    double a;
    double priority;
  };
  std::vector<Cluster> clusters;
  for (const Region& region : regions) {
    const Block& block = region.heads[kv_head];
    for (int c = 0; c < block.n_clusters; ++c) {
      const double a = DotOf(qs, test::ToDouble(block.centroids.data() + c * head_dim, head_dim));
      double variance = 0;
      for (int j = 0; j < config.rank; ++j) {
        const double x =
            DotOf(qs, test::ToDouble(block.directions.data() + (c * config.rank + j) * head_dim, head_dim));
        variance += x * x;
      }
      for (int d = 0; d < head_dim; ++d) variance += qs[d] * qs[d] * block.residuals[c * head_dim + d];
      clusters.push_back({&block, c, a, a + std::log(static_cast<double>(block.RowsOf(c))) + variance / 2});
    }
  }
  std::vector<int> order(clusters.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int x, int y) { return clusters[x].priority > clusters[y].priority; });

  PlainHead out;
  std::vector<bool> is_open(clusters.size(), false);
  for (const int c : order) {
    double closed = 0;
    double captured = query.exact_mass;
    for (std::size_t i = 0; i < clusters.size(); ++i) {
      if (is_open[i]) {
        captured += static_cast<double>(clusters[i].block->RowsOf(clusters[i].index)) * std::exp(clusters[i].a);
      } else {
        closed += std::exp(clusters[i].priority);
      }
    }
    if (closed / (closed + captured) < tau) break;
    is_open[c] = true;
    out.opened.push_back(c);
  }
  for (std::size_t i = 0; i < clusters.size(); ++i) {
    const Block& block = *clusters[i].block;
    const int c = clusters[i].index;
    if (is_open[i]) {
      test::AddPackedRows(layer, block, c, &query);
    } else {
      query.softmax.Add(clusters[i].a + std::log(static_cast<double>(block.RowsOf(c))),
                        test::ToDouble(block.value_means.data() + c * head_dim, head_dim));
    }
  }
  out.output = params.sinks == nullptr ? query.softmax.Output() : query.softmax.Output(params.sinks[h]);
  return out;
}

// The whole sparse output against the formulas, on every target: groups, head sizes, row and packed formats, attention
// sinks, one block and several.
TEST(Attend, MatchesTheFormulas) {
  const Shape shapes[] = {{3, 1, 64}, {6, 2, 40}, {4, 4, 16}, {8, 1, 24}, {2, 2, 136}};
  const DType types[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kQ8_0, DType::kF16};
  test::OnEveryTarget([&] {
    for (int i = 0; i < 5; ++i) {
      const Shape& shape = shapes[i];
      for (const PackedFormat format : {PackedFormat::kQ8_0, PackedFormat::kF16}) {
        SCOPED_TRACE(std::to_string(i) + (format == PackedFormat::kF16 ? " f16" : " q8_0"));
        const std::int64_t n = 620 + 7 * i;
        const SyntheticCache cache(shape, n, types[i], 30 + i);
        Config config = SmallConfig();
        config.packed_format = format;
        config.rank = i;
        auto layer = NewLayer(shape, config);
        for (int h = 0; h < shape.q_heads; ++h) ASSERT_TRUE(layer->SetTau(h, kTauGrid[(2 * h) % kTauGridSize]).ok());
        Decoder decoder(shape);
        std::vector<float> sinks(shape.q_heads, 2.0f);
        if (i % 2 == 1) decoder.params().sinks = sinks.data();
        const std::vector<float> out = decoder.Attend(*layer, cache.View());
        ASSERT_EQ(layer->stats().sparse_steps, 1u);
        std::uint64_t opened_rows = 0;
        std::size_t opened = 0;
        for (int h = 0; h < shape.q_heads; ++h) {
          const PlainHead plain = PlainSparse(*layer, cache, std::vector<bool>(n, true), decoder.query().data(), h,
                                              layer->taus()[h], decoder.params());
          EXPECT_LT(test::RelativeL2(HeadOf(out, shape, h), plain.output), 2e-5) << h;
          opened += plain.opened.size();
          for (int c : plain.opened) {
            for (const Region& region : SeedRegions(*layer)) {
              const Block& block = region.heads[h / shape.group()];
              if (c < block.n_clusters) {
                opened_rows += static_cast<std::uint64_t>(block.RowsOf(c));
                break;
              }
              c -= block.n_clusters;
            }
          }
        }
        // The decisions themselves, through the counter; some clusters open and some do not, or nothing was tested.
        EXPECT_EQ(layer->stats().stat_opened_rows, opened_rows);
        EXPECT_GT(opened, 0u);
        EXPECT_LT(opened, layer->stats().stat_scored);
      }
    }
  });
}

TEST(Attend, AtTauZeroEqualsExact) {
  test::OnEveryTarget([] {
    const Shape shape{6, 2, 64};
    for (const DType type : {DType::kF16, DType::kBF16, DType::kF32, DType::kQ8_0}) {
      for (const PackedFormat format : {PackedFormat::kF16, PackedFormat::kQ8_0}) {
        const SyntheticCache cache(shape, 700, type, 41);
        Config config = SmallConfig();
        config.packed_format = format;
        auto layer = NewLayer(shape, config);
        SetAllTaus(*layer, 0.0f);
        Decoder decoder(shape, 2.0f);
        const std::vector<float> out = decoder.Attend(*layer, cache.View());
        ASSERT_EQ(layer->stats().union_rows, layer->stats().visible_rows);
        // The same rows bit for bit: rounding of f32 sums alone. f16 copies of wider rows: 2^-11 per value. q8_0: half
        // a step of 127 in keys, values and query, which moves a logit by about 0.02 here.
        const bool same_values = format == PackedFormat::kF16 && type == DType::kF16;
        const double bound = same_values ? 1e-5 : format == PackedFormat::kF16 ? 2e-3 : 3e-2;
        for (int h = 0; h < shape.q_heads; ++h) {
          const Vector exact = test::ExactHead(cache, shape, 700, decoder.query().data(), h, decoder.params());
          EXPECT_LT(test::RelativeL2(HeadOf(out, shape, h), exact), bound) << static_cast<int>(type);
        }
      }
    }
  });
}

// Nothing is dropped: with the same value everywhere, the weights must sum to one whatever is opened.
TEST(Attend, DropsNoKey) {
  const Shape shape{6, 2, 40};
  SyntheticCache cache(shape, 900, DType::kF16, 50);
  std::vector<float> value(40);
  for (int d = 0; d < 40; ++d) value[d] = 0.25f * static_cast<float>(d - 20);
  for (std::int64_t r = 0; r < 900; ++r) {
    for (int h = 0; h < 2; ++h) cache.SetValue(r, h, value.data());
  }
  Config config = SmallConfig();
  config.packed_format = PackedFormat::kF16;
  for (const float tau : {0.0f, 0.001f, 0.01f, 0.1f, 0.3f, 0.7f, 1.0f}) {
    auto layer = NewLayer(shape, config);
    SetAllTaus(*layer, tau);
    Decoder decoder(shape, 3.0f);
    for (const std::int64_t n : {150, 400, 900}) {
      const std::vector<float> out = decoder.Attend(*layer, cache.View(n), 5);
      for (int h = 0; h < 6; ++h) {
        for (int d = 0; d < 40; ++d) EXPECT_NEAR(out[h * 40 + d], value[d], 1e-5 * 5) << tau << " " << n;
      }
    }
    EXPECT_EQ(layer->stats().sparse_steps, 3u) << tau << " " << layer->stats().build_failures;
  }
}

TEST(Attend, HasTheSameBitsForAnyThreadsAndSerial) {
  const Shape shape{14, 2, 64};
  const SyntheticCache cache(shape, 3000, DType::kF16, 60);
  Config config;
  config.rebuild_interval = 128;
  config.block_size = 1024;
  config.cluster_size = 32;
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
      const std::vector<float> out =
          decoder.Attend(*layer, cache.View(2900 + 20 * step), step, Verify::kSample, n_threads);
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

// Rows behind a hole and rows that no block covers are attended exactly; what is invisible is not attended at all.
TEST(Attend, HonoursVisibleSets) {
  const Shape shape{4, 2, 32};
  constexpr std::int64_t kRows = 1030;
  const SyntheticCache cache(shape, kRows, DType::kF16, 70);
  std::mt19937 random(5);
  for (const std::int64_t prefix : {400, 447, 448, 511, 700}) {
    for (const int kind : {0, 1, 2}) {
      std::vector<bool> visible(kRows, false);
      std::fill(visible.begin(), visible.begin() + prefix, true);
      for (std::int64_t r = prefix + 1; r < kRows; ++r) {
        if (kind == 1) visible[r] = random() % 3 == 0;
        if (kind == 2) visible[r] = (r / 130) % 2 == 0;
      }
      std::vector<std::uint64_t> words = test::Bitmap(visible);
      // Bits at and after n_kv mean nothing.
      words.back() |= ~std::uint64_t{0} << (kRows % 64);
      auto layer = NewLayer(shape, SmallConfig());
      SetAllTaus(*layer, 0.1f);
      Decoder decoder(shape);
      const std::vector<float> out =
          decoder.Attend(*layer, cache.View(), 3, Verify::kFull, 2, {words.data(), std::ssize(words)});
      EXPECT_EQ(layer->sealed_end(), prefix - 32);
      for (int h = 0; h < shape.q_heads; ++h) {
        const PlainHead plain =
            PlainSparse(*layer, cache, visible, decoder.query().data(), h, layer->taus()[h], decoder.params());
        EXPECT_LT(test::RelativeL2(HeadOf(out, shape, h), plain.output), 2e-5) << prefix << " " << kind;
      }
      const std::uint64_t n_visible = static_cast<std::uint64_t>(std::ranges::count(visible, true));
      EXPECT_EQ(layer->stats().visible_rows, 2 * n_visible);
      EXPECT_EQ(layer->stats().stat_exact_rows, 4 * (n_visible - (prefix - 36)));
    }
  }
}

TEST(Attend, ListsEveryVisibleRowOnce) {
  std::mt19937 random(6);
  for (int round = 0; round < 300; ++round) {
    const std::int64_t n_kv = 1 + random() % 900;
    const std::int64_t prefix = random() % (n_kv + 1);
    const std::int64_t sink = random() % 5;
    const std::int64_t sealed = sink + random() % (std::max<std::int64_t>(prefix - sink, 0) + 1);
    if (sealed > prefix) continue;
    std::vector<bool> visible(n_kv, false);
    std::fill(visible.begin(), visible.begin() + prefix, true);
    const auto density = 1 + random() % 5;
    for (std::int64_t r = prefix + 1; r < n_kv; ++r) visible[r] = random() % density == 0 && (r / 100) % 3 != 1;
    const std::vector<std::uint64_t> words = test::Bitmap(visible);
    const VisibleSets sets{words.data(), std::ssize(words)};
    ASSERT_EQ(VisiblePrefix(sets, n_kv), prefix == n_kv ? n_kv : prefix);
    std::vector<CacheRun> runs;
    const std::int64_t rows = ListExactRuns(sets, n_kv, prefix, sink, sealed, &runs);
    std::vector<int> times(n_kv, 0);
    for (const CacheRun& run : runs) {
      ASSERT_GT(run.n_rows, 0);
      ASSERT_TRUE(!run.masked || run.begin % 64 == 0);
      for (std::int64_t r = run.begin; r < run.begin + run.n_rows; ++r) times[r] += !run.masked || visible[r];
    }
    std::int64_t expected = 0;
    for (std::int64_t r = 0; r < n_kv; ++r) {
      const bool wanted = visible[r] && (r < sink || r >= sealed);
      ASSERT_EQ(times[r], wanted ? 1 : 0) << r;
      expected += wanted;
    }
    EXPECT_EQ(rows, expected);
  }
}

// The output of the present call must be the exact one bit for bit.
void ExpectExact(Layer& layer, Decoder& decoder, const KvView& kv, const VisibleSets& visible = {}) {
  const LayerStats before = layer.stats();
  EXPECT_EQ(decoder.Attend(layer, kv, 9, Verify::kFull, 2, visible), decoder.Exact(kv, 9, visible));
  EXPECT_EQ(layer.stats().exact_steps, before.exact_steps + 1);
  EXPECT_EQ(layer.stats().sparse_steps, before.sparse_steps);
}

TEST(Attend, AnswersExactlyWhereNoPlanApplies) {
  const Shape shape{4, 2, 32};
  const SyntheticCache cache(shape, 500, DType::kF16, 80);
  auto layer = NewLayer(shape, SmallConfig());
  Decoder decoder(shape);
  ExpectExact(*layer, decoder, cache.View(0));
  ExpectExact(*layer, decoder, cache.View(1));
  ExpectExact(*layer, decoder, cache.View(4 + 32 + 63));
  // A hole at the start leaves no prefix.
  std::vector<bool> visible(500, true);
  visible[0] = false;
  const std::vector<std::uint64_t> words = test::Bitmap(visible);
  ExpectExact(*layer, decoder, cache.View(), {words.data(), std::ssize(words)});
  decoder.params().softcap = 20.0f;
  ExpectExact(*layer, decoder, cache.View());
  decoder.params().softcap = 0.0f;

  // Two query rows.
  std::vector<float> q = test::RandomQueries(shape, 1);
  const std::vector<float> second = test::RandomQueries(shape, 2);
  q.insert(q.end(), second.begin(), second.end());
  std::vector<float> out(q.size()), expected(q.size());
  const QueryView view{q.data(), 128, 32, 2};
  Workspace workspace;
  ASSERT_TRUE(
      layer->Attend(view, cache.View(), {}, decoder.params(), Verify::kFull, 2, workspace, {out.data(), 128, 32}).ok());
  ASSERT_TRUE(
      ExactAttention(shape, view, cache.View(), {}, decoder.params(), 2, workspace, {expected.data(), 128, 32}).ok());
  EXPECT_EQ(out, expected);
  EXPECT_EQ(layer->stats().exact_steps, 6u);
  EXPECT_EQ(layer->stats().stat_calls, 0u);
  EXPECT_EQ(layer->sealed_end(), 4);
}

TEST(Attend, ReportsBadArgumentsLikeExactAttention) {
  const Shape shape{2, 1, 16};
  const SyntheticCache cache(shape, 300, DType::kF16);
  auto layer = NewLayer(shape, SmallConfig());
  std::vector<float> q = test::RandomQueries(shape, 1);
  std::vector<float> out(32, 7.0f);
  Workspace workspace;
  const OutView view{out.data(), 32, 16};
  const auto code = [&](const QueryView& query, const KvView& kv, int n_threads, const OutView& to) {
    return layer->Attend(query, kv, {}, {}, Verify::kFull, n_threads, workspace, to).code();
  };
  KvView no_rows = cache.View();
  no_rows.k = nullptr;
  EXPECT_EQ(code({nullptr, 32, 16, 1}, cache.View(), 1, view), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({q.data(), 32, 16, 0}, cache.View(), 1, view), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({q.data(), 32, 16, 1}, no_rows, 1, view), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({q.data(), 32, 16, 1}, cache.View(), 0, view), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({q.data(), 32, 16, 1}, cache.View(), 1, {nullptr, 32, 16}), StatusCode::kInvalidArgument);
  EXPECT_EQ(out, std::vector<float>(32, 7.0f));
  EXPECT_EQ(layer->sealed_end(), 4);
  EXPECT_EQ(code({q.data(), 32, 16, 1}, cache.View(), 1, view), StatusCode::kOk);
}

TEST(Attend, StridedQueriesAndOutputs) {
  const Shape shape{4, 2, 16};
  const SyntheticCache cache(shape, 400, DType::kF16, 81);
  auto layer = NewLayer(shape, SmallConfig());
  Decoder decoder(shape);
  const std::vector<float> expected = decoder.Attend(*layer, cache.View(), 3);
  std::vector<float> q(4 * 24, 0.0f), out(4 * 40, -5.0f);
  for (int h = 0; h < 4; ++h) std::copy_n(decoder.query().begin() + h * 16, 16, q.begin() + h * 24);
  ASSERT_TRUE(layer
                  ->Attend({q.data(), 0, 24, 1}, cache.View(), {}, decoder.params(), Verify::kFull, 2,
                           decoder.workspace(), {out.data(), 0, 40})
                  .ok());
  for (int h = 0; h < 4; ++h) {
    for (int d = 0; d < 40; ++d) EXPECT_EQ(out[h * 40 + d], d < 16 ? expected[h * 16 + d] : -5.0f);
  }
}

TEST(Attend, QueriesThatAreNoNumbersDoNotBreakIt) {
  const Shape shape{2, 1, 16};
  const SyntheticCache cache(shape, 400, DType::kF16, 82);
  for (const PackedFormat format : {PackedFormat::kF16, PackedFormat::kQ8_0}) {
    Config config = SmallConfig();
    config.packed_format = format;
    auto layer = NewLayer(shape, config);
    std::vector<float> q = test::RandomQueries(shape, 1);
    q[3] = std::nanf("");
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape);
    Workspace workspace;
    ASSERT_TRUE(
        layer->Attend(test::ViewQueries(q, shape), cache.View(), {}, {}, Verify::kFull, 2, workspace, view).ok());
    // The other head is not affected.
    for (int d = 0; d < 16; ++d) EXPECT_TRUE(std::isfinite(out[16 + d]));
  }
}

TEST(Maintenance, CountersOfAGrowingCache) {
  const Shape shape{6, 2, 32};
  const SyntheticCache cache(shape, 400, DType::kF16, 90);
  Config config = SmallConfig();
  auto layer = NewLayer(shape, config);
  SetAllTaus(*layer, 0.2f);
  Decoder decoder(shape);
  std::uint64_t exact_rows = 0, visible_rows = 0, scored = 0, sparse = 0;
  for (std::int64_t n = 1; n <= 400; ++n) {
    decoder.Attend(*layer, cache.View(n), static_cast<std::uint32_t>(n), Verify::kSample);
    const std::int64_t sealed = std::max<std::int64_t>(0, n - 36) / 64 * 64;
    ASSERT_EQ(layer->sealed_end(), 4 + sealed) << n;
    if (sealed == 0) continue;
    ++sparse;
    exact_rows += n - sealed;
    visible_rows += n;
    // 64 rows in clusters of at most 16: 4, 8, 16 (halving 192 gives 12 in each), 16; 256 rows freeze.
    const std::uint64_t clusters[] = {0, 4, 8, 16, 16, 20};
    scored += clusters[sealed / 64];
  }
  const LayerStats stats = layer->stats();
  EXPECT_EQ(stats.rebuild_count, 5u);
  EXPECT_EQ(stats.sparse_steps, sparse);
  EXPECT_EQ(stats.exact_steps, 400 - sparse);
  EXPECT_EQ(stats.stat_calls, 6 * sparse);
  EXPECT_EQ(stats.stat_exact_rows, 6 * exact_rows);
  EXPECT_EQ(stats.visible_rows, 2 * visible_rows);
  EXPECT_EQ(stats.stat_scored, 6 * scored);
  EXPECT_EQ(stats.calibration_steps, 0u);
  EXPECT_EQ(stats.build_failures, 0u);
  EXPECT_EQ(stats.dropped_blocks, 0u);
  EXPECT_GT(stats.build_ns, 0u);
  // Opened rows count once in the union and once per head.
  EXPECT_GE(stats.stat_opened_rows, stats.union_rows - 2 * exact_rows);
  EXPECT_LE(stats.stat_opened_rows, 3 * (stats.union_rows - 2 * exact_rows));
  EXPECT_LT(stats.union_rows, stats.visible_rows);
  // f16 rows of K and V: 128 bytes; packed q8_0: 68. Summaries per cluster and KV head: 5 vectors of 32 and log m.
  EXPECT_EQ(stats.bytes_read,
            2 * exact_rows * 128 + (stats.union_rows - 2 * exact_rows) * 68 + 2 * scored * (5 * 32 * 4 + 4));
  EXPECT_GT(stats.plan_bytes, 2u * 320 * 68);
  layer->ResetStats();
  EXPECT_EQ(layer->stats().stat_calls, 0u);
  EXPECT_GT(layer->stats().plan_bytes, 0u);
}

TEST(Maintenance, TruncationReplans) {
  const Shape shape{4, 2, 32};
  SyntheticCache cache(shape, 1000, DType::kF16, 91);
  const SyntheticCache other(shape, 1000, DType::kF16, 92);
  auto layer = NewLayer(shape, SmallConfig());
  Decoder decoder(shape);
  decoder.Attend(*layer, cache.View(1000));
  EXPECT_EQ(layer->sealed_end(), 968);
  // Into the recent rows: the plan stays. Below the sealed end: the last block goes, and 196 due rows are sealed anew.
  decoder.Attend(*layer, cache.View(970));
  EXPECT_EQ(layer->stats().dropped_blocks, 0u);
  decoder.Attend(*layer, cache.View(960));
  EXPECT_EQ(layer->stats().dropped_blocks, 1u);
  EXPECT_EQ(layer->sealed_end(), 928);
  // Cut at 600 and continued with other rows: nothing of the old ones may be left.
  decoder.Attend(*layer, cache.View(600));
  EXPECT_EQ(layer->stats().dropped_blocks, 3u);
  EXPECT_EQ(layer->sealed_end(), 516);
  for (std::int64_t r = 600; r < 1000; ++r) {
    for (int h = 0; h < 2; ++h) {
      std::copy_n(other.View().KRow(r, h), 64, cache.Key(r, h));
      std::copy_n(other.View().VRow(r, h), 64, cache.Value(r, h));
    }
  }
  const std::vector<float> out = decoder.Attend(*layer, cache.View(1000), 4, Verify::kNone);
  auto fresh = NewLayer(shape, SmallConfig());
  EXPECT_EQ(out, decoder.Attend(*fresh, cache.View(1000), 4));
  EXPECT_EQ(layer->stats().dropped_blocks, 3u);
}

TEST(Maintenance, NotifiedWritesAreReadAtOnce) {
  const Shape shape{4, 2, 32};
  SyntheticCache cache(shape, 1000, DType::kF16, 93);
  auto layer = NewLayer(shape, SmallConfig());
  SetAllTaus(*layer, 0.3f);
  Decoder decoder(shape);
  decoder.Attend(*layer, cache.View());
  std::vector<float> key = test::RandomQueries(shape, 77);
  cache.SetKey(300, 1, key.data());
  cache.SetValue(300, 1, key.data());
  const std::int64_t rows[] = {300};
  layer->NotifyWrites(rows);
  EXPECT_EQ(layer->sealed_end(), 260);
  EXPECT_EQ(layer->stats().dropped_blocks, 3u);
  const std::vector<float> out = decoder.Attend(*layer, cache.View(), 6, Verify::kNone);
  auto fresh = NewLayer(shape, SmallConfig());
  SetAllTaus(*fresh, 0.3f);
  EXPECT_EQ(out, decoder.Attend(*fresh, cache.View(), 6));
  layer->DropPlans();
  EXPECT_EQ(layer->sealed_end(), 4);
  EXPECT_EQ(layer->stats().dropped_blocks, 7u);
}

TEST(Maintenance, SilentlyChangedRowsAreFound) {
  const Shape shape{2, 1, 32};
  SyntheticCache cache(shape, 1000, DType::kF16, 94);
  const std::vector<float> row(32, 4.0f);
  for (const Verify verify : {Verify::kFull, Verify::kSample}) {
    auto layer = NewLayer(shape, SmallConfig());
    SetAllTaus(*layer, 0.3f);
    Decoder decoder(shape);
    decoder.Attend(*layer, cache.View());
    cache.SetValue(verify == Verify::kFull ? 400 : 401, 0, row.data());
    int calls = 0;
    while (layer->stats().dropped_blocks == 0 && calls < 1000) {
      decoder.Attend(*layer, cache.View(), 6, verify);
      ++calls;
    }
    EXPECT_LE(calls, verify == Verify::kFull ? 1 : 128);
    // The call that found it kept the block before the change and read the rest exactly.
    EXPECT_EQ(layer->sealed_end(), 260);
    EXPECT_EQ(layer->stats().dropped_blocks, 3u);
    const std::vector<float> out = decoder.Attend(*layer, cache.View(), 6, verify);
    EXPECT_EQ(layer->sealed_end(), 968);
    auto fresh = NewLayer(shape, SmallConfig());
    SetAllTaus(*fresh, 0.3f);
    EXPECT_EQ(out, decoder.Attend(*fresh, cache.View(), 6));
  }
}

TEST(Maintenance, ShortMemoryMeansExactAnswers) {
  const Shape shape{4, 2, 32};
  const SyntheticCache cache(shape, 1000, DType::kF16, 95);
  auto layer = NewLayer(shape, SmallConfig());
  Decoder decoder(shape);
  const std::vector<float> expected = decoder.Exact(cache.View(), 9);
  fail_from = 8192;
  const std::vector<float> out = decoder.Attend(*layer, cache.View(), 9);
  fail_from = SIZE_MAX;
  EXPECT_EQ(out, expected);
  EXPECT_EQ(layer->stats().build_failures, 1u);
  EXPECT_EQ(layer->stats().exact_steps, 1u);
  EXPECT_EQ(layer->sealed_end(), 4);
  // Not tried again before rebuild_interval more rows are there, unless the plan is dropped or the cache starts over.
  decoder.Attend(*layer, cache.View(), 9);
  EXPECT_EQ(layer->stats().build_failures, 1u);
  EXPECT_EQ(layer->sealed_end(), 4);

  // Memory for the plan but none for the scratch space of a step.
  auto other = NewLayer(shape, SmallConfig());
  decoder.Attend(*other, cache.View(), 9);
  ASSERT_EQ(other->stats().sparse_steps, 1u);
  Workspace workspace;
  std::vector<float> q = test::RandomQueries(shape, 9);
  std::vector<float> scratch_out;
  const OutView view = test::ViewOut(scratch_out, shape);
  ASSERT_TRUE(
      ExactAttention(shape, test::ViewQueries(q, shape), cache.View(), {}, decoder.params(), 2, workspace, view).ok());
  for (const bool calibrating : {false, true}) {
    ASSERT_TRUE(!calibrating || other->StartCalibration(0.1f).ok());
    std::ranges::fill(scratch_out, 0.0f);
    fail_from = 2048;
    const Status status = other->Attend(test::ViewQueries(q, shape), cache.View(), {}, decoder.params(), Verify::kNone,
                                        2, workspace, view);
    fail_from = SIZE_MAX;
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(scratch_out, expected);
    EXPECT_EQ(other->stats().exact_steps, calibrating ? 2u : 1u);
    EXPECT_EQ(other->calibration_steps(), 0);
  }
}

TEST(Layer, WithoutMemoryThereIsNoAuditAndAnswersStayTheSame) {
  const Shape shape{4, 2, 32};
  const SyntheticCache cache(shape, 900, DType::kF16);
  auto layer = NewLayer(shape, SmallConfig());
  for (int head = 0; head < 4; ++head) ASSERT_TRUE(layer->SetTau(head, 0.5f).ok());
  const LogitParams params{.scale = 1.0f / std::sqrt(32.0f)};
  const std::vector<float> q = test::RandomQueries(shape, 3);
  std::vector<float> out;
  const OutView view = test::ViewOut(out, shape);
  Workspace workspace;
  const auto attend = [&] {
    return layer->Attend(test::ViewQueries(q, shape), cache.View(), {}, params, Verify::kNone, 2, workspace, view).ok();
  };
  ASSERT_TRUE(attend());
  const std::vector<float> expected = out;
  const auto attend_without_memory = [&] {
    fail_from = 2048;
    const bool ok = attend();
    fail_from = SIZE_MAX;
    return ok;
  };

  fail_from = 8192;
  const StatusCode code = layer->SetAudit({.share = 1, .capacity = 1000}).code();
  fail_from = SIZE_MAX;
  EXPECT_EQ(code, StatusCode::kOutOfMemory);
  EXPECT_EQ(layer->stats().audit_failures, 1u);

  // Memory for the audit but none for the exact kernel's scratch space.
  ASSERT_TRUE(layer->SetAudit({.share = 1, .tolerance = 1e-6f}).ok());
  EXPECT_TRUE(attend_without_memory());
  EXPECT_EQ(out, expected);
  EXPECT_EQ(layer->stats().sparse_steps, 2u);
  EXPECT_EQ(layer->stats().audit_failures, 3u);  // two KV heads
  EXPECT_TRUE(layer->AuditSamples().empty());

  // No tolerance is met: after 16 audits the heads have drifted. Then no memory for the window.
  for (int step = 0; step < 16; ++step) ASSERT_TRUE(attend());
  EXPECT_EQ(out, expected);
  std::vector<float> exact;
  const OutView exact_view = test::ViewOut(exact, shape);
  ASSERT_TRUE(
      ExactAttention(shape, test::ViewQueries(q, shape), cache.View(), {}, params, 2, workspace, exact_view).ok());
  EXPECT_TRUE(attend_without_memory());
  EXPECT_EQ(out, exact);
  EXPECT_EQ(layer->stats().audit_failures, 4u);
  EXPECT_EQ(layer->stats().recalibrated_heads, 0u);
  ASSERT_TRUE(attend());
  EXPECT_EQ(out, expected);
}

// Inside the window the output is the exact one, and each recorded error is what really stopping there produces, or
// stopping at the last threshold that is still in play.
TEST(Calibration, ReplayEqualsReallyStopping) {
  constexpr float kTolerance = 0.05f;
  constexpr std::uint32_t kSteps = 6;
  constexpr std::uint32_t kProbeSteps = 4;
  int out_of_play = 0;
  test::OnEveryTarget([&] {
    const Shape shapes[] = {{6, 2, 64}, {4, 1, 24}};
    for (const Shape& shape : shapes) {
      for (const PackedFormat format : {PackedFormat::kQ8_0, PackedFormat::kF16}) {
        for (const bool with_sinks : {false, true}) {
          const SyntheticCache cache(shape, 900, DType::kF16, 100);
          Config config = SmallConfig();
          config.packed_format = format;
          auto layer = NewLayer(shape, config);
          auto stopping = NewLayer(shape, config);
          Decoder decoder(shape, 1.5f);
          std::vector<float> sinks(shape.q_heads, 1.0f);
          if (with_sinks) decoder.params().sinks = sinks.data();
          ASSERT_TRUE(layer->StartCalibration(kTolerance).ok());
          EXPECT_TRUE(layer->calibrating());
          for (std::uint32_t step = 0; step < kSteps; ++step) {
            const KvView kv = cache.View(890 + step);
            EXPECT_EQ(decoder.Attend(*layer, kv, step), decoder.Exact(kv, step));
          }
          EXPECT_EQ(layer->calibration_steps(), static_cast<int>(kSteps));
          EXPECT_EQ(layer->stats().calibration_steps, kSteps);
          EXPECT_EQ(layer->stats().stat_calls, 0u);
          // The first threshold at which more than half of the steps before are within half the tolerance.
          const auto last_in_play = [&](int h, std::uint32_t step) {
            if (step < kProbeSteps) return kTauGridSize - 1;
            for (int g = 0; g < kTauGridSize; ++g) {
              const std::span<const float> before = layer->CalibrationErrors(h, g).first(step);
              if (2 * std::ranges::count_if(before, [=](float e) { return e <= kTolerance / 2; }) > step) return g;
            }
            return kTauGridSize - 1;
          };
          for (int g = 0; g < kTauGridSize; ++g) {
            SetAllTaus(*stopping, kTauGrid[g]);
            for (std::uint32_t step = 0; step < kSteps; ++step) {
              const KvView kv = cache.View(890 + step);
              const std::vector<float> out = decoder.Attend(*stopping, kv, step);
              const std::vector<float> exact = decoder.Exact(kv, step);
              for (int h = 0; h < shape.q_heads; ++h) {
                const double error = test::RelativeL2(HeadOf(out, shape, h), HeadOf(exact, shape, h));
                ASSERT_EQ(layer->CalibrationErrors(h, g).size(), kSteps);
                if (const int last = last_in_play(h, step); g > last) {
                  EXPECT_EQ(layer->CalibrationErrors(h, g)[step], layer->CalibrationErrors(h, last)[step]);
                  ++out_of_play;
                  continue;
                }
                EXPECT_NEAR(layer->CalibrationErrors(h, g)[step], error, 1e-5 + 1e-4 * error) << g << " " << h;
              }
            }
          }
          ASSERT_TRUE(layer->FinishCalibration().ok());
          for (int h = 0; h < shape.q_heads; ++h) {
            float expected = kTauGrid[kTauGridSize - 1];
            for (int g = kTauGridSize - 1; g >= 0; --g) {
              std::vector<float> errors(layer->CalibrationErrors(h, g).begin(), layer->CalibrationErrors(h, g).end());
              std::ranges::sort(errors);
              if (0.5f * errors[2] + 0.5f * errors[3] <= kTolerance) expected = kTauGrid[g];
            }
            EXPECT_EQ(layer->taus()[h], expected);
          }
          EXPECT_FALSE(layer->calibrating());
          decoder.Attend(*layer, cache.View(900));
          EXPECT_EQ(layer->stats().sparse_steps, 1u);
        }
      }
    }
  });
  EXPECT_GT(out_of_play, 0);
}

TEST(Calibration, WindowWithoutAPlanRecordsNothing) {
  const Shape shape{4, 2, 16};
  const SyntheticCache cache(shape, 80, DType::kF16, 101);
  Config config = SmallConfig();
  config.tau_default = 0.125f;
  auto layer = NewLayer(shape, config);
  EXPECT_EQ(layer->FinishCalibration().code(), StatusCode::kFailedPrecondition);
  for (const float bad : {0.0f, -1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(layer->StartCalibration(bad).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_FALSE(layer->calibrating());
  ASSERT_TRUE(layer->SetTau(2, 0.5f).ok());
  ASSERT_TRUE(layer->StartCalibration(0.1f).ok());
  Decoder decoder(shape);
  decoder.Attend(*layer, cache.View());
  EXPECT_EQ(layer->calibration_steps(), 0);
  EXPECT_EQ(layer->stats().exact_steps, 1u);
  EXPECT_TRUE(layer->CalibrationErrors(0, 0).empty());
  EXPECT_TRUE(layer->CalibrationErrors(4, 0).empty());
  EXPECT_TRUE(layer->CalibrationErrors(0, kTauGridSize).empty());
  ASSERT_TRUE(layer->FinishCalibration().ok());
  for (const float tau : layer->taus()) EXPECT_EQ(tau, 0.125f);
}

TEST(Create, ChecksShapeAndConfigWithAMessage) {
  struct Case {
    Shape shape;
    void (*change)(Config&);
    const char* message;
  };
  const auto keep = [](Config&) {};
  const Shape good{4, 2, 16};
  const Case cases[] = {
      {{3, 2, 16}, keep, "q_heads"},
      {{0, 1, 16}, keep, "q_heads"},
      {{130, 65, 16}, keep, "kv_heads"},
      {{132, 4, 16}, keep, "q_heads"},
      {{4, 0, 16}, keep, "kv_heads"},
      {{4, 2, 12}, keep, "head_dim"},
      {{4, 2, 0}, keep, "head_dim"},
      {{4, 2, 520}, keep, "head_dim"},
      {good, [](Config& c) { c.cluster_size = 1; }, "cluster_size"},
      {good,
       [](Config& c) {
         c.cluster_size = 65537;
         c.block_size = 70000;
       },
       "cluster_size"},
      {good, [](Config& c) { c.rebuild_interval = 0; }, "rebuild_interval"},
      {good, [](Config& c) { c.block_size = 127; }, "block_size"},
      {good, [](Config& c) { c.sink = -1; }, "sink"},
      {good, [](Config& c) { c.recent = -1; }, "recent"},
      {good, [](Config& c) { c.tau_default = 1.5f; }, "tau_default"},
      {good, [](Config& c) { c.tau_default = std::nanf(""); }, "tau_default"},
      {good, [](Config& c) { c.rank = 9; }, "rank"},
      {good, [](Config& c) { c.rank = -1; }, "rank"},
      {good, [](Config& c) { c.power_iterations = 0; }, "power_iterations"},
      {good, [](Config& c) { c.packed_format = static_cast<PackedFormat>(7); }, "packed_format"},
  };
  for (const Case& test_case : cases) {
    Config config;
    test_case.change(config);
    std::unique_ptr<Layer> layer;
    const Status status = Layer::Create(test_case.shape, config, &layer);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(test_case.message), std::string::npos) << status.message();
    EXPECT_EQ(layer, nullptr);
  }
  std::unique_ptr<Layer> layer;
  EXPECT_TRUE(Layer::Create({128, 64, 512}, Config(), &layer).ok());
  EXPECT_TRUE(Layer::Create(good, Config(), &layer).ok());
  EXPECT_EQ(layer->taus().size(), 4u);
  EXPECT_EQ(layer->taus()[3], 0.05f);
  EXPECT_EQ(layer->SetTau(4, 0.1f).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(layer->SetTau(-1, 0.1f).code(), StatusCode::kInvalidArgument);
  for (const float bad : {-0.1f, 1.1f, std::nanf("")}) {
    EXPECT_EQ(layer->SetTau(0, bad).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(layer->taus()[0], 0.05f);
}

// No sinks, no recent rows: everything may be sealed, and nothing exact is left over.
TEST(Attend, WorksWithoutAnyExactRow) {
  const Shape shape{2, 1, 32};
  const SyntheticCache cache(shape, 256, DType::kF16, 110);
  Config config = SmallConfig();
  config.sink = 0;
  config.recent = 0;
  auto layer = NewLayer(shape, config);
  SetAllTaus(*layer, 1.0f);
  Decoder decoder(shape);
  const std::vector<float> out = decoder.Attend(*layer, cache.View());
  EXPECT_EQ(layer->sealed_end(), 256);
  EXPECT_EQ(layer->stats().stat_exact_rows, 0u);
  for (int h = 0; h < 2; ++h) {
    const PlainHead plain =
        PlainSparse(*layer, cache, std::vector<bool>(256, true), decoder.query().data(), h, 1.0f, decoder.params());
    EXPECT_EQ(plain.opened.size(), 1u);
    EXPECT_LT(test::RelativeL2(HeadOf(out, shape, h), plain.output), 2e-5);
  }
}

}  // namespace
}  // namespace scsa
