// SPDX-License-Identifier: Apache-2.0
//
// Layers under a limit on the memory of their plans: it is kept, answers stay right, and what is of use stays.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "scsa/layer.h"
#include "scsa/memory_budget.h"
#include "scsa/state.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;

constexpr std::int64_t kRows = 700;
// Calls after which a block that none of them used may go, and some more.
constexpr int kLong = 300;
// Of preset `fast` at 672 rows: the last 32 are not sealed.
constexpr int kBlocks = 10;
constexpr std::int64_t kContext = 672;

Config SmallBlocks(Preset preset) {
  Config config = ConfigFor(preset);
  config.block_size = 64;
  config.cluster_size = 8;
  config.rebuild_interval = 64;
  config.recent = 32;
  config.tau_default = 1.0f;  // nothing is opened, so that all blocks save the same
  return config;
}

std::shared_ptr<MemoryBudget> NewBudget(std::uint64_t limit) {
  std::shared_ptr<MemoryBudget> budget;
  EXPECT_TRUE(MemoryBudget::Create(limit, &budget).ok());
  return budget;
}

// A layer with a cache of its own.
struct Decoder {
  explicit Decoder(const Config& config, const std::shared_ptr<MemoryBudget>& budget, std::uint32_t seed = 1)
      : cache(kShape, kRows, DType::kF16, seed) {
    EXPECT_TRUE(Layer::Create(kShape, config, &layer).ok());
    EXPECT_TRUE(layer->SetBudget(budget).ok());
  }
  // Over the rows [first, end). Expects no answer worse than `tolerance` where that is given.
  const std::vector<float>& Attend(std::int64_t first, std::int64_t end, double tolerance = 0) {
    std::vector<bool> visible(static_cast<std::size_t>(kRows), false);
    for (std::int64_t row = first; row < end; ++row) visible[static_cast<std::size_t>(row)] = true;
    const std::vector<std::uint64_t> words = test::Bitmap(visible);
    const std::vector<float> q = test::RandomQueries(kShape, ++query);
    const OutView view = test::ViewOut(out, kShape);
    const VisibleSets sets{words.data(), 0};
    EXPECT_TRUE(
        layer->Attend(test::ViewQueries(q, kShape), cache.View(end), sets, kParams, Verify::kSample, 1, workspace, view)
            .ok());
    const OutView exact_view = test::ViewOut(exact, kShape);
    EXPECT_TRUE(
        ExactAttention(kShape, test::ViewQueries(q, kShape), cache.View(end), sets, kParams, 1, workspace, exact_view)
            .ok());
    if (tolerance > 0) {
      EXPECT_LT(test::RelativeL2({out.begin(), out.end()}, {exact.begin(), exact.end()}), tolerance);
    }
    return out;
  }

  static constexpr Shape kShape{4, 2, 32};
  static constexpr LogitParams kParams{.scale = 0.17678f};
  SyntheticCache cache;
  std::unique_ptr<Layer> layer;
  Workspace workspace;
  std::uint32_t query = 0;
  std::vector<float> out;
  std::vector<float> exact;  // the answer to the same query
};

// Of a block of preset `fast`.
std::uint64_t BlockBytes() {
  Decoder decoder(SmallBlocks(Preset::kFast), nullptr);
  decoder.Attend(0, kContext);
  EXPECT_EQ(decoder.layer->stats().rebuild_count, static_cast<std::uint64_t>(kBlocks));
  return decoder.layer->stats().plan_bytes / kBlocks;
}

TEST(MemoryBudget, ABlockIsAsLargeAsItsParts) {
  // Two KV heads: key record (3 x 32 + 8 + 3 x 8 floats, 8 x 32 bytes), value record (2 x 32 floats, 8 x 32 bytes), 64
  // fingerprints, 64 members, 9 offsets, each in whole lines of 64 bytes.
  EXPECT_EQ(BlockBytes(), 2u * (768 + 512 + 256 + 128 + 64));
}

