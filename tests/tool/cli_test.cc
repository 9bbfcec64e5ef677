// SPDX-License-Identifier: Apache-2.0
//
// Messages and exit statuses of the program, where no model is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "command.h"

namespace scsa::tool {
namespace {

namespace fs = std::filesystem;

CommandResult Scsa(std::vector<std::string> arguments, const std::vector<std::string>& environment = {}) {
  arguments.insert(arguments.begin(), SCSA_TOOL);
  return RunCommand(arguments, environment);
}

// Exactly one line on stderr, beginning with "scsa: " and holding `part`; nothing on stdout; a failure status.
void ExpectOneLineError(const CommandResult& result, const std::string& part) {
  EXPECT_GT(result.status, 0);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_EQ(result.err.rfind("scsa: ", 0), 0u) << result.err;
  EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
}

class CliTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              (std::string("scsa_cli_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    text_ = Path("text.txt");
    std::ofstream(text_) << "Some text.\n";
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  // A file of thresholds for preset fast at tolerance 0.015, without a model.
  std::string Taus() const {
    const std::string path = Path("taus.json");
    std::ofstream(path)
        << "{\"format\": \"scsa-taus\", \"version\": 1, \"preset\": \"fast\", \"tolerance\": 0.015, \"config\": "
           "{\"cluster_size\": 8, \"block_size\": 256, \"sink\": 4, \"recent\": 96, \"packed_format\": \"none\", "
           "\"power_iterations\": 3, \"statistic\": \"mean\", \"kmeans_rounds\": 2, \"tail_shrink\": 0.5}, "
           "\"taus\": {\"0:0\": 0.1}}\n";
    return path;
  }
  // A bench command that fails at its missing model if nothing else is wrong.
  CommandResult Bench(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"bench", "decode", "-m", Path("none.gguf"), "-f", text_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Scsa(arguments);
  }

  fs::path folder_;
  std::string text_;
};

TEST_F(CliTest, VersionAndHelp) {
  const CommandResult version = Scsa({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.out.rfind("scsa ", 0), 0u) << version.out;
  for (const std::vector<std::string>& command : {std::vector<std::string>{},
                                                  {"run"},
                                                  {"calibrate"},
                                                  {"bench"},
                                                  {"bench", "decode"},
                                                  {"bench", "kernels"},
                                                  {"bench", "quality"},
                                                  {"bench", "scaling"},
                                                  {"capture"},
                                                  {"exec"}}) {
    std::vector<std::string> arguments = command;
    arguments.push_back("--help");
    const CommandResult help = Scsa(arguments);
    EXPECT_EQ(help.status, 0);
    EXPECT_EQ(help.err, "");
    if (command != std::vector<std::string>{"bench"}) {
      EXPECT_NE(help.out.find("Examples:"), std::string::npos) << help.out;
    }
  }
}

TEST_F(CliTest, UsageErrors) {
  ExpectOneLineError(Scsa({}), "subcommand is required");
  ExpectOneLineError(Scsa({"nonsense"}), "--help");
  ExpectOneLineError(Scsa({"bench", "decode", "-m", "x"}), "--file is required");
  ExpectOneLineError(Scsa({"run", "-m", "x", "-p", "q", "--mode", "fast"}), "--mode");
  ExpectOneLineError(Bench({"-n", "0"}), "--steps");
  ExpectOneLineError(Scsa({"calibrate", "-m", "x", "-f", text_}), "--out is required");
  ExpectOneLineError(Scsa({"calibrate", "-m", "x", "-f", text_, "-o", Path("t"), "-c", "100"}), "--context");
  ExpectOneLineError(Bench({"--tolerance", "x"}), "--tolerance");
  ExpectOneLineError(Bench({"--tolerance", "0.1,2"}), "--tolerance: \"2\" is not a number from");
  ExpectOneLineError(Bench({"--threads", "-1"}), "--threads");
}

TEST_F(CliTest, MissingFiles) {
  ExpectOneLineError(Bench({}), "model file not found");
  ExpectOneLineError(Scsa({"bench", "decode", "-m", "x", "-f", Path("none.txt")}), "text file not found");
  ExpectOneLineError(Scsa({"run", "-m", Path("none.gguf"), "-p", "q"}), "model file not found");
  ExpectOneLineError(Scsa({"run", "-m", "x", "-f", Path("none.txt"), "-p", "q"}), "document file not found");
  ExpectOneLineError(Scsa({"run", "-m", "x", "-p", "q", "--taus", Path("none.json")}), "thresholds file not found");
  ExpectOneLineError(Scsa({"calibrate", "-m", "x", "-f", Path("none.txt"), "-o", Path("t")}), "text file not found");
  // The text from standard input, which is empty here.
  ExpectOneLineError(Scsa({"calibrate", "-m", Path("none.gguf"), "-o", Path("t")}), "model file not found");
  EXPECT_FALSE(fs::exists(Path("t")));
}

TEST_F(CliTest, NoGguf) { ExpectOneLineError(Scsa({"run", "-m", text_, "-p", "q"}), "no GGUF"); }

TEST_F(CliTest, BadLists) {
  ExpectOneLineError(Bench({"-c", "1000,x"}), "\"x\"");
  ExpectOneLineError(Bench({"-c", "1000,,2000"}), "empty item");
  ExpectOneLineError(Bench({"-c", "3"}), "from 16");
  ExpectOneLineError(Bench({"--arms", "llama,quest"}), "unknown arm \"quest\"");
  ExpectOneLineError(Bench({"--preset", "nonsense"}), "nonsense");
}

TEST_F(CliTest, EvalFreerunErrors) {
  const auto freerun = [this](std::vector<std::string> more) {
    more.insert(more.begin(), {"eval", "freerun", "-m", Path("none.gguf"), "-f", text_});
    return Scsa(more);
  };
  ExpectOneLineError(freerun({}), "model file not found");
  ExpectOneLineError(freerun({"-c", "500"}), "from 1000");
  ExpectOneLineError(freerun({"--preset", "nonsense"}), "nonsense");
  ExpectOneLineError(freerun({"--seeds", "-1"}), "--seeds");
  ExpectOneLineError(freerun({"--seeds", "0", "--starts", "0"}), "leave nothing to measure");
  ExpectOneLineError(freerun({"--csv", "--json", "-"}), "give one of them");
  ExpectOneLineError(freerun({"--trials", Path("no_folder/t.json")}), "--trials: cannot write");
  ExpectOneLineError(Scsa({"eval"}), "subcommand");
}

TEST_F(CliTest, ReportErrors) {
  ExpectOneLineError(Scsa({"report", "-o", Path("r.html")}), "files is required");
  ExpectOneLineError(Scsa({"report", Path("none.json"), "-o", Path("r.html")}), "result file not found");
  ExpectOneLineError(Scsa({"report", text_, "-o", Path("r.html")}), "is no JSON");
  std::ofstream(Path("other.json")) << R"([{"arm": "exact"}, 3, null])";
  ExpectOneLineError(Scsa({"report", Path("other.json"), "-o", Path("r.html")}), "holds no results");
  EXPECT_FALSE(fs::exists(Path("r.html")));
}

TEST_F(CliTest, ReportWritesItsFigures) {
  if (RunCommand({"/bin/sh", "-c", "command -v gnuplot"}).status != 0) GTEST_SKIP() << "no gnuplot";
  std::ofstream(Path("r.json")) << R"([{"model": "a/B", "context": 8000, "arm": "scsa", "preset": "fast",
      "tolerance": 0.01, "tok_s": 80.0, "head_rows_read": [[0.5, 0.25], [0.1, 0.2]]}])";
  ASSERT_EQ(Scsa({"report", Path("r.json"), "-o", Path("r.html"), "--figures", Path("figures")}).status, 0);
  std::ifstream file(Path("figures/rows-read-a-b-scsa-fast-0-01-8000-tokens.svg"));
  const std::string svg((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(svg.rfind("<svg", 0), 0u);
  // What a file of its own must say.
  EXPECT_NE(svg.find("xmlns=\"http://www.w3.org/2000/svg\""), std::string::npos);
  std::ofstream(Path("taken")) << "x";
  ExpectOneLineError(Scsa({"report", Path("r.json"), "-o", Path("s.html"), "--figures", Path("taken")}), "--figures");
  EXPECT_FALSE(fs::exists(Path("s.html")));
}

TEST_F(CliTest, BenchKernelsErrors) {
  const auto kernels = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "kernels"});
    return Scsa(more);
  };
  ExpectOneLineError(kernels({"--targets", "AVX9"}), "--targets: SIMD target \"AVX9\" is not available here; choose");
  ExpectOneLineError(kernels({"--targets", "SCALAR,,AVX2"}), "empty item");
  ExpectOneLineError(kernels({"--threads", "0"}), "--threads");
  ExpectOneLineError(kernels({"--rows", "100"}), "--rows: 100 is not from 1024");
  ExpectOneLineError(kernels({"--rows", "100000000"}), "--rows: 100000000 is not from 1024");
  ExpectOneLineError(kernels({"--head-dim", "100"}), "--head-dim: head_dim is 100");
  ExpectOneLineError(kernels({"--heads", "0"}), "--heads");
  ExpectOneLineError(kernels({"--primitives", "attend,sort"}),
                     "unknown primitive \"sort\"; choose from attend, packed");
  ExpectOneLineError(kernels({"--repetitions", "0"}), "--repetitions");
  ExpectOneLineError(kernels({"--csv", "--json", "-"}), "give one of them");
  ExpectOneLineError(kernels({"--json", Path("no_folder/r.json")}), "--json: cannot write");
}

