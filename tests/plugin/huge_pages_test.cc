// SPDX-License-Identifier: Apache-2.0
#include "plugin/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace scsa::plugin {
namespace {

// Touched memory in small pages, where the kernel moves pages when it is asked to.
class HugePagesTest : public ::testing::Test {
 protected:
  using Range = HugePages::Range;
  static constexpr std::size_t kPages = 6;  // huge ones, of which five at least lie in the mapping as a whole

  void SetUp() override {
    page_ = HugePageBytes();
    if (page_ == 0) GTEST_SKIP() << "no huge pages on request here";
    Map();
    if (Moved() > 0) GTEST_SKIP() << "memory has huge pages from the beginning here";
    if (MovedBy(1, {First(), 1}, All(), All()) == 0) GTEST_SKIP() << "this kernel does not move pages at once";
    Unmap();
    Map();
  }
  void TearDown() override { Unmap(); }

  void Map() {
    memory_ =
        static_cast<std::byte*>(mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(memory_, MAP_FAILED);
    for (std::size_t i = 0; i < Bytes(); i += 64) memory_[i] = Value(i);
  }
  void Unmap() {
    if (memory_ != nullptr) munmap(memory_, Bytes());
    memory_ = nullptr;
  }

  std::size_t Bytes() const { return kPages * page_; }
  static std::byte Value(std::size_t i) { return static_cast<std::byte>(i * 2654435761u >> 11); }
  // Where the first whole page begins.
  std::byte* First() const {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_);
    return memory_ + ((at + page_ - 1) / page_ * page_ - at);
  }
  std::size_t WholePages() const { return (Bytes() - static_cast<std::size_t>(First() - memory_)) / page_; }
  // Of the mapping, in huge pages, as the kernel counts them.
  std::size_t Moved() const {
    std::ifstream smaps("/proc/self/smaps");
    std::size_t kilobytes = 0;
    bool ours = false;
    for (std::string line; std::getline(smaps, line);) {
      std::uintptr_t begin = 0;
      std::uintptr_t end = 0;
      char dash = 0;
      if (std::istringstream range(line); range >> std::hex >> begin >> dash >> end && dash == '-') {
        const auto at = reinterpret_cast<std::uintptr_t>(memory_);
        ours = begin < at + Bytes() && end > at;
      } else if (ours && line.starts_with("AnonHugePages:")) {
        kilobytes += std::stoul(line.substr(14));
      }
    }
    return kilobytes * 1024 / page_;
  }
  // Calls with these arguments until `expected` pages have moved. The kernel may refuse a page for a moment, so that
  // several objects begin anew; never do they move more than they should.
  std::size_t MovedBy(std::size_t expected, Range used, Range tensor, Range buffer) const {
    for (int attempt = 0; attempt < 20 && Moved() < expected; ++attempt) {
      HugePages pages(1.0);
      for (int call = 0; call < 4; ++call) pages.Advance(used, tensor, buffer);
    }
    return Moved();
  }
  Range All() const { return {memory_, Bytes()}; }

  std::size_t page_ = 0;
  std::byte* memory_ = nullptr;
};

TEST_F(HugePagesTest, AllOfACacheMovesAndKeepsItsContents) {
  EXPECT_EQ(MovedBy(WholePages(), All(), All(), All()), WholePages());
  for (std::size_t i = 0; i < Bytes(); i += 64) ASSERT_EQ(memory_[i], Value(i)) << i;
}

TEST_F(HugePagesTest, OnlyWhatIsUsedMovesAndTheRestFollows) {
  EXPECT_EQ(MovedBy(2, {First() + 100, page_}, All(), All()), 2u);  // it lies in two
  EXPECT_EQ(MovedBy(3, {First() + 100, 2 * page_}, All(), All()), 3u);
}

// Other layers are as full as this one.
TEST_F(HugePagesTest, ATensorThatIsHalfFullTakesItsWholeBufferAlong) {
  const Range tensor = {First(), 2 * page_};
  EXPECT_EQ(MovedBy(1, {First(), page_ - 64}, tensor, All()), 1u);
  EXPECT_EQ(MovedBy(WholePages(), {First(), page_}, tensor, All()), WholePages());
}

// With next to no share of the time the next call to the system has to wait for days.
TEST_F(HugePagesTest, MoreHasToWaitForItsShareOfTheTime) {
  HugePages pages(1e-9);
  for (int call = 0; call < 8; ++call) {
    pages.Advance({First() + static_cast<std::size_t>(call % 2) * 2 * page_, 64}, All(), All());
  }
  EXPECT_LE(Moved(), 1u);
}

TEST_F(HugePagesTest, ABufferWithoutAWholePageIsLeftAlone) {
  HugePages pages(1.0);
  // From the middle of a page to the middle of the next one, and half a page.
  for (const Range& buffer : {Range{First() + page_ / 2, page_}, Range{First(), page_ / 2}}) {
    for (int call = 0; call < 4; ++call) pages.Advance(buffer, buffer, buffer);
  }
  EXPECT_EQ(Moved(), 0u);
}

}  // namespace
}  // namespace scsa::plugin
