// SPDX-License-Identifier: Apache-2.0
#include "attention_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace scsa::tool {
namespace {

constexpr int kF32 = 0;  // GGML_TYPE_F32

// Two query heads on one KV head, three rows of two values; row 1 is hidden.
struct SmallCall {
  std::vector<float> q = {1.0f, 0.0f, 0.0f, 2.0f};
  std::vector<float> k = {1.0f, 0.5f, 9.0f, 9.0f, 2.0f, 1.0f};
  std::vector<float> v = {1.0f, 10.0f, 1000.0f, 1000.0f, 3.0f, 20.0f};
  std::uint64_t visible = 0b101;
  std::vector<float> out = std::vector<float>(4);
  scsa_attention_call call{};

  SmallCall() {
    call.q_heads = 2;
    call.kv_heads = 1;
    call.head_dim = 2;
    call.n_q = 1;
    call.n_kv = 3;
    call.q = q.data();
    call.q_row_stride = 4;
    call.q_head_stride = 2;
    call.k = k.data();
    call.v = v.data();
    call.k_type = call.v_type = kF32;
    call.k_row_stride = call.v_row_stride = 8;
    call.k_head_stride = call.v_head_stride = 24;
    call.visible = &visible;
    call.visible_stride = 1;
    call.scale = 0.5f;
    call.out = out.data();
    call.out_row_stride = 4;
    call.out_head_stride = 2;
  }
};

TEST(ReferenceAttention, MatchesAHandComputedSoftmax) {
  const SmallCall small;
  const std::vector<double> out = ReferenceAttention(small.call, 2);
  ASSERT_EQ(out.size(), 4u);
  // Head 0: logits 0.5 * {1, 2}. Head 1: logits 0.5 * 2 * {0.5, 1}: the same weights.
  const double weight = std::exp(1.0) / (std::exp(0.5) + std::exp(1.0));  // of row 2
  for (int head = 0; head < 2; ++head) {
    EXPECT_NEAR(out[2 * head], (1.0 - weight) * 1.0 + weight * 3.0, 1e-12);
    EXPECT_NEAR(out[2 * head + 1], (1.0 - weight) * 10.0 + weight * 20.0, 1e-12);
  }
}

TEST(ReferenceAttention, SinkTakesMassAndSoftcapBendsLogits) {
  SmallCall small;
  const std::vector<float> sinks = {0.25f, -1.0f};
  small.call.sinks = sinks.data();
  small.call.softcap = 2.0f;
  const std::vector<double> out = ReferenceAttention(small.call, 1);
  const double low = std::exp(2.0 * std::tanh(0.25));
  const double high = std::exp(2.0 * std::tanh(0.5));
  for (int head = 0; head < 2; ++head) {
    EXPECT_NEAR(out[2 * head], (low * 1.0 + high * 3.0) / (low + high + std::exp(sinks[head])), 1e-7);
  }
}

TEST(ReferenceAttention, NothingVisibleIsZero) {
  SmallCall small;
  small.visible = 0;
  EXPECT_EQ(ReferenceAttention(small.call, 1), std::vector<double>(4, 0.0));
}

TEST(VisiblePairs, IgnoresBitsBeyondTheCache) {
  SmallCall small;
  EXPECT_EQ(VisiblePairs(small.call), 4.0);  // two rows, two heads
  small.visible = ~std::uint64_t{0};
  EXPECT_EQ(VisiblePairs(small.call), 6.0);
  small.call.visible = nullptr;
  EXPECT_EQ(VisiblePairs(small.call), 6.0);
}

TEST(ReferenceProbe, ReportsOneErrorPerHead) {
  SmallCall small;
  const std::vector<double> exact = ReferenceAttention(small.call, 1);
  for (int i = 0; i < 2; ++i) small.out[i] = static_cast<float>(exact[i]);
  for (int i = 2; i < 4; ++i) small.out[i] = static_cast<float>(1.5 * exact[i]);
  ReferenceProbe probe(1, false);
  ReferenceProbe::Observe(&probe, &small.call);
  ASSERT_EQ(probe.errors().size(), 2u);
  EXPECT_LT(probe.errors()[0], 1e-6);
  EXPECT_NEAR(probe.errors()[1], 0.5, 1e-6);
  EXPECT_EQ(probe.multiply_adds(), 4.0 * 2.0 * 2.0);
}

}  // namespace
}  // namespace scsa::tool