TEST_F(CliTest, BenchScalingErrors) {
  const auto scaling = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "scaling"});
    return Scsa(more);
  };
  ExpectOneLineError(scaling({"--rows", "100"}), "--rows: \"100\" is not a whole number from 1024");
  ExpectOneLineError(scaling({"--rows", "4096,x"}), "\"x\"");
  ExpectOneLineError(scaling({"--rows", "67108864", "--kv-heads", "64", "--q-heads", "64"}), "give fewer rows");
  ExpectOneLineError(scaling({"--preset", "quick"}), "unknown preset \"quick\"; choose from seed, fast");
  ExpectOneLineError(scaling({"--q-heads", "3", "--kv-heads", "2"}), "must be a multiple of kv_heads");
  ExpectOneLineError(scaling({"--tau", "1.5"}), "--tau");
  ExpectOneLineError(scaling({"--tau", "0.1", "--tolerance", "0.1"}), "give one of them");
  ExpectOneLineError(scaling({"--threads", "0"}), "--threads");
  ExpectOneLineError(scaling({"--csv", "--json", "-"}), "give one of them");
  ExpectOneLineError(scaling({"--json", folder_.string()}), "it is a folder");
  ExpectOneLineError(Scsa({"bench", "scaling", "--rows", "2048"}, {"SCSA_TARGET=AVX9"}), "SCSA_TARGET");
}