TEST(MemoryBudget, WithoutRoomAnswersAreExact) {
  for (const Preset preset : {Preset::kFast, Preset::kSeed}) {
    for (const std::uint64_t limit : {0, 100}) {
      const auto budget = NewBudget(limit);
      Decoder decoder(SmallBlocks(preset), budget);
      for (std::int64_t n = 500; n < kRows; n += 20) {
        decoder.Attend(0, n);
        EXPECT_EQ(decoder.out, decoder.exact);
      }
      const LayerStats stats = decoder.layer->stats();
      EXPECT_EQ(stats.exact_steps, 10u);
      EXPECT_EQ(stats.plan_bytes, 0u);
      EXPECT_EQ(stats.build_failures, 0u);
      EXPECT_GT(stats.refused_blocks, 0u);
      EXPECT_EQ(stats.refused_blocks, budget->refused_blocks());
      EXPECT_EQ(budget->used(), 0u);
    }
  }
}

TEST(MemoryBudget, WhatFitsIsSparse) {
  const std::uint64_t block = BlockBytes();
  const auto budget = NewBudget(5 * block + block / 2);
  Decoder decoder(SmallBlocks(Preset::kFast), budget);
  for (int step = 0; step < kLong; ++step) decoder.Attend(0, kContext);
  const LayerStats stats = decoder.layer->stats();
  EXPECT_EQ(budget->used(), 5 * block);
  EXPECT_EQ(stats.plan_bytes, 5 * block);
  EXPECT_EQ(stats.sparse_steps, static_cast<std::uint64_t>(kLong));
  EXPECT_EQ(stats.rebuild_count, 5u);
  EXPECT_EQ(stats.refused_blocks, 5u);
  EXPECT_EQ(stats.evicted_blocks, 0u);
  // Exactly: the first 4 rows, 5 blocks and the 32 last ones, in each KV head and step.
  EXPECT_EQ(stats.stat_exact_rows, static_cast<std::uint64_t>(kLong) * 4 * (4 + 5 * 64 + 32));

  // The room that a dropped block leaves is taken by another one.
  const std::int64_t rows[] = {70};
  decoder.layer->NotifyWrites(rows);
  EXPECT_EQ(budget->used(), 4 * block);
  decoder.Attend(0, kContext);
  EXPECT_EQ(budget->used(), 5 * block);
  decoder.layer.reset();
  EXPECT_EQ(budget->used(), 0u);
}

TEST(MemoryBudget, PresetSeedKeepsTheRegionsThatFit) {
  Decoder unlimited(SmallBlocks(Preset::kSeed), nullptr);
  unlimited.Attend(0, 4 + 64 + 32);
  const std::uint64_t region = unlimited.layer->stats().plan_bytes;
  const auto budget = NewBudget(3 * region);
  Decoder decoder(SmallBlocks(Preset::kSeed), budget);
  for (std::int64_t n = 4 + 64 + 32; n < kRows; ++n) decoder.Attend(0, n);
  EXPECT_EQ(decoder.layer->sealed_end(), 4 + 3 * 64);
  EXPECT_EQ(decoder.layer->stats().plan_bytes, 3 * region);
  EXPECT_EQ(budget->used(), 3 * region);
  EXPECT_EQ(decoder.layer->stats().exact_steps, 0u);
  budget->SetLimit(2 * region);
  EXPECT_EQ(budget->used(), 2 * region);
  EXPECT_EQ(decoder.layer->sealed_end(), 4 + 2 * 64);
}

