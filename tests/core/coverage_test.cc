// SPDX-License-Identifier: Apache-2.0
#include "core/coverage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/core/synthetic.h"

namespace scsa {
namespace {

using Runs = std::vector<std::pair<std::int64_t, std::int64_t>>;
using Usable = std::vector<std::uint8_t>;

constexpr int kBlockSize = 128;
constexpr std::int64_t kRows = 1100;  // eight whole blocks and a rest

class CoverageTest : public ::testing::Test {
 protected:
  void Build(const std::vector<int>& blocks, int sink = 4) {
    config_ = ConfigFor(Preset::kFast);
    config_.block_size = kBlockSize;
    config_.sink = sink;
    plan_ = std::make_unique<BlockPlan>(kShape, config_);
    ASSERT_TRUE(plan_->Build(cache_.View(), blocks, 1).status.ok());
    coverage_ = {};
    visible_.assign(kRows, true);
  }

  void Hide(std::int64_t first, std::int64_t end) {
    std::fill(visible_.begin() + first, visible_.begin() + end, false);
  }

  const Coverage& Find(std::int64_t n_kv = kRows) {
    // Exactly the words of n_kv rows, so that a sanitizer sees a read beyond them. The last word's spare bits are 0.
    const std::vector<std::uint64_t> words = test::Bitmap(std::vector<bool>(visible_.begin(), visible_.begin() + n_kv));
    coverage_.Find(*plan_, n_kv, words.data());
    return coverage_;
  }

  // The rule of docs/operator.md, row by row: each row belongs to a usable block or to one exact run.
  void ExpectRestated(const std::vector<int>& built, std::int64_t n_kv) {
    const Coverage& coverage = Find(n_kv);
    Usable usable;
    std::vector<int> covered(n_kv, 0);
    for (const int block : built) {
      const std::int64_t first = block == 0 ? config_.sink : std::int64_t{block} * kBlockSize;
      const std::int64_t end = std::int64_t{block + 1} * kBlockSize;
      if (end > n_kv || std::find(visible_.begin() + first, visible_.begin() + end, false) != visible_.begin() + end) {
        continue;
      }
      usable.resize(std::max<std::size_t>(usable.size(), block + 1), 0);
      usable[block] = 1;
      for (std::int64_t row = first; row < end; ++row) ++covered[row];
    }
    EXPECT_EQ(coverage.usable, usable);
    EXPECT_EQ(coverage.n_blocks(), static_cast<int>(usable.size()));
    EXPECT_EQ(coverage.usable_blocks, std::count(usable.begin(), usable.end(), 1));
    EXPECT_EQ(coverage.usable_rows, std::count(covered.begin(), covered.end(), 1));
    std::int64_t last_end = 0;
    for (const auto& [first, end] : coverage.exact_runs) {
      EXPECT_EQ(first % 64, 0);
      EXPECT_GE(first, last_end);
      EXPECT_GT(end, first);
      ASSERT_LE(end, n_kv);
      for (std::int64_t row = first; row < end; ++row) ++covered[row];
      last_end = end;
    }
    EXPECT_EQ(covered, std::vector<int>(n_kv, 1));
  }

