// SPDX-License-Identifier: Apache-2.0
#include "scsa/exact.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "scsa/config.h"
#include "scsa/target.h"
#include "tests/core/attention_call.h"
#include "tests/core/reference.h"

namespace scsa {
namespace {

using testing::Bitmaps;
using testing::Call;
using testing::kTolerance;
using testing::Layout;
using testing::TestCache;

class ExactTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(ForceTarget(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(ForceTarget("").ok()); }
};

INSTANTIATE_TEST_SUITE_P(Targets, ExactTest, ::testing::ValuesIn(AvailableTargets()),
                         [](const auto& param) { return param.param; });

TEST_P(ExactTest, EveryGroupRatioAndHeadDim) {
  const Shape shapes[] = {{1, 1, 8},  {2, 1, 24}, {9, 3, 64},   {4, 1, 40},  {7, 1, 72},  {14, 2, 64},
                          {8, 1, 80}, {9, 1, 96}, {16, 8, 128}, {4, 1, 256}, {3, 3, 512}, {2, 2, 136}};
  unsigned seed = 0;
  for (const Shape& shape : shapes) {
    for (const std::int64_t n_kv : {1, 7, 63, 64, 65, 200}) {
      const TestCache cache(shape, DType::kF16, DType::kF16, n_kv, Layout::kRowMajor, ++seed);
      for (const int n_q : {1, 2, 5}) {
        Call call(shape, n_q, seed);
        ASSERT_TRUE(call.Run(cache.view(), 2).ok());
        ASSERT_LE(call.ErrorAgainstReference(cache.view()), kTolerance)
            << shape.q_heads << "/" << shape.kv_heads << " x " << shape.head_dim << ", " << n_kv << " rows, n_q "
            << n_q;
      }
    }
  }
}

TEST_P(ExactTest, EveryMixOfTypesAndLayout) {
  const DType types[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};
  const Shape shape{6, 2, 40};
  unsigned seed = 1000;
  for (const DType k_type : types) {
    for (const DType v_type : types) {
      for (const Layout layout : {Layout::kRowMajor, Layout::kHeadMajor, Layout::kPadded}) {
        for (const int misalign : {0, 4}) {
          const TestCache cache(shape, k_type, v_type, 200, layout, ++seed, misalign);
          Call call(shape, 1, seed);
          ASSERT_TRUE(call.Run(cache.view(), 2).ok());
          ASSERT_LE(call.ErrorAgainstReference(cache.view()), kTolerance)
              << DTypeName(k_type) << " " << DTypeName(v_type);
        }
      }
    }
  }
}

TEST_P(ExactTest, ManyRows) {
  const Shape shape{9, 3, 64};
  const TestCache cache(shape, DType::kF16, DType::kF16, 5000, Layout::kRowMajor, 2);
  Call call(shape, 1, 3);
  ASSERT_TRUE(call.Run(cache.view(), 2).ok());
  EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance);
}

TEST_P(ExactTest, SameBitsForEveryThreadCount) {
  for (const Shape& shape : {Shape{9, 3, 64}, Shape{14, 2, 64}, Shape{4, 1, 256}}) {
    // More than 64 blocks are grouped into pieces of several.
    for (const std::int64_t n_kv : {1, 65, 1000, shape.q_heads == 14 ? 4500 : 64}) {
      const TestCache cache(shape, DType::kF16, DType::kF16, n_kv, Layout::kRowMajor, 4);
      Call single(shape, 2, 5);
      ASSERT_TRUE(single.Run(cache.view(), 1).ok());
      for (const int n_threads : {2, 3, 7, 64}) {
        Call several(shape, 2, 5);
        ASSERT_TRUE(several.Run(cache.view(), n_threads).ok());
        ASSERT_EQ(std::memcmp(several.out.data(), single.out.data(), single.out.size() * sizeof(float)), 0)
            << n_threads << " threads, " << n_kv << " rows";
      }
    }
  }
}

TEST_P(ExactTest, VisibleSetsWithHoles) {
  const Shape shape{6, 2, 64};
  const std::int64_t n_kv = 700;
  const TestCache cache(shape, DType::kF16, DType::kF16, n_kv, Layout::kRowMajor, 6);
  std::mt19937 generator(7);
  for (const int n_q : {1, 2, 5}) {
    Bitmaps bitmaps(n_q, n_kv);
    for (int i = 0; i < n_q; ++i) {
      for (std::int64_t row = 0; row < n_kv; ++row) {
        const bool in_hole = row >= 128 && row < 384;  // whole words that nobody sees
        if (!in_hole && generator() % 3 != 0) bitmaps.Set(i, row);
      }
    }
    Call call(shape, n_q, 8);
    call.visible = bitmaps.view();
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance) << n_q;
  }
}

