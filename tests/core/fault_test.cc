// SPDX-License-Identifier: Apache-2.0
//
// Every allocation of a Layer's life fails once, and all from it on: answers are then the exact ones or those of a
// layer that never failed, counters say so, and with memory again the layer is what it would have been.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "scsa/layer.h"
#include "scsa/state.h"
#include "tests/core/short_memory.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::ShortMemory;
using test::SyntheticCache;

constexpr std::int64_t kSealed = 72;  // rows from which the block [4, 64) is sealed
constexpr std::int64_t kRows = 240;

struct Fault {
  Preset preset;
  int n_threads;
  bool for_good;
  Selection selection = Selection::kFlat;
};

Config SmallBlocks(const Fault& fault) {
  Config config = ConfigFor(fault.preset);
  config.block_size = 64;
  config.cluster_size = fault.preset == Preset::kFast ? 8 : 32;
  config.rebuild_interval = 60;
  config.recent = 8;
  config.selection = fault.selection;
  return config;
}

std::string NameOf(const ::testing::TestParamInfo<Fault>& info) {
  return std::string(PresetName(info.param.preset)) +
         (info.param.selection == Selection::kHierarchical ? "_hierarchical" : "") + "_threads" +
         std::to_string(info.param.n_threads) + (info.param.for_good ? "_for_good" : "_once");
}

class FaultTest : public ::testing::TestWithParam<Fault> {
 protected:
  std::unique_ptr<Layer> NewLayer(const Config& config) const {
    std::unique_ptr<Layer> layer;
    EXPECT_TRUE(Layer::Create(shape_, config, &layer).ok());
    return layer;
  }

  // Query number `query` over the first n_kv rows; the answer is in out_.
  StatusCode Attend(Layer& layer, std::size_t query, std::int64_t n_kv, Verify verify = Verify::kSample) {
    const OutView view{out_.data(), std::int64_t{shape_.q_heads} * shape_.head_dim, shape_.head_dim};
    return layer
        .Attend(test::ViewQueries(queries_[query], shape_), cache_.View(n_kv), {}, params_, verify,
                GetParam().n_threads, *workspace_, view)
        .code();
  }
  std::vector<float> Exact(std::size_t query, std::int64_t n_kv) const {
    std::vector<float> exact;
    const OutView view = test::ViewOut(exact, shape_);
    Workspace workspace;
    EXPECT_TRUE(ExactAttention(shape_, test::ViewQueries(queries_[query], shape_), cache_.View(n_kv), {}, params_, 1,
                               workspace, view)
                    .ok());
    return exact;
  }
  // What a layer answers that never failed.
  std::vector<float> Sparse(const Config& config, std::span<const float> taus, std::size_t query, std::int64_t n_kv) {
    const auto layer = NewLayer(config);
    for (std::size_t h = 0; h < taus.size(); ++h) EXPECT_TRUE(layer->SetTau(static_cast<int>(h), taus[h]).ok());
    EXPECT_EQ(Attend(*layer, query, n_kv), StatusCode::kOk);
    EXPECT_EQ(layer->stats().sparse_steps, 1u);
    return out_;
  }
  void ExpectRecovered(Layer& layer) {
    std::vector<float> taus(layer.taus().begin(), layer.taus().end());
    // Rows enough for preset `seed` to try again.
    std::uint64_t sparse_steps = layer.stats().sparse_steps;
    ASSERT_EQ(Attend(layer, 1, kRows), StatusCode::kOk);
    EXPECT_EQ(layer.stats().sparse_steps, sparse_steps + 1);
    // From here on its history is that of a new layer.
    layer.DropPlans();
    ASSERT_EQ(Attend(layer, 2, kRows), StatusCode::kOk);
    const std::vector<float> out = out_;
    EXPECT_EQ(out, Sparse(layer.config(), taus, 2, kRows));
  }

