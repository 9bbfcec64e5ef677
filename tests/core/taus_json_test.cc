// SPDX-License-Identifier: Apache-2.0
#include "core/taus_json.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace scsa {
namespace {

Status Parse(std::string_view text, std::vector<TauEntry>* entries) { return ParseTausJson(text, 3, 12, entries); }

TEST(ParseTausJson, AcceptsWhatJsonAllows) {
  std::vector<TauEntry> entries;
  ASSERT_TRUE(Parse("{\"0:0\": 0.05, \"2:11\":1e-2,\n\t\"1:3\" : 0 , \"1:4\":1,\"1:5\":2.5E-1}\r\n", &entries).ok());
  ASSERT_EQ(entries.size(), 5u);
  EXPECT_EQ(entries[0].layer, 0);
  EXPECT_EQ(entries[0].head, 0);
  EXPECT_EQ(entries[0].tau, 0.05f);
  EXPECT_EQ(entries[1].layer, 2);
  EXPECT_EQ(entries[1].head, 11);
  EXPECT_EQ(entries[1].tau, 0.01f);
  EXPECT_EQ(entries[2].tau, 0.0f);
  EXPECT_EQ(entries[3].tau, 1.0f);
  EXPECT_EQ(entries[4].tau, 0.25f);
  ASSERT_TRUE(Parse(" { } ", &entries).ok());
  EXPECT_TRUE(entries.empty());
}

TEST(ParseTausJson, NamesThePlaceOfAnError) {
  struct Case {
    const char* text;
    StatusCode code;
    const char* place;
  };
  const StatusCode malformed = StatusCode::kParseError;
  const StatusCode range = StatusCode::kInvalidArgument;
  const Case cases[] = {
      {"", malformed, "line 1, column 1:"},
      {"[]", malformed, "line 1, column 1:"},
      {"\xEF\xBB\xBF{}", malformed, "line 1, column 1:"},
      {"{", malformed, "line 1, column 2:"},
      {"{}x", malformed, "line 1, column 3:"},
      {"{\"0:0\": 0.1,}", malformed, "line 1, column 13:"},
      {"{\"0:0\": 0.1\n \"0:1\": 0.1}", malformed, "line 2, column 2:"},
      {"{\"0:0\" 0.1}", malformed, "line 1, column 8:"},
      {"{\n\"0:0\": 0.1,\n\"0:0\": 0.2}", malformed, "line 3, column 1:"},
      {"{\"0\": 0.1}", malformed, "line 1, column 4:"},
      {"{\"00:1\": 0.1}", malformed, "line 1, column 3:"},
      {"{\"0:-1\": 0.1}", malformed, "line 1, column 5:"},
      {"{\"0:1 \": 0.1}", malformed, "line 1, column 6:"},
      {"{\"0:99999999999999999999\": 0.1}", malformed, "line 1, column 5:"},
      {"{\"\\u0030:0\": 0.1}", malformed, "line 1, column 3:"},
      {"{'0:0': 0.1}", malformed, "line 1, column 2:"},
      {"{\"0:0\": null}", malformed, "line 1, column 9:"},
      {"{\"0:0\": {}}", malformed, "line 1, column 9:"},
      {"{\"0:0\": \"0.1\"}", malformed, "line 1, column 9:"},
      {"{\"0:0\": .5}", malformed, "line 1, column 9:"},
      {"{\"0:0\": 0.}", malformed, "line 1, column 11:"},
      {"{\"0:0\": 01}", malformed, "line 1, column 10:"},
      {"{\"0:0\": 1e}", malformed, "line 1, column 11:"},
      {"{\"0:0\": +1}", malformed, "line 1, column 9:"},
      {"{\"0:0\": nan}", malformed, "line 1, column 9:"},
      {"{\"0:0\": 0.1", malformed, "line 1, column 12:"},
      {"{\"0:0\": 0x1}", malformed, "line 1, column 10:"},
      {"{\"3:0\": 0.1}", range, "line 1, column 2:"},
      {"{\"0:12\": 0.1}", range, "line 1, column 2:"},
      {"{\"0:0\": 1.01}", range, "line 1, column 9:"},
      {"{\"0:0\": -0.01}", range, "line 1, column 9:"},
      {"{\"0:0\": 1e999}", range, "line 1, column 9:"},
  };
  for (const Case& test_case : cases) {
    std::vector<TauEntry> entries = {{7, 7, 0.7f}};
    const Status status = Parse(test_case.text, &entries);
    EXPECT_EQ(status.code(), test_case.code) << test_case.text;
    EXPECT_NE(status.message().find(test_case.place), std::string::npos) << test_case.text << " " << status.message();
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_EQ(entries[0].tau, 0.7f);
  }
}

TEST(ParseTausJson, RefusesHugeTexts) {
  std::vector<TauEntry> entries;
  std::string text(kMaxTausJsonBytes, ' ');
  text.front() = '{';
  text.back() = '}';
  EXPECT_TRUE(Parse(text, &entries).ok());
  text += ' ';
  EXPECT_EQ(Parse(text, &entries).code(), StatusCode::kParseError);
  // Depth cannot grow either: a nested value is refused at once.
  EXPECT_EQ(Parse("{\"0:0\":" + std::string(100000, '{'), &entries).code(), StatusCode::kParseError);
}

TEST(FormatTausJson, RoundTripsEveryFloat) {
  EXPECT_EQ(FormatTausJson({}), "{}\n");
  EXPECT_EQ(FormatTausJson(std::vector<TauEntry>{{0, 0, 0.05f}, {2, 11, 0.25f}}),
            "{\n  \"0:0\": 0.05,\n  \"2:11\": 0.25\n}\n");
  std::vector<TauEntry> entries;
  float tau = 1.0f;
  for (int head = 0; head < 12; ++head) entries.push_back({0, head, tau *= 0.37f});
  for (int head = 0; head < 12; ++head) entries.push_back({1, head, tau *= 1e-3f});
  entries.push_back({2, 0, 1.0f / 3});
  std::vector<TauEntry> parsed;
  ASSERT_TRUE(Parse(FormatTausJson(entries), &parsed).ok());
  ASSERT_EQ(parsed.size(), entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(parsed[i].layer, entries[i].layer);
    EXPECT_EQ(parsed[i].head, entries[i].head);
    EXPECT_EQ(parsed[i].tau, entries[i].tau);
  }
}

}  // namespace
}  // namespace scsa
