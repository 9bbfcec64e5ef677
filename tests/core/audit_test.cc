// SPDX-License-Identifier: Apache-2.0
//
// The audit of a layer: its samples against errors worked out here, its confidence interval against the truth, and what
// it does when the data change.
#include "scsa/audit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "core/calibration.h"
#include "scsa/layer.h"
#include "scsa/state.h"
#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using test::SyntheticCache;
using test::Vector;

Config ConfigOf(Preset preset) {
  Config config = ConfigFor(preset);
  config.block_size = preset == Preset::kFast ? 64 : 256;
  if (preset == Preset::kSeed) {
    config.cluster_size = 16;
    config.rebuild_interval = 64;
  }
  return config;
}

// A layer over a synthetic cache, one query row per step, with a visible row more at each step.
class Stream {
 public:
  Stream(const Shape& layer_shape, const Config& config, std::int64_t n_rows, std::int64_t first_n_kv)
      : shape(layer_shape), cache(layer_shape, n_rows, DType::kF16), n_kv(first_n_kv) {
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    EXPECT_TRUE(Layer::Create(shape, config, &layer).ok());
  }

  void Step(const std::vector<float>& queries, int n_threads = 1, const VisibleSets& visible = {}) {
    q = queries;
    ++n_kv;
    const OutView view = test::ViewOut(out, shape);
    ASSERT_TRUE(layer
                    ->Attend(test::ViewQueries(q, shape), cache.View(n_kv), visible, params, Verify::kNone, n_threads,
                             workspace, view)
                    .ok());
  }
  // Errors of the last step's outputs, by the exact kernel and arithmetic of this file.
  std::vector<float> Errors() {
    std::vector<float> exact;
    const OutView view = test::ViewOut(exact, shape);
    EXPECT_TRUE(
        ExactAttention(shape, test::ViewQueries(q, shape), cache.View(n_kv), {}, params, 1, workspace, view).ok());
    std::vector<float> errors;
    for (int h = 0; h < shape.q_heads; ++h) {
      const auto head = [&](const std::vector<float>& x) {
        return test::ToDouble(x.data() + std::int64_t{h} * shape.head_dim, shape.head_dim);
      };
      errors.push_back(static_cast<float>(test::RelativeL2(head(out), head(exact))));
    }
    return errors;
  }

  Shape shape;
  LogitParams params;
  SyntheticCache cache;
  std::int64_t n_kv;
  std::unique_ptr<Layer> layer;
  Workspace workspace;
  std::vector<float> q;
  std::vector<float> out;
};

// Queries that wander, so that the errors of neighbouring steps go together as those of a text do.
class WanderingQueries {
 public:
  WanderingQueries(const Shape& shape, std::uint32_t seed, float size) : random_(seed), size_(size) {
    q_.resize(std::size_t{1} * shape.q_heads * shape.head_dim);
    for (float& x : q_) x = size_ * normal_(random_);
  }
  const std::vector<float>& Next() {
    constexpr float kKept = 0.9f;
    const float fresh = size_ * std::sqrt(1 - kKept * kKept);
    for (float& x : q_) x = kKept * x + fresh * normal_(random_);
    return q_;
  }

 private:
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  float size_;
  std::vector<float> q_;
};

class AuditTest : public ::testing::TestWithParam<Preset> {};

TEST_P(AuditTest, SamplesAreTheTrueErrors) {
  test::OnEveryTarget([&] {
    const Shape shape{6, 2, 32};
    Stream stream(shape, ConfigOf(GetParam()), 600, 560);
    const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -3.0f};
    stream.params.sinks = sinks.data();
    // Hidden rows behind the plans of either preset.
    std::vector<bool> visible(600, true);
    for (std::int64_t r = 550; r < 555; ++r) visible[r] = false;
    const std::vector<std::uint64_t> words = test::Bitmap(visible);
    ASSERT_TRUE(stream.layer->SetAudit({.share = 1.0}).ok());
    for (int step = 0; step < 3; ++step) {
      const std::vector<float> q = test::RandomQueries(shape, 50 + step);
      stream.Step(q, 2, {words.data(), 0});
      const std::span<const AuditSample> samples = stream.layer->AuditSamples();
      ASSERT_EQ(std::ssize(samples), 6 * (step + 1));
      for (int h = 0; h < shape.q_heads; ++h) {
        const Vector exact = test::ExactHead(stream.cache, shape, stream.n_kv, q.data(), h, stream.params, &visible);
        const Vector head = test::ToDouble(stream.out.data() + std::int64_t{h} * shape.head_dim, shape.head_dim);
        const AuditSample& sample = samples[step * 6 + h];
        EXPECT_EQ(sample.q_head, h);
        EXPECT_EQ(sample.call, static_cast<std::uint64_t>(step));
        EXPECT_EQ(sample.together, 3);
        const double error = test::RelativeL2(head, exact);
        EXPECT_GT(error, 1e-3);
        EXPECT_NEAR(sample.error, error, 1e-5 + 1e-3 * error);
      }
    }
    EXPECT_EQ(stream.layer->stats().sparse_steps, 3u);
    EXPECT_EQ(stream.layer->stats().audited_outputs, 18u);
    EXPECT_EQ(stream.layer->stats().audit_failures, 0u);
  });
}

