// SPDX-License-Identifier: Apache-2.0
#include "timing.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace scsa::tool {
namespace {

TEST(TimeInterleaved, EveryArmOncePerRoundAndEachFirstInTurn) {
  std::vector<std::pair<int, int>> calls;
  const auto seconds = TimeInterleaved(3, 4, [&](int arm, int round) { calls.emplace_back(arm, round); });
  const std::vector<std::pair<int, int>> expected = {{0, 0}, {1, 0}, {2, 0}, {1, 1}, {2, 1}, {0, 1},
                                                     {2, 2}, {0, 2}, {1, 2}, {0, 3}, {1, 3}, {2, 3}};
  EXPECT_EQ(calls, expected);
  ASSERT_EQ(seconds.size(), 3u);
  for (const auto& arm : seconds) EXPECT_EQ(arm.size(), 4u);
}

TEST(TimeInterleaved, NothingToDo) {
  EXPECT_TRUE(TimeInterleaved(0, 5, [](int, int) { FAIL(); }).empty());
  const auto seconds = TimeInterleaved(2, 0, [](int, int) { FAIL(); });
  ASSERT_EQ(seconds.size(), 2u);
  EXPECT_TRUE(seconds[0].empty());
}

}  // namespace
}  // namespace scsa::tool
