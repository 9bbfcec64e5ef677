// SPDX-License-Identifier: Apache-2.0
//
// The program on a real model (SmolLM2-135M), short enough for two slow cores.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"

namespace scsa::tool {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

CommandResult Scsa(std::vector<std::string> arguments, std::vector<std::string> environment = {}) {
  arguments.insert(arguments.begin(), SCSA_TOOL);
  // Threads that wait must sleep: other tests may run beside this one, and no time is asserted.
  environment.push_back("OMP_WAIT_POLICY=passive");
  return RunCommand(arguments, environment);
}

std::string OneError(const CommandResult& result) {
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  return result.err;
}

class ModelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(SCSA_TEST_MODEL)) GTEST_SKIP() << "no model at " << SCSA_TEST_MODEL << " (scripts/setup gets it)";
    folder_ = fs::path(testing::TempDir()) /
              (std::string("scsa_model_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    WriteText("text.txt", 40);
    WriteText("short.txt", 18);  // more rows than the operator waits for before it seals a block
  }
  // Sentences that repeat with other numbers: some 40 tokens each.
  void WriteText(const std::string& name, int sentences) const {
    std::ofstream text(Path(name));
    for (int i = 0; i < sentences; ++i) {
      text << "In room " << (i * 37) % 101 << " of the archive there is a box with " << (i * 53) % 97
           << " letters, and the clerk of year " << 1800 + (i * 29) % 150 << " signed the list.\n";
    }
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  fs::path folder_;
};

TEST_F(ModelTest, BenchDecodeMeasuresEveryArmAndReusesItsStates) {
  const std::vector<std::string> command = {"bench",       "decode",
                                            "-m",          SCSA_TEST_MODEL,
                                            "-f",          Path("text.txt"),
                                            "-c",          "300,600",
                                            "-n",          "8",
                                            "--calibrate", "8",
                                            "--arms",      "llama,llama-q8,exact,scsa,limit",
                                            "--crossover", "0",
                                            "--state-dir", Path("states"),
                                            "--json",      Path("r.json"),
                                            "--audit",     "0.25"};
  const CommandResult first = Scsa(command);
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.err, "");  // no terminal, no progress
  EXPECT_NE(first.out.find("context 600"), std::string::npos) << first.out;
  EXPECT_NE(first.out.find("roofline of exact attention"), std::string::npos) << first.out;

  std::ifstream file(Path("r.json"));
  const json array = json::parse(file);
  ASSERT_EQ(array.size(), 10u);
  std::map<std::string, json> arms;
  for (const json& object : array) {
    SCOPED_TRACE(object.dump());
    EXPECT_GT(object["tok_s"].get<double>(), 0.0);
    EXPECT_GE(object["ms_p99"].get<double>(), object["ms_median"].get<double>());
    EXPECT_EQ(object["model"], "SmolLM2-135M-Instruct.Q4_1");
    EXPECT_GE(object["threads"].get<int>(), 1);
    EXPECT_EQ(object["steps"], 8);
    if (object["context"] == 600) arms[object["arm"]] = object;
  }
  ASSERT_EQ(arms.size(), 5u);
  EXPECT_EQ(arms["llama"]["speedup_vs_llama"], 1.0);
  EXPECT_EQ(arms["exact"]["agreement"], 1.0);
  EXPECT_EQ(arms["exact"]["kl_mean"], 0.0);
  EXPECT_EQ(arms["exact"]["rows_read"], 1.0);
  EXPECT_EQ(arms["exact"]["sparse_calls"], 0);
  // SmolLM2: 30 layers, 8 steps.
  EXPECT_EQ(arms["exact"]["exact_calls"], 240);
  // 30 layers, 3 KV heads, K and V rows of 128 bytes; 8 warm-up steps, the timed ones see 609 ... 616 rows.
  const double rows = 612.5;
  EXPECT_NEAR(arms["exact"]["bytes_read"].get<double>(), rows * 30 * 3 * 256, 0.02 * rows * 30 * 3 * 256);
  EXPECT_NEAR(arms["llama-q8"]["bytes_read"].get<double>(), arms["llama"]["bytes_read"].get<double>() * 34 / 64, 1.0);
  // 9 query heads, 64 values, K and V; the two error steps see 617 and 618 rows.
  EXPECT_DOUBLE_EQ(arms["exact"]["multiply_adds"].get<double>(), 617.5 * 30 * 9 * 64 * 2);
  EXPECT_LT(arms["exact"]["attn_err_mean"].get<double>(), 1e-3);
  EXPECT_LT(arms["exact"]["attn_err_mean"].get<double>(), arms["llama"]["attn_err_mean"].get<double>());
  EXPECT_LT(arms["llama"]["attn_err_mean"].get<double>(), 0.05);
  EXPECT_GT(arms["exact"]["roofline_share"].get<double>(), 0.0);
  EXPECT_LT(arms["llama"]["kl_mean"].get<double>(), 0.1);
  EXPECT_GT(arms["llama-q8"]["kl_mean"].get<double>(), 0.0);
  EXPECT_EQ(arms["scsa"]["preset"], "fast");
  EXPECT_EQ(arms["scsa"]["failures"], 0);
  EXPECT_EQ(arms["scsa"]["sparse_calls"], 240);
  EXPECT_EQ(arms["scsa"]["calibration_steps"], 8);
  EXPECT_GT(arms["scsa"]["calibration_ms_median"].get<double>(), 0.0);
  EXPECT_GT(arms["scsa"]["calibration_exact_ms_median"].get<double>(), 0.0);
  EXPECT_EQ(arms["exact"]["calibration_steps"], 0);
  // A quarter of 8 steps and 3 KV heads in each of 30 layers, 3 query heads each.
  EXPECT_EQ(arms["scsa"]["audit_outputs"], 6 * 30 * 3);
  EXPECT_GT(arms["scsa"]["audit_ms"].get<double>(), 0.0);
  EXPECT_LE(arms["scsa"]["audit_err_median_low"], arms["scsa"]["audit_err_median"]);
  EXPECT_LE(arms["scsa"]["audit_err_median"], arms["scsa"]["audit_err_median_high"]);
  EXPECT_LE(arms["scsa"]["audit_err_p90"], arms["scsa"]["audit_err_p99"]);
  // Against double precision in two later steps.
  EXPECT_GT(arms["scsa"]["audit_err_mean"], 0.3 * arms["scsa"]["attn_err_mean"].get<double>());
  EXPECT_LT(arms["scsa"]["audit_err_mean"], 3 * arms["scsa"]["attn_err_mean"].get<double>());
  EXPECT_EQ(arms["scsa"]["recalibrated_heads"], 0);
  EXPECT_EQ(arms["exact"]["audit_outputs"], 0);
  EXPECT_TRUE(arms["exact"]["audit_err_median"].is_null());
  EXPECT_TRUE(arms["scsa"]["taus"].is_null());
  EXPECT_GT(arms["scsa"]["plan_bytes"].get<double>(), 0.0);
  EXPECT_GT(arms["scsa"]["rows_read"].get<double>(), 0.0);
  EXPECT_LT(arms["scsa"]["rows_read"].get<double>(), 1.0);
  EXPECT_GT(arms["scsa"]["attn_err_mean"].get<double>(), arms["exact"]["attn_err_mean"].get<double>());
  EXPECT_LT(arms["scsa"]["kl_mean"].get<double>(), 1.0);
  for (const char* field : {"agreement", "kl_mean", "nll_delta", "attn_err_mean"}) {
    EXPECT_TRUE(arms["limit"][field].is_null()) << field;
  }

  std::map<fs::path, fs::file_time_type> times;
  for (const auto& entry : fs::directory_iterator(Path("states"))) {
    times[entry.path()] = fs::last_write_time(entry.path());
    EXPECT_EQ(entry.path().extension(), ".state");
  }
  EXPECT_EQ(times.size(), 4u);  // two lengths, two cache types
  std::vector<std::string> again = command;
  again[7] = "600";
  again[13] = "exact,llama";
  again[19] = "-";
  const CommandResult second = Scsa(again);
  ASSERT_EQ(second.status, 0) << second.err;
  const json repeated = json::parse(second.out);
  ASSERT_EQ(repeated.size(), 2u);
  // The same saved cache and the same tokens give the same numbers.
  EXPECT_EQ(repeated[0]["arm"], "exact");
  EXPECT_EQ(repeated[1]["kl_mean"], arms["llama"]["kl_mean"]);
  EXPECT_EQ(repeated[1]["nll_delta"], arms["llama"]["nll_delta"]);
  int files = 0;
  for (const auto& entry : fs::directory_iterator(Path("states"))) {
    EXPECT_EQ(fs::last_write_time(entry.path()), times.at(entry.path()));
    ++files;
  }
  EXPECT_EQ(files, 4);

  // A damaged state is refused, not believed.
  for (const auto& [path, time] : times) fs::resize_file(path, fs::file_size(path) / 2);
  EXPECT_NE(OneError(Scsa(again)).find("is damaged: delete it"), std::string::npos);
}

