// SPDX-License-Identifier: Apache-2.0
#include "plugin/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

namespace scsa::plugin {
namespace {

// Touched memory in small pages.
class HugePagesTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kPages = 6;  // huge ones, of which five lie in the mapping as a whole

  void SetUp() override {
    page_ = HugePageBytes();
    if (page_ == 0) GTEST_SKIP() << "no huge pages on request here";
    memory_ =
        static_cast<std::byte*>(mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(memory_, MAP_FAILED);
    ASSERT_EQ(madvise(memory_, Bytes(), MADV_NOHUGEPAGE), 0);
    for (std::size_t i = 0; i < Bytes(); i += 64) memory_[i] = Value(i);
    ASSERT_EQ(madvise(memory_, Bytes(), MADV_HUGEPAGE), 0);
  }
  void TearDown() override {
    if (memory_ != nullptr) munmap(memory_, Bytes());
  }

  std::size_t Bytes() const { return kPages * page_; }
  static std::byte Value(std::size_t i) { return static_cast<std::byte>(i * 2654435761u >> 11); }
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
  std::size_t WholePages() const {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_);
    return (at + Bytes()) / page_ - (at + page_ - 1) / page_;
  }

  std::size_t page_ = 0;
  std::byte* memory_ = nullptr;
};

TEST_F(HugePagesTest, OnePageMovesInEachCallAndKeepsItsContents) {
  HugePages pages;
  pages.Advance(memory_, Bytes(), memory_, Bytes());
  if (Moved() == 0) GTEST_SKIP() << "this kernel does not move pages at once";
  EXPECT_EQ(Moved(), 1u);
  for (std::size_t call = 0; call < 2 * kPages; ++call) pages.Advance(memory_, Bytes(), memory_, Bytes());
  EXPECT_EQ(Moved(), WholePages());
  for (std::size_t i = 0; i < Bytes(); i += 64) ASSERT_EQ(memory_[i], Value(i)) << i;
}

TEST_F(HugePagesTest, OnlyWhatIsUsedMovesAndTheRestFollows) {
  HugePages pages;
  const auto at = reinterpret_cast<std::uintptr_t>(memory_);
  std::byte* first = memory_ + ((at + page_ - 1) / page_ * page_ - at);  // of the whole pages
  for (std::size_t call = 0; call < kPages; ++call) pages.Advance(first + 100, page_, memory_, Bytes());
  if (Moved() == 0) GTEST_SKIP() << "this kernel does not move pages at once";
  EXPECT_EQ(Moved(), 2u);  // it lies in two
  for (std::size_t call = 0; call < kPages; ++call) pages.Advance(first + 100, 2 * page_, memory_, Bytes());
  EXPECT_EQ(Moved(), 3u);
}

TEST_F(HugePagesTest, ABufferWithoutAWholePageIsLeftAlone) {
  HugePages pages;
  const auto at = reinterpret_cast<std::uintptr_t>(memory_);
  std::byte* first = memory_ + ((at + page_ - 1) / page_ * page_ - at);
  // From the middle of a page to the middle of the next one.
  for (std::size_t call = 0; call < kPages; ++call) {
    pages.Advance(first + page_ / 2, page_, first + page_ / 2, page_);
    pages.Advance(first, page_ / 2, first, page_ / 2);
  }
  EXPECT_EQ(Moved(), 0u);
}

}  // namespace
}  // namespace scsa::plugin
