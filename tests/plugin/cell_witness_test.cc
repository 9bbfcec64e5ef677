// SPDX-License-Identifier: Apache-2.0
#include "plugin/cell_witness.h"

#include <gtest/gtest.h>

#include <vector>

namespace scsa::plugin {
namespace {

constexpr std::int64_t kCells = 150;
constexpr std::int64_t kStride = 101;  // no alignment

using Bitmap = std::vector<std::uint64_t>;
Bitmap Cells(std::initializer_list<int> cells) {
  Bitmap words(3);
  for (int cell : cells) words[static_cast<std::size_t>(cell / 64)] |= std::uint64_t{1} << (cell % 64);
  return words;
}

class CellWitnessTest : public testing::Test {
 protected:
  void SetUp() override {
    for (std::size_t i = 0; i < keys_.size(); ++i) keys_[i] = static_cast<std::byte>(i * 37 % 251);
  }
  bool Look(const Bitmap& visible, const Bitmap& seen, const Bitmap& written) {
    return witness_.Look({keys_.data(), kStride, bytes_}, visible, seen, written);
  }
  std::byte& Key(int cell, std::int64_t at) { return keys_[static_cast<std::size_t>(cell * kStride + at)]; }

  std::vector<std::byte> keys_ = std::vector<std::byte>(kCells * kStride);
  std::size_t bytes_ = 64;
  CellWitness witness_{kCells};
};

TEST_F(CellWitnessTest, ACellThatDiffersIsFoundOnce) {
  const Bitmap cells = Cells({0, 63, 64, 149});
  EXPECT_FALSE(Look(cells, Cells({}), Cells({})));  // all are new
  EXPECT_FALSE(Look(cells, cells, Cells({})));
  for (const int cell : {0, 63, 64, 149}) {
    for (std::int64_t at = 0; at < 32; ++at) {
      Key(cell, at) ^= std::byte{1};
      EXPECT_TRUE(Look(cells, cells, Cells({}))) << "cell " << cell << ", byte " << at;
      EXPECT_FALSE(Look(cells, cells, Cells({}))) << "cell " << cell << ", byte " << at;
    }
  }
}

TEST_F(CellWitnessTest, OnlyCellsThatShouldBeTheSameAreCompared) {
  const Bitmap cells = Cells({5, 6, 100});
  Look(cells, Cells({}), Cells({}));
  Key(100, 0) ^= std::byte{1};
  EXPECT_FALSE(Look(cells, cells, Cells({100}))) << "written since";
  Key(100, 0) ^= std::byte{1};
  EXPECT_FALSE(Look(cells, Cells({5, 6}), Cells({}))) << "not seen before";
  Key(100, 0) ^= std::byte{1};
  EXPECT_FALSE(Look(Cells({5, 6}), cells, Cells({}))) << "not visible";
  EXPECT_TRUE(Look(cells, cells, Cells({})));
}

TEST_F(CellWitnessTest, AShorterBitmapHidesWhatLiesBehind) {
  const Bitmap cells = Cells({5, 100});
  Look(cells, Cells({}), Cells({}));
  Key(100, 0) ^= std::byte{1};
  EXPECT_FALSE(witness_.Look({keys_.data(), kStride, bytes_}, std::span(cells).first(1), cells, Cells({})));
  Key(5, 0) ^= std::byte{1};
  EXPECT_TRUE(witness_.Look({keys_.data(), kStride, bytes_}, std::span(cells).first(1), cells, Cells({})));
}

TEST_F(CellWitnessTest, AShortKeyEndsWhereItEnds) {
  bytes_ = 16;
  const Bitmap cells = Cells({149});
  Look(cells, Cells({}), Cells({}));
  Key(149, 16) ^= std::byte{1};
  EXPECT_FALSE(Look(cells, cells, Cells({})));
  Key(149, 15) ^= std::byte{1};
  EXPECT_TRUE(Look(cells, cells, Cells({})));
}

TEST_F(CellWitnessTest, TheLowestLayerIsTheWitness) {
  witness_.Join(4);
  EXPECT_TRUE(witness_.IsWitness(4));
  witness_.Join(6);
  EXPECT_TRUE(witness_.IsWitness(4));
  EXPECT_FALSE(witness_.IsWitness(6));
  witness_.Join(2);
  EXPECT_TRUE(witness_.IsWitness(2));
  EXPECT_FALSE(witness_.IsWitness(4));
}

TEST_F(CellWitnessTest, ReportsAndAlarmsAreCounted) {
  witness_.Report(false);
  EXPECT_EQ(witness_.reports(), 1u);
  EXPECT_EQ(witness_.alarms(), 0u);
  witness_.Report(true);
  EXPECT_EQ(witness_.reports(), 2u);
  EXPECT_EQ(witness_.alarms(), 1u);
}

}  // namespace
}  // namespace scsa::plugin