TEST_F(ModelTest, BenchDecodeMeasuresSeveralTolerancesAndReportDrawsThem) {
  const CommandResult run = Scsa(
      {"bench",   "decode",      "-m",     SCSA_TEST_MODEL, "-f",   Path("text.txt"), "-c", "680",         "-n",
       "40",      "--calibrate", "8",      "--arms",        "scsa", "--crossover",    "0",  "--tolerance", "0.01,0.3",
       "--audit", "1",           "--json", Path("r.json")});
  ASSERT_EQ(run.status, 0) << run.err;
  std::ifstream file(Path("r.json"));
  const json array = json::parse(file);
  ASSERT_EQ(array.size(), 2u);
  EXPECT_EQ(array[0]["tolerance"], 0.01);
  EXPECT_EQ(array[1]["tolerance"], 0.3);
  EXPECT_GT(array[0]["rows_read"].get<double>(), array[1]["rows_read"].get<double>());
  EXPECT_LT(array[0]["attn_err_mean"].get<double>(), array[1]["attn_err_mean"].get<double>());
  EXPECT_LT(array[0]["audit_err_median"].get<double>(), array[1]["audit_err_median"].get<double>());
  for (const json& object : array) {
    SCOPED_TRACE(object["tolerance"].dump());
    // 30 layers of 3 KV heads. All heads see the same rows, so that their mean is the share of all.
    ASSERT_EQ(object["head_rows_read"].size(), 30u);
    double rows = 0.0, bytes = 0.0;
    for (int layer = 0; layer < 30; ++layer) {
      ASSERT_EQ(object["head_rows_read"][layer].size(), 3u);
      for (int head = 0; head < 3; ++head) {
        rows += object["head_rows_read"][layer][head].get<double>() / 90;
        bytes += object["head_bytes_read"][layer][head].get<double>();
      }
    }
    EXPECT_NEAR(rows, object["rows_read"].get<double>(), 1e-3);
    EXPECT_NEAR(bytes, object["bytes_read"].get<double>(), 1.0);
    // Everything is audited: 9 query heads in each layer and step.
    ASSERT_EQ(object["audit_windows"].size(), 2u);
    EXPECT_EQ(object["audit_windows"][0]["outputs"], 32 * 30 * 9);
    EXPECT_EQ(object["audit_windows"][1]["outputs"], 8 * 30 * 9);
    EXPECT_EQ(object["audit_windows"][1]["end"], 40);
  }
  const CommandResult report = Scsa({"report", Path("r.json"), "-o", Path("r.html")});
  if (report.err.find("gnuplot") != std::string::npos) GTEST_SKIP() << report.err;
  ASSERT_EQ(report.status, 0) << report.err;
  EXPECT_GT(fs::file_size(Path("r.html")), 20000u);
}

