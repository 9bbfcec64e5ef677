// SPDX-License-Identifier: Apache-2.0
#include "scsa/taus.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace scsa {
namespace {

Status Parse(std::string_view text, std::vector<TauEntry>* entries) {
  TausFile file;
  file.taus = *entries;
  const Status status = ParseTaus(text, &file);
  EXPECT_TRUE(!status.ok() || file.bare);
  *entries = file.taus;
  return status;
}

TEST(ParseBareTaus, AcceptsWhatJsonAllows) {
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

TEST(ParseBareTaus, NamesThePlaceOfAnError) {
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
      {"{\"4096:0\": 0.1}", range, "line 1, column 2:"},
      {"{\"0:128\": 0.1}", range, "line 1, column 2:"},
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

TEST(ParseBareTaus, RefusesHugeTexts) {
  std::vector<TauEntry> entries;
  std::string text(kMaxTausBytes, ' ');
  text.front() = '{';
  text.back() = '}';
  EXPECT_TRUE(Parse(text, &entries).ok());
  text += ' ';
  EXPECT_EQ(Parse(text, &entries).code(), StatusCode::kParseError);
  // Depth cannot grow either: a nested value is refused at once.
  EXPECT_EQ(Parse("{\"0:0\":" + std::string(100000, '{'), &entries).code(), StatusCode::kParseError);
}

std::string Format(const TausFile& file) {
  std::string text;
  EXPECT_TRUE(FormatTaus(file, &text).ok());
  return text;
}

TEST(FormatBareTaus, RoundTripsEveryFloat) {
  TausFile file;
  file.bare = true;
  EXPECT_EQ(Format(file), "{}\n");
  file.taus = {{0, 0, 0.05f}, {2, 11, 0.25f}};
  EXPECT_EQ(Format(file), "{\n  \"0:0\": 0.05,\n  \"2:11\": 0.25\n}\n");
  file.taus.clear();
  float tau = 1.0f;
  for (int head = 0; head < 12; ++head) file.taus.push_back({0, head, tau *= 0.37f});
  for (int head = 0; head < 12; ++head) file.taus.push_back({1, head, tau *= 1e-3f});
  file.taus.push_back({2, 0, 1.0f / 3});
  std::vector<TauEntry> parsed;
  ASSERT_TRUE(Parse(Format(file), &parsed).ok());
  ASSERT_EQ(parsed.size(), file.taus.size());
  for (std::size_t i = 0; i < parsed.size(); ++i) {
    EXPECT_EQ(parsed[i].layer, file.taus[i].layer);
    EXPECT_EQ(parsed[i].head, file.taus[i].head);
    EXPECT_EQ(parsed[i].tau, file.taus[i].tau);
  }
}

// The format as docs/operator.md shows it, two layers of one KV head.
const std::string kFast = R"({
  "format": "scsa-taus",
  "version": 1,
  "preset": "fast",
  "tolerance": 0.015,
  "config": {"cluster_size": 8, "block_size": 256, "sink": 4, "recent": 96, "packed_format": "none", "power_iterations": 3, "statistic": "mean", "kmeans_rounds": 2, "tail_shrink": 0.5},
  "model": {"architecture": "llama", "layers": 2, "q_heads": 3, "kv_heads": 1, "head_dim": 64, "metadata_hash": "0123abcd"},
  "taus": {
    "0:0": 0.125,
    "1:0": 0.25
  }
}
)";
const std::string kSeed = R"({
  "format": "scsa-taus",
  "version": 1,
  "preset": "seed",
  "config": {"cluster_size": 128, "block_size": 4096, "sink": 4, "recent": 32, "packed_format": "q8_0", "power_iterations": 4, "statistic": "median", "rebuild_interval": 512, "rank": 2},
  "taus": {
    "3:0": 0.5,
    "3:1": 0.01
  }
}
)";

