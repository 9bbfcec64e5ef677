// SPDX-License-Identifier: Apache-2.0
#include "freerun_tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tool_error.h"

namespace scsa::tool {
namespace {

std::vector<llama_token> Characters(std::string_view text) { return {text.begin(), text.end()}; }

std::string Text(const std::vector<llama_token>& tokens) {
  std::string text;
  for (const llama_token token : tokens) text += static_cast<char>(token);
  return text;
}

int RunIn(std::string_view text) { return LongestPeriodicRun(Characters(text)); }

TEST(LongestPeriodicRun, CountsTheWholeRun) {
  EXPECT_EQ(RunIn(""), 0);
  EXPECT_EQ(RunIn("abcdefg"), 0);
  EXPECT_EQ(RunIn("aa"), 2);
  EXPECT_EQ(RunIn("xyaaaaz"), 4);
  EXPECT_EQ(RunIn("xabcabcabq"), 8);  // two periods and two thirds
  EXPECT_EQ(RunIn("abcdeabcd"), 0);   // less than two periods
  EXPECT_EQ(RunIn("ababcdcdcd"), 6);  // the longer one of two
  EXPECT_EQ(RunIn("abababaaaaaaab"), 7);
}

TEST(LongestPeriodicRun, FindsALongPeriod) {
  const std::string period = "the quick brown fox jumps over";
  EXPECT_EQ(RunIn("0" + period + period + "1"), static_cast<int>(2 * period.size()));
}

TEST(FoundNumbers, WantsNumbersOfTheirOwn) {
  const std::vector<std::string> expected = {"12345", "67890"};
  const auto found = [&](std::string_view answer) { return FoundNumbers(answer, expected); };
  EXPECT_EQ(found("It is 67890."), (std::vector<bool>{false, true}));
  EXPECT_EQ(found("12345,67890"), (std::vector<bool>{true, true}));
  EXPECT_EQ(found("912345 or 1234 or 123456"), (std::vector<bool>{false, false}));
  EXPECT_EQ(found(""), (std::vector<bool>{false, false}));
}

TEST(MakeRetrievalSet, AsksForNumbersThatStandInOneNeedleEach) {
  std::set<std::string> all;
  for (int haystack = 0; haystack < 3; ++haystack) {
    const RetrievalSet set = MakeRetrievalSet(7, haystack);
    ASSERT_EQ(set.questions.size(), 5u);
    ASSERT_EQ(set.needles.size(), 9u);
    EXPECT_TRUE(std::is_sorted(set.needles.begin(), set.needles.end(),
                               [](const Needle& a, const Needle& b) { return a.depth < b.depth; }));
    EXPECT_GE(set.needles.front().depth, 0.05);
    EXPECT_LE(set.needles.back().depth, 0.95);
    int tasks[3] = {};
    for (const RetrievalQuestion& question : set.questions) {
      ++tasks[static_cast<int>(question.task)];
      EXPECT_EQ(question.haystack, haystack);
      for (const std::string& number : question.expected) {
        EXPECT_EQ(number.size(), 5u);
        EXPECT_EQ(std::count_if(set.needles.begin(), set.needles.end(),
                                [&](const Needle& needle) { return needle.text.find(number) != std::string::npos; }),
                  1);
        EXPECT_EQ(question.question.find(number), std::string::npos);
        EXPECT_EQ(question.answer_start.find(number), std::string::npos);
        all.insert(number);
      }
    }
    EXPECT_EQ(tasks[0], 3);
    EXPECT_EQ(tasks[1], 1);
    EXPECT_EQ(tasks[2], 1);
  }
  EXPECT_GE(all.size(), 20u) << "haystacks have numbers of their own (21, but for a chance repetition)";
  EXPECT_EQ(MakeRetrievalSet(7, 1).needles[0].text, MakeRetrievalSet(7, 1).needles[0].text);
  EXPECT_NE(MakeRetrievalSet(7, 1).questions[0].expected, MakeRetrievalSet(8, 1).questions[0].expected);
}

TEST(MakePasskeySet, HidesAsManyAsAskedForAtEvenDepths) {
  const RetrievalSet set = MakePasskeySet(1, 4);
  ASSERT_EQ(set.questions.size(), 4u);
  ASSERT_EQ(set.needles.size(), 4u);
  std::set<std::string> numbers, names;
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_DOUBLE_EQ(set.needles[i].depth, 0.125 + 0.25 * static_cast<double>(i));
    ASSERT_EQ(set.questions[i].expected.size(), 1u);
    EXPECT_NE(set.needles[i].text.find(set.questions[i].expected[0]), std::string::npos);
    numbers.insert(set.questions[i].expected[0]);
    names.insert(set.questions[i].answer_start);
  }
  EXPECT_EQ(numbers.size(), 4u);
  EXPECT_EQ(names.size(), 4u);
  EXPECT_NE(MakePasskeySet(2, 4).questions[0].expected, set.questions[0].expected);
}

TEST(BuildHaystack, PutsNeedlesBetweenParagraphsAndCutsToLength) {
  std::string text;
  for (int i = 0; i < 20; ++i) text += "paragraph\n\n";                   // 11 tokens each
  const std::vector<Needle> needles = {{0.0, "FIRST"}, {0.5, "MIDDLE"}};  // 7 and 8 tokens
  const std::string haystack = Text(BuildHaystack(Characters, text, needles, 115));
  EXPECT_EQ(haystack.size(), 115u);
  EXPECT_EQ(haystack.rfind("FIRST\n\nparagraph\n\n", 0), 0u);
  // 100 tokens of text: the first paragraph that begins at or after the 50th is the sixth.
  EXPECT_EQ(haystack.find("MIDDLE\n\n"), 7u + 5 * 11);
  const std::vector<Needle> needle = {{0.5, "NEEDLE"}};
  EXPECT_EQ(Text(BuildHaystack(Characters, "line one\nline two\nline three\n", needle, 26)),
            "line one\nNEEDLE\n\nline two\n");
  EXPECT_EQ(Text(BuildHaystack(Characters, text, {}, 12)), "paragraph\n\np");
}

TEST(BuildHaystack, RefusesWhatDoesNotFit) {
  const std::vector<Needle> needles = {{0.5, std::string(60, 'x')}};
  EXPECT_THROW(BuildHaystack(Characters, "short", {}, 10), ToolError);
  EXPECT_THROW(BuildHaystack(Characters, std::string(1000, 'y'), needles, 100), ToolError);
}

}  // namespace
}  // namespace scsa::tool
