// SPDX-License-Identifier: Apache-2.0
#include "freerun_report.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace scsa::tool {
namespace {

// Eight continuations: `dense` and `scsa` of them loop. NLL 1.0 for dense and 1.0 + nll for scsa.
FreerunResult Result(int dense, int scsa, double nll) {
  FreerunResult result;
  result.context = 2000;
  for (int trial = 0; trial < 8; ++trial) {
    std::vector<Continuation>& pair = result.continuations.emplace_back(2);
    pair[0].loop = trial < dense ? 32 : 31;
    pair[1].loop = trial < scsa ? 40 : 0;
    pair[0].nll = 1.0;
    pair[1].nll = 1.0 + nll;
  }
  return result;
}

void Ask(FreerunResult& result, RetrievalTask task, const std::vector<bool>& dense, const std::vector<bool>& scsa) {
  RetrievalQuestion& question = result.questions.emplace_back();
  question.task = task;
  question.expected.assign(dense.size(), "12345");
  result.answers.push_back({{"dense", dense}, {"scsa", scsa}});
}

Gate Find(const std::vector<Gate>& gates, const std::string& name) {
  for (const Gate& gate : gates) {
    if (gate.name == name) return gate;
  }
  ADD_FAILURE() << name;
  return {};
}

TEST(GatesOf, LoopsMayBeTenPointsMoreThanDense) {
  const Gate more = Find(GatesOf({}, Result(2, 3, 0.0)), "loops");  // 12.5 points
  EXPECT_EQ(more.trials, 8);
  EXPECT_DOUBLE_EQ(more.dense, 0.25);
  EXPECT_DOUBLE_EQ(more.scsa, 0.375);
  EXPECT_DOUBLE_EQ(more.figure, 0.125);
  EXPECT_EQ(more.verdict, Verdict::kFail);
  ASSERT_TRUE(more.range);
  EXPECT_LT(more.range->low, 0.0);
  EXPECT_GT(more.range->high, 0.4);
  EXPECT_EQ(Find(GatesOf({}, Result(2, 2, 0.0)), "loops").verdict, Verdict::kPass);
  EXPECT_EQ(Find(GatesOf({}, Result(8, 0, 0.0)), "loops").verdict, Verdict::kPass);
}

TEST(GatesOf, LikelihoodMayBeALittleWorse) {
  EXPECT_EQ(Find(GatesOf({}, Result(0, 0, 0.15)), "nll").verdict, Verdict::kPass);
  EXPECT_EQ(Find(GatesOf({}, Result(0, 0, 0.16)), "nll").verdict, Verdict::kFail);
  EXPECT_EQ(Find(GatesOf({}, Result(0, 0, -1.0)), "nll").verdict, Verdict::kPass);
}

TEST(GatesOf, OnlyWhatDenseFindsMustBeKept) {
  FreerunResult result = Result(0, 0, 0.0);
  for (int i = 0; i < 9; ++i) Ask(result, RetrievalTask::kPasskey, {true}, {i != 0});  // 8 of 9 are kept
  Ask(result, RetrievalTask::kPasskey, {false}, {true});                               // a gain makes up for nothing
  Ask(result, RetrievalTask::kMultiNeedle, {true, true, false}, {true, false, true});  // 1 of 2
  Ask(result, RetrievalTask::kVariables, {false}, {false});
  const std::vector<Gate> gates = GatesOf({}, result);
  const Gate passkey = Find(gates, "passkey");
  EXPECT_EQ(passkey.trials, 10);
  EXPECT_DOUBLE_EQ(passkey.dense, 0.9);
  EXPECT_DOUBLE_EQ(passkey.scsa, 0.9);
  EXPECT_DOUBLE_EQ(passkey.figure, 8.0 / 9.0);
  EXPECT_EQ(passkey.verdict, Verdict::kPass);
  const Gate multi = Find(gates, "multi-needle");
  EXPECT_EQ(multi.trials, 3);  // numbers, not questions
  EXPECT_DOUBLE_EQ(multi.figure, 0.5);
  EXPECT_EQ(multi.verdict, Verdict::kFail);
  const Gate variables = Find(gates, "variables");
  EXPECT_EQ(variables.verdict, Verdict::kNone);
  EXPECT_FALSE(variables.range);
  // Dense answers nine questions in full, of which scsa keeps eight: below 95 %.
  const Gate retained = Find(gates, "retained");
  EXPECT_EQ(retained.trials, 12);
  EXPECT_DOUBLE_EQ(retained.figure, 8.0 / 9.0);
  EXPECT_EQ(retained.verdict, Verdict::kFail);
  EXPECT_EQ(VerdictText(gates), "3 gates pass, 2 fail, 1 without a verdict");
}

TEST(GatesOf, LeavesOutWhatWasNotMeasured) {
  FreerunResult result = Result(0, 0, 0.0);
  EXPECT_EQ(GatesOf({}, result).size(), 2u);
  Ask(result, RetrievalTask::kPasskey, {true}, {true});
  Ask(result, RetrievalTask::kMultiNeedle, {true}, {true});
  Ask(result, RetrievalTask::kVariables, {true}, {true});
  result.continuations.clear();
  const std::vector<Gate> gates = GatesOf({}, result);
  ASSERT_EQ(gates.size(), 4u);
  EXPECT_EQ(gates[0].name, "passkey");
}

TEST(GateTable, SaysWhereDenseFails) {
  FreerunResult result = Result(0, 0, 0.01);
  Ask(result, RetrievalTask::kPasskey, {true}, {true});
  Ask(result, RetrievalTask::kMultiNeedle, {true}, {true});
  Ask(result, RetrievalTask::kVariables, {false}, {false});
  const std::string table = GateTable(GatesOf({}, result));
  EXPECT_NE(table.find("dense fails: no verdict\n"), std::string::npos) << table;
  EXPECT_NE(table.find("+0.010"), std::string::npos) << table;
  EXPECT_NE(table.find("PASS\n"), std::string::npos) << table;
}

TEST(GateRecords, OneObjectPerGate) {
  FreerunResult result = Result(1, 1, 0.0);
  Ask(result, RetrievalTask::kPasskey, {true}, {true});
  Ask(result, RetrievalTask::kMultiNeedle, {true}, {false});
  Ask(result, RetrievalTask::kVariables, {false}, {false});
  RunInfo info;
  info.model = "m";
  info.preset = "fast";
  const FreerunOptions options;
  const auto records = Record::parse(RecordsJson(GateRecords(info, options, result, GatesOf(options, result))));
  ASSERT_EQ(records.size(), 6u);
  EXPECT_EQ(records[0]["gate"], "loops");
  EXPECT_EQ(records[0]["limit_kind"], "at most");
  EXPECT_EQ(records[2]["verdict"], "pass");
  EXPECT_EQ(records[3]["verdict"], "fail");
  EXPECT_EQ(records[4]["verdict"], "none");
  EXPECT_TRUE(records[4]["figure"].is_null());
  EXPECT_EQ(records[4]["tolerance"], 0.015);
  EXPECT_TRUE(records[0]["llama"].is_null());
}

}  // namespace
}  // namespace scsa::tool