  static constexpr Shape kShape = {.q_heads = 1, .kv_heads = 1, .head_dim = 8};
  test::SyntheticCache cache_{kShape, kRows, DType::kF32};
  Config config_;
  std::unique_ptr<BlockPlan> plan_;
  std::vector<bool> visible_;
  Coverage coverage_;
};

TEST_F(CoverageTest, FirstRowsAndTheRestAreExact) {
  Build({0, 1, 2, 3, 4, 5, 6, 7});
  const Coverage& coverage = Find();
  EXPECT_EQ(coverage.usable, Usable(8, 1));
  EXPECT_EQ(coverage.exact_runs, (Runs{{0, 4}, {1024, 1100}}));
}

TEST_F(CoverageTest, WithoutSinkRowsNothingPrecedesTheFirstBlock) {
  Build({0, 1}, /*sink=*/0);
  EXPECT_EQ(Find(256).exact_runs, Runs());
  EXPECT_EQ(coverage_.usable, Usable(2, 1));
}

TEST_F(CoverageTest, HolesMakeTheirBlocksExact) {
  Build({0, 1, 2, 3, 4, 5, 6, 7});
  Hide(128, 129);  // first row of block 1
  Hide(383, 384);  // last row of block 2
  Hide(700, 701);  // inside block 5
  const Coverage& coverage = Find();
  EXPECT_EQ(coverage.usable, (Usable{1, 0, 0, 1, 1, 0, 1, 1}));
  EXPECT_EQ(coverage.exact_runs, (Runs{{0, 4}, {128, 384}, {640, 768}, {1024, 1100}}));
}

TEST_F(CoverageTest, HolesInTheFirstRowsDoNotMatter) {
  Build({0, 1}, /*sink=*/4);
  Hide(0, 4);
  EXPECT_EQ(Find(256).usable, Usable(2, 1));
  EXPECT_EQ(coverage_.exact_runs, (Runs{{0, 4}}));
  Hide(4, 5);
  EXPECT_EQ(Find(256).usable, (Usable{0, 1}));
  EXPECT_EQ(coverage_.exact_runs, (Runs{{0, 128}}));
}

TEST_F(CoverageTest, FirstRowsMayFillAWordOfTheBitmap) {
  for (const int sink : {63, 64, 65, 100, 127}) {
    Build({0}, sink);
    Hide(0, sink);
    EXPECT_EQ(Find(128).usable, Usable(1, 1)) << sink;
    EXPECT_EQ(coverage_.exact_runs, (Runs{{0, sink}})) << sink;
    Hide(sink, sink + 1);
    EXPECT_EQ(Find(128).usable, Usable()) << sink;
    EXPECT_EQ(coverage_.exact_runs, (Runs{{0, 128}})) << sink;
  }
}

TEST_F(CoverageTest, BlocksThatWereNotBuiltAreExact) {
  Build({1, 4});
  const Coverage& coverage = Find();
  EXPECT_EQ(coverage.usable, (Usable{0, 1, 0, 0, 1}));
  EXPECT_EQ(coverage.exact_runs, (Runs{{0, 128}, {256, 512}, {640, 1100}}));
}

TEST_F(CoverageTest, BlocksBeyondTheAddressableRowsAreNotUsed) {
  Build({0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(Find(256).usable, Usable(2, 1));
  EXPECT_EQ(coverage_.exact_runs, (Runs{{0, 4}}));
  EXPECT_EQ(Find(255).usable, Usable(1, 1));
  EXPECT_EQ(coverage_.exact_runs, (Runs{{0, 4}, {128, 255}}));
  EXPECT_EQ(Find(100).usable, Usable());
  EXPECT_EQ(coverage_.exact_runs, (Runs{{0, 100}}));
  EXPECT_EQ(Find(0).usable, Usable());
  EXPECT_EQ(coverage_.exact_runs, Runs());
}

TEST_F(CoverageTest, NothingUsableIsOneExactRun) {
  Build({0, 1, 2, 3, 4, 5, 6, 7});
  Hide(0, kRows);
  EXPECT_EQ(Find().usable, Usable());
  EXPECT_EQ(coverage_.exact_runs, (Runs{{0, kRows}}));
}

TEST_F(CoverageTest, EveryRowBelongsToOnePlaceWhateverIsHidden) {
  std::mt19937 random(3);
  for (const std::vector<int>& built : {std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}, {0, 2, 3, 7}, {5}, {1, 2}}) {
    for (const int sink : {0, 4, 64, 90}) {
      Build(built, sink);
      for (int trial = 0; trial < 50; ++trial) {
        visible_.assign(kRows, true);
        const int holes = static_cast<int>(random() % 6);
        for (int i = 0; i < holes; ++i) {
          const auto first = static_cast<std::int64_t>(random() % kRows);
          Hide(first, std::min<std::int64_t>(kRows, first + 1 + static_cast<std::int64_t>(random() % 200)));
        }
        ExpectRestated(built, 1 + static_cast<std::int64_t>(random() % kRows));
      }
      // The same with all rows addressable.
      ExpectRestated(built, kRows);
    }
  }
}

// One coverage through all of it, as a layer has it: rows that come and go, and blocks that are built, dropped and
// built anew. Most steps change the end alone, as decoding does.
TEST_F(CoverageTest, FollowsThePlanAndTheVisibleRowsFromCallToCall) {
  std::mt19937 random(11);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  for (const int sink : {0, 4, 70}) {
    Build({0, 1}, sink);
    std::int64_t n_kv = 300;
    int without_bitmap = 0;
    for (int step = 0; step < 2000; ++step) {
      const std::int64_t row = below(kRows);
      switch (below(12)) {
        case 0:
          visible_[static_cast<std::size_t>(row)] = !visible_[static_cast<std::size_t>(row)];
          break;
        case 1:
          std::fill(visible_.begin(), visible_.end(), true);
          break;
        case 2: {
          const std::vector<int> block = {static_cast<int>(below(kRows / kBlockSize))};
          if (plan_->built(block[0])) break;
          ASSERT_EQ(plan_->Build(cache_.View(), block, 1).built, 1);
          break;
        }
        case 3:
          plan_->DropWritten(std::vector{row});
          break;
        case 4:
          n_kv = 1 + below(kRows);
          break;
        default:
          n_kv = std::min(n_kv + 1, kRows);
      }
      std::vector<int> built;
      for (int b = 0; b < plan_->n_blocks(); ++b) {
        if (plan_->built(b)) built.push_back(b);
      }
      const std::vector<std::uint64_t> words = test::Bitmap(visible_);
      Coverage fresh;
      fresh.Find(*plan_, n_kv, words.data());
      // Some callers have no bitmap when every row is visible.
      if (std::find(visible_.begin(), visible_.begin() + n_kv, false) == visible_.begin() + n_kv && below(3) == 0) {
        ++without_bitmap;
        coverage_.Find(*plan_, n_kv, nullptr);
        EXPECT_EQ(coverage_.usable, fresh.usable);
        EXPECT_EQ(coverage_.usable_rows, fresh.usable_rows);
      } else {
        ExpectRestated(built, n_kv);
      }
      ASSERT_EQ(coverage_.exact_runs, fresh.exact_runs) << "sink " << sink << " step " << step;
      ASSERT_FALSE(HasFailure()) << "sink " << sink << " step " << step;
    }
    EXPECT_GT(without_bitmap, 100);
  }
}

TEST(CountVisibleTest, CountsTheVisibleRowsOfARange) {
  std::mt19937 random(9);
  std::vector<bool> visible(500);
  for (std::size_t row = 0; row < visible.size(); ++row) visible[row] = random() % 3 != 0;
  const std::vector<std::uint64_t> words = test::Bitmap(visible);
  for (std::int64_t first = 0; first < 500; first += 64) {
    for (std::int64_t end = first; end <= 500; ++end) {
      EXPECT_EQ(CountVisible(words.data(), first, end),
                static_cast<std::uint64_t>(std::count(visible.begin() + first, visible.begin() + end, true)))
          << first << " " << end;
    }
  }
}

}  // namespace
}  // namespace scsa