TEST_F(ModelTest, EvalFreerunJudgesWhatIsWritten) {
  WriteText("long.txt", 60);
  const CommandResult result =
      Scsa({"eval",   "freerun",      "-m",       SCSA_TEST_MODEL, "-f",          Path("long.txt"), "-c",
            "1000",   "-n",           "40",       "--starts",      "1",           "--seeds",        "1",
            "--json", Path("f.json"), "--trials", Path("t.json"),  "--tolerance", "0.001"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_NE(result.out.find("retained"), std::string::npos) << result.out;
  std::ifstream file(Path("f.json"));
  const json gates = json::parse(file);
  ASSERT_EQ(gates.size(), 6u);
  EXPECT_GT(gates[0]["rows_read"].get<double>(), 0.0);
  EXPECT_LT(gates[0]["rows_read"].get<double>(), 1.0);
  std::ifstream trial_file(Path("t.json"));
  const json trials = json::parse(trial_file);
  ASSERT_EQ(trials.size(), 2u + 2 * 5);
  // A text of the model's own making is likely to it, and less so where the choice was another's.
  EXPECT_GT(trials[0]["nll"].get<double>(), 0.0);
  EXPECT_LT(trials[0]["nll"].get<double>(), 3.0);
  EXPECT_EQ(trials[2]["question"], trials[3]["question"]);
  EXPECT_EQ(trials[2]["arm"], "exact");
  EXPECT_EQ(trials[3]["arm"], "scsa");
}

TEST_F(ModelTest, BenchDecodeRefusesWhatDoesNotFit) {
  const std::vector<std::string> base = {"bench", "decode", "-m", SCSA_TEST_MODEL, "-f", Path("text.txt"), "-c"};
  std::vector<std::string> command = base;
  command.push_back("8150");
  EXPECT_NE(OneError(Scsa(command)).find("the model's context holds 8192"), std::string::npos);
  command.back() = "4000";
  const std::string error = OneError(Scsa(command));
  EXPECT_NE(error.find("the text has "), std::string::npos) << error;
  EXPECT_NE(error.find("4147 are needed"), std::string::npos) << error;
}

TEST_F(ModelTest, BenchPrefillMeasuresEveryArm) {
  const std::vector<std::string> base = {"bench", "prefill", "-m", SCSA_TEST_MODEL, "-f", Path("text.txt"), "-t", "2"};
  std::vector<std::string> command = base;
  command.insert(command.end(), {"-c", "1100", "-n", "3", "--crossover", "600", "--quality", "--quality-steps", "4",
                                 "--prompt-tolerance", "0.05", "--json", "-"});
  const CommandResult run = Scsa(command);
  ASSERT_EQ(run.status, 0) << run.err;
  const nlohmann::json records = nlohmann::json::parse(run.out);
  ASSERT_EQ(records.size(), 4u);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const auto& record = records[i];
    EXPECT_EQ(record["arm"], (std::vector<std::string>{"llama", "exact", "scsa", "sparse"})[i]);
    EXPECT_EQ(record["context"], 1100);
    EXPECT_GT(record["ttft_s"].get<double>(), record["attention_s"].get<double>());
    EXPECT_GT(record["first_step_ms"].get<double>(), 0.0);
    // All but the last compute the prompt exactly. That one has no blocks of 1,024 rows before its last batch.
    EXPECT_LT(record["kl_prompt"].get<double>(), 1e-3);
    // Only with the sparse operator blocks are built and heads calibrated during the prompt.
    EXPECT_EQ(record["ready_s"].get<double>() > 0.0, i >= 2);
    EXPECT_EQ(record["rows_read"].is_null(), i != 3);
    // What follows is judged after exact and after sparse prompts.
    ASSERT_EQ(record["perplexity"].is_null(), i == 0 || i == 2);
    if (record["perplexity"].is_null()) continue;
    EXPECT_GT(record["perplexity"].get<double>(), 2.0);
    EXPECT_LT(record["perplexity"].get<double>(), 200.0);
    EXPECT_EQ(record["hidden"], 4);
    EXPECT_LE(record["found"].get<int>(), 4);
    EXPECT_LT(record["kl_mean"].get<double>(), 0.01);
    if (i == 1) {
      EXPECT_EQ(record["kl_mean"], 0.0);
    }
  }
  command = base;
  command.insert(command.end(), {"-c", "9000"});
  EXPECT_NE(OneError(Scsa(command)).find("use a shorter -c"), std::string::npos);
}

TEST_F(ModelTest, CaptureRecordsARunThatBenchQualityMeasures) {
  std::vector<std::string> command = {
      "capture", "-m", SCSA_TEST_MODEL, "-f",          Path("text.txt"), "-c", "600", "-n",
      "34",      "-o", Path("c.gguf"),  "--state-dir", Path("states")};
  const CommandResult first = Scsa(command);
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.err, "");
  // SmolLM2 has 30 layers.
  EXPECT_NE(first.out.find("layers 2,8,14,20,26, 34 steps from 601 cached rows on"), std::string::npos) << first.out;
  const std::uintmax_t size = fs::file_size(Path("c.gguf"));
  // K and V: 634 rows, 3 heads, 64 values of 2 bytes; Q: 34 steps, 9 heads, 64 values of 4 bytes; 5 layers; a header.
  EXPECT_NEAR(static_cast<double>(size), 5.0 * (2 * 634 * 3 * 64 * 2 + 34 * 9 * 64 * 4), 4096);

  EXPECT_NE(OneError(Scsa(command)).find("give --force"), std::string::npos);
  const auto time = fs::last_write_time(Path("c.gguf"));
  command.insert(command.end(), {"--force", "--layers", "29,2"});
  ASSERT_EQ(Scsa(command).status, 0);
  EXPECT_GT(fs::last_write_time(Path("c.gguf")), time);
  command.back() = "2,30";
  EXPECT_NE(OneError(Scsa(command)).find("no attention layer 30: choose from 0 to 29"), std::string::npos);
  command[6] = "8170";
  EXPECT_NE(OneError(Scsa(command)).find("the model's context holds 8192"), std::string::npos);
  command[6] = "4000";
  EXPECT_NE(OneError(Scsa(command)).find("4034 are needed"), std::string::npos);

  const CommandResult measured = Scsa({"bench", "quality", "--capture", Path("c.gguf"), Path("c.gguf"), "--json", "-"});
  ASSERT_EQ(measured.status, 0) << measured.err;
  const json results = json::parse(measured.out);
  ASSERT_EQ(results.size(), 2u * (5 + 3 * 3));
  for (const json& result : results) {
    SCOPED_TRACE(result.dump());
    EXPECT_EQ(result["model"], "SmolLM2-135M-Instruct.Q4_1");
    EXPECT_EQ(result["architecture"], "llama");
    EXPECT_EQ(result["layers"], "2 29");
    EXPECT_EQ(result["n_kv"], 601);
    EXPECT_EQ(result["steps"], 2);
    EXPECT_GE(result["err_mean"].get<double>(), 0.0);
    EXPECT_LE(result["err_median"].get<double>(), result["err_p99"].get<double>());
  }
  EXPECT_EQ(results[0]["method"], "fast");
  EXPECT_LT(results[0]["rows_read"].get<double>(), 1.0);
  EXPECT_LT(results[0]["err_mean"].get<double>(), 0.1);
  EXPECT_EQ(results[0]["err_mean"], results[14]["err_mean"]);

  const CommandResult csv = Scsa({"bench", "quality", "--capture", Path("c.gguf"), "--csv"});
  EXPECT_EQ(std::count(csv.out.begin(), csv.out.end(), '\n'), 15) << csv.out;

  // Too few steps to measure anything; a model is no capture.
  command[6] = "600";
  command[8] = "32";
  command.back() = "2";
  ASSERT_EQ(Scsa(command).status, 0);
  EXPECT_NE(OneError(Scsa({"bench", "quality", "--capture", Path("c.gguf")})).find("has 32 steps"), std::string::npos);
  EXPECT_NE(OneError(Scsa({"bench", "quality", "--capture", SCSA_TEST_MODEL})).find("no capture"), std::string::npos);
}

