// SPDX-License-Identifier: Apache-2.0
#include "core/exact_tiled.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/tile.h"
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

// Query rows that make tiles pay, and are no whole number of them.
int ManyRows(const Shape& shape) {
  const int rows = (2 * TilePanel() + shape.group() - 1) / shape.group() + 3;
  EXPECT_TRUE(TilesPay(shape, rows));
  return rows;
}

// Query row i sees the rows up to and with n_kv - n_q + i.
Bitmaps Causal(int n_q, std::int64_t n_kv) {
  Bitmaps bitmaps(n_q, n_kv);
  for (int i = 0; i < n_q; ++i) {
    for (std::int64_t row = 0; row <= n_kv - n_q + i; ++row) bitmaps.Set(i, row);
  }
  return bitmaps;
}

class ExactTiledTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(ForceTarget(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(ForceTarget("").ok()); }
};

INSTANTIATE_TEST_SUITE_P(Targets, ExactTiledTest, ::testing::ValuesIn(AvailableTargets()),
                         [](const auto& param) { return param.param; });

TEST_P(ExactTiledTest, EveryGroupRatioAndHeadDim) {
  const Shape shapes[] = {{1, 1, 8},   {2, 1, 24}, {9, 3, 64},   {5, 1, 40},  {7, 1, 72},
                          {14, 2, 64}, {9, 1, 96}, {16, 8, 128}, {4, 1, 256}, {1, 1, 512}};
  unsigned seed = 0;
  for (const Shape& shape : shapes) {
    for (const std::int64_t n_kv : {1, 7, 64, 65, 200}) {
      const TestCache cache(shape, DType::kF16, DType::kF16, n_kv, Layout::kRowMajor, ++seed);
      Call call(shape, ManyRows(shape), seed);
      ASSERT_TRUE(call.Run(cache.view(), 2).ok());
      ASSERT_LE(call.ErrorAgainstReference(cache.view()), kTolerance)
          << shape.q_heads << "/" << shape.kv_heads << " x " << shape.head_dim << ", " << n_kv << " rows";
    }
  }
}

TEST_P(ExactTiledTest, EveryMixOfTypesAndLayout) {
  const DType types[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};
  const Shape shape{6, 2, 40};
  unsigned seed = 1000;
  for (const DType k_type : types) {
    for (const DType v_type : types) {
      for (const Layout layout : {Layout::kRowMajor, Layout::kHeadMajor, Layout::kPadded}) {
        for (const int misalign : {0, 4}) {
          const TestCache cache(shape, k_type, v_type, 150, layout, ++seed, misalign);
          Call call(shape, ManyRows(shape), seed);
          ASSERT_TRUE(call.Run(cache.view(), 2).ok());
          ASSERT_LE(call.ErrorAgainstReference(cache.view()), kTolerance)
              << DTypeName(k_type) << " " << DTypeName(v_type);
        }
      }
    }
  }
}

TEST_P(ExactTiledTest, CausalMask) {
  const Shape shape{9, 3, 64};
  for (const std::int64_t n_kv : {150, 333}) {
    const TestCache cache(shape, DType::kF16, DType::kF16, n_kv, Layout::kRowMajor, 2);
    const Bitmaps bitmaps = Causal(130, n_kv);
    Call call(shape, 130, 3);
    call.visible = bitmaps.view();
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance) << n_kv;
  }
}

TEST_P(ExactTiledTest, VisibleSetsWithHoles) {
  const Shape shape{6, 2, 64};
  const std::int64_t n_kv = 500;
  const int n_q = ManyRows(shape);
  const TestCache cache(shape, DType::kF16, DType::kF16, n_kv, Layout::kRowMajor, 6);
  std::mt19937 generator(7);
  Bitmaps bitmaps(n_q, n_kv);
  for (int i = 0; i < n_q; ++i) {
    for (std::int64_t row = 0; row < n_kv; ++row) {
      const bool in_hole = row >= 128 && row < 256;        // blocks that nobody sees
      const bool half = row >= 256 && row < 320 && i < 9;  // a block that whole panels do not see
      if (!in_hole && !half && generator() % 3 != 0) bitmaps.Set(i, row);
    }
  }
  Call call(shape, n_q, 8);
  call.visible = bitmaps.view();
  ASSERT_TRUE(call.Run(cache.view(), 2).ok());
  EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance);
}

TEST_P(ExactTiledTest, SameBitsForEveryThreadCount) {
  const Shape shape{6, 2, 64};
  const TestCache cache(shape, DType::kF16, DType::kF16, 300, Layout::kRowMajor, 4);
  const Bitmaps bitmaps = Causal(250, 300);
  Call single(shape, 250, 5);
  single.visible = bitmaps.view();
  ASSERT_TRUE(single.Run(cache.view(), 1).ok());
  for (const int n_threads : {2, 7, 64}) {
    Call several(shape, 250, 5);
    several.visible = bitmaps.view();
    ASSERT_TRUE(several.Run(cache.view(), n_threads).ok());
    ASSERT_EQ(std::memcmp(several.out.data(), single.out.data(), single.out.size() * sizeof(float)), 0) << n_threads;
  }
}

