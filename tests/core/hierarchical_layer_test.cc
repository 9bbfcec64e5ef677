// SPDX-License-Identifier: Apache-2.0
//
// A Layer of preset `fast` whose clusters are found by a walk: that the tree follows the plan, when automatic selection
// is which, and what its thresholds and its memory are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "scsa/layer.h"
#include "scsa/memory_budget.h"
#include "scsa/state.h"
#include "scsa/taus.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;

Config SmallBlocks(Selection selection) {
  Config config = ConfigFor(Preset::kFast);
  config.block_size = 64;
  config.recent = 32;
  config.selection = selection;
  return config;
}

// A layer with its cache.
class Decoder {
 public:
  Decoder(const Shape& shape, std::int64_t n_rows, const Config& config)
      : cache(shape, n_rows, DType::kF16), shape_(shape) {
    params_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    Make(config);
  }
  void Make(const Config& config) { ASSERT_TRUE(Layer::Create(shape_, config, &layer).ok()); }

  std::vector<float> Attend(std::int64_t n_kv, Verify verify = Verify::kNone, int n_threads = 1) {
    const std::vector<float> q = Query(n_kv);
    std::vector<float> out;
    const OutView view = test::ViewOut(out, shape_);
    EXPECT_TRUE(
        layer->Attend(test::ViewQueries(q, shape_), cache.View(n_kv), {}, params_, verify, n_threads, workspace_, view)
            .ok());
    return out;
  }
  void SetTaus(float tau) {
    for (int h = 0; h < shape_.kv_heads; ++h) ASSERT_TRUE(layer->SetTau(h, tau).ok());
  }
  void Calibrate(std::int64_t n_kv, int steps) {
    ASSERT_TRUE(layer->StartCalibration(0.05f).ok());
    for (int i = 0; i < steps; ++i) Attend(n_kv + i);
    ASSERT_TRUE(layer->FinishCalibration().ok());
  }
  double ErrorAgainstExact(const std::vector<float>& out, std::int64_t n_kv) const {
    const std::vector<float> q = Query(n_kv);
    double worst = 0;
    for (int h = 0; h < shape_.q_heads; ++h) {
      const auto head = test::ToDouble(out.data() + std::int64_t{h} * shape_.head_dim, shape_.head_dim);
      worst = std::max(worst, test::RelativeL2(head, test::ExactHead(cache, shape_, n_kv, q.data(), h, params_)));
    }
    return worst;
  }

  SyntheticCache cache;
  std::unique_ptr<Layer> layer;

 private:
  std::vector<float> Query(std::int64_t n_kv) const {
    return test::RandomQueries(shape_, static_cast<std::uint32_t>(n_kv));
  }
  Shape shape_;
  LogitParams params_;
  Workspace workspace_;
};

TEST(HierarchicalLayer, GrowingStepByStepGivesTheSameBitsAsStartingLate) {
  Decoder decoder({6, 2, 32}, 1500, SmallBlocks(Selection::kHierarchical));
  decoder.SetTaus(0.05f);
  for (std::int64_t n = 100; n < 1400; n += 33) {
    decoder.Attend(n);
    // Rows are written anew now and then: their blocks go, and come back.
    const std::int64_t rows[] = {n / 2, n / 3};
    if (n % 5 == 0) decoder.layer->NotifyWrites(rows);
  }
  const std::vector<float> grown = decoder.Attend(1400);
  EXPECT_GT(decoder.layer->stats().dropped_blocks, 10u);
  EXPECT_EQ(decoder.layer->stats().exact_steps, 0u);
  decoder.Make(SmallBlocks(Selection::kHierarchical));
  decoder.SetTaus(0.05f);
  EXPECT_EQ(decoder.Attend(1400, Verify::kNone, 3), grown);
}

// The closed clusters show what the tree holds: an outdated one would be far off.
TEST(HierarchicalLayer, TheTreeFollowsRowsThatChange) {
  const Shape shape{6, 2, 32};
  Decoder decoder(shape, 1000, SmallBlocks(Selection::kHierarchical));
  decoder.SetTaus(1.0f);
  decoder.Attend(900);
  const std::vector<float> value(32, 3.0f);
  for (std::int64_t r = 256; r < 320; ++r) {
    for (int h = 0; h < 2; ++h) decoder.cache.SetValue(r, h, value.data());
  }
  decoder.Attend(900, Verify::kSample);  // drops the block and builds nothing
  const std::vector<float> changed = decoder.Attend(900);
  EXPECT_EQ(decoder.layer->stats().dropped_blocks, 1u);
  decoder.Make(SmallBlocks(Selection::kHierarchical));
  decoder.SetTaus(1.0f);
  EXPECT_EQ(decoder.Attend(900), changed);
  decoder.layer->DropPlans();
  EXPECT_EQ(decoder.layer->stats().plan_bytes, 0u);
  EXPECT_EQ(decoder.Attend(900), changed);
}

