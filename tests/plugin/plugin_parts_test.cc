// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <vector>

#include "plugin/ggml_compat.h"
#include "plugin/mask.h"
#include "plugin/options.h"

namespace scsa::plugin {
namespace {

constexpr std::uint16_t kZero = 0x0000;
constexpr std::uint16_t kMinusZero = 0x8000;
constexpr std::uint16_t kHidden = 0xFC00;
constexpr std::uint16_t kOne = 0x3C00;
constexpr std::uint16_t kPlusInfinity = 0x7C00;

TEST(MaskToBitmap, SetsTheBitsOfVisibleRowsAtEveryLength) {
  std::mt19937 random(7);
  for (std::int64_t n : {1, 7, 8, 31, 63, 64, 65, 100, 127, 128, 200, 768}) {
    std::vector<std::uint16_t> mask(static_cast<std::size_t>(n));
    for (auto& x : mask) x = random() % 3 == 0 ? kHidden : random() % 2 == 0 ? kZero : kMinusZero;
    std::vector<std::uint64_t> words(static_cast<std::size_t>((n + 63) / 64), ~std::uint64_t{0});
    EXPECT_TRUE(MaskToBitmap(mask.data(), n, words.data())) << n;
    for (std::int64_t r = 0; r < static_cast<std::int64_t>(words.size()) * 64; ++r) {
      const bool expected = r < n && mask[static_cast<std::size_t>(r)] != kHidden;
      EXPECT_EQ((words[static_cast<std::size_t>(r / 64)] >> (r % 64)) & 1, expected ? 1u : 0u) << n << " row " << r;
    }
  }
}

TEST(MaskToBitmap, ReportsABiasWhereverItStands) {
  for (std::int64_t n : {5, 64, 100}) {
    for (std::int64_t at = 0; at < n; ++at) {
      for (std::uint16_t bias : {kOne, kPlusInfinity, std::uint16_t{0x7E00}, std::uint16_t{0xFBFF}}) {
        std::vector<std::uint16_t> mask(static_cast<std::size_t>(n), kHidden);
        mask[static_cast<std::size_t>(at)] = bias;
        std::vector<std::uint64_t> words(2);
        EXPECT_FALSE(MaskToBitmap(mask.data(), n, words.data())) << n << " at " << at;
      }
    }
  }
}

TEST(ParseCacheName, KnowsKeysAndValuesOfALayer) {
  EXPECT_EQ(ParseCacheName("cache_k_l0").kind, CacheName::Kind::kKey);
  EXPECT_EQ(ParseCacheName("cache_k_l17").layer, 17);
  EXPECT_EQ(ParseCacheName("cache_v_l3").kind, CacheName::Kind::kValue);
  EXPECT_EQ(ParseCacheName("cache_v_l3").layer, 3);
  EXPECT_EQ(ParseCacheName("cache_swa_k_l12").kind, CacheName::Kind::kKey);
  for (const char* name : {"", "cache_k_l", "cache_r_l0", "cache_s_l0", "k_l0", "cache_k_l0 (view)", "cache_l0", "l0",
                           "blk.0.attn_k.weight"}) {
    EXPECT_EQ(ParseCacheName(name).kind, CacheName::Kind::kNone) << name;
  }
}

TEST(SetOption, TakesEveryAllowedValue) {
  Options o;
  EXPECT_EQ(SetOption("mode", "limit", &o), "");
  EXPECT_EQ(o.mode, Mode::kLimit);
  EXPECT_EQ(SetOption("preset", "seed", &o), "");
  EXPECT_EQ(SetOption("tolerance", "0.1", &o), "");
  EXPECT_FLOAT_EQ(o.tolerance, 0.1f);
  EXPECT_EQ(SetOption("calibrate", "0", &o), "");
  EXPECT_EQ(o.calibrate, 0);
  EXPECT_EQ(SetOption("crossover", "12345", &o), "");
  EXPECT_EQ(o.crossover, 12345);
  EXPECT_EQ(SetOption("crossover", "auto", &o), "");
  EXPECT_EQ(o.crossover, Options().crossover);
  EXPECT_EQ(SetOption("stats", "1", &o), "");
  EXPECT_TRUE(o.stats);
  EXPECT_EQ(SetOption("prompt_tolerance", "0.05", &o), "");
  EXPECT_FLOAT_EQ(o.prompt_tolerance, 0.05f);
  EXPECT_EQ(SetOption("prompt_tolerance", "0", &o), "");
  EXPECT_EQ(o.prompt_tolerance, 0.0f);
  EXPECT_EQ(SetOption("progress", "1", &o), "");
  EXPECT_TRUE(o.progress);
  for (const char* share : {"0", "1", "0.004", "1e-9"}) {
    EXPECT_EQ(SetOption("audit", share, &o), "");
    EXPECT_EQ(o.audit, std::atof(share));
  }
}

TEST(SetOption, ThePresetBringsItsToleranceUnlessOneWasChosen) {
  Options o;
  EXPECT_EQ(SetOption("preset", "fast", &o), "");
  EXPECT_EQ(o.config.preset, Preset::kFast);
  EXPECT_FLOAT_EQ(o.tolerance, 0.015f);
  EXPECT_EQ(SetOption("tolerance", "0.1", &o), "");
  EXPECT_EQ(SetOption("preset", "seed", &o), "");
  EXPECT_EQ(o.config.preset, Preset::kSeed);
  EXPECT_FLOAT_EQ(o.tolerance, 0.1f);
}

TEST(SetOption, TheSelectionOutlivesThePreset) {
  Options o;
  EXPECT_EQ(o.config.selection, Selection::kFlat);
  EXPECT_EQ(SetOption("selection", "hierarchical", &o), "");
  EXPECT_EQ(o.config.selection, Selection::kHierarchical);
  EXPECT_EQ(SetOption("preset", "seed", &o), "");
  EXPECT_EQ(o.config.preset, Preset::kSeed);
  EXPECT_EQ(o.config.selection, Selection::kHierarchical);
  EXPECT_TRUE(ValidateConfig(o.config).ok());
  EXPECT_EQ(SetOption("selection", "auto", &o), "");
  EXPECT_EQ(SetOption("preset", "fast", &o), "");
  EXPECT_EQ(o.config.selection, Selection::kAutomatic);
  EXPECT_EQ(SetOption("selection", "flat", &o), "");
  EXPECT_EQ(o.config.selection, Selection::kFlat);
}

TEST(SetOption, PackedRowsAreThoseOfThePresetUnlessChosen) {
  Options o;
  EXPECT_EQ(o.config.packed_format, PackedFormat::kNone);
  EXPECT_EQ(SetOption("packed", "int8", &o), "");
  EXPECT_EQ(o.config.packed_format, PackedFormat::kInt8);
  EXPECT_TRUE(ValidateConfig(o.config).ok());
  EXPECT_NE(SetOption("preset", "seed", &o).find("packs rows as q8_0 or f16"), std::string::npos);
  EXPECT_EQ(o.config.preset, Preset::kFast);
  EXPECT_EQ(SetOption("packed", "auto", &o), "");
  EXPECT_EQ(o.config.packed_format, PackedFormat::kNone);
  EXPECT_EQ(SetOption("preset", "seed", &o), "");
  EXPECT_EQ(o.config.packed_format, PackedFormat::kQ8_0);
  EXPECT_EQ(SetOption("packed", "f16", &o), "");
  EXPECT_EQ(o.config.packed_format, PackedFormat::kF16);
  for (const char* format : {"none", "int8"}) {
    EXPECT_NE(SetOption("packed", format, &o).find("packs rows as q8_0 or f16"), std::string::npos) << format;
  }
  // The choice outlives the preset.
  EXPECT_EQ(SetOption("preset", "fast", &o), "");
  EXPECT_EQ(o.config.packed_format, PackedFormat::kF16);
}

TEST(SetOption, RefusesEverythingElseAndChangesNothing) {
  const Options before;
  const std::pair<const char*, const char*> bad[] = {
      {"packed", "q4_0"},
      {"packed", ""},
      {"selection", "automatic"},
      {"mode", "fast"},
      {"mode", ""},
      {"mode", "AUTO"},
      {"preset", "fastest"},
      {"tolerance", "0"},
      {"tolerance", "1.1"},
      {"tolerance", "nan"},
      {"tolerance", "-1"},
      {"tolerance", "0.1x"},
      {"calibrate", "-1"},
      {"calibrate", "many"},
      {"calibrate", "1e3"},
      {"crossover", "-1"},
      {"crossover", "4k"},
      {"stats", "yes"},
      {"stats", "2"},
      {"calibrate", "99999"},
      {"colour", "red"},
      {"taus", "/no/such/file"},
      {"taus", "/dev/null"},
      {"audit", "-0.1"},
      {"audit", "1.5"},
      {"audit", "nan"},
      {"audit", "1e-10"},
      {"audit", "1%"},
      {"checks", "0"},
      {"max_mem", ""},
      {"max_mem", "-1"},
      {"max_mem", "M"},
      {"max_mem", "1.5G"},
      {"max_mem", "2T"},
      {"max_mem", "2GB"},
      {"max_mem", "17179869184G"},
      {"progress", "on"},
      {"prompt_tolerance", "2"},
      {"prompt_tolerance", "-0.1"},
  };
  for (const auto& [name, value] : bad) {
    Options o;
    const std::string error = SetOption(name, value, &o);
    EXPECT_NE(error, "") << name << "=" << value;
    EXPECT_EQ(error.find('\n'), std::string::npos);
    EXPECT_EQ(o.mode, before.mode);
    EXPECT_EQ(o.tolerance, before.tolerance);
    EXPECT_EQ(o.calibrate, before.calibrate);
    EXPECT_EQ(o.crossover, before.crossover);
    EXPECT_EQ(o.stats, before.stats);
    EXPECT_EQ(o.audit, before.audit);
    EXPECT_EQ(o.prompt_tolerance, before.prompt_tolerance);
    EXPECT_EQ(o.progress, before.progress);
    EXPECT_EQ(o.max_mem, before.max_mem);
    EXPECT_EQ(o.checks, before.checks);
    EXPECT_EQ(o.taus, nullptr);
  }
}

TEST(SetOption, ReadsBytes) {
  Options o;
  EXPECT_EQ(o.max_mem, UINT64_MAX);
  const std::pair<const char*, std::uint64_t> good[] = {{"0", 0},           {"1000", 1000},
                                                        {"64K", 65536},     {"512M", 536870912},
                                                        {"2G", 2147483648}, {"17179869183G", UINT64_MAX - 1073741823}};
  for (const auto& [text, bytes] : good) {
    EXPECT_EQ(SetOption("max_mem", text, &o), "");
    EXPECT_EQ(o.max_mem, bytes) << text;
  }
  EXPECT_EQ(SetOption("max_mem", "none", &o), "");
  EXPECT_EQ(o.max_mem, UINT64_MAX);
}

TEST(OptionsFromEnvironment, NamesTheVariableTheValueAndWhatIsAllowed) {
  setenv("SCSA_CALIBRATE", "often", 1);
  Options o;
  const std::string error = OptionsFromEnvironment(&o);
  unsetenv("SCSA_CALIBRATE");
  EXPECT_NE(error.find("SCSA_CALIBRATE"), std::string::npos) << error;
  EXPECT_NE(error.find("often"), std::string::npos) << error;
  EXPECT_NE(error.find("0 to 65536"), std::string::npos) << error;
}

TEST(OptionsFromEnvironment, ADeviceForWholeGraphsIsForThoseWhoAsk) {
  for (const auto& [value, cpu] : {std::pair{"", false}, {"attention", false}, {"cpu", true}}) {
    setenv("SCSA_DEVICE", value, 1);
    Options o;
    EXPECT_EQ(OptionsFromEnvironment(&o), "");
    EXPECT_EQ(o.cpu_device, cpu) << value;
  }
  setenv("SCSA_DEVICE", "gpu", 1);
  Options o;
  EXPECT_EQ(OptionsFromEnvironment(&o), "SCSA_DEVICE: \"gpu\" is not allowed; use attention or cpu");
  EXPECT_FALSE(o.cpu_device);
  unsetenv("SCSA_DEVICE");
}

class TausOption : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "/scsa_taus_option_" + std::to_string(getpid()) + ".json";
    TausFile file;
    file.config = ConfigFor(Preset::kFast);
    file.tolerance = 0.015f;
    file.taus = {{0, 0, 0.5f}};
    std::string text;
    ASSERT_TRUE(FormatTaus(file, &text).ok());
    std::ofstream(path_) << text;
  }
  void TearDown() override {
    unsetenv("SCSA_TAUS");
    std::remove(path_.c_str());
  }
  std::string path_;
};