TEST_P(AuditTest, ChangesNoOutputAndHasTheSameBitsForAnyNumberOfThreads) {
  const Shape shape{6, 2, 32};
  const auto run = [&](double share, int n_threads, std::vector<AuditSample>* samples) {
    Stream stream(shape, ConfigOf(GetParam()), 700, 560);
    EXPECT_TRUE(stream.layer->SetAudit({.share = share, .seed = 3}).ok());
    std::vector<float> all;
    for (int step = 0; step < 40; ++step) {
      stream.Step(test::RandomQueries(shape, step), n_threads);
      all.insert(all.end(), stream.out.begin(), stream.out.end());
    }
    const std::span<const AuditSample> span = stream.layer->AuditSamples();
    samples->assign(span.begin(), span.end());
    return all;
  };
  std::vector<AuditSample> none;
  std::vector<AuditSample> one_thread;
  std::vector<AuditSample> three_threads;
  const std::vector<float> without = run(0, 1, &none);
  EXPECT_EQ(run(0.2, 1, &one_thread), without);
  EXPECT_EQ(run(0.2, 3, &three_threads), without);
  EXPECT_TRUE(none.empty());
  ASSERT_EQ(one_thread.size(), 48u);  // a fifth of 40 steps and 2 KV heads, 3 query heads each
  ASSERT_EQ(three_threads.size(), one_thread.size());
  for (std::size_t i = 0; i < one_thread.size(); ++i) {
    EXPECT_EQ(one_thread[i].call, three_threads[i].call);
    EXPECT_EQ(one_thread[i].q_head, three_threads[i].q_head);
    EXPECT_EQ(one_thread[i].error, three_threads[i].error);
  }
}

TEST_P(AuditTest, KeepsTheLastSamplesOldestFirst) {
  const Shape shape{4, 2, 32};
  Stream stream(shape, ConfigOf(GetParam()), 700, 560);
  ASSERT_TRUE(stream.layer->SetAudit({.share = 1, .capacity = 10}).ok());
  std::vector<float> errors;
  for (int step = 0; step < 7; ++step) {
    stream.Step(test::RandomQueries(shape, step));
    for (const float error : stream.Errors()) errors.push_back(error);
    const std::span<const AuditSample> samples = stream.layer->AuditSamples();
    ASSERT_EQ(samples.size(), std::min<std::size_t>(10, errors.size()));
    for (std::size_t i = 0; i < samples.size(); ++i) {
      EXPECT_NEAR(samples[i].error, errors[errors.size() - samples.size() + i], 1e-5);
    }
  }
  EXPECT_EQ(stream.layer->stats().audited_outputs, 28u);
}

INSTANTIATE_TEST_SUITE_P(Presets, AuditTest, ::testing::Values(Preset::kSeed, Preset::kFast),
                         [](const auto& test) { return std::string(PresetName(test.param)); });

TEST(AuditInterval, HoldsTheTrueMedianInAtLeast90Of100Windows) {
  const Shape shape{4, 2, 32};
  constexpr int kSteps = 150;
  int held = 0;
  double width = 0;
  for (int window = 0; window < 100; ++window) {
    Stream stream(shape, ConfigOf(Preset::kFast), 620, 400);
    ASSERT_TRUE(stream.layer->SetAudit({.share = 0.2, .seed = 1000u + window}).ok());
    WanderingQueries queries(shape, 77 + window, 1.5f);
    std::vector<float> truth;
    for (int step = 0; step < kSteps; ++step) {
      stream.Step(queries.Next());
      for (const float error : stream.Errors()) truth.push_back(error);
    }
    ASSERT_EQ(stream.layer->stats().sparse_steps, static_cast<std::uint64_t>(kSteps));
    AuditSummary summary;
    ASSERT_TRUE(SummarizeAudit(stream.layer->AuditSamples(), &summary).ok());
    ASSERT_EQ(summary.observations, 60u);  // a fifth of 150 steps and 2 KV heads
    ASSERT_EQ(summary.outputs, 120u);
    const double median = Median(truth);
    held += summary.median_low <= median && median <= summary.median_high ? 1 : 0;
    width += (summary.median_high - summary.median_low) / median / 100;
  }
  RecordProperty("held", held);
  RecordProperty("mean_relative_width", std::to_string(width));
  EXPECT_GE(held, 90);
  EXPECT_LT(width, 1.0);  // an interval that says something
}