TEST(HierarchicalLayer, CalibratesItsOwnThresholds) {
  Decoder decoder({6, 2, 32}, 2100, SmallBlocks(Selection::kHierarchical));
  // Keys next to nothing, whose blocks a walk leaves closed as a whole, where flat selection orders their clusters.
  std::mt19937 random(7);
  std::normal_distribution<float> small(0.0f, 0.02f);
  for (std::int64_t r = 0; r < 256; ++r) {
    for (int h = 0; h < 2; ++h) {
      std::vector<float> key(32);
      std::ranges::generate(key, [&] { return small(random); });
      decoder.cache.SetKey(r, h, key.data());
    }
  }
  decoder.Calibrate(2000, 32);
  const std::vector<float> taus(decoder.layer->taus().begin(), decoder.layer->taus().end());
  EXPECT_EQ(decoder.layer->stats().calibration_steps, 32u);
  double error = 0;
  for (std::int64_t n = 2040; n < 2060; ++n) error += decoder.ErrorAgainstExact(decoder.Attend(n), n) / 20;
  EXPECT_LT(error, 3 * 0.05);
  EXPECT_EQ(decoder.layer->stats().sparse_steps, 20u);
  // The replay is not that of flat selection, by more than rounding, which is 1e-6.
  decoder.Make(SmallBlocks(Selection::kFlat));
  decoder.Calibrate(2000, 32);
  for (std::size_t h = 0; h < taus.size(); ++h) {
    EXPECT_GT(std::abs(decoder.layer->taus()[h] - taus[h]), 1e-5 * taus[h]) << h;
  }
}

// Long enough for automatic selection to be hierarchical. Rows are small.
constexpr Shape kLongShape{1, 1, 8};
constexpr std::int64_t kLongRows = kHierarchicalRows + 200;

TEST(AutomaticSelection, IsDecidedWhenAWindowBegins) {
  Decoder decoder(kLongShape, kLongRows, SmallBlocks(Selection::kAutomatic));
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);
  decoder.Attend(1000);
  decoder.Calibrate(1000, 4);
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);
  decoder.Attend(kLongRows);
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);  // its thresholds are those of flat selection
  decoder.Calibrate(kLongRows - 10, 4);
  EXPECT_EQ(decoder.layer->selection(), Selection::kHierarchical);
  const std::uint64_t scored = decoder.layer->stats().stat_scored;
  decoder.SetTaus(1.0f);
  decoder.Attend(kLongRows);
  EXPECT_EQ(decoder.layer->stats().stat_scored, scored + 1);  // the root
  decoder.Attend(1000);
  EXPECT_EQ(decoder.layer->selection(), Selection::kHierarchical);
  decoder.Calibrate(1000, 4);
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);
}

TEST(AutomaticSelection, OfShortContextsIsFlatBitForBit) {
  Decoder automatic({6, 2, 32}, 1500, SmallBlocks(Selection::kAutomatic));
  Decoder flat({6, 2, 32}, 1500, SmallBlocks(Selection::kFlat));
  automatic.Calibrate(1300, 16);
  flat.Calibrate(1300, 16);
  ASSERT_TRUE(std::equal(flat.layer->taus().begin(), flat.layer->taus().end(), automatic.layer->taus().begin()));
  for (std::int64_t n = 1400; n < 1410; ++n) EXPECT_EQ(automatic.Attend(n), flat.Attend(n));
  EXPECT_EQ(automatic.layer->stats().plan_bytes, flat.layer->stats().plan_bytes);
}

TEST(AutomaticSelection, CallersSayWhatTheirThresholdsAreFor) {
  Decoder decoder({6, 2, 32}, 1000, SmallBlocks(Selection::kAutomatic));
  EXPECT_TRUE(decoder.layer->SetSelection(Selection::kHierarchical).ok());
  EXPECT_EQ(decoder.layer->selection(), Selection::kHierarchical);
  decoder.SetTaus(1.0f);
  decoder.Attend(900);
  EXPECT_EQ(decoder.layer->stats().stat_scored, 6u);  // the root, by each query head
  EXPECT_TRUE(decoder.layer->SetSelection(Selection::kFlat).ok());
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);
  EXPECT_TRUE(decoder.layer->SetSelection(Selection::kAutomatic).ok());
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);
  decoder.Make(SmallBlocks(Selection::kFlat));
  EXPECT_EQ(decoder.layer->SetSelection(Selection::kHierarchical).code(), StatusCode::kInvalidArgument);
  decoder.Make(SmallBlocks(Selection::kHierarchical));
  EXPECT_EQ(decoder.layer->SetSelection(Selection::kFlat).code(), StatusCode::kInvalidArgument);
}