TEST_P(ExactTest, HiddenRowsMayHoldAnything) {
  const Shape shape{2, 1, 16};
  TestCache cache(shape, DType::kF32, DType::kF32, 200, Layout::kRowMajor, 9);
  Bitmaps bitmaps(1, 200);
  for (std::int64_t row = 0; row < 200; ++row) {
    if (row % 5 == 0) {
      bitmaps.Set(0, row);
    } else {
      cache.SetKey(row, 0, std::vector<float>(16, std::numeric_limits<float>::quiet_NaN()));
      cache.SetValue(row, 0, std::vector<float>(16, std::numeric_limits<float>::infinity()));
    }
  }
  Call call(shape, 1, 10);
  call.visible = bitmaps.view();
  ASSERT_TRUE(call.Run(cache.view(), 2).ok());
  EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance);
}

TEST_P(ExactTest, BitsBehindTheRowsDoNotMatter) {
  const Shape shape{2, 1, 16};
  const TestCache cache(shape, DType::kF16, DType::kF16, 70, Layout::kRowMajor, 11);
  Call all(shape, 1, 12);
  ASSERT_TRUE(all.Run(cache.view(), 1).ok());
  Bitmaps bitmaps(1, 70);
  bitmaps.words.assign(bitmaps.words.size(), ~std::uint64_t{0});
  Call masked(shape, 1, 12);
  masked.visible = bitmaps.view();
  ASSERT_TRUE(masked.Run(cache.view(), 1).ok());
  EXPECT_EQ(all.out, masked.out);
}

TEST_P(ExactTest, QueryThatSeesNothingGetsZeros) {
  const Shape shape{4, 2, 24};
  const TestCache cache(shape, DType::kF16, DType::kF16, 100, Layout::kRowMajor, 13);
  Bitmaps bitmaps(3, 100);
  bitmaps.Set(0, 99);
  bitmaps.Set(2, 5);
  const std::vector<float> sinks(4, 1.0f);
  for (const bool with_sinks : {false, true}) {
    Call call(shape, 3, 14);
    call.visible = bitmaps.view();
    if (with_sinks) call.params.sinks = sinks.data();
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance);
    const std::vector<float> dense = call.Dense();
    for (std::size_t j = 4 * 24; j < 2 * 4 * 24; ++j) ASSERT_EQ(dense[j], 0.0f);
  }
}

TEST_P(ExactTest, NoRowsGiveZeros) {
  const Shape shape{4, 2, 24};
  Call call(shape, 2, 15);
  ASSERT_TRUE(call.Run(KvView{}, 2).ok());
  for (const float value : call.Dense()) EXPECT_EQ(value, 0.0f);
}

TEST_P(ExactTest, SinksTakeTheirShare) {
  const Shape shape{6, 2, 64};
  const TestCache cache(shape, DType::kF16, DType::kF16, 300, Layout::kRowMajor, 16);
  const std::vector<float> sinks = {-100.0f, -1.0f, 0.0f, 4.0f, 9.0f, 60.0f};
  Call call(shape, 2, 17);
  call.params.sinks = sinks.data();
  ASSERT_TRUE(call.Run(cache.view(), 2).ok());
  EXPECT_LE(call.ErrorAgainstReference(cache.view()), 2e-5);
}