// Queries that look at many rows. After the shift, as if the slot had another text now, KV head 0 has rows of another
// kind and its queries look at few of them.
class ShiftingStream : public Stream {
 public:
  static constexpr float kTolerance = 0.05f;

  ShiftingStream(const Config& config, std::int64_t n_rows) : Stream({4, 2, 32}, config, n_rows, 600) {}

  void Shift() {
    std::normal_distribution<float> normal;
    std::vector<float> row(32);
    for (std::int64_t r = 0; r < cache.n_rows(); ++r) {
      for (float& x : row) x = 0.8f * normal(random_);
      cache.SetKey(r, 0, row.data());
      for (float& x : row) x = normal(random_);
      cache.SetValue(r, 0, row.data());
    }
    layer->DropPlans();
    query_size_ = kShiftedSize;
  }
  void Next() {
    std::normal_distribution<float> normal;
    std::vector<float> queries(4 * 32);
    for (int i = 0; i < 4 * 32; ++i) queries[i] = (i < 2 * 32 ? query_size_ : 1.0f) * normal(random_);
    Step(queries);
  }
  // True errors of a query head in the next `steps` steps that are answered sparsely.
  std::vector<float> ErrorsOf(int q_head, int steps) {
    std::vector<float> errors;
    while (std::ssize(errors) < steps) {
      const std::uint64_t sparse = layer->stats().sparse_steps;
      Next();
      if (layer->stats().sparse_steps != sparse) errors.push_back(Errors()[q_head]);
    }
    return errors;
  }
  double MeanOfKvHead(int kv_head, int steps) {
    double sum = 0;
    for (const int q_head : {2 * kv_head, 2 * kv_head + 1}) {
      for (const float error : ErrorsOf(q_head, steps)) sum += error;
    }
    return sum / (2 * steps);
  }
  void Calibrate() {
    ASSERT_TRUE(layer->StartCalibration(kTolerance).ok());
    for (int i = 0; i < 32; ++i) Next();
    ASSERT_TRUE(layer->FinishCalibration().ok());
  }
  std::vector<float> Taus() const { return {layer->taus().begin(), layer->taus().end()}; }
  std::uint64_t Recalibrated() const { return layer->stats().recalibrated_heads; }

 private:
  static constexpr float kShiftedSize = 2.5f;
  float query_size_ = 1.0f;
  std::mt19937 random_{99};
};

TEST(AuditDrift, AShiftedKvHeadIsRecalibratedAndMeetsTheToleranceAgain) {
  ShiftingStream stream(ConfigOf(Preset::kFast), 3000);
  const float tolerance = ShiftingStream::kTolerance;
  // A long window, for a short one chooses a threshold by chance: the mean error of 40 steps varies by a fifth here.
  ASSERT_TRUE(stream.layer->SetAudit({.share = 0.1, .window = 128}).ok());
  stream.Calibrate();
  const std::vector<float> taus = stream.Taus();
  EXPECT_LT(stream.MeanOfKvHead(0, 100), tolerance);
  EXPECT_EQ(stream.Recalibrated(), 0u);
  stream.Shift();
  EXPECT_GT(stream.MeanOfKvHead(0, 25), 2 * tolerance);
  while (stream.Recalibrated() == 0 && stream.n_kv < 2000) {
    stream.Next();
    if (stream.layer->stats().calibration_steps > 32) {
      EXPECT_FALSE(stream.layer->calibrating()) << "the caller's window is closed";
      for (const float error : stream.Errors()) EXPECT_LT(error, 1e-5) << "exact inside the audit's window";
    }
  }
  EXPECT_EQ(stream.Recalibrated(), 1u);
  EXPECT_EQ(stream.layer->stats().calibration_steps, 32u + 128u);
  EXPECT_LT(stream.layer->taus()[0], taus[0]);
  EXPECT_EQ(stream.layer->taus()[1], taus[1]) << "the other head keeps its threshold";
  EXPECT_LT(stream.MeanOfKvHead(0, 300), 1.1 * tolerance);
  EXPECT_EQ(stream.Recalibrated(), 1u);
}

