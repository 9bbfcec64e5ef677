// SPDX-License-Identifier: Apache-2.0
//
// The choice between exact and sparse steps, fed with made-up times.
#include "plugin/crossover.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace scsa::plugin {
namespace {

using Answer = Crossover::Answer;
using Cost = std::function<double(std::uint64_t visible)>;

// Exact attention at 1 us per cell, as it is.
double ExactCost(std::uint64_t visible) { return 1e-6 * static_cast<double>(visible); }

// Sparse attention that is as fast as exact attention at `cells` and grows a tenth as fast.
Cost EqualAt(double cells) {
  return [cells](std::uint64_t visible) { return 1e-6 * (0.9 * cells + 0.1 * static_cast<double>(visible)); };
}

// Decodes with a made-up machine.
struct Decoder {
  Cost sparse_cost;
  Crossover crossover{};
  bool ready = true;
  int layers = 1;
  std::uint64_t sparse_steps = 0;
  double seconds = 0;

  // One step; whether it was sparse. The next step, or Settle, takes it into account.
  bool Step(std::uint64_t visible) {
    crossover.BeginStep(visible, ready);
    const bool sparse = crossover.sparse();
    const double cost = sparse ? sparse_cost(visible) : ExactCost(visible);
    for (int i = 0; i < layers; ++i) crossover.Add(sparse ? Answer::kSparse : Answer::kExact, cost / layers);
    sparse_steps += sparse ? 1 : 0;
    seconds += cost;
    return sparse;
  }
  // Steps of one length until no trial is going on; sparse ones may have been part of one.
  bool Settle(std::uint64_t visible) {
    for (int i = 0; i < 40; ++i) Step(visible);
    return Step(visible);
  }
  void Grow(std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t visible = from; visible < to; ++visible) Step(visible);
  }
};

TEST(Crossover, NothingIsTriedBelowTheFirstLength) {
  Decoder decoder{.sparse_cost = [](std::uint64_t) { return 0.0; }};
  decoder.Grow(1, Crossover::kFirst);
  EXPECT_EQ(decoder.sparse_steps, 0u);
  EXPECT_FALSE(decoder.crossover.bound());
  EXPECT_TRUE(decoder.Step(Crossover::kFirst) || decoder.Step(Crossover::kFirst));
}

TEST(Crossover, AWindowIsOpenedFromItsOwnLengthOn) {
  Decoder decoder{.sparse_cost = EqualAt(100), .ready = false};
  decoder.Grow(Crossover::kFirst, Crossover::kFirstWindow);
  EXPECT_EQ(decoder.sparse_steps, 0u);
  EXPECT_TRUE(decoder.Step(Crossover::kFirstWindow));
  EXPECT_EQ(decoder.crossover.trials(), 0);
}

TEST(Crossover, ATrialTakesTurnsAndSparseStays) {
  Decoder decoder{.sparse_cost = EqualAt(1000), .layers = 30};
  std::vector<bool> sparse;
  // One that catches up, then exact and sparse in turn.
  for (std::size_t i = 0; i < 1 + 2 * Crossover::kTimed; ++i) sparse.push_back(decoder.Step(4000));
  EXPECT_TRUE(sparse[0]);
  for (std::size_t i = 1; i < sparse.size(); ++i) EXPECT_EQ(sparse[i], i % 2 == 0) << i;
  EXPECT_EQ(decoder.crossover.trials(), 0);  // the last step is not over
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(decoder.Step(4000 + static_cast<std::uint64_t>(i)));
  EXPECT_EQ(decoder.crossover.trials(), 1);
}

TEST(Crossover, HowClearlySparseWonSaysHowFarItCarries) {
  Decoder decoder{.sparse_cost = EqualAt(1000)};
  EXPECT_TRUE(decoder.Settle(9000));
  // 1,800 of 9,000 us: at 1,800 / 0.98 cells, 1,836, exact attention would take 0.98 times of that at least.
  EXPECT_EQ(decoder.crossover.bound(), 1836u);
  EXPECT_TRUE(decoder.Step(1836));
  EXPECT_FALSE(decoder.Step(1835));
  EXPECT_EQ(decoder.crossover.trials(), 1);
  // A little below there is no other trial.
  Decoder other{.sparse_cost = EqualAt(1000)};
  other.crossover = decoder.crossover;
  EXPECT_FALSE(other.Settle(1600));
  EXPECT_EQ(other.crossover.trials(), 1);
}

TEST(Crossover, WhereExactWinsItStaysUntilTheContextIsLonger) {
  Decoder decoder{.sparse_cost = EqualAt(1900)};
  EXPECT_FALSE(decoder.Settle(1800));
  EXPECT_EQ(decoder.crossover.bound(), 2250u);  // 1.25 times as long
  const std::uint64_t tried = decoder.sparse_steps;
  decoder.Grow(1800, 2250);
  decoder.Grow(1000, 2250);
  EXPECT_EQ(decoder.sparse_steps, tried);
  EXPECT_TRUE(decoder.Settle(2250));
  EXPECT_EQ(decoder.crossover.trials(), 2);
  EXPECT_TRUE(decoder.Step(100000));
}