TEST(MemoryBudget, AnIdleLayerGivesWay) {
  const std::uint64_t block = BlockBytes();
  const auto budget = NewBudget(kBlocks * block);
  Decoder first(SmallBlocks(Preset::kFast), budget, 1);
  Decoder second(SmallBlocks(Preset::kFast), budget, 2);
  first.Attend(0, kContext);
  for (int step = 0; step < 100; ++step) second.Attend(0, kContext);
  EXPECT_EQ(first.layer->stats().plan_bytes, kBlocks * block);
  EXPECT_EQ(second.layer->stats().sparse_steps, 0u);
  for (int step = 0; step < kLong; ++step) second.Attend(0, kContext);
  EXPECT_EQ(first.layer->stats().plan_bytes, 0u);
  EXPECT_EQ(first.layer->stats().evicted_blocks, static_cast<std::uint64_t>(kBlocks));
  EXPECT_EQ(second.layer->stats().plan_bytes, kBlocks * block);
  EXPECT_EQ(second.layer->stats().evicted_blocks, 0u);
  EXPECT_EQ(budget->evicted_blocks(), static_cast<std::uint64_t>(kBlocks));
  // Back again, it is answered exactly until the other one has rested.
  first.Attend(0, kContext);
  EXPECT_EQ(first.out, first.exact);
  EXPECT_EQ(second.layer->stats().rebuild_count, static_cast<std::uint64_t>(kBlocks));
}

TEST(MemoryBudget, LayersThatTakeTurnsKeepWhatTheyHave) {
  const std::uint64_t block = BlockBytes();
  const auto budget = NewBudget(kBlocks * block);
  Decoder first(SmallBlocks(Preset::kFast), budget, 1);
  Decoder second(SmallBlocks(Preset::kFast), budget, 2);
  for (int turn = 0; turn < 6; ++turn) {
    for (int step = 0; step < 100; ++step) (turn % 2 == 0 ? first : second).Attend(0, kContext);
  }
  EXPECT_EQ(budget->evicted_blocks(), 0u);
  EXPECT_EQ(first.layer->stats().rebuild_count + second.layer->stats().rebuild_count,
            static_cast<std::uint64_t>(kBlocks));
}

// Two sequences in one cache.
TEST(MemoryBudget, TheIdleSequencesBlocksGoBeforeTheActiveOnes) {
  const std::uint64_t block = BlockBytes();
  const auto budget = NewBudget(5 * block);
  Decoder decoder(SmallBlocks(Preset::kFast), budget);
  decoder.Attend(0, 4 * 64 + 32);  // blocks 0 ... 3
  const std::uint64_t built = decoder.layer->stats().rebuild_count;
  ASSERT_EQ(built, 4u);
  for (int step = 0; step < kLong; ++step) decoder.Attend(4 * 64, 7 * 64 + 32);  // blocks 4 ... 6
  EXPECT_EQ(decoder.layer->stats().rebuild_count, built + 3);
  EXPECT_EQ(decoder.layer->stats().evicted_blocks, 2u);
  EXPECT_EQ(budget->used(), 5 * block);
  const std::uint64_t exact = decoder.layer->stats().stat_exact_rows;
  decoder.Attend(4 * 64, 7 * 64 + 32);
  EXPECT_EQ(decoder.layer->stats().stat_exact_rows - exact, 4u * 32);
}

TEST(MemoryBudget, ABlockThatIsReadAnywayGivesWayAndStaysAway) {
  Config config = SmallBlocks(Preset::kFast);
  config.tau_default = 0.0f;  // every row is read
  const std::uint64_t block = BlockBytes();
  const auto budget = NewBudget(3 * block);
  Decoder decoder(config, budget);
  for (int step = 0; step < 20; ++step) decoder.Attend(0, kContext, 1e-5);
  EXPECT_EQ(budget->evicted_blocks(), 0u);
  for (int step = 0; step < 1000; ++step) decoder.Attend(0, kContext);
  decoder.Attend(0, kContext, 1e-5);
  // Each block had its turn, and none a second one.
  EXPECT_EQ(decoder.layer->stats().rebuild_count, static_cast<std::uint64_t>(kBlocks));
  EXPECT_EQ(budget->evicted_blocks(), static_cast<std::uint64_t>(kBlocks) - 3);
}