TEST(AuditDrift, WithPresetSeedAQueryHeadIsRecalibratedAlone) {
  ShiftingStream stream(ConfigOf(Preset::kSeed), 2000);
  for (const int head : {0, 2, 3}) ASSERT_TRUE(stream.layer->SetTau(head, 0.02f).ok());
  ASSERT_TRUE(stream.layer->SetTau(1, 0.5f).ok());
  // As if head 1 had drifted: twice the tolerance is well below its error, the tolerance well above the others'.
  const float tolerance = Median(stream.ErrorsOf(1, 50)) / 3;
  for (const int head : {0, 2, 3}) ASSERT_LT(Median(stream.ErrorsOf(head, 50)), tolerance) << head;
  ASSERT_TRUE(stream.layer->SetAudit({.share = 0.25, .tolerance = tolerance, .window = 16}).ok());
  while (stream.Recalibrated() == 0 && stream.n_kv < 1500) stream.Next();
  EXPECT_EQ(stream.Recalibrated(), 1u);
  EXPECT_LT(stream.layer->taus()[1], 0.5f);
  for (const int head : {0, 2, 3}) EXPECT_EQ(stream.layer->taus()[head], 0.02f) << head;
  EXPECT_LT(Median(stream.ErrorsOf(1, 150)), 1.1 * tolerance);
}

TEST(AuditDrift, WithoutAShiftNothingIsRecalibrated) {
  for (const Preset preset : {Preset::kFast, Preset::kSeed}) {
    ShiftingStream stream(ConfigOf(preset), 4000);
    ASSERT_TRUE(stream.layer->SetAudit({.share = 0.5}).ok());
    stream.Calibrate();
    while (stream.n_kv < 4000) stream.Next();
    EXPECT_EQ(stream.layer->stats().sparse_steps, 3400u - 32u);
    // Half of the pairs, two query heads each.
    EXPECT_EQ(stream.layer->stats().audited_outputs, (3400u - 32u) * 2);
    EXPECT_EQ(stream.Recalibrated(), 0u);
  }
}

TEST(AuditDrift, TheCallersCalibrationTakesPrecedence) {
  ShiftingStream stream(ConfigOf(Preset::kFast), 2000);
  ASSERT_TRUE(stream.layer->SetAudit({.share = 1, .window = 1000}).ok());
  stream.Calibrate();
  stream.Shift();
  while (stream.layer->stats().calibration_steps == 32 && stream.n_kv < 1500) stream.Next();
  ASSERT_GT(stream.layer->stats().calibration_steps, 32u) << "the audit's window is open";
  ASSERT_TRUE(stream.layer->SetTau(0, 0.001f).ok());
  const std::uint64_t sparse = stream.layer->stats().sparse_steps;
  stream.Next();
  EXPECT_EQ(stream.layer->stats().sparse_steps, sparse + 1) << "setting a threshold gives the window up";
  stream.Calibrate();
  EXPECT_EQ(stream.layer->calibration_steps(), 32);
  EXPECT_EQ(stream.Recalibrated(), 0u);
}

TEST(AuditDrift, WithoutAToleranceHeadsAreMeasuredOnly) {
  ShiftingStream stream(ConfigOf(Preset::kFast), 1000);
  ASSERT_TRUE(stream.layer->SetAudit({.share = 1}).ok());
  for (const int head : {0, 1}) ASSERT_TRUE(stream.layer->SetTau(head, 0.2f).ok());
  stream.Shift();
  while (stream.n_kv < 700) stream.Next();
  EXPECT_EQ(stream.layer->stats().calibration_steps, 0u);
  ASSERT_TRUE(stream.layer->SetAudit({.share = 1, .tolerance = ShiftingStream::kTolerance}).ok());
  while (stream.n_kv < 800) stream.Next();
  EXPECT_GT(stream.Recalibrated(), 0u);
}