// Two short runs: results on stdout alone, nothing on stderr when it is no terminal.
TEST_F(CliTest, BenchKernelsPrintsOneLinePerCaseAndTarget) {
  const CommandResult result = Scsa({"bench", "kernels", "--primitives", "cluster-fast", "--targets", "scalar,SCALAR",
                                     "--head-dim", "32", "--repetitions", "3", "--threads", "1", "--csv"});
  if (result.status != 0) GTEST_SKIP() << result.err;  // the portable target has another name here
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(result.out.rfind("primitive,format,heads,cache,simd_target,rows_s,", 0), 0u) << result.out;
  EXPECT_NE(result.out.find("\ncluster-fast,f16,,any,SCALAR,"), std::string::npos) << result.out;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 2);
}

TEST_F(CliTest, BenchScalingWritesJson) {
  const std::string json = Path("scaling.json");
  const CommandResult result = Scsa({"bench", "scaling", "--rows", "2048,1024", "--q-heads", "2", "--kv-heads", "1",
                                     "--head-dim", "32", "--repetitions", "2", "--json", json});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(result.out.rfind("preset seed, 2 query heads, 1 KV heads, head size 32, f16 | ", 0), 0u) << result.out;
  EXPECT_NE(result.out.find("\nflat          1024  "), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("\nhierarchical  2048  "), std::string::npos) << result.out;
  std::ifstream file(json);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(text.rfind("[\n  {\n    \"rows\": 1024,", 0), 0u) << text;
  EXPECT_NE(text.find("\"mode\": \"flat\""), std::string::npos);
  EXPECT_NE(text.find("\"mode\": \"hierarchical\""), std::string::npos);
}

