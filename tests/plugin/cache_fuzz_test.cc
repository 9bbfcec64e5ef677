// SPDX-License-Identifier: Apache-2.0
//
// Random sequences of operations on llama.cpp's KV cache, on contexts with and without the plugin in lockstep.
//
//   SCSA_CACHE_FUZZ_OPS=100000     operations per test (default: DefaultOps)
//   SCSA_CACHE_FUZZ_SEED=7         other operations (default: 1)
//   SCSA_CACHE_FUZZ_REPLAY=file    runs the operations of a file, as a failure prints them, in place of random ones
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>

#include "tests/plugin/cache_lockstep.h"

namespace scsa::plugin_test {
namespace {

// Preset seed shares most of its way through the plugin with preset fast.
constexpr std::uint64_t DefaultOps(Preset preset) {
  return preset == Preset::kFast ? SCSA_FUZZ_OPS : SCSA_FUZZ_OPS / 3;
}
// Contexts are made anew after so many operations: lists stay short, and contexts come and go.
constexpr int kEpisode = 400;
constexpr int kMaxTrials = 250;  // of shrinking

std::uint64_t FromEnvironment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : std::strtoull(value, nullptr, 10);
}

struct Totals {
  std::uint64_t exact = 0, sparse = 0, blocks = 0, ambiguous = 0, fresh = 0;
  double oracle = 0;
  LogitErrors logits;

  void Add(const CacheLockstep& run) {
    const AttentionOracle::Counts& c = run.counts();
    exact += c.exact;
    sparse += c.sparse;
    blocks += c.blocks;
    ambiguous += c.ambiguous;
    oracle = std::max(oracle, c.worst_error);
    fresh += static_cast<std::uint64_t>(run.fresh_comparisons());
    logits.exact = std::max(logits.exact, run.errors().exact);
    logits.opened = std::max(logits.opened, run.errors().opened);
    logits.fresh = std::max(logits.fresh, run.errors().fresh);
  }
};

struct Failure {
  std::size_t at;
  std::string message;
};

// Operations under way, for the case that llama.cpp aborts.
const std::vector<CacheOp>* g_ops = nullptr;
std::size_t g_at = 0;
void PrintOps(const char* message) {
  std::cerr << message << "\nafter the operations\n"
            << (g_ops == nullptr ? ""
                                 : ToText({g_ops->begin(), g_ops->begin() + static_cast<std::ptrdiff_t>(g_at) + 1}));
}

struct Variant {
  bool unified;
  Preset preset;
};

class CacheFuzz : public testing::TestWithParam<Variant> {
 protected:
  static void SetUpTestSuite() {
    const std::string path = testing::TempDir() + "/scsa_cache_fuzz_" + std::to_string(getpid()) + ".gguf";
    WriteFuzzModel(path);
    model_ = LoadModel(path);
    std::remove(path.c_str());
    ASSERT_NE(model_, nullptr);
    // A full cache is part of the game; llama.cpp reports it as an error.
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    ggml_set_abort_callback(PrintOps);
  }
  static void TearDownTestSuite() {
    ggml_set_abort_callback(nullptr);
    model_.reset();
  }

  static std::optional<Failure> Run(const std::vector<CacheOp>& ops, Totals* totals) {
    CacheLockstep contexts(model_.get(), GetParam().unified, GetParam().preset);
    g_ops = &ops;
    std::optional<Failure> failure;
    for (g_at = 0; g_at < ops.size() && !failure; ++g_at) {
      std::string message = contexts.Apply(ops[g_at]);
      if (!message.empty()) failure = Failure{g_at, std::move(message)};
    }
    g_ops = nullptr;
    if (totals != nullptr) totals->Add(contexts);
    return failure;
  }

  // Leaves out ever smaller parts of a failing list, as long as what is left still fails.
  static std::vector<CacheOp> Shrink(std::vector<CacheOp> ops, Failure* failure) {
    ops.resize(failure->at + 1);
    int trials = 0;
    for (std::size_t part = ops.size() / 2; part > 0; part /= 2) {
      for (std::size_t begin = 0; begin < ops.size() && trials < kMaxTrials; ++trials) {
        std::vector<CacheOp> fewer = ops;
        const auto first = fewer.begin() + static_cast<std::ptrdiff_t>(begin);
        fewer.erase(first, first + static_cast<std::ptrdiff_t>(std::min(part, ops.size() - begin)));
        if (auto smaller = Run(fewer, nullptr)) {
          fewer.resize(smaller->at + 1);
          ops = std::move(fewer);
          *failure = std::move(*smaller);
        } else {
          begin += part;
        }
      }
    }
    return ops;
  }

