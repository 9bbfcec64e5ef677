// SPDX-License-Identifier: Apache-2.0
#include "scsa/state.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;

constexpr Shape kShape{4, 2, 16};

Config SmallConfig() {
  Config config;
  config.cluster_size = 16;
  config.rebuild_interval = 64;
  config.block_size = 256;
  return config;
}

std::unique_ptr<State> NewState(int num_layers) {
  std::unique_ptr<State> state;
  EXPECT_TRUE(State::Create(num_layers, kShape, SmallConfig(), &state).ok());
  return state;
}

void Step(State& state, const SyntheticCache& cache, std::uint32_t query) {
  Workspace workspace;
  const std::vector<float> q = test::RandomQueries(kShape, query);
  std::vector<float> out;
  const OutView view = test::ViewOut(out, kShape);
  for (int i = 0; i < state.num_layers(); ++i) {
    ASSERT_TRUE(state.layer(i)
                    .Attend(test::ViewQueries(q, kShape), cache.View(), {}, {}, Verify::kSample, 2, workspace, view)
                    .ok());
  }
}

TEST(State, CreateChecksItsArguments) {
  std::unique_ptr<State> state;
  const Status none = State::Create(0, kShape, Config(), &state);
  EXPECT_EQ(none.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(none.message().find("num_layers"), std::string::npos);
  EXPECT_EQ(State::Create(2, {3, 2, 16}, Config(), &state).code(), StatusCode::kInvalidArgument);
  Config config;
  config.rank = 9;
  EXPECT_EQ(State::Create(2, kShape, config, &state).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(state, nullptr);
  EXPECT_EQ(NewState(5)->num_layers(), 5);
}

TEST(State, CalibratesItsLayersTogetherAndSumsTheirCounters) {
  const SyntheticCache cache(kShape, 400, DType::kF16, 3);
  auto state = NewState(3);
  EXPECT_EQ(state->FinishCalibration().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(state->StartCalibration(-1.0f).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(state->StartCalibration(0.05f).ok());
  Step(*state, cache, 1);
  Step(*state, cache, 2);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(state->layer(i).calibrating());
    EXPECT_EQ(state->layer(i).calibration_steps(), 2);
  }
  ASSERT_TRUE(state->FinishCalibration().ok());
  Step(*state, cache, 3);
  const LayerStats total = state->stats();
  EXPECT_EQ(total.calibration_steps, 6u);
  EXPECT_EQ(total.sparse_steps, 3u);
  EXPECT_EQ(total.stat_calls, 12u);
  EXPECT_EQ(total.rebuild_count, 6u);
  LayerStats sum;
  for (int i = 0; i < 3; ++i) {
    const LayerStats one = state->layer(i).stats();
    sum.stat_opened_rows += one.stat_opened_rows;
    sum.stat_exact_rows += one.stat_exact_rows;
    sum.stat_scored += one.stat_scored;
    sum.union_rows += one.union_rows;
    sum.visible_rows += one.visible_rows;
    sum.bytes_read += one.bytes_read;
    sum.build_ns += one.build_ns;
    sum.plan_bytes += one.plan_bytes;
  }
  EXPECT_EQ(total.stat_opened_rows, sum.stat_opened_rows);
  EXPECT_EQ(total.stat_exact_rows, sum.stat_exact_rows);
  EXPECT_EQ(total.stat_scored, sum.stat_scored);
  EXPECT_EQ(total.union_rows, sum.union_rows);
  EXPECT_EQ(total.visible_rows, 3u * 2 * 400);
  EXPECT_EQ(total.visible_rows, sum.visible_rows);
  EXPECT_EQ(total.bytes_read, sum.bytes_read);
  EXPECT_EQ(total.build_ns, sum.build_ns);
  EXPECT_EQ(total.plan_bytes, sum.plan_bytes);
  EXPECT_GT(total.plan_bytes, 0u);
}

TEST(State, TausTravelAsJson) {
  auto state = NewState(2);
  ASSERT_TRUE(state->layer(0).SetTau(1, 0.125f).ok());
  ASSERT_TRUE(state->layer(1).SetTau(3, 0.5f).ok());
  EXPECT_EQ(state->TausToJson(),
            "{\n  \"format\": \"scsa-taus\",\n  \"version\": 1,\n  \"preset\": \"seed\",\n"
            "  \"config\": {\"cluster_size\": 16, \"block_size\": 256, \"sink\": 4, \"recent\": 32, "
            "\"packed_format\": \"q8_0\", \"power_iterations\": 4, \"statistic\": \"median\", "
            "\"rebuild_interval\": 64, \"rank\": 2},\n"
            "  \"model\": {\"layers\": 2, \"q_heads\": 4, \"kv_heads\": 2, \"head_dim\": 16},\n  \"taus\": {\n"
            "    \"0:0\": 0.05,\n    \"0:1\": 0.125,\n    \"0:2\": 0.05,\n    \"0:3\": 0.05,\n"
            "    \"1:0\": 0.05,\n    \"1:1\": 0.05,\n    \"1:2\": 0.05,\n    \"1:3\": 0.5\n  }\n}\n");
  ModelIdentity model;
  model.architecture = "llama";
  model.metadata_hash = "cafe";
  const std::string text = state->TausToJson(model);
  auto other = NewState(2);
  ASSERT_TRUE(other->LoadTausJson(text, model).ok());
  EXPECT_EQ(other->TausToJson(model), text);
  // A subset changes only what it names; an error changes nothing at all.
  ASSERT_TRUE(other->LoadTausJson("{\"1:0\": 0.25}").ok());
  EXPECT_EQ(other->layer(1).taus()[0], 0.25f);
  EXPECT_EQ(other->layer(1).taus()[3], 0.5f);
  const std::string before = other->TausToJson();
  EXPECT_EQ(other->LoadTausJson("{\"1:0\": 0.75, \"1:9\": 0.1}").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(other->LoadTausJson("{\"1:0\": 0.75, \"2:0\": 0.1}").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(other->LoadTausJson("{\"1:0\": 0.75, \"1:1\": 1.5}").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(other->LoadTausJson("{\"1:0\": 0.75").code(), StatusCode::kParseError);
  EXPECT_EQ(other->TausToJson(), before);
}

TEST(State, ThresholdsOfAnotherOriginAreRefused) {
  ModelIdentity model;
  model.metadata_hash = "cafe";
  auto state = NewState(2);
  const std::string text = state->TausToJson(model);
  const auto expect_refused = [&text](State& other, const ModelIdentity& here, const std::string& part) {
    ASSERT_TRUE(other.layer(0).SetTau(0, 0.75f).ok());
    const Status status = other.LoadTausJson(text, here);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(other.layer(0).taus()[0], 0.75f);
  };
  expect_refused(*NewState(3), {}, "layers 2, here it is 3");
  ModelIdentity another = model;
  another.metadata_hash = "beef";
  expect_refused(*NewState(2), another, "metadata_hash cafe, here it is beef");
  std::unique_ptr<State> other;
  Config config = SmallConfig();
  config.rank = 1;
  ASSERT_TRUE(State::Create(2, kShape, config, &other).ok());
  expect_refused(*other, {}, "rank 2, here it is 1");
  ASSERT_TRUE(State::Create(2, {8, 2, 16}, SmallConfig(), &other).ok());
  expect_refused(*other, {}, "q_heads 4, here it is 8");
  ASSERT_TRUE(State::Create(2, kShape, ConfigFor(Preset::kFast), &other).ok());
  expect_refused(*other, {}, "preset seed, here it is fast");
}

TEST(State, TheToleranceTravelsWithTheThresholds) {
  const SyntheticCache cache(kShape, 400, DType::kF16, 5);
  auto state = NewState(1);
  ASSERT_TRUE(state->StartCalibration(0.0625f).ok());
  Step(*state, cache, 1);
  EXPECT_EQ(state->TausToJson().find("tolerance"), std::string::npos);
  ASSERT_TRUE(state->FinishCalibration().ok());
  const std::string text = state->TausToJson();
  EXPECT_NE(text.find("\"tolerance\": 0.0625,"), std::string::npos) << text;
  auto other = NewState(1);
  ASSERT_TRUE(other->LoadTausJson(text).ok());
  EXPECT_EQ(other->TausToJson(), text);
}

TEST(State, SerialGivesTheSameThresholds) {
  const SyntheticCache cache(kShape, 400, DType::kF16, 4);
  std::string taus[2];
  for (const bool serial : {false, true}) {
    auto state = NewState(2);
    state->set_serial(serial);
    ASSERT_TRUE(state->StartCalibration(0.02f).ok());
    for (std::uint32_t query = 0; query < 4; ++query) Step(*state, cache, query);
    ASSERT_TRUE(state->FinishCalibration().ok());
    taus[serial] = state->TausToJson();
  }
  EXPECT_EQ(taus[0], taus[1]);
}

}  // namespace
}  // namespace scsa