  // Rows [begin, end) take other values, as if a program had rewritten them without a word.
  void Rewrite(std::int64_t begin, std::int64_t end, std::uint32_t seed) {
    std::vector<float> row(shape_.head_dim);
    const SyntheticCache other(shape_, end, DType::kF16, seed);
    for (std::int64_t r = begin; r < end; ++r) {
      for (int h = 0; h < shape_.kv_heads; ++h) {
        std::ranges::copy(other.DecodedKey(r, h), row.begin());
        cache_.SetKey(r, h, row.data());
        std::ranges::copy(other.DecodedValue(r, h), row.begin());
        cache_.SetValue(r, h, row.data());
      }
    }
  }

  // Runs `scenario` with the k-th allocation inside ShortMemory::In failing, for one k after another until none fails.
  template <class Scenario>
  void ForEachAllocation(Scenario&& scenario) {
    for (std::int64_t k = 1;; k += test::kAllocationStride) {
      SCOPED_TRACE("allocation " + std::to_string(k));
      ASSERT_LT(k, 3000);
      workspace_ = std::make_unique<Workspace>();
      const ShortMemory memory(k, GetParam().for_good);
      scenario(memory);
      if (HasFailure()) return;
      if (memory.failed()) continue;
      EXPECT_GT(k, 10);
      return;
    }
  }

  Shape shape_{4, 2, 32};
  LogitParams params_{.scale = 1.0f / std::sqrt(32.0f)};
  SyntheticCache cache_{shape_, kRows, DType::kF16};
  std::unique_ptr<Workspace> workspace_ = std::make_unique<Workspace>();
  std::vector<float> out_ = std::vector<float>(std::size_t{4} * 32);
  std::vector<std::vector<float>> queries_ = [this] {
    std::vector<std::vector<float>> queries;
    for (std::uint32_t i = 0; i < 20; ++i) queries.push_back(test::RandomQueries(shape_, i));
    return queries;
  }();
};

// A plan of one block, so that a step is answered by all of it or exactly. Everything is closed, so that an outdated
// plan would show.
TEST_P(FaultTest, AnswersAreExactOrThoseOfAPlanThatFits) {
  Config config = SmallBlocks(GetParam());
  config.tau_default = 1.0f;
  constexpr std::size_t kSteps = 8;
  const auto rewrites = [](std::size_t step) { return step == 3 || step == 6; };
  const auto start = [&] { Rewrite(0, kRows, 1); };
  const auto prepare = [&](std::size_t step) {
    if (rewrites(step)) Rewrite(0, kRows, static_cast<std::uint32_t>(step));
  };
  start();
  std::vector<std::vector<float>> exact;
  std::vector<std::vector<float>> sparse;
  for (std::size_t step = 0; step < kSteps; ++step) {
    prepare(step);
    exact.push_back(Exact(step, kSealed));
    sparse.push_back(Sparse(config, {}, step, kSealed));
    ASSERT_NE(exact.back(), sparse.back());
  }
  ForEachAllocation([&](const ShortMemory& memory) {
    start();
    const auto layer = NewLayer(config);
    std::uint64_t unanswered = 0;
    std::uint64_t answered_exactly = 0;
    for (std::size_t step = 0; step < kSteps; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      prepare(step);
      const Verify verify = rewrites(step) ? Verify::kFull : Verify::kSample;
      const StatusCode code = memory.In([&] { return Attend(*layer, step, kSealed, verify); });
      if (code != StatusCode::kOk) {
        EXPECT_EQ(code, StatusCode::kOutOfMemory);
        ++unanswered;
        continue;
      }
      EXPECT_TRUE(out_ == exact[step] || out_ == sparse[step]);
      answered_exactly += out_ == exact[step] ? 1 : 0;
    }
    const LayerStats stats = layer->stats();
    EXPECT_EQ(stats.exact_steps, answered_exactly);
    EXPECT_EQ(stats.sparse_steps, kSteps - unanswered - answered_exactly);
    // Two steps are exact since they found the change.
    if (answered_exactly > 2) {
      EXPECT_GT(stats.build_failures + stats.step_failures, 0u);
    }
    ExpectRecovered(*layer);
  });
}