TEST_F(ModelTest, ACutOffModelIsOneLine) {
  const std::string path = Path("cut.gguf");
  fs::copy_file(SCSA_TEST_MODEL, path);
  for (const std::uintmax_t size : {fs::file_size(path) / 2, std::uintmax_t{100000}, std::uintmax_t{10}}) {
    fs::resize_file(path, size);
    const std::string error = OneError(Scsa({"run", "-m", path, "-p", "q"}));
    EXPECT_NE(error.find("cut off"), std::string::npos) << error;
  }
}

TEST_F(ModelTest, RunStreamsAnAnswerAndOneLineOfFigures) {
  const std::vector<std::string> command = {"run", "-m", SCSA_TEST_MODEL, "-f", Path("short.txt"), "-p", "Who signed?",
                                            "-n",  "12"};
  const CommandResult result = Scsa(command, {"SCSA_CROSSOVER=0", "SCSA_CALIBRATE=4", "SCSA_AUDIT=0.5"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_GT(result.out.size(), 1u);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  for (const char* part : {"tok/s", "rows read ", "measured error ", "plan build ", "4 prompt rows calibrated on"}) {
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  }

  std::vector<std::string> exact = command;
  exact.insert(exact.end(), {"--mode", "exact", "--json"});
  const CommandResult figures = Scsa(exact);
  ASSERT_EQ(figures.status, 0) << figures.err;
  EXPECT_EQ(figures.err, "");
  const json object = json::parse(figures.out);
  EXPECT_FALSE(object["answer"].get<std::string>().empty());
  EXPECT_GT(object["prompt_tokens"].get<int>(), 300);
  EXPECT_LE(object["answer_tokens"].get<int>(), 12);
  EXPECT_TRUE(object["rows_read"].is_null());
}

TEST_F(ModelTest, CalibratedThresholdsTakeThePlaceOfTheWindow) {
  const std::string taus = Path("taus.json");
  const std::vector<std::string> calibrate = {
      "calibrate", "-m",          SCSA_TEST_MODEL, "-f",          Path("text.txt"), "-c", "700", "-n",
      "4",         "--tolerance", "0.02",          "--state-dir", Path("states"),   "-o", taus};
  const CommandResult written = Scsa(calibrate);
  ASSERT_EQ(written.status, 0) << written.err;
  EXPECT_EQ(written.out, "");
  EXPECT_EQ(written.err.rfind("scsa: 30 of 30 layers calibrated on 4 steps after 700 tokens", 0), 0u) << written.err;
  json file = json::parse(std::ifstream(taus));
  EXPECT_EQ(file["format"], "scsa-taus");
  EXPECT_EQ(file["preset"], "fast");
  EXPECT_EQ(file["tolerance"], 0.02);
  EXPECT_EQ(file["taus"].size(), 90u);  // 30 layers, 3 KV heads
  EXPECT_EQ(file["model"]["architecture"], "llama");
  EXPECT_EQ(file["model"]["layers"], 30);
  EXPECT_EQ(file["model"]["q_heads"], 9);
  EXPECT_EQ(file["model"]["kv_heads"], 3);
  EXPECT_EQ(file["model"]["head_dim"], 64);
  EXPECT_EQ(file["model"]["metadata_hash"].get<std::string>().size(), 16u);

  const std::vector<std::string> run = {
      "run", "-m",     SCSA_TEST_MODEL, "-f", Path("short.txt"), "-p", "Who signed?", "-n",
      "6",   "--json", "--taus",        taus, "--audit",         "1"};
  const CommandResult answered = Scsa(run, {"SCSA_CROSSOVER=0"});
  ASSERT_EQ(answered.status, 0) << answered.err;
  const json figures = json::parse(answered.out);
  EXPECT_EQ(figures["taus"], taus);
  EXPECT_EQ(figures["calibration_steps"], 0);
  EXPECT_TRUE(figures["exact_ms_median"].is_null());  // the first token was sparse already
  EXPECT_GT(figures["sparse_ms_median"].get<double>(), 0.0);
  EXPECT_EQ(figures["crossover"], 0);
  EXPECT_EQ(figures["crossover_measured"], false);
  EXPECT_LT(figures["rows_read"].get<double>(), 1.0);
  // Every output of the sparse steps; the last 256 of each layer.
  EXPECT_EQ(figures["error_samples"], figures["answer_tokens"].get<int>() * 30 * 9);
  EXPECT_LE(figures["error_median_low"], figures["error_median"]);
  EXPECT_LE(figures["error_median"], figures["error_median_high"]);
  EXPECT_GT(figures["error_median"].get<double>(), 0.0);
  EXPECT_LT(figures["error_median"].get<double>(), 0.1);
  EXPECT_GT(figures["error_seconds"].get<double>(), 0.0);

  const CommandResult measured = Scsa({"bench",       "decode",
                                       "-m",          SCSA_TEST_MODEL,
                                       "-f",          Path("text.txt"),
                                       "-c",          "700",
                                       "-n",          "4",
                                       "--calibrate", "8",
                                       "--arms",      "scsa",
                                       "--crossover", "0",
                                       "--state-dir", Path("states"),
                                       "--json",      "-",
                                       "--taus",      taus});
  ASSERT_EQ(measured.status, 0) << measured.err;
  const json arm = json::parse(measured.out)[0];
  EXPECT_EQ(arm["taus"], taus);
  EXPECT_EQ(arm["tolerance"].get<float>(), 0.02f);
  EXPECT_EQ(arm["calibration_steps"], 0);
  EXPECT_TRUE(arm["calibration_ms_median"].is_null());
  EXPECT_EQ(arm["sparse_calls"], 120);
  EXPECT_LT(arm["rows_read"].get<double>(), 1.0);

  // Of another model.
  file["model"]["metadata_hash"] = "0123456789abcdef";
  std::ofstream(taus) << file;
  EXPECT_NE(OneError(Scsa(run)).find("metadata_hash 0123456789abcdef, here it is "), std::string::npos);
  file["model"]["architecture"] = "qwen2";
  std::ofstream(taus) << file;
  EXPECT_NE(OneError(Scsa(run)).find("architecture qwen2, here it is llama"), std::string::npos);
}

TEST_F(ModelTest, CalibrateRefusesATextThatIsTooShort) {
  const std::string error = OneError(
      Scsa({"calibrate", "-m", SCSA_TEST_MODEL, "-f", Path("text.txt"), "-c", "5000", "-o", Path("taus.json")}));
  EXPECT_NE(error.find("5032 are needed (context 5000 + 32 steps)"), std::string::npos) << error;
  // An empty standard input.
  EXPECT_NE(OneError(Scsa({"calibrate", "-m", SCSA_TEST_MODEL, "-o", Path("taus.json")})).find("632 are needed"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(Path("taus.json")));
}

TEST_F(ModelTest, RunRefusesADocumentBeyondTheContext) {
  std::ofstream text(Path("long.txt"));
  for (int i = 0; i < 10000; ++i) text << "word ";
  text.close();
  const std::string error = OneError(Scsa({"run", "-m", SCSA_TEST_MODEL, "-f", Path("long.txt"), "-p", "q"}));
  EXPECT_NE(error.find("the model's context holds 8192"), std::string::npos) << error;
}

TEST_F(ModelTest, ExecLoadsThePluginIntoAnUnmodifiedProgram) {
  const CommandResult result = Scsa({"exec", "--mode", "exact", "--stats", "--", SCSA_LLAMA_BENCH, "-m",
                                     SCSA_TEST_MODEL, "-p", "0", "-n", "4", "-d", "128", "-r", "1", "-fa", "on"},
                                    {"LD_PRELOAD=" SCSA_TEST_PRELOAD});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("mode exact"), std::string::npos) << result.err;
  EXPECT_NE(result.out.find("tg4"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace scsa::tool
