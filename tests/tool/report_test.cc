// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "output_file.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

RunInfo Info() {
  RunInfo info;
  info.model = "m";
  info.cpu = "Some CPU, 2 GHz";
  info.simd_target = "AVX2";
  info.date = "2026-01-31";
  info.llama_cpp_version = "1/2";
  info.preset = "seed";
  info.threads = 2;
  return info;
}

std::vector<ArmResult> Results() {
  std::vector<ArmResult> results(2);
  results[0].context = 8000;
  results[0].arm = Arm::kExact;
  results[0].tok_s = 25.0;
  results[0].ms_median = 40.0;
  results[0].ms_p99 = 45.0;
  results[0].attn_ms = 20.0;
  results[0].attn_ms_source = "plugin";
  results[0].agreement = 1.0;
  results[0].kl_mean = 0.0;
  results[0].nll_delta = 0.0;
  results[0].rows_read = 1.0;
  results[0].bytes_read = 2e8;
  results[0].attn_err_mean = 1e-7;
  results[0].roofline = Roofline{
      .bytes = 2e8, .multiply_adds = 3e8, .bandwidth = 2e10, .multiply_add_rate = 2.5e10, .attention_ms = 20.0};
  results[0].calibration = CalibrationCost{.steps = 32, .ms_median = 30.0, .exact_ms_median = 20.0};
  results[1].context = 8000;
  results[1].arm = Arm::kLimit;
  results[1].tok_s = 90.0;
  return results;
}

TEST(Roofline, TheTighterLimitCounts) {
  const Roofline roofline = *Results()[0].roofline;
  EXPECT_DOUBLE_EQ(roofline.MemoryMs(), 10.0);   // 200 MB at 20 GB/s
  EXPECT_DOUBLE_EQ(roofline.ComputeMs(), 12.0);  // 300 M at 25 G/s
  EXPECT_DOUBLE_EQ(roofline.LimitMs(), 12.0);
  EXPECT_DOUBLE_EQ(roofline.Share(), 0.6);
}

TEST(AlignedTable, PadsColumnsAndLeavesNoTrailingBlanks) {
  EXPECT_EQ(AlignedTable({{"arm", "x"}, {"longer", "10"}, {"a", ""}}, 1), "arm      x\nlonger  10\na\n");
}

TEST(ResultTable, ShowsADashForWhatWasNotMeasured) {
  std::istringstream lines(ResultTable(Results()));
  std::string header, exact, limit;
  std::getline(lines, header);
  std::getline(lines, exact);
  std::getline(lines, limit);
  EXPECT_EQ(header.size(), exact.size());
  EXPECT_NE(exact.find("100.0 %"), std::string::npos);
  EXPECT_NE(limit.find("90.00"), std::string::npos);
  EXPECT_EQ(limit.substr(limit.size() - 3), "  -");
}

TEST(RooflineText, StatesTheShare) {
  EXPECT_NE(RooflineText(Results()).find("60 % of what the machine allows"), std::string::npos);
  std::vector<ArmResult> none = Results();
  none.erase(none.begin());
  EXPECT_EQ(RooflineText(none), "");
}

TEST(CalibrationText, StatesTheCostBesideExactSteps) {
  EXPECT_EQ(CalibrationText(Results()),
            "calibration window: 32 steps, median 30.0 ms = 1.50 x the exact arm's 20.0 ms\n");
  std::vector<ArmResult> none = Results();
  none[0].calibration.reset();
  EXPECT_EQ(CalibrationText(none), "");
}

TEST(CrossoverText, NamesWhatWasMeasured) {
  std::vector<ArmResult> results = Results();
  EXPECT_EQ(CrossoverText(results), "");
  results[1].arm = Arm::kScsa;
  results[1].crossover = 600;  // set by the user, who knows it
  EXPECT_EQ(CrossoverText(results), "");
  results[1].crossover_measured = true;
  EXPECT_EQ(CrossoverText(results), "crossover of scsa: 600 visible cells (measured)\n");
  const auto array = nlohmann::json::parse(RecordsJson(ResultRecords(Info(), results)));
  EXPECT_TRUE(array[0]["crossover"].is_null());
  EXPECT_EQ(array[0]["crossover_measured"], false);
  EXPECT_EQ(array[1]["crossover"], 600);
  EXPECT_EQ(array[1]["crossover_measured"], true);
}