// Several blocks at once, of which some may fail. They hold copies of their rows, all of which are opened: an outdated
// block would show, whereas a missing one is read from the cache with the same result.
TEST_P(FaultTest, BlocksThatFailAreReadFromTheCache) {
  Config config = SmallBlocks(GetParam());
  config.packed_format = PackedFormat::kF16;
  config.tau_default = 0.0f;
  constexpr std::size_t kSteps = 6;
  ForEachAllocation([&](const ShortMemory& memory) {
    Rewrite(0, kRows, 1);
    const auto layer = NewLayer(config);
    const StatusCode sealed =
        memory.In([&] { return layer->Seal(cache_.View(150), 150, GetParam().n_threads).code(); });
    EXPECT_TRUE(sealed == StatusCode::kOk || sealed == StatusCode::kOutOfMemory);
    for (std::size_t step = 0; step < kSteps; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      if (step == 2) {
        Rewrite(100, 140, 2);
        std::vector<std::int64_t> rows(40);
        std::iota(rows.begin(), rows.end(), 100);
        memory.In([&] { layer->NotifyWrites(rows); });
      }
      if (step == 4) Rewrite(10, 20, 3);
      const StatusCode code =
          memory.In([&] { return Attend(*layer, step, 160, step == 4 ? Verify::kFull : Verify::kSample); });
      if (code != StatusCode::kOk) {
        EXPECT_EQ(code, StatusCode::kOutOfMemory);
        continue;
      }
      const std::vector<float> exact = Exact(step, 160);
      EXPECT_LT(test::RelativeL2({out_.begin(), out_.end()}, {exact.begin(), exact.end()}), 1e-5);
    }
    ExpectRecovered(*layer);
  });
}

// A calibration window and the audit after it.
TEST_P(FaultTest, CalibrationCanBeDoneAgain) {
  const Config config = SmallBlocks(GetParam());
  constexpr std::size_t kWindow = 6;
  constexpr std::size_t kSteps = 10;
  const auto calibrate = [&](Layer& layer) {
    EXPECT_TRUE(layer.StartCalibration(0.1f).ok());
    for (std::size_t step = 0; step < kWindow; ++step) {
      EXPECT_EQ(Attend(layer, step, kSealed), StatusCode::kOk);
      EXPECT_EQ(out_, Exact(step, kSealed));
    }
    EXPECT_EQ(layer.calibration_steps(), static_cast<int>(kWindow));
    EXPECT_TRUE(layer.FinishCalibration().ok());
    return std::vector<float>(layer.taus().begin(), layer.taus().end());
  };
  const std::vector<float> expected = calibrate(*NewLayer(config));
  ASSERT_NE(expected, std::vector<float>(expected.size(), config.tau_default));
  ForEachAllocation([&](const ShortMemory& memory) {
    const auto layer = NewLayer(config);
    const std::vector<float> before(layer->taus().begin(), layer->taus().end());
    ASSERT_TRUE(layer->StartCalibration(0.1f).ok());
    const bool audited = memory.In([&] { return layer->SetAudit({.share = 1, .window = 4}).ok(); });
    EXPECT_EQ(layer->stats().audit_failures, audited ? 0u : 1u);
    std::uint64_t unanswered = 0;
    for (std::size_t step = 0; step < kWindow; ++step) {
      if (memory.In([&] { return Attend(*layer, step, kSealed); }) != StatusCode::kOk) {
        ++unanswered;
      } else {
        EXPECT_EQ(out_, Exact(step, kSealed));
      }
    }
    const auto recorded = static_cast<std::uint64_t>(layer->calibration_steps());
    LayerStats stats = layer->stats();
    EXPECT_EQ(stats.calibration_steps, recorded);
    EXPECT_EQ(stats.exact_steps, kWindow - unanswered - recorded);
    if (stats.exact_steps > 0) {
      EXPECT_GT(stats.build_failures + stats.step_failures, 0u);
    }
    const StatusCode finished = memory.In([&] { return layer->FinishCalibration().code(); });
    if (finished != StatusCode::kOk) {
      EXPECT_EQ(finished, StatusCode::kOutOfMemory);
      EXPECT_TRUE(layer->calibrating());
      EXPECT_TRUE(std::ranges::equal(layer->taus(), before));
      EXPECT_TRUE(layer->FinishCalibration().ok());
    }
    EXPECT_FALSE(layer->calibrating());
    if (recorded == kWindow) {
      EXPECT_TRUE(std::ranges::equal(layer->taus(), expected));
    }

    const std::uint64_t outputs = layer->stats().audited_outputs;
    for (std::size_t step = kWindow; step < kSteps; ++step) {
      const std::vector<float> taus(layer->taus().begin(), layer->taus().end());
      const std::uint64_t sparse_steps = layer->stats().sparse_steps;
      if (memory.In([&] { return Attend(*layer, step, kSealed); }) != StatusCode::kOk) continue;
      const std::vector<float> out = out_;
      const bool sparse = layer->stats().sparse_steps > sparse_steps;
      EXPECT_EQ(out, sparse ? Sparse(config, taus, step, kSealed) : Exact(step, kSealed));
    }
    stats = layer->stats();
    // Each sparse answer was audited, or a failure was counted for each of its KV heads.
    if (audited) {
      const std::uint64_t group = static_cast<std::uint64_t>(shape_.group());
      EXPECT_EQ((stats.audited_outputs - outputs) / group + stats.audit_failures,
                stats.sparse_steps * static_cast<std::uint64_t>(shape_.kv_heads));
    }

    ASSERT_TRUE(layer->SetAudit({}).ok());
    layer->DropPlans();
    EXPECT_EQ(calibrate(*layer), expected);
    ExpectRecovered(*layer);
  });
}