TEST_F(TausOption, ReadsAFileAndForgetsIt) {
  Options o;
  ASSERT_EQ(SetOption("taus", path_, &o), "");
  ASSERT_NE(o.taus, nullptr);
  EXPECT_EQ(o.taus->path, path_);
  EXPECT_EQ(o.taus->file.taus.size(), 1u);
  EXPECT_EQ(TausMisfit(o), "");
  EXPECT_EQ(SetOption("taus", "", &o), "");
  EXPECT_EQ(o.taus, nullptr);
}

TEST_F(TausOption, DoesNotFitAnotherPresetOrAnotherChosenTolerance) {
  Options o;
  ASSERT_EQ(SetOption("taus", path_, &o), "");
  ASSERT_EQ(SetOption("tolerance", "0.015", &o), "");
  EXPECT_EQ(TausMisfit(o), "");
  ASSERT_EQ(SetOption("tolerance", "0.03", &o), "");
  EXPECT_NE(TausMisfit(o).find("tolerance 0.015, 0.03 is set"), std::string::npos) << TausMisfit(o);
  ASSERT_EQ(SetOption("preset", "seed", &o), "");
  EXPECT_NE(TausMisfit(o).find("preset fast, here it is seed"), std::string::npos) << TausMisfit(o);
}

TEST_F(TausOption, FitsTheSelectionThatItIsForAndAnAutomaticOne) {
  TausFile file;
  file.config = ConfigFor(Preset::kFast);
  file.config.selection = Selection::kHierarchical;
  file.taus = {{0, 0, 0.5f}};
  std::string text;
  ASSERT_TRUE(FormatTaus(file, &text).ok());
  std::ofstream(path_) << text;
  Options o;
  ASSERT_EQ(SetOption("taus", path_, &o), "");
  EXPECT_NE(TausMisfit(o).find("selection hierarchical, here it is flat"), std::string::npos) << TausMisfit(o);
  for (const char* selection : {"auto", "hierarchical"}) {
    ASSERT_EQ(SetOption("selection", selection, &o), "");
    EXPECT_EQ(TausMisfit(o), "");
  }
}