TEST(ResultsJson, HoldsEveryPromisedField) {
  const auto array = nlohmann::json::parse(RecordsJson(ResultRecords(Info(), Results())));
  ASSERT_EQ(array.size(), 2u);
  for (const auto& object : array) {
    for (const char* field : {"model",
                              "context",
                              "arm",
                              "preset",
                              "tok_s",
                              "ms_median",
                              "ms_p99",
                              "attn_ms",
                              "speedup_vs_llama",
                              "agreement",
                              "kl_mean",
                              "nll_delta",
                              "rows_read",
                              "bytes_read",
                              "plan_build_ms",
                              "plan_bytes",
                              "evicted_blocks",
                              "refused_blocks",
                              "threads",
                              "simd_target",
                              "cpu",
                              "attn_err_mean",
                              "attn_err_p99",
                              "attn_ms_source",
                              "roofline_ms",
                              "roofline_share",
                              "audit_outputs",
                              "audit_ms",
                              "audit_err_mean",
                              "audit_err_median",
                              "audit_err_median_low",
                              "audit_err_median_high",
                              "audit_err_p90",
                              "audit_err_p99",
                              "recalibrated_heads",
                              "crossover",
                              "crossover_measured",
                              "calibration_steps",
                              "calibration_ms_median",
                              "calibration_exact_ms_median",
                              "taus"}) {
      EXPECT_TRUE(object.contains(field)) << field;
    }
  }
  EXPECT_EQ(array[0]["arm"], "exact");
  EXPECT_EQ(array[0]["tok_s"], 25.0);
  EXPECT_EQ(array[0]["roofline_share"], 0.6);
  EXPECT_TRUE(array[0]["preset"].is_null());
  EXPECT_EQ(array[0]["calibration_steps"], 32);
  EXPECT_EQ(array[0]["calibration_ms_median"], 30.0);
  EXPECT_EQ(array[0]["calibration_exact_ms_median"], 20.0);
  EXPECT_EQ(array[1]["calibration_steps"], 0);
  EXPECT_EQ(array[1]["arm"], "limit");
  for (const char* field :
       {"agreement", "kl_mean", "nll_delta", "speedup_vs_llama", "roofline_ms", "calibration_ms_median", "taus"}) {
    EXPECT_TRUE(array[1][field].is_null()) << field;
  }
}

TEST(ResultsJson, NamesTheThresholdsOfTheSparseArmAlone) {
  RunInfo info = Info();
  info.taus = "t.json";
  std::vector<ArmResult> results = Results();
  results[1].arm = Arm::kScsa;
  const auto array = nlohmann::json::parse(RecordsJson(ResultRecords(info, results)));
  EXPECT_TRUE(array[0]["taus"].is_null());
  EXPECT_EQ(array[1]["taus"], "t.json");
}

TEST(ResultsJson, ReportsTheAuditOfTheArmThatHasOne) {
  std::vector<ArmResult> results = Results();
  results[0].stats.audited_outputs = 90;
  results[0].stats.audit_ns = 2500000;
  results[0].stats.recalibrated_heads = 1;
  results[0].audit = AuditSummary{};
  results[0].audit->outputs = 60;
  results[0].audit->observations = 20;
  results[0].audit->median = 0.01;
  results[0].audit->median_low = 0.005;
  results[0].audit->median_high = 0.02;
  results[0].audit->p99 = 0.25;
  auto array = nlohmann::json::parse(RecordsJson(ResultRecords(Info(), results)));
  EXPECT_EQ(array[0]["audit_outputs"], 90);
  EXPECT_EQ(array[0]["audit_ms"], 2.5);
  EXPECT_EQ(array[0]["recalibrated_heads"], 1);
  EXPECT_EQ(array[0]["audit_err_median"], 0.01);
  EXPECT_EQ(array[0]["audit_err_median_low"], 0.005);
  EXPECT_EQ(array[0]["audit_err_median_high"], 0.02);
  EXPECT_EQ(array[0]["audit_err_p99"], 0.25);
  EXPECT_TRUE(array[1]["audit_err_median"].is_null());
  results[0].audit->observations = 5;
  array = nlohmann::json::parse(RecordsJson(ResultRecords(Info(), results)));
  EXPECT_TRUE(array[0]["audit_err_median_low"].is_null());
  EXPECT_EQ(array[0]["audit_err_median"], 0.01);
}