TEST_P(ExactTest, HugeSinkTakesAll) {
  const Shape shape{1, 1, 8};
  const TestCache cache(shape, DType::kF32, DType::kF32, 10, Layout::kRowMajor, 18);
  const float sink = 1e6f;
  Call call(shape, 1, 19);
  call.params.sinks = &sink;
  ASSERT_TRUE(call.Run(cache.view(), 1).ok());
  for (const float value : call.Dense()) EXPECT_EQ(value, 0.0f);
}

TEST_P(ExactTest, SoftcapBendsLogits) {
  const Shape shape{4, 1, 256};
  const TestCache cache(shape, DType::kF16, DType::kF16, 300, Layout::kRowMajor, 20);
  for (const float softcap : {0.3f, 5.0f, 50.0f}) {
    Call call(shape, 1, 21);
    call.params.softcap = softcap;
    call.params.scale = 1.0f;
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), 5e-5) << softcap;
  }
}

TEST_P(ExactTest, LargeLogits) {
  const Shape shape{3, 1, 64};
  const TestCache cache(shape, DType::kF16, DType::kF16, 500, Layout::kRowMajor, 22);
  for (const float scale : {1.0f, 10.0f, 1000.0f}) {
    Call call(shape, 1, 23);
    call.params.scale = scale;
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    // The error of an f32 logit, some 1e-7 of it, is the relative error of its weight.
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), 1e-5 * (1.0 + static_cast<double>(scale))) << scale;
  }
}

TEST_P(ExactTest, EqualValuesGiveThatValue) {
  const Shape shape{6, 2, 40};
  TestCache cache(shape, DType::kF16, DType::kF16, 400, Layout::kRowMajor, 24);
  std::vector<float> value(40);
  for (std::size_t j = 0; j < value.size(); ++j) value[j] = static_cast<float>(j) - 20.0f;
  for (std::int64_t row = 0; row < 400; ++row) {
    for (int head = 0; head < 2; ++head) cache.SetValue(row, head, value);
  }
  Call call(shape, 2, 25);
  ASSERT_TRUE(call.Run(cache.view(), 2).ok());
  const std::vector<float> dense = call.Dense();
  for (std::size_t i = 0; i < dense.size(); ++i) ASSERT_NEAR(dense[i], value[i % 40], 2e-5) << i;
}

TEST_P(ExactTest, WorkspaceIsReusedAcrossShapes) {
  Workspace workspace;
  for (const Shape& shape : {Shape{2, 1, 8}, Shape{16, 8, 128}, Shape{2, 1, 8}}) {
    const TestCache cache(shape, DType::kF16, DType::kF16, 150, Layout::kRowMajor, 26);
    Call call(shape, 1, 27);
    std::swap(call.workspace, workspace);
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance);
    std::swap(call.workspace, workspace);
  }
}

// ------------------------------------------------------------------------------------------------ refusals

TEST(ExactArguments, ShapesOutOfRange) {
  for (const Shape& shape :
       {Shape{0, 1, 64}, Shape{1, 0, 64}, Shape{-2, 1, 64}, Shape{3, 2, 64}, Shape{129, 1, 64}, Shape{65, 65, 64},
        Shape{1, 1, 0}, Shape{1, 1, 4}, Shape{1, 1, 12}, Shape{1, 1, 63}, Shape{1, 1, 520}, Shape{1, 1, 576}}) {
    const Status status = ValidateShape(shape);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument)
        << shape.q_heads << " " << shape.kv_heads << " " << shape.head_dim;
    EXPECT_FALSE(status.message().empty());
  }
  for (const Shape& shape : {Shape{1, 1, 8}, Shape{128, 64, 512}, Shape{128, 1, 72}})
    EXPECT_TRUE(ValidateShape(shape).ok());
}

