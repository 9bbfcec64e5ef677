// SPDX-License-Identifier: Apache-2.0
#include "capture_recorder.h"

#include <ggml.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr int kCells = 64;  // cells of the cache
constexpr int kDim = 8;
constexpr int kQHeads = 4;
constexpr int kKvHeads = 2;

// Whole numbers below 2048 are exact in f16.
float Key(int layer, int row, int head, int d) { return static_cast<float>(100 * layer + 16 * row + 8 * head + d); }
float Query(int layer, int step, int head, int d) {
  return static_cast<float>(1000 * layer + 100 * step + 10 * head + d);
}

// One layer's cache as llama.cpp lays it out, [row][kv_head][head_dim], and the call of one step.
struct FakeLayer {
  explicit FakeLayer(int number) : layer(number) {
    for (int row = 0; row < kCells; ++row) {
      for (int head = 0; head < kKvHeads; ++head) {
        for (int d = 0; d < kDim; ++d) {
          k.push_back(ggml_fp32_to_fp16(Key(layer, row, head, d)));
          v.push_back(ggml_fp32_to_fp16(-Key(layer, row, head, d)));
        }
      }
    }
  }

  scsa_attention_call Call(int step, int visible_rows) {
    q.clear();
    for (int head = 0; head < kQHeads; ++head) {
      for (int d = 0; d < kDim; ++d) q.push_back(Query(layer, step, head, d));
      q.push_back(-1.0f);  // between the heads
    }
    visible = visible_rows < 64 ? (std::uint64_t{1} << visible_rows) - 1 : ~std::uint64_t{0};
    scsa_attention_call call{};
    call.layer = layer;
    call.q_heads = kQHeads;
    call.kv_heads = kKvHeads;
    call.head_dim = kDim;
    call.n_q = 1;
    call.n_kv = kCells;
    call.q = q.data();
    call.q_row_stride = kQHeads * (kDim + 1);
    call.q_head_stride = kDim + 1;
    call.k = k.data();
    call.v = v.data();
    call.k_type = call.v_type = GGML_TYPE_F16;
    call.k_row_stride = call.v_row_stride = 2 * kKvHeads * kDim;
    call.k_head_stride = call.v_head_stride = 2 * kDim;
    call.visible = &visible;
    call.visible_stride = 1;
    call.scale = 0.25f;
    return call;
  }

  int layer;
  std::vector<std::uint16_t> k;
  std::vector<std::uint16_t> v;
  std::vector<float> q;
  std::uint64_t visible = 0;
};

void Show(CaptureRecorder& recorder, const scsa_attention_call& call) { CaptureRecorder::Observe(&recorder, &call); }

std::string ErrorOfStep(CaptureRecorder& recorder) {
  try {
    recorder.EndStep();
  } catch (const ToolError& e) {
    return e.what();
  }
  return "";
}

TEST(CaptureRecorder, TakesQueriesOfEachStepAndRowsOfTheLast) {
  CaptureRecorder recorder({1}, 10, 2);
  FakeLayer other(0);
  FakeLayer chosen(1);
  for (int step = 0; step < 2; ++step) {
    Show(recorder, other.Call(step, 10 + step));
    Show(recorder, chosen.Call(step, 10 + step));
    recorder.EndStep();
  }
  const Capture capture = recorder.Take();
  EXPECT_EQ(capture.shape.q_heads, kQHeads);
  EXPECT_EQ(capture.shape.kv_heads, kKvHeads);
  EXPECT_EQ(capture.shape.head_dim, kDim);
  EXPECT_EQ(capture.scale, 0.25f);
  EXPECT_EQ(capture.n_kv, 10);
  EXPECT_EQ(capture.steps, 2);
  ASSERT_EQ(capture.layers.size(), 1u);
  const CapturedLayer& layer = capture.layers[0];
  EXPECT_EQ(layer.layer, 1);
  std::vector<float> q;
  for (int step = 0; step < 2; ++step) {
    for (int head = 0; head < kQHeads; ++head) {
      for (int d = 0; d < kDim; ++d) q.push_back(Query(1, step, head, d));
    }
  }
  EXPECT_EQ(layer.q, q);
  std::vector<std::uint16_t> k;
  std::vector<std::uint16_t> v;
  for (int head = 0; head < kKvHeads; ++head) {
    for (int row = 0; row < 11; ++row) {  // the second step sees 11 rows
      for (int d = 0; d < kDim; ++d) {
        k.push_back(ggml_fp32_to_fp16(Key(1, row, head, d)));
        v.push_back(ggml_fp32_to_fp16(-Key(1, row, head, d)));
      }
    }
  }
  EXPECT_EQ(layer.k, k);
  EXPECT_EQ(layer.v, v);
}