TEST(HierarchicalThresholds, SayInAFileWhatTheyAreFor) {
  const Shape shape{6, 2, 32};
  const auto create = [&](Selection selection) {
    std::unique_ptr<State> state;
    EXPECT_TRUE(State::Create(2, shape, SmallBlocks(selection), &state).ok());
    return state;
  };
  const auto hierarchical = create(Selection::kHierarchical);
  ASSERT_TRUE(hierarchical->layer(1).SetTau(1, 0.125f).ok());
  const std::string text = hierarchical->TausToJson();
  EXPECT_NE(text.find("\"selection\": \"hierarchical\""), std::string::npos) << text;
  const auto flat = create(Selection::kFlat);
  EXPECT_EQ(flat->TausToJson().find("selection"), std::string::npos);
  const Status refused = flat->LoadTausJson(text);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("selection hierarchical, here it is flat"), std::string::npos) << refused.message();
  EXPECT_FALSE(hierarchical->LoadTausJson(flat->TausToJson()).ok());

  const auto automatic = create(Selection::kAutomatic);
  ASSERT_TRUE(automatic->LoadTausJson(text).ok());
  EXPECT_EQ(automatic->layer(0).selection(), Selection::kHierarchical);
  EXPECT_EQ(automatic->layer(1).taus()[1], 0.125f);
  EXPECT_EQ(automatic->TausToJson(), text);
  ASSERT_TRUE(automatic->LoadTausJson(flat->TausToJson()).ok());
  EXPECT_EQ(automatic->layer(1).selection(), Selection::kFlat);
}

// Three vectors of floats per KV head and block, and half of that for the levels above.
constexpr std::uint64_t NodeBytes(const Shape& shape) {
  return std::uint64_t{3} * sizeof(float) * shape.kv_heads * shape.head_dim * 3 / 2;
}

TEST(HierarchicalMemory, CountsTheTree) {
  const Shape shape{6, 2, 32};
  Decoder flat(shape, 1000, SmallBlocks(Selection::kFlat));
  flat.Attend(900);
  Decoder decoder(shape, 1000, SmallBlocks(Selection::kHierarchical));
  std::shared_ptr<MemoryBudget> budget;
  ASSERT_TRUE(MemoryBudget::Create(std::uint64_t{1} << 30, &budget).ok());
  ASSERT_TRUE(decoder.layer->SetBudget(budget).ok());
  decoder.Attend(900);
  const std::uint64_t blocks = 13;
  EXPECT_EQ(decoder.layer->stats().plan_bytes, flat.layer->stats().plan_bytes + blocks * NodeBytes(shape));
  EXPECT_EQ(budget->used(), decoder.layer->stats().plan_bytes);
  decoder.layer->DropPlans();
  EXPECT_EQ(budget->used(), 0u);
  decoder.Attend(900);
  decoder.Make(SmallBlocks(Selection::kFlat));
  EXPECT_EQ(budget->used(), 0u);
}

TEST(HierarchicalMemory, WithoutRoomForTheTreeAutomaticSelectionStaysFlat) {
  Decoder decoder(kLongShape, kLongRows, SmallBlocks(Selection::kAutomatic));
  std::shared_ptr<MemoryBudget> budget;
  ASSERT_TRUE(MemoryBudget::Create(std::uint64_t{1} << 30, &budget).ok());
  ASSERT_TRUE(decoder.layer->SetBudget(budget).ok());
  decoder.SetTaus(0.1f);
  for (int step = 0; step < 3; ++step) decoder.Attend(kLongRows);
  const std::uint64_t used = budget->used();
  budget->SetLimit(used + 1000);
  decoder.Calibrate(kLongRows - 10, 2);
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);
  EXPECT_EQ(budget->used(), used);
  budget->SetLimit(std::uint64_t{1} << 30);
  decoder.Calibrate(kLongRows - 10, 2);
  EXPECT_EQ(decoder.layer->selection(), Selection::kHierarchical);
  const std::uint64_t blocks = (kLongRows - 10 - 32) / 64;
  EXPECT_EQ(budget->used(), used + blocks * NodeBytes(kLongShape));
  decoder.Calibrate(1000, 2);
  EXPECT_EQ(decoder.layer->selection(), Selection::kFlat);
}

TEST(HierarchicalConfig, KnowsThreeSelections) {
  for (const Preset preset : {Preset::kSeed, Preset::kFast}) {
    Config config = ConfigFor(preset);
    for (const Selection selection : {Selection::kFlat, Selection::kHierarchical, Selection::kAutomatic}) {
      config.selection = selection;
      EXPECT_TRUE(ValidateConfig(config).ok());
    }
    config.selection = static_cast<Selection>(3);
    EXPECT_EQ(ValidateConfig(config).message(), "selection is not known, must be flat, hierarchical or automatic");
  }
}

}  // namespace
}  // namespace scsa