TEST(AuditLayer, EveryQueryRowIsAudited) {
  const Shape shape{4, 2, 32};
  Stream stream(shape, ConfigOf(Preset::kFast), 640, 600);
  ASSERT_TRUE(stream.layer->SetAudit({.share = 1}).ok());
  std::vector<float> q = test::RandomQueries({12, 2, 32}, 4);  // three rows
  std::vector<float> out(q.size());
  const std::int64_t stride = std::int64_t{4} * 32;
  ASSERT_TRUE(stream.layer
                  ->Attend({q.data(), stride, 32, 3}, stream.cache.View(), {}, stream.params, Verify::kNone, 1,
                           stream.workspace, {out.data(), stride, 32})
                  .ok());
  const std::span<const AuditSample> samples = stream.layer->AuditSamples();
  ASSERT_EQ(samples.size(), 12u);
  for (int i = 0; i < 12; ++i) {
    const float* row = q.data() + i / 4 * stride;
    const Vector exact = test::ExactHead(stream.cache, shape, 640, row, i % 4, stream.params);
    const double error = test::RelativeL2(test::ToDouble(out.data() + std::int64_t{i} * 32, 32), exact);
    EXPECT_EQ(samples[i].q_head, i % 4);
    EXPECT_EQ(samples[i].call, 0u);
    EXPECT_NEAR(samples[i].error, error, 1e-5 + 1e-3 * error);
  }
}

TEST(AuditLayer, ExactAnswersAreNotAudited) {
  Stream stream({4, 2, 32}, ConfigOf(Preset::kFast), 700, 50);
  ASSERT_TRUE(stream.layer->SetAudit({.share = 1}).ok());
  stream.Step(test::RandomQueries(stream.shape, 1));  // too short for a plan
  EXPECT_EQ(stream.layer->stats().exact_steps, 1u);
  EXPECT_TRUE(stream.layer->AuditSamples().empty());
}

TEST(AuditLayer, RefusesValuesOutOfRange) {
  const auto message = [](const AuditConfig& config) {
    const Status status = ValidateAuditConfig(config);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message({.share = 1.5}), "the audit's share is 1.500000, must be 0 or 1e-9 ... 1");
  EXPECT_NE(message({.share = std::nan("")}), "");
  EXPECT_NE(message({.share = -0.1}), "");
  EXPECT_NE(message({.share = 1e-10}), "");
  EXPECT_EQ(message({.capacity = 0}), "the audit's capacity is 0, must be 1 ... 1048576");
  EXPECT_EQ(message({.tolerance = -1}), "the audit's tolerance is -1.000000, must be finite and at least 0");
  EXPECT_EQ(message({.drift_factor = 0.5f}), "the audit's drift_factor is 0.500000, must be finite and at least 1");
  EXPECT_EQ(message({.window = 0}), "the audit's window is 0, must be 1 ... 65536");
  EXPECT_TRUE(ValidateAuditConfig({.share = 1e-9}).ok());
}

TEST(AuditState, AuditsLayersInDifferentStepsAndPoolsTheirSamples) {
  const Shape shape{4, 2, 32};
  constexpr int kLayers = 20;
  std::unique_ptr<State> state;
  ASSERT_TRUE(State::Create(kLayers, shape, ConfigOf(Preset::kFast), &state).ok());
  EXPECT_EQ(state->SetAudit({.share = 2}).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(state->SetAudit({.share = 0.01}).ok());
  const SyntheticCache cache(shape, 640, DType::kF16);
  Workspace workspace;
  std::vector<float> out;
  const OutView view = test::ViewOut(out, shape);
  constexpr int kSteps = 50;  // one stretch of 100 (query row, KV head) pairs
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<float> q = test::RandomQueries(shape, step);
    for (int i = 0; i < kLayers; ++i) {
      ASSERT_TRUE(state->layer(i)
                      .Attend(test::ViewQueries(q, shape), cache.View(), {}, {}, Verify::kNone, 1, workspace, view)
                      .ok());
    }
  }
  std::set<std::uint64_t> calls;
  std::vector<float> errors;
  for (int i = 0; i < kLayers; ++i) {
    ASSERT_EQ(state->layer(i).AuditSamples().size(), 2u);
    calls.insert(state->layer(i).AuditSamples()[0].call);
    for (const AuditSample& sample : state->layer(i).AuditSamples()) errors.push_back(sample.error);
  }
  EXPECT_GT(calls.size(), 10u);
  AuditSummary summary;
  ASSERT_TRUE(state->SummarizeAudit(&summary).ok());
  EXPECT_EQ(summary.outputs, 40u);
  EXPECT_EQ(summary.observations, 20u);
  EXPECT_NEAR(summary.median, Median(errors), 1e-7);
  EXPECT_EQ(state->stats().audited_outputs, 40u);
  EXPECT_GT(state->stats().audit_ns, 0u);
}

}  // namespace
}  // namespace scsa