TEST_F(TausOption, ComesFromTheEnvironmentUnlessItIsBroken) {
  Options o;
  EXPECT_EQ(TausFromEnvironment(&o), "");
  EXPECT_EQ(o.taus, nullptr);
  setenv("SCSA_TAUS", path_.c_str(), 1);
  EXPECT_EQ(TausFromEnvironment(&o), "");
  ASSERT_NE(o.taus, nullptr);
  ASSERT_EQ(SetOption("preset", "seed", &o), "");
  EXPECT_NE(TausFromEnvironment(&o).find("SCSA_TAUS: \"" + path_), std::string::npos);
  EXPECT_EQ(o.taus, nullptr);
  std::ofstream(path_) << "{\"0:0\": 0.1";
  const std::string error = TausFromEnvironment(&o);
  EXPECT_NE(error.find("line 1, column 12"), std::string::npos) << error;
  EXPECT_EQ(error.find('\n'), std::string::npos);
}

TEST(ResolveGgml, RefusesAnotherVersion) {
  // This program is compiled as if it were made for version 0.
  const std::string error = ResolveGgml(reinterpret_cast<const void*>(&ggml_init));
  EXPECT_NE(error.find("built for ggml 0"), std::string::npos) << error;
  EXPECT_NE(error.find(ggml_version()), std::string::npos) << error;
}

}  // namespace
}  // namespace scsa::plugin
