// SPDX-License-Identifier: Apache-2.0
#include "text.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "decode_bench.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

std::string MessageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const ToolError& e) {
    return e.what();
  }
  return "";
}

TEST(SplitList, DropsBlanksAroundItems) {
  EXPECT_EQ(SplitList("a, b ,c", "-x"), (std::vector<std::string>{"a", "b", "c"}));
}

TEST(SplitList, RejectsEmptyItems) {
  for (const char* text : {"", ",", "a,", ",a", "a,,b"}) {
    EXPECT_NE(MessageOf([&] { SplitList(text, "-x"); }).find("-x: empty item"), std::string::npos) << text;
  }
}

TEST(ParseIntList, SortsAndDropsRepeats) {
  EXPECT_EQ(ParseIntList("8000,1000,8000,4000", "-c", 1, 10000), (std::vector<int>{1000, 4000, 8000}));
}

TEST(ParseIntList, NamesTheBadItem) {
  for (const char* item : {"x", "12x", "1.5", "0", "10001", "-3", "99999999999999"}) {
    const std::string message = MessageOf([&] { ParseIntList(std::string("5,") + item, "-c", 1, 10000); });
    EXPECT_NE(message.find(std::string("\"") + item + "\""), std::string::npos) << item << ": " << message;
    EXPECT_NE(message.find("from 1 to 10000"), std::string::npos) << message;
  }
}

TEST(ParseArms, KeepsTheGivenOrder) {
  EXPECT_EQ(ParseArms("limit,llama-q8,exact"), (std::vector<Arm>{Arm::kLimit, Arm::kLlamaQ8, Arm::kExact}));
  EXPECT_EQ(ParseArms("scsa-unchecked,scsa"), (std::vector<Arm>{Arm::kScsaUnchecked, Arm::kScsa}));
}

TEST(ParseArms, RejectsUnknownAndRepeatedOnes) {
  EXPECT_NE(MessageOf([] { ParseArms("llama,quest"); }).find("\"quest\""), std::string::npos);
  EXPECT_NE(MessageOf([] { ParseArms("scsa,exact,scsa"); }).find("twice"), std::string::npos);
}

TEST(OneLine, JoinsLines) {
  EXPECT_EQ(OneLine("one\ntwo\n\nthree\n"), "one; two; three");
  EXPECT_EQ(OneLine("one"), "one");
}

TEST(ReadFile, ReadsBytesAndReportsWhatItCannotRead) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "scsa_read_file";
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "a.txt").string();
  const std::string content("a\0b\r\n", 5);
  std::ofstream(path, std::ios::binary) << content;
  EXPECT_EQ(ReadFile(path, "text"), content);
  EXPECT_NE(MessageOf([&] { ReadFile((folder / "none").string(), "text"); }).find("not found"), std::string::npos);
  EXPECT_NE(MessageOf([&] { ReadFile(folder.string(), "text"); }).find("is a folder"), std::string::npos);
  std::ofstream(path, std::ios::binary | std::ios::trunc).close();
  EXPECT_NE(MessageOf([&] { ReadFile(path, "text"); }).find("is empty"), std::string::npos);
  std::filesystem::remove_all(folder);
}

TEST(DecodeBenchOptions, CountsTheTokensOfARun) {
  DecodeBenchOptions options;
  options.steps = 96;
  options.calibrate = 32;
  EXPECT_EQ(options.WarmupSteps(), 32 + 17);
  EXPECT_EQ(options.TokensNeeded(8000), 8000 + 32 + 17 + 96 + 2);
  options.crossover = "auto";
  EXPECT_EQ(options.WarmupSteps(), 32 + 17);
  options.crossover = "0";
  EXPECT_EQ(options.WarmupSteps(), 32);
  EXPECT_EQ(options.TokensNeeded(8000), 8000 + 32 + 96 + 2);
  options.calibrate = 0;
  EXPECT_EQ(options.WarmupSteps(), 8);
}

TEST(ParseNumberList, KeepsTheOrderAndRefusesTheRest) {
  EXPECT_EQ(ParseNumberList("0.05, 0.01,1e-1", "--tolerance", 0.0, 1.0), (std::vector<double>{0.05, 0.01, 0.1}));
  for (const char* bad : {"x", "0.5x", "nan", "-0.1", "2", "", "0.1,,0.2", "0.1,0.10"}) {
    EXPECT_THROW(ParseNumberList(bad, "--tolerance", 0.0, 1.0), ToolError) << bad;
  }
}

}  // namespace
}  // namespace scsa::tool