TEST(MemoryBudget, ALowerLimitHoldsAtOnce) {
  const std::uint64_t block = BlockBytes();
  const auto budget = NewBudget(100 * block);
  std::unique_ptr<State> state;
  ASSERT_TRUE(State::Create(2, Decoder::kShape, SmallBlocks(Preset::kFast), &state).ok());
  ASSERT_TRUE(state->SetBudget(budget).ok());
  const SyntheticCache cache(Decoder::kShape, kRows, DType::kF16);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(state->layer(i).Seal(cache.View(), 640, 1).ok());
  EXPECT_EQ(budget->used(), 20 * block);
  EXPECT_EQ(state->stats().plan_bytes, 20 * block);
  budget->SetLimit(3 * block - 1);
  EXPECT_EQ(budget->limit(), 3 * block - 1);
  EXPECT_EQ(budget->used(), 2 * block);
  EXPECT_EQ(state->stats().plan_bytes, 2 * block);
  EXPECT_EQ(state->stats().evicted_blocks, 18u);
  budget->SetLimit(20 * block);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(state->layer(i).Seal(cache.View(), 640, 1).ok());
  EXPECT_EQ(state->stats().plan_bytes, 20 * block);
}

// Packed copies, all of which are opened, show a block that is not what it should be.
TEST(MemoryBudget, AnswersStayRightWhateverHappens) {
  Config config = SmallBlocks(Preset::kFast);
  config.packed_format = PackedFormat::kF16;
  config.tau_default = 0.0f;
  Decoder probe(config, nullptr);
  probe.Attend(0, kContext);
  const std::uint64_t block = probe.layer->stats().plan_bytes / kBlocks;
  const auto budget = NewBudget(7 * block);
  std::vector<std::unique_ptr<Decoder>> decoders;
  for (std::uint32_t i = 0; i < 3; ++i) decoders.push_back(std::make_unique<Decoder>(config, budget, i));
  std::mt19937 random(5);
  for (int step = 0; step < 2000; ++step) {
    Decoder& decoder = *decoders[step / kLong % 2 == 0 ? random() % 3 : 0];
    const std::int64_t n = 100 + random() % 600;
    switch (random() % 32) {
      case 0: {
        const std::int64_t rows[] = {n, n - 50};
        decoder.layer->NotifyWrites(rows);
        const std::vector<float> value = test::RandomQueries(Decoder::kShape, static_cast<std::uint32_t>(step));
        for (const std::int64_t row : rows) decoder.cache.SetValue(row, 0, value.data());
        break;
      }
      case 1:
        decoder.layer->DropPlans();
        break;
      case 2:
        budget->SetLimit((random() % 12) * block);
        break;
      default:
        decoder.Attend(random() % 2 == 0 ? 0 : 64, n, 1e-5);
    }
    std::uint64_t held = 0;
    for (const auto& d : decoders) held += d->layer->stats().plan_bytes;
    ASSERT_EQ(budget->used(), held);
    ASSERT_LE(held, budget->limit());
  }
  EXPECT_GT(budget->evicted_blocks(), 20u);
  EXPECT_GT(budget->refused_blocks(), 20u);
}

TEST(MemoryBudget, LayersMayBeUsedByDifferentThreads) {
  Config config = SmallBlocks(Preset::kFast);
  config.tau_default = 0.0f;
  const std::uint64_t block = BlockBytes();
  const auto budget = NewBudget(8 * block);
  const auto work = [&](std::uint32_t seed) {
    Decoder decoder(config, budget, seed);
    for (int step = 0; step < 400; ++step) {
      if (step % 100 == 99) decoder.layer->DropPlans();
      decoder.Attend(0, 400 + step % 3 * 100, 1e-5);
      EXPECT_LE(budget->used(), budget->limit());
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t seed = 1; seed <= 3; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget->used(), 0u);
}

}  // namespace
}  // namespace scsa