std::vector<int> DefaultLayers(const std::vector<int>& layers_with_windows, int n_layers) {
  CaptureRecorder recorder({}, 10, 1);
  std::vector<FakeLayer> layers;
  for (int i = 0; i < n_layers; ++i) layers.emplace_back(i);
  for (FakeLayer& layer : layers) {
    scsa_attention_call call = layer.Call(0, 10);
    for (const int windowed : layers_with_windows) {
      if (layer.layer == windowed) layer.visible &= ~std::uint64_t{3};
    }
    Show(recorder, call);
  }
  recorder.EndStep();
  std::vector<int> numbers;
  for (const CapturedLayer& layer : recorder.Take().layers) numbers.push_back(layer.layer);
  return numbers;
}

TEST(CaptureRecorder, ChoosesEverySixthLayerThatSeesAllRows) {
  EXPECT_EQ(DefaultLayers({}, 15), (std::vector<int>{2, 8, 14}));
  EXPECT_EQ(DefaultLayers({}, 14), (std::vector<int>{2, 8}));
  // Five sliding windows, then a layer that sees everything, and so on.
  EXPECT_EQ(DefaultLayers({0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16}, 18), (std::vector<int>{5, 11, 17}));
  EXPECT_EQ(DefaultLayers({2, 3, 4, 5, 6, 7, 8}, 15), (std::vector<int>{9, 14}));
}

TEST(CaptureRecorder, TakesTheFirstCallOfALayerInAStep) {
  CaptureRecorder recorder({3}, 10, 1);
  FakeLayer layer(3);
  Show(recorder, layer.Call(0, 10));
  Show(recorder, layer.Call(7, 10));  // another layer of the model that shares the cache of layer 3
  recorder.EndStep();
  EXPECT_EQ(recorder.Take().layers[0].q[0], Query(3, 0, 0, 0));
}

TEST(CaptureRecorder, RefusesWhatTheFormatDoesNotHold) {
  const auto error = [](const auto& change) {
    CaptureRecorder recorder({3}, 10, 2);
    FakeLayer layer(3);
    scsa_attention_call call = layer.Call(0, 10);
    change(layer, call);
    Show(recorder, call);
    return ErrorOfStep(recorder);
  };
  EXPECT_EQ(error([](FakeLayer&, scsa_attention_call&) {}), "");
  EXPECT_NE(error([](FakeLayer& layer, scsa_attention_call&) { layer.visible = 0b1111111101; }).find("all cached rows"),
            std::string::npos);
  EXPECT_NE(
      error([](FakeLayer& layer, scsa_attention_call&) { layer.visible = 0b11111111111; }).find("all cached rows"),
      std::string::npos);
  EXPECT_NE(error([](FakeLayer&, scsa_attention_call& call) { call.v_type = GGML_TYPE_Q8_0; }).find("not f16"),
            std::string::npos);
  EXPECT_NE(error([](FakeLayer&, scsa_attention_call& call) { call.softcap = 30.0f; }).find("caps its logits"),
            std::string::npos);
  const std::vector<float> sinks(kQHeads);
  EXPECT_NE(error([&](FakeLayer&, scsa_attention_call& call) { call.sinks = sinks.data(); }).find("sinks"),
            std::string::npos);
}

TEST(CaptureRecorder, RefusesLayersThatAreNotThere) {
  CaptureRecorder missing({3, 40}, 10, 1);
  FakeLayer layer(3);
  Show(missing, layer.Call(0, 10));
  EXPECT_NE(ErrorOfStep(missing).find("no attention layer 40"), std::string::npos);

  CaptureRecorder nothing({}, 10, 1);
  EXPECT_NE(ErrorOfStep(nothing).find("no attention layer of this model"), std::string::npos);

  CaptureRecorder few({}, 10, 1);
  FakeLayer first(0);
  Show(few, first.Call(0, 10));
  EXPECT_NE(ErrorOfStep(few).find("--layers"), std::string::npos);

  CaptureRecorder lost({3}, 10, 2);
  Show(lost, layer.Call(0, 10));
  lost.EndStep();
  EXPECT_NE(ErrorOfStep(lost).find("in step 2"), std::string::npos);
}

TEST(CaptureRecorder, RefusesLayersOfDifferentShape) {
  CaptureRecorder recorder({3, 4}, 10, 1);
  FakeLayer a(3);
  FakeLayer b(4);
  Show(recorder, a.Call(0, 10));
  scsa_attention_call call = b.Call(0, 10);
  call.scale = 0.5f;
  Show(recorder, call);
  EXPECT_NE(ErrorOfStep(recorder).find("not that of layer 3"), std::string::npos);
}

}  // namespace
}  // namespace scsa::tool