// Prompts: a call that fails is exact, and thresholds start over like those of a layer that never failed.
TEST_P(FaultTest, PromptsAreExactOrSparse) {
  if (GetParam().preset == Preset::kSeed) GTEST_SKIP() << "preset seed answers prompts exactly";
  constexpr std::int64_t kPromptRows = 1200;
  constexpr int kQueries = 60;
  constexpr int kCalls = 2;
  const SyntheticCache cache(shape_, kPromptRows, DType::kF16);
  std::vector<float> q;
  for (std::uint32_t i = 0; i < kQueries; ++i) {
    // Neighbours look for the same keys, so that few clusters matter.
    std::vector<float> row = test::RandomQueries(shape_, 100, 2.0f);
    const std::vector<float> own = test::RandomQueries(shape_, i, 0.5f);
    std::ranges::transform(row, own, row.begin(), std::plus<>());
    q.insert(q.end(), row.begin(), row.end());
  }
  const std::int64_t row_stride = std::int64_t{shape_.q_heads} * shape_.head_dim;
  const QueryView view{q.data(), row_stride, shape_.head_dim, kQueries};
  std::vector<float> out(q.size());
  const OutView out_view{out.data(), row_stride, shape_.head_dim};
  const auto attend = [&](Layer& layer) {
    return layer
        .AttendPrompt(view, cache.View(), {}, params_, Verify::kSample, GetParam().n_threads, *workspace_, out_view)
        .code();
  };
  // Building can fail as in the tests above.
  const auto seal = [&](Layer& layer) {
    EXPECT_TRUE(layer.Seal(cache.View(), kPromptRows, GetParam().n_threads).ok());
  };
  const auto calls = [&](Layer& layer) {
    seal(layer);
    std::vector<std::vector<float>> outs;
    EXPECT_TRUE(layer.SetPrompt({.tolerance = 0.2f, .share = 0.25}).ok());
    for (int call = 0; call < kCalls; ++call) {
      EXPECT_EQ(attend(layer), StatusCode::kOk);
      outs.push_back(out);
    }
    return outs;
  };
  const Config config = SmallBlocks(GetParam());
  const auto expected = calls(*NewLayer(config));
  Workspace workspace;
  std::vector<float> exact(q.size());
  ASSERT_TRUE(
      ExactAttention(shape_, view, cache.View(), {}, params_, 1, workspace, {exact.data(), row_stride, shape_.head_dim})
          .ok());
  ASSERT_NE(expected[1], exact);
  ForEachAllocation([&](const ShortMemory& memory) {
    const auto layer = NewLayer(config);
    seal(*layer);
    ASSERT_TRUE(layer->SetPrompt({.tolerance = 0.2f, .share = 0.25}).ok());
    for (int call = 0; call < kCalls; ++call) {
      const std::uint64_t tiles = layer->prompt_heads()[0].tiles;
      if (memory.In([&] { return attend(*layer); }) != StatusCode::kOk) continue;
      if (layer->prompt_heads()[0].tiles > tiles) {
        EXPECT_LT(test::RelativeL2({out.begin(), out.end()}, {exact.begin(), exact.end()}), 0.4);
        continue;
      }
      EXPECT_EQ(out, exact);
      EXPECT_GT(layer->stats().step_failures + layer->stats().build_failures, 0u);
    }
    EXPECT_EQ(calls(*layer), expected);
  });
}