TEST_F(CliTest, PlacesThatCannotBeWritten) {
  ExpectOneLineError(Bench({"--json", Path("no_folder/r.json")}), "--json: cannot write");
  ExpectOneLineError(Bench({"--json", folder_.string()}), "it is a folder");
  ExpectOneLineError(Bench({"--state-dir", text_}), "--state-dir: cannot create");
  ExpectOneLineError(Bench({"--csv", "--json", "-"}), "give one of them");
  ExpectOneLineError(Scsa({"calibrate", "-m", "x", "-f", text_, "-o", Path("no_folder/t.json")}), "-o: cannot write");
  EXPECT_FALSE(fs::exists(Path("r.json")));
}

TEST_F(CliTest, CaptureErrors) {
  const auto capture = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"capture", "-m", Path("none.gguf"), "-f", text_, "-o", Path("c.gguf")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Scsa(arguments);
  };
  ExpectOneLineError(capture({}), "model file not found");
  ExpectOneLineError(capture({"--layers", "2,x"}), "--layers: \"x\"");
  ExpectOneLineError(capture({"-c", "100"}), "--context");
  ExpectOneLineError(capture({"-n", "0"}), "--steps");
  ExpectOneLineError(capture({"-o", Path("no_folder/c.gguf")}), "-o: cannot write");
  ExpectOneLineError(capture({"-o", text_}), "give --force to replace it");
  ExpectOneLineError(capture({"-o", text_, "--force"}), "model file not found");
  ExpectOneLineError(capture({"-f", Path("none.txt")}), "text file not found");
  ExpectOneLineError(Scsa({"capture", "-m", "x", "-f", text_}), "--output is required");
}

TEST_F(CliTest, BenchQualityErrors) {
  ExpectOneLineError(Scsa({"bench", "quality"}), "--capture is required");
  ExpectOneLineError(Scsa({"bench", "quality", "--capture", Path("none.gguf")}), "capture file not found");
  ExpectOneLineError(Scsa({"bench", "quality", "--capture", text_}), "no GGUF");
  ExpectOneLineError(Scsa({"bench", "quality", "--capture", text_, "--tolerance", "0"}), "--tolerance");
  ExpectOneLineError(Scsa({"bench", "quality", "--capture", text_, "--csv", "--json", "-"}), "give one of them");
  ExpectOneLineError(Scsa({"bench", "quality", "--capture", text_, "--json", Path("no_folder/r.json")}),
                     "--json: cannot write");
}