TEST_P(ExactTiledTest, HiddenRowsMayHoldAnything) {
  const Shape shape{2, 1, 16};
  TestCache cache(shape, DType::kF32, DType::kF32, 200, Layout::kRowMajor, 9);
  const int n_q = ManyRows(shape);
  Bitmaps bitmaps(n_q, 200);
  for (std::int64_t row = 0; row < 200; ++row) {
    if (row % 5 == 0) {
      for (int i = 0; i < n_q; ++i) bitmaps.Set(i, row);
    } else {
      cache.SetKey(row, 0, std::vector<float>(16, std::numeric_limits<float>::quiet_NaN()));
      cache.SetValue(row, 0, std::vector<float>(16, std::numeric_limits<float>::infinity()));
    }
  }
  Call call(shape, n_q, 10);
  call.visible = bitmaps.view();
  ASSERT_TRUE(call.Run(cache.view(), 2).ok());
  EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance);
}

TEST_P(ExactTiledTest, QueryThatSeesNothingGetsZeros) {
  const Shape shape{4, 2, 24};
  const TestCache cache(shape, DType::kF16, DType::kF16, 100, Layout::kRowMajor, 13);
  const int n_q = ManyRows(shape);
  Bitmaps bitmaps(n_q, 100);
  for (int i = 0; i < n_q; ++i) {
    if (i != 1) bitmaps.Set(i, 99 - i % 40);
  }
  const std::vector<float> sinks(4, 1.0f);
  for (const bool with_sinks : {false, true}) {
    Call call(shape, n_q, 14);
    call.visible = bitmaps.view();
    if (with_sinks) call.params.sinks = sinks.data();
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), kTolerance);
    const std::vector<float> dense = call.Dense();
    for (std::size_t j = 4 * 24; j < 2 * 4 * 24; ++j) ASSERT_EQ(dense[j], 0.0f);
  }
}

TEST_P(ExactTiledTest, NoRowsGiveZeros) {
  const Shape shape{4, 2, 24};
  Call call(shape, ManyRows(shape), 15);
  ASSERT_TRUE(call.Run(KvView{}, 2).ok());
  for (const float value : call.Dense()) EXPECT_EQ(value, 0.0f);
}

TEST_P(ExactTiledTest, SinksTakeTheirShare) {
  const Shape shape{6, 2, 64};
  const TestCache cache(shape, DType::kF16, DType::kF16, 300, Layout::kRowMajor, 16);
  const std::vector<float> sinks = {-100.0f, -1.0f, 0.0f, 4.0f, 9.0f, 60.0f};
  Call call(shape, ManyRows(shape), 17);
  call.params.sinks = sinks.data();
  ASSERT_TRUE(call.Run(cache.view(), 2).ok());
  EXPECT_LE(call.ErrorAgainstReference(cache.view()), 2e-5);
}

TEST_P(ExactTiledTest, SoftcapBendsLogits) {
  const Shape shape{4, 1, 256};
  const TestCache cache(shape, DType::kF16, DType::kF16, 150, Layout::kRowMajor, 20);
  const int n_q = ManyRows(shape);
  const Bitmaps bitmaps = Causal(n_q, 150);
  for (const float softcap : {0.3f, 5.0f, 50.0f}) {
    Call call(shape, n_q, 21);
    call.visible = bitmaps.view();
    call.params.softcap = softcap;
    call.params.scale = 1.0f;
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), 5e-5) << softcap;
  }
}

TEST_P(ExactTiledTest, LargeLogits) {
  const Shape shape{3, 1, 64};
  const TestCache cache(shape, DType::kF16, DType::kF16, 300, Layout::kRowMajor, 22);
  for (const float scale : {1.0f, 10.0f, 1000.0f}) {
    Call call(shape, ManyRows(shape), 23);
    call.params.scale = scale;
    ASSERT_TRUE(call.Run(cache.view(), 2).ok());
    // The error of an f32 logit, some 1e-7 of it, is the relative error of its weight.
    EXPECT_LE(call.ErrorAgainstReference(cache.view()), 1e-5 * (1.0 + static_cast<double>(scale))) << scale;
  }
}

TEST_P(ExactTiledTest, OverflowingLogitsShareTheMass) {
  const Shape shape{1, 1, 8};
  TestCache cache(shape, DType::kF32, DType::kF32, 10, Layout::kRowMajor, 24);
  const int n_q = ManyRows(shape);
  Call call(shape, n_q, 25);
  call.params.scale = 1e20f;
  for (int i = 0; i < n_q; ++i) {
    for (int dim = 0; dim < 8; ++dim) call.q[static_cast<std::size_t>(i * call.query().row_stride + dim)] = 1e10f;
  }
  for (const std::int64_t row : {3, 8}) {
    cache.SetKey(row, 0, std::vector<float>(8, 1e20f));
    cache.SetValue(row, 0, std::vector<float>(8, static_cast<float>(row)));
  }
  for (const std::int64_t row : {0, 1, 2, 4, 5, 6, 7, 9}) cache.SetKey(row, 0, std::vector<float>(8, -1.0f));
  ASSERT_TRUE(call.Run(cache.view(), 1).ok());
  for (const float value : call.Dense()) EXPECT_FLOAT_EQ(value, 5.5f);
}

}  // namespace
}  // namespace scsa