std::string Replaced(std::string text, std::string_view from, std::string_view to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(ParseTaus, ReadsPresetFastWithItsOrigin) {
  TausFile file;
  const Status status = ParseTaus(kFast, &file);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_FALSE(file.bare);
  EXPECT_EQ(file.config.preset, Preset::kFast);
  EXPECT_EQ(file.tolerance, 0.015f);
  EXPECT_EQ(file.config.cluster_size, 8);
  EXPECT_EQ(file.config.packed_format, PackedFormat::kNone);
  EXPECT_EQ(file.config.statistic, CalibrationStatistic::kMean);
  EXPECT_EQ(file.config.tail_shrink, 0.5f);
  ASSERT_TRUE(file.model.has_value());
  EXPECT_EQ(file.model->architecture, "llama");
  EXPECT_EQ(file.model->metadata_hash, "0123abcd");
  EXPECT_EQ(file.model->layers, 2);
  EXPECT_EQ(file.model->q_heads, 3);
  EXPECT_EQ(file.model->kv_heads, 1);
  EXPECT_EQ(file.model->head_dim, 64);
  ASSERT_EQ(file.taus.size(), 2u);
  EXPECT_EQ(file.taus[1].layer, 1);
  EXPECT_EQ(file.taus[1].tau, 0.25f);
  EXPECT_EQ(Format(file), kFast);
}

TEST(ParseTaus, ReadsPresetSeedWithoutModelAndTolerance) {
  TausFile file;
  const Status status = ParseTaus(kSeed, &file);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(file.config.preset, Preset::kSeed);
  EXPECT_EQ(file.config.rebuild_interval, 512);
  EXPECT_FALSE(file.tolerance.has_value());
  EXPECT_FALSE(file.model.has_value());
  EXPECT_EQ(file.taus.size(), 2u);
  EXPECT_EQ(Format(file), kSeed);
}

TEST(ParseTaus, TakesSectionsInAnyOrder) {
  std::string text = Replaced(kSeed, "  \"format\": \"scsa-taus\",\n", "");
  text = Replaced(text, "\n  }\n}", "\n  },\n  \"format\" : \"scsa-taus\"\n}");
  TausFile file;
  EXPECT_TRUE(ParseTaus(text, &file).ok());
}

TEST(ParseTaus, SaysWhatIsWrongAndWhere) {
  struct Case {
    const std::string& text;
    const char* from;
    const char* to;
    StatusCode code;
    const char* part;
  };
  const StatusCode malformed = StatusCode::kParseError;
  const StatusCode range = StatusCode::kInvalidArgument;
  const StatusCode unsupported = StatusCode::kUnsupported;
  const Case cases[] = {
      {kFast, "\"version\": 1", "\"version\": 2", unsupported, "the version is 2, 1 is expected"},
      {kFast, "\"version\": 1", "\"version\": 2, \"new\": [1, {\"a\": true}]", unsupported, "the version is 2"},
      {kFast, "\"version\": 1", "\"version\": 1.5", malformed, "line 3, column 15: expected a whole number"},
      {kFast, "  \"version\": 1,\n", "", malformed, "\"version\" is missing"},
      {kFast, "scsa-taus", "other", unsupported, "the format is \"other\""},
      {kFast, "  \"format\": \"scsa-taus\",\n", "", unsupported, "\"format\" is missing"},
      {kFast, "\"tolerance\": 0.015", "\"tolerance\": 0", range, "line 5, column 16: the tolerance must be above 0"},
      {kFast, "\"tolerance\": 0.015", "\"tolerance\": NaN", malformed, "line 5, column 16: expected a value"},
      {kFast, "\"tolerance\"", "\"colour\": 1, \"tolerance\"", malformed, "line 5, column 3: \"colour\" is not known"},
      {kFast, "\"tolerance\"", "\"version\": 1, \"tolerance\"", malformed, "line 5, column 3: this key occurs twice"},
      {kFast, "\"preset\": \"fast\"", "\"preset\": \"quick\"", range, "line 4, column 13: \"quick\" is not known"},
      {kFast, "\"preset\": \"fast\"", "\"preset\": \"seed\"", malformed, "is no parameter of preset seed"},
      {kFast, "\"cluster_size\": 8, ", "", malformed, "line 6, column 13: \"cluster_size\" is missing"},
      {kFast, "\"sink\": 4", "\"sink\": 4, \"sink\": 4", malformed, "this key occurs twice"},
      {kFast, "\"sink\": 4", "\"sink\": -4", malformed, "expected a whole number"},
      {kFast, "\"sink\": 4", "\"sink\": 256", range, "sink is 256, must be less than block_size"},
      {kFast, "\"none\"", "\"q4_0\"", range, "\"q4_0\" is not known"},
      {kFast, "\"tail_shrink\": 0.5", "\"tail_shrink\": 1.5", range, "must be in [0, 1]"},
      {kFast, "\"sink\": 4", "\"sink\": 4, \"selection\": \"automatic\"", range, "for flat or for hierarchical"},
      {kFast, "\"sink\": 4", "\"sink\": 4, \"selection\": \"deep\"", range, "\"deep\" is not known"},
      {kSeed, "\"sink\": 4", "\"sink\": 4, \"selection\": \"automatic\"", range, "for flat or for hierarchical"},
      {kSeed, "\"sink\": 4", "\"sink\": 4, \"tail_shrink\": 1", malformed, "is no parameter of preset seed"},
      {kFast, "\"layers\": 2", "\"layers\": 0", range, "must be at least 1"},
      {kFast, "\"layers\": 2", "\"layers\": 1", malformed, "layer 1 does not exist, the model has 1 layers"},
      {kFast, "\"kv_heads\": 1", "\"kv_heads\": 2", malformed,
       "layer 0 must have a threshold for each of its 2 KV heads"},
      {kFast, "\"kv_heads\": 1, ", "", malformed, "\"kv_heads\" is missing"},
      {kFast, "\"kv_heads\": 1", "\"kv_heads\": 1, \"kv_heads\": 1", malformed, "this key occurs twice"},
      {kFast, "\"llama\"", "\"ll\\u0061ma\"", malformed, "line 7, column 32: only plain ASCII"},
      {kFast, "\"llama\"", "3", malformed, "line 7, column 29: expected a string"},
      {kFast, "\"0:0\": 0.125", "\"0:1\": 0.125", malformed,
       "layer 0 must have a threshold for each of its 1 KV heads"},
      {kFast, "\"0:0\": 0.125", "\"0:0\": 1.125", range, "line 9, column 12: a tau must be in [0, 1]"},
      {kFast, "\"1:0\": 0.25", "\"0:0\": 0.25", malformed, "line 10, column 5: this key occurs twice"},
      {kFast, "\"1:0\": 0.25", "\"1:0\": null", malformed, "line 10, column 12: expected a number"},
      {kSeed, "\"3:0\": 0.5", "\"3:2\": 0.5", malformed, "layer 3 must have a threshold for each of its 3 query heads"},
      {kSeed, "\"taus\"", "\"tau\"", malformed, "\"tau\" is not known"},
      {kFast, "\"model\": {", "\"model\": {\"a\": [[[[[1]]]]], ", malformed, "nested too deeply"},
  };
  for (const Case& test_case : cases) {
    TausFile file;
    file.taus = {{7, 7, 0.7f}};
    const std::string text = Replaced(test_case.text, test_case.from, test_case.to);
    const Status status = ParseTaus(text, &file);
    EXPECT_EQ(status.code(), test_case.code) << text << status.message();
    EXPECT_NE(status.message().find(test_case.part), std::string::npos) << text << status.message();
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
    ASSERT_EQ(file.taus.size(), 1u);
    EXPECT_EQ(file.taus[0].tau, 0.7f);
  }
}

TEST(ParseTaus, RefusesEveryTruncationAndAnyDepth) {
  TausFile file;
  const std::string_view text(kFast);
  for (std::size_t size = 0; size < text.find_last_of('}'); ++size) {
    EXPECT_EQ(ParseTaus(text.substr(0, size), &file).code(), StatusCode::kParseError) << size;
  }
  for (const char open : {'[', '{'}) {
    const std::string deep = "{\"format\": " + std::string(100000, open);
    EXPECT_EQ(ParseTaus(deep, &file).code(), StatusCode::kParseError);
  }
  std::string objects = "{\"format\": ";
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  const Status status = ParseTaus(objects, &file);
  EXPECT_NE(status.message().find("nested too deeply"), std::string::npos) << status.message();
}

TEST(FormatTaus, RefusesTextThatItCouldNotReadBack) {
  TausFile file;
  ASSERT_TRUE(ParseTaus(kFast, &file).ok());
  for (const char* bad : {"a\"b", "a\\b", "a\nb", "\xC3\xA4"}) {
    file.model->architecture = bad;
    std::string text = "old";
    EXPECT_EQ(FormatTaus(file, &text).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(text, "old");
  }
}

TEST(TausSelection, IsNamedWhereItIsHierarchical) {
  TausFile file;
  ASSERT_TRUE(ParseTaus(kFast, &file).ok());
  EXPECT_EQ(file.config.selection, Selection::kFlat);
  file.config.selection = Selection::kHierarchical;
  std::string text;
  ASSERT_TRUE(FormatTaus(file, &text).ok());
  EXPECT_EQ(text, Replaced(kFast, "\"tail_shrink\": 0.5", "\"tail_shrink\": 0.5, \"selection\": \"hierarchical\""));
  TausFile back;
  ASSERT_TRUE(ParseTaus(text, &back).ok());
  EXPECT_EQ(back.config.selection, Selection::kHierarchical);
  file.config.selection = Selection::kAutomatic;
  EXPECT_EQ(FormatTaus(file, &text).code(), StatusCode::kInvalidArgument);
}

TausFile FastFile() {
  TausFile file;
  EXPECT_TRUE(ParseTaus(kFast, &file).ok());
  return file;
}

void ExpectRefused(const Status& status, const std::string& part) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

TEST(CheckTausConfig, NamesTheParameterThatDiffers) {
  const TausFile file = FastFile();
  Config config = ConfigFor(Preset::kFast);
  EXPECT_TRUE(CheckTausConfig(file, config).ok());
  // Neither changes what a threshold means.
  config.seal_delay = 7;
  config.tau_default = 0.3f;
  EXPECT_TRUE(CheckTausConfig(file, config).ok());
  config.cluster_size = 16;
  ExpectRefused(CheckTausConfig(file, config), "cluster_size 8, here it is 16: use the same parameters");
  config = ConfigFor(Preset::kFast);
  config.packed_format = PackedFormat::kF16;
  ExpectRefused(CheckTausConfig(file, config), "packed_format none, here it is f16");
  config = ConfigFor(Preset::kFast);
  config.tail_shrink = 0.25f;
  ExpectRefused(CheckTausConfig(file, config), "tail_shrink 0.5");
  config = ConfigFor(Preset::kFast);
  config.selection = Selection::kHierarchical;
  ExpectRefused(CheckTausConfig(file, config), "selection flat, here it is hierarchical");
  config.selection = Selection::kAutomatic;
  EXPECT_TRUE(CheckTausConfig(file, config).ok());
  config = ConfigFor(Preset::kFast);
  config.statistic = CalibrationStatistic::kMedian;
  ExpectRefused(CheckTausConfig(file, config), "statistic mean, here it is median");
  ExpectRefused(CheckTausConfig(file, ConfigFor(Preset::kSeed)), "preset fast, here it is seed: use preset fast");
  TausFile bare;
  bare.bare = true;
  EXPECT_TRUE(CheckTausConfig(bare, config).ok());
}

TEST(CheckTausModel, ComparesWhatBothSidesKnow) {
  const TausFile file = FastFile();
  const ModelIdentity same = *file.model;
  EXPECT_TRUE(CheckTausModel(file, same).ok());
  EXPECT_TRUE(CheckTausModel(file, {}).ok());
  ModelIdentity other = same;
  other.architecture = "qwen2";
  ExpectRefused(CheckTausModel(file, other), "architecture llama, here it is qwen2");
  other = same;
  other.metadata_hash = "ffff";
  ExpectRefused(CheckTausModel(file, other), "metadata_hash 0123abcd, here it is ffff");
  other = same;
  other.layers = 3;
  ExpectRefused(CheckTausModel(file, other), "layers 2, here it is 3");
  other = same;
  other.q_heads = 9;
  ExpectRefused(CheckTausModel(file, other), "q_heads 3, here it is 9");
  other = same;
  other.kv_heads = 3;
  ExpectRefused(CheckTausModel(file, other), "kv_heads 1, here it is 3");
  other = same;
  other.head_dim = 128;
  ExpectRefused(CheckTausModel(file, other), "head_dim 64, here it is 128");
  TausFile unknown = file;
  unknown.model.reset();
  EXPECT_TRUE(CheckTausModel(unknown, other).ok());
}

TEST(TausOfLayer, GivesAllHeadsOrNone) {
  const TausFile file = FastFile();
  const Shape shape{3, 1, 64};
  std::vector<float> taus = {9.0f};
  ASSERT_TRUE(TausOfLayer(file, 1, shape, Preset::kFast, &taus).ok());
  EXPECT_EQ(taus, std::vector<float>{0.25f});
  ExpectRefused(TausOfLayer(file, 2, shape, Preset::kFast, &taus), "a model of 2 layers, layer 2 exists here");
  ExpectRefused(TausOfLayer(file, 1, {3, 1, 32}, Preset::kFast, &taus), "head_dim 64, here it is 32");
  ExpectRefused(TausOfLayer(file, 1, {3, 3, 64}, Preset::kFast, &taus), "kv_heads 1, here it is 3");
  EXPECT_EQ(taus, std::vector<float>{0.25f});

  TausFile bare;
  bare.bare = true;
  bare.taus = {{4, 1, 0.5f}, {4, 0, 0.125f}, {5, 1, 0.5f}};
  ASSERT_TRUE(TausOfLayer(bare, 4, {2, 1, 64}, Preset::kSeed, &taus).ok());
  EXPECT_EQ(taus, (std::vector<float>{0.125f, 0.5f}));
  ExpectRefused(TausOfLayer(bare, 4, {2, 1, 64}, Preset::kFast, &taus), "layer 4 has 2 thresholds, preset fast needs");
  ExpectRefused(TausOfLayer(bare, 5, {2, 1, 64}, Preset::kFast, &taus), "each of 1 KV heads");
  ExpectRefused(TausOfLayer(bare, 5, {2, 1, 64}, Preset::kSeed, &taus), "each of 2 query heads");
  ASSERT_TRUE(TausOfLayer(bare, 6, {2, 1, 64}, Preset::kSeed, &taus).ok());
  EXPECT_TRUE(taus.empty());
}

}  // namespace
}  // namespace scsa