TEST_F(CliTest, ThresholdsThatDoNotFitTheCommandLine) {
  const std::string taus = Taus();
  // Nothing is wrong with them as such: the missing model is.
  ExpectOneLineError(Bench({"--taus", taus}), "model file not found");
  ExpectOneLineError(Bench({"--taus", taus, "--preset", "fast", "--tolerance", "0.015"}), "model file not found");
  ExpectOneLineError(Bench({"--taus", taus, "--preset", "seed"}), "preset fast, here it is seed: use preset fast");
  ExpectOneLineError(Bench({"--taus", taus, "--tolerance", "0.02"}), "for tolerance 0.015, --tolerance is 0.02");
  ExpectOneLineError(Scsa({"run", "-m", "x", "-p", "q", "--taus", taus, "--preset", "seed"}), "use preset fast");
  ExpectOneLineError(Bench({"--taus", text_}), "--taus: " + text_ + ": taus JSON, line 1, column 1: expected '{'");
}

TEST_F(CliTest, ThresholdsFromTheEnvironmentThatAreBrokenAreAWarning) {
  const CommandResult result = Scsa({"run", "-m", text_, "-p", "q"}, {"SCSA_TAUS=" + text_});
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.err.rfind("scsa: SCSA_TAUS: \"" + text_ + "\": taus JSON, line 1", 0), 0u) << result.err;
  EXPECT_NE(result.err.find("; calibrating instead\nscsa: " + text_ + " is no GGUF"), std::string::npos) << result.err;
}

TEST_F(CliTest, PluginThatIsNotThere) {
  ExpectOneLineError(Scsa({"run", "-m", text_, "-p", "q"}, {"SCSA_PLUGIN=" + Path("none.so")}), "SCSA_PLUGIN names");
  ExpectOneLineError(Scsa({"run", "-m", text_, "-p", "q"}, {"SCSA_PLUGIN=" + text_}), "cannot load");
}

TEST_F(CliTest, PluginThatRefusesItsEnvironment) {
  ExpectOneLineError(Scsa({"run", "-m", text_, "-p", "q"}, {"SCSA_TOLERANCE=banana"}), "SCSA_TOLERANCE");
}

TEST_F(CliTest, ExecSetsTheEnvironment) {
  const std::string plugin = Path("plugin.so");
  std::ofstream(plugin) << "not a library: the loader says so and goes on";
  const CommandResult result =
      Scsa({"exec", "--mode", "exact", "--tolerance", "0.01", "--stats", "--taus", Taus(), "--", "/bin/sh", "-c",
            "echo $SCSA_MODE $SCSA_TOLERANCE $SCSA_STATS $SCSA_TAUS $GGML_BACKEND_PATH; echo \"$1\"", "sh", "--mode"},
           {"SCSA_PLUGIN=" + plugin, "SCSA_MODE=off"});
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out, "exact 0.01 1 " + Taus() + " " + plugin + "\n--mode\n");
}

TEST_F(CliTest, ExecKeepsPreloadsAndPassesTheStatusOn) {
  const CommandResult result =
      Scsa({"exec", "--", "/bin/sh", "-c", "echo $LD_PRELOAD; exit 7"}, {"LD_PRELOAD=" SCSA_TEST_PRELOAD});
  EXPECT_EQ(result.status, 7);
  EXPECT_EQ(result.out.rfind(SCSA_TEST_PRELOAD ":/", 0), 0u) << result.out;
  EXPECT_NE(result.out.find("/libggml-scsa.so\n"), std::string::npos) << result.out;
}

TEST_F(CliTest, ExecErrors) {
  ExpectOneLineError(Scsa({"exec"}), "give a program after --");
  ExpectOneLineError(Scsa({"exec", "--"}), "give a program after --");
  ExpectOneLineError(Scsa({"exec", "--", Path("no_program")}), "not found");
  ExpectOneLineError(Scsa({"exec", "--", text_}), "cannot start");
  ExpectOneLineError(Scsa({"exec", "--taus", text_, "--", "/bin/true"}), "--taus: " + text_);
  ExpectOneLineError(Scsa({"exec", "--mode", "fast", "--", "/bin/true"}), "--mode");
  ExpectOneLineError(Scsa({"exec", "--", "/bin/true"}, {"SCSA_PLUGIN=" + Path("none.so")}), "SCSA_PLUGIN names");
}

}  // namespace
}  // namespace scsa::tool