TEST_P(FaultTest, CreatingReportsIt) {
  for (std::int64_t k = 1;; ++k) {
    const ShortMemory memory(k, GetParam().for_good);
    std::unique_ptr<State> state;
    const Config config = SmallBlocks(GetParam());
    const StatusCode code = memory.In([&] { return State::Create(3, shape_, config, &state).code(); });
    if (!memory.failed()) {
      EXPECT_EQ(code, StatusCode::kOk);
      break;
    }
    EXPECT_EQ(code, StatusCode::kOutOfMemory);
    EXPECT_EQ(state, nullptr);
  }
}

TEST_P(FaultTest, AStateFinishesTheWindowsThatAreLeft) {
  const Config config = SmallBlocks(GetParam());
  const auto recorded = [&] {
    std::unique_ptr<State> state;
    EXPECT_TRUE(State::Create(3, shape_, config, &state).ok());
    EXPECT_TRUE(state->StartCalibration(0.1f).ok());
    for (int i = 0; i < 3; ++i) {
      for (std::size_t step = 0; step < 4; ++step) {
        EXPECT_EQ(Attend(state->layer(i), step + static_cast<std::size_t>(i), kSealed), StatusCode::kOk);
      }
    }
    return state;
  };
  const auto reference = recorded();
  ASSERT_TRUE(reference->FinishCalibration().ok());
  ForEachAllocation([&](const ShortMemory& memory) {
    const auto state = recorded();
    const StatusCode code = memory.In([&] { return state->FinishCalibration().code(); });
    EXPECT_EQ(code, memory.failed() ? StatusCode::kOutOfMemory : StatusCode::kOk);
    if (memory.failed()) {
      EXPECT_TRUE(state->FinishCalibration().ok());
    }
    EXPECT_EQ(state->FinishCalibration().code(), StatusCode::kFailedPrecondition);
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(std::ranges::equal(state->layer(i).taus(), reference->layer(i).taus()));
    }
    EXPECT_EQ(state->TausToJson(), reference->TausToJson());
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, FaultTest, ::testing::Values(Fault{Preset::kFast, 2, false}), NameOf);
#if !defined(__SANITIZE_THREAD__)  // which has nothing to see on one thread
INSTANTIATE_TEST_SUITE_P(All, FaultTest,
                         ::testing::Values(Fault{Preset::kFast, 1, false}, Fault{Preset::kFast, 1, true},
                                           Fault{Preset::kFast, 1, false, Selection::kHierarchical},
                                           Fault{Preset::kFast, 1, true, Selection::kHierarchical},
                                           Fault{Preset::kSeed, 1, false}, Fault{Preset::kSeed, 1, true},
                                           Fault{Preset::kSeed, 1, false, Selection::kHierarchical},
                                           Fault{Preset::kSeed, 1, true, Selection::kHierarchical}),
                         NameOf);
#endif

}  // namespace
}  // namespace scsa