TEST(ExactArguments, BadCallsLeaveTheOutputAlone) {
  const Shape shape{2, 1, 8};
  const TestCache cache(shape, DType::kF16, DType::kF16, 100, Layout::kRowMajor, 1);
  Bitmaps bitmaps(2, 100);
  const auto refused = [&](Shape s, QueryView q, KvView kv, VisibleSets visible, LogitParams params, int n_threads) {
    Call call(shape, 2, 2);
    const std::vector<float> before = call.out;
    if (q.data == nullptr && q.n_q == 2) q.data = call.q.data();
    const Status status =
        ExactAttention(s, q, kv, visible, params, n_threads, call.workspace, OutView{call.out.data(), 64, 16});
    EXPECT_EQ(call.out, before);
    EXPECT_FALSE(status.message().empty());
    return status.code() == StatusCode::kInvalidArgument;
  };
  const QueryView q{nullptr, 64, 16, 2};  // data is filled in
  const KvView kv = cache.view();
  EXPECT_TRUE(refused({3, 2, 8}, q, kv, {}, {}, 1));
  EXPECT_TRUE(refused(shape, q, kv, {}, {}, 0));
  EXPECT_TRUE(refused(shape, {nullptr, 64, 16, 1}, kv, {}, {}, 1));
  EXPECT_TRUE(refused(shape, {nullptr, 64, 16, 0}, kv, {}, {}, 1));
  EXPECT_TRUE(refused(shape, q, kv, {bitmaps.words.data(), 1}, {}, 1));
  EXPECT_TRUE(refused(shape, q, kv, {}, {1.0f, -1.0f, nullptr}, 1));
  EXPECT_TRUE(refused(shape, q, kv, {}, {1.0f, std::nanf(""), nullptr}, 1));
  EXPECT_TRUE(refused(shape, q, kv, {}, {std::nanf(""), 0.0f, nullptr}, 1));
  KvView no_keys = kv;
  no_keys.k = nullptr;
  EXPECT_TRUE(refused(shape, q, no_keys, {}, {}, 1));
  KvView negative = kv;
  negative.n_kv = -1;
  EXPECT_TRUE(refused(shape, q, negative, {}, {}, 1));
  KvView unknown = kv;
  unknown.v_type = static_cast<DType>(9);
  EXPECT_TRUE(refused(shape, q, unknown, {}, {}, 1));
}

TEST(ExactArguments, ConfigsOutOfRange) {
  EXPECT_TRUE(ValidateConfig(Config{}).ok());
  const auto refused = [](auto change) {
    Config config;
    change(&config);
    const Status status = ValidateConfig(config);
    EXPECT_FALSE(status.message().empty());
    return status.code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](Config* c) { c->cluster_size = 1; }));
  EXPECT_TRUE(refused([](Config* c) { c->cluster_size = 65537; }));
  EXPECT_TRUE(refused([](Config* c) { c->rebuild_interval = 0; }));
  EXPECT_TRUE(refused([](Config* c) { c->block_size = 127; }));
  EXPECT_TRUE(refused([](Config* c) { c->sink = -1; }));
  EXPECT_TRUE(refused([](Config* c) { c->recent = -1; }));
  EXPECT_TRUE(refused([](Config* c) { c->tau_default = 1.5f; }));
  EXPECT_TRUE(refused([](Config* c) { c->tau_default = std::nanf(""); }));
  EXPECT_TRUE(refused([](Config* c) { c->packed_format = static_cast<PackedFormat>(7); }));
  EXPECT_TRUE(refused([](Config* c) { c->rank = 9; }));
  EXPECT_TRUE(refused([](Config* c) { c->rank = -1; }));
  EXPECT_TRUE(refused([](Config* c) { c->power_iterations = 0; }));
}

}  // namespace
}  // namespace scsa