TEST(Crossover, AClearLossPutsTheNextTrialOff) {
  // Twice the exact time: without any growth, sparse attention would win at 2 / 0.98 times the length.
  Decoder decoder{.sparse_cost = [](std::uint64_t visible) { return 2 * ExactCost(visible); }};
  EXPECT_FALSE(decoder.Settle(4900));
  EXPECT_NEAR(static_cast<double>(*decoder.crossover.bound()), 10000.0, 1.0);
  // The trial was given up after four timed steps of each kind and the one that catches up.
  EXPECT_EQ(decoder.sparse_steps, 5u);
}

TEST(Crossover, ALossByAnyFactorIsTriedAgain) {
  Decoder decoder{.sparse_cost = [](std::uint64_t) { return 1.0; }};
  EXPECT_FALSE(decoder.Settle(2000));
  EXPECT_EQ(decoder.crossover.bound(), 8000u);
}

TEST(Crossover, SpikesDecideNothing) {
  // Three of eight steps of either kind are disturbed.
  for (const bool sparse_is_faster : {true, false}) {
    int step = 0;
    const double factor = sparse_is_faster ? 0.9 : 1.1;
    Decoder decoder{.sparse_cost = [&](std::uint64_t visible) {
      return (step++ % 3 == 1 ? 20.0 : 1.0) * factor * ExactCost(visible);
    }};
    EXPECT_EQ(decoder.Settle(4000), sparse_is_faster);
    EXPECT_EQ(decoder.crossover.trials(), 1);
  }
}

TEST(Crossover, StepsOfAnotherKindDoNotCount) {
  Crossover crossover;
  const auto step = [&](Answer answer) {
    crossover.BeginStep(4000, true);
    crossover.Add(crossover.sparse() ? Answer::kSparse : Answer::kExact, 1e-3);
    crossover.Add(answer, 1e-3);  // another layer
  };
  for (int i = 0; i < 100; ++i) step(Answer::kOther);
  EXPECT_EQ(crossover.trials(), 0);
  EXPECT_FALSE(crossover.bound());
}

TEST(Crossover, AShorterContextIsJudgedByTrialsOfItsOwn) {
  // Equal at 3,000: a trial at 16,000 carries to 4,300 / 0.98 cells.
  Decoder decoder{.sparse_cost = EqualAt(3000)};
  EXPECT_TRUE(decoder.Settle(16000));
  EXPECT_EQ(decoder.crossover.bound(), 4387u);
  EXPECT_FALSE(decoder.Settle(2000));
  EXPECT_EQ(decoder.crossover.trials(), 2);
  EXPECT_EQ(decoder.crossover.bound(), 4387u);
  EXPECT_TRUE(decoder.Settle(3400));
  EXPECT_EQ(decoder.crossover.trials(), 3);
  EXPECT_LT(*decoder.crossover.bound(), 3400u);
  EXPECT_TRUE(decoder.Step(3400));
}

TEST(Crossover, ATrialEndsWithItsLength) {
  Decoder decoder{.sparse_cost = EqualAt(1000)};
  for (int i = 0; i < 6; ++i) decoder.Step(2000);
  EXPECT_FALSE(decoder.Step(1000));
  for (int i = 0; i < 6; ++i) decoder.Step(2000);
  EXPECT_EQ(decoder.crossover.trials(), 0);
  EXPECT_TRUE(decoder.Settle(8000));
  EXPECT_EQ(decoder.crossover.trials(), 1);
  // 1,700 us / 0.98; with steps of 2,000 cells among them it would be less.
  EXPECT_EQ(decoder.crossover.bound(), 1734u);
}

TEST(Crossover, TrialsAreFewAndCostLittle) {
  for (const double equal : {500.0, 2500.0, 10000.0, 1e9}) {
    Decoder decoder{.sparse_cost = EqualAt(equal)};
    constexpr std::uint64_t kEnd = 100000;
    decoder.Grow(1, kEnd);
    // 1.25^19 = 69 times the first length is beyond the end.
    EXPECT_LE(decoder.crossover.trials(), 19) << equal;
    double best = 0;
    for (std::uint64_t visible = 1; visible < kEnd; ++visible) {
      best += std::min(ExactCost(visible), visible < Crossover::kFirst ? 1.0 : EqualAt(equal)(visible));
    }
    if (equal < 1e6) {
      EXPECT_LT(decoder.seconds, 1.02 * best) << equal;
    } else {
      EXPECT_LT(decoder.sparse_steps, 40u);
    }
  }
}

TEST(Crossover, ContextsThatComeAndGoAddFewTrials) {
  Decoder decoder{.sparse_cost = EqualAt(4000)};
  // Each conversation begins a little shorter than the one before.
  for (std::uint64_t start = 20000; start > 1600; start -= 20) {
    for (std::uint64_t i = 0; i < 40; ++i) decoder.Step(start + i);
  }
  EXPECT_LE(decoder.crossover.trials(), 12);
}

}  // namespace
}  // namespace scsa::plugin