  static ModelPtr model_;
};
ModelPtr CacheFuzz::model_;

TEST_P(CacheFuzz, PluginAnswersAsIfItHadNoPlans) {
  const std::uint64_t seed = FromEnvironment("SCSA_CACHE_FUZZ_SEED", 1);
  const std::uint64_t n = FromEnvironment("SCSA_CACHE_FUZZ_OPS", DefaultOps(GetParam().preset));
  const char* replay = std::getenv("SCSA_CACHE_FUZZ_REPLAY");
  const auto before = LoadedPlugin::Get().Stats();
  Totals totals;
  if (replay != nullptr && *replay != '\0') {
    std::ifstream file(replay);
    ASSERT_TRUE(file) << "cannot read " << replay;
    const auto failure = Run(FromText(file), &totals);
    ASSERT_FALSE(failure) << "operation " << failure->at + 1 << ": " << failure->message;
    return;
  }
  for (std::uint64_t done = 0; done < n; done += kEpisode) {
    const auto ops = RandomOps(seed * 1000003 + done, static_cast<int>(std::min<std::uint64_t>(kEpisode, n - done)));
    if (auto failure = Run(ops, &totals)) {
      // At once, for shrinking may take longer than the test may run.
      std::cout << "seed " << seed << ", operation " << done + failure->at + 1 << ": " << failure->message << std::endl;
      const std::vector<CacheOp> few = Shrink(ops, &*failure);
      FAIL() << "Fewer operations that fail (" << failure->message << "):\n"
             << ToText(few) << "To run them again, put them into a file and name it in SCSA_CACHE_FUZZ_REPLAY.";
    }
  }
  const auto after = LoadedPlugin::Get().Stats();
  const std::uint64_t sparse_calls = after.sparse_calls - before.sparse_calls;
  const std::uint64_t built = after.rebuild_count - before.rebuild_count;
  const std::uint64_t dropped = after.dropped_blocks - before.dropped_blocks;
  std::cout << n << " operations from seed " << seed << ": " << sparse_calls << " sparse calls, " << built
            << " blocks built, " << dropped << " dropped; worst logits: exact " << totals.logits.exact << ", opened "
            << totals.logits.opened << ", " << totals.fresh << " fresh contexts " << totals.logits.fresh;
  const bool judged = GetParam().preset == Preset::kFast;
  if (judged) {
    std::cout << "; judged: " << totals.sparse << " sparse calls of " << totals.blocks << " blocks, " << totals.exact
              << " exact ones, " << totals.ambiguous << " ambiguous, worst error " << totals.oracle;
  }
  std::cout << "\n";
  EXPECT_EQ(after.failures, before.failures);
  EXPECT_EQ(after.calibration_calls, before.calibration_calls) << "the thresholds were not used";
  // That there was something to find.
  constexpr std::uint64_t kEnough = 1600;  // operations
  if (n < kEnough) return;
  EXPECT_GT(sparse_calls, n / 20);
  EXPECT_GT(built, n / 100);
  EXPECT_GT(dropped, n / 100);
  EXPECT_GT(totals.fresh, n / 100);
  if (!judged) return;
  EXPECT_GT(totals.sparse, n / 10);
  EXPECT_GT(totals.exact, n / 10);
  EXPECT_GT(totals.blocks, totals.sparse);
  EXPECT_LT(totals.ambiguous, totals.sparse / 100);
}

TEST_P(CacheFuzz, SoItDoesWithLittleMemory) {
  const std::uint64_t seed = FromEnvironment("SCSA_CACHE_FUZZ_SEED", 1);
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  // Room for a few blocks. Those of preset `seed` hold copies of their rows.
  const char* const room = GetParam().preset == Preset::kFast ? "40K" : "200K";
  plugin.Set("max_mem", room);
  const auto before = plugin.Stats();
  Totals totals;
  constexpr std::uint64_t kEpisodes = std::min(3, SCSA_FUZZ_OPS / kEpisode);
  for (std::uint64_t episode = 0; episode < kEpisodes; ++episode) {
    const auto ops = RandomOps(seed * 1000033 + episode, kEpisode);
    const auto failure = Run(ops, &totals);
    ASSERT_FALSE(failure) << failure->message << "\n" << ToText({ops.begin(), ops.begin() + failure->at + 1});
  }
  const auto after = plugin.Stats();
  plugin.Set("max_mem", "none");
  EXPECT_EQ(after.max_mem, 1024u * std::strtoull(room, nullptr, 10));
  EXPECT_EQ(after.failures, before.failures);
  EXPECT_GT(after.sparse_calls - before.sparse_calls, kEpisodes > 1 ? 100u : 10u);
  EXPECT_GT(after.refused_blocks - before.refused_blocks, 0u);
}

INSTANTIATE_TEST_SUITE_P(Variants, CacheFuzz,
                         testing::Values(Variant{true, Preset::kFast}, Variant{false, Preset::kFast},
                                         Variant{true, Preset::kSeed}, Variant{false, Preset::kSeed}),
                         [](const auto& variant) {
                           return std::string(variant.param.unified ? "Unified" : "PerSequence")
                               .append(variant.param.preset == Preset::kFast ? "Fast" : "Seed");
                         });

}  // namespace
}  // namespace scsa::plugin_test