TEST(ResultsJson, HoldsTheReadsOfEachHeadAndTheAuditsWindows) {
  std::vector<ArmResult> results = Results();
  results[1].arm = Arm::kScsa;
  results[1].tolerance = 0.05;
  results[1].steps = 64;
  results[1].head_reads = {{{.rows_read = 10, .rows_visible = 100, .bytes_read = 6400}, {}}, {}};
  results[1].audit_windows = {{0,
                               32,
                               {.outputs = 24,
                                .observations = 8,
                                .mean = 0.2,
                                .median = 0.1,
                                .median_low = 0.05,
                                .median_high = 0.3,
                                .p90 = 0.4,
                                .p99 = 0.5}},
                              {32, 64, {}}};
  const auto array = nlohmann::json::parse(RecordsJson(ResultRecords(Info(), results)));
  EXPECT_TRUE(array[0]["head_rows_read"].is_null());
  EXPECT_TRUE(array[0]["audit_windows"].is_null());
  EXPECT_EQ(array[1]["tolerance"], 0.05);
  EXPECT_EQ(array[1]["head_rows_read"], nlohmann::json::parse("[[0.1, null], []]"));
  EXPECT_EQ(array[1]["head_bytes_read"], nlohmann::json::parse("[[100.0, 0.0], []]"));
  ASSERT_EQ(array[1]["audit_windows"].size(), 2u);
  EXPECT_EQ(array[1]["audit_windows"][0]["end"], 32);
  EXPECT_EQ(array[1]["audit_windows"][0]["median_high"], 0.3);
  EXPECT_TRUE(array[1]["audit_windows"][1]["median"].is_null());
}

TEST(ResultTable, TellsSparseArmsApartByTheirTolerance) {
  std::vector<ArmResult> results = Results();
  results[0].arm = results[1].arm = Arm::kScsa;
  results[0].tolerance = 0.01;
  results[1].tolerance = 0.1;
  const std::string table = ResultTable(results);
  EXPECT_NE(table.find("scsa 0.01 "), std::string::npos) << table;
  EXPECT_NE(table.find("scsa 0.1 "), std::string::npos) << table;
}

TEST(ResultsJson, AnInfiniteErrorIsNull) {
  std::vector<ArmResult> results = Results();
  results[0].attn_err_p99 = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(nlohmann::json::parse(RecordsJson(ResultRecords(Info(), results)))[0]["attn_err_p99"].is_null());
}

TEST(ResultsCsv, HasOneCellPerFieldAndQuotesCommas) {
  std::istringstream lines(RecordsCsv(ResultRecords(Info(), Results())));
  std::string header, exact;
  std::getline(lines, header);
  std::getline(lines, exact);
  EXPECT_EQ(header.rfind("model,context,arm,", 0), 0u);
  EXPECT_EQ(exact.rfind("m,8000,exact,,,25.0,", 0), 0u);
  EXPECT_NE(exact.find(",\"Some CPU, 2 GHz\","), std::string::npos);
  const auto commas = [](const std::string& line) { return std::count(line.begin(), line.end(), ','); };
  EXPECT_EQ(commas(exact), commas(header) + 1);  // one comma is inside the quotes
}

TEST(WriteFileAtomically, ReplacesTheFileAndLeavesNoOther) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "scsa_report_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "r.json").string();
  WriteFileAtomically(path, "old");
  WriteFileAtomically(path, "new");
  EXPECT_EQ(ReadFile(path, "result"), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
  std::filesystem::remove_all(folder);
}

TEST(CheckWritable, RefusesFoldersAndMissingParents) {
  EXPECT_THROW(CheckWritable(testing::TempDir(), "--json"), ToolError);
  EXPECT_THROW(CheckWritable(testing::TempDir() + "/no_such_folder/r.json", "--json"), ToolError);
  EXPECT_NO_THROW(CheckWritable(testing::TempDir() + "/r.json", "--json"));
}

}  // namespace
}  // namespace scsa::tool
