// SPDX-License-Identifier: Apache-2.0
//
// Limits of control groups, read from made-up folders that look like those of the kernel.
#include "memory_limit.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace scsa::tool {
namespace {

namespace fs = std::filesystem;

class MemoryLimitTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
    folder_ = fs::path(testing::TempDir()) / ("memory_limit_" + test + "_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void Write(const fs::path& name, const std::string& text) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
  }
  std::optional<std::uint64_t> Left() { return ControlGroupMemory(folder_ / "groups", folder_ / "mount"); }

  fs::path folder_;
};

TEST_F(MemoryLimitTest, Version2) {
  Write("groups", "0::/user/job\n");
  Write("mount/user/job/memory.max", "1000000\n");
  Write("mount/user/job/memory.current", "700000\n");
  // Of the 700,000 bytes in use, 250,000 are page cache that can go.
  Write("mount/user/job/memory.stat", "anon 400000\nfile 300000\ninactive_file 250000\nactive_file 50000\n");
  EXPECT_EQ(Left(), 550000u);
}

TEST_F(MemoryLimitTest, Version1) {
  Write("groups", "5:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/\n");
  Write("mount/memory/memory.limit_in_bytes", "9223372036854771712\n");  // the kernel's "no limit"
  Write("mount/memory/memory.usage_in_bytes", "5000\n");
  Write("mount/memory/job/memory.limit_in_bytes", "4096\n");
  Write("mount/memory/job/memory.usage_in_bytes", "1096\n");
  Write("mount/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 96\n");
  EXPECT_EQ(Left(), 3096u);
}

TEST_F(MemoryLimitTest, TheTightestGroupCounts) {
  Write("groups", "0::/outer/inner\n");
  Write("mount/outer/memory.max", "600\n");
  Write("mount/outer/memory.current", "500\n");
  Write("mount/outer/inner/memory.max", "400\n");
  Write("mount/outer/inner/memory.current", "100\n");
  EXPECT_EQ(Left(), 100u);
}

TEST_F(MemoryLimitTest, InsideAContainerTheMountIsTheGroup) {
  Write("groups", "4:memory:/docker/0123\n");
  Write("mount/memory/memory.limit_in_bytes", "1000\n");
  Write("mount/memory/memory.usage_in_bytes", "10\n");
  EXPECT_EQ(Left(), 990u);
}

TEST_F(MemoryLimitTest, MoreInUseThanAllowedLeavesNothing) {
  Write("groups", "0::/job\n");
  Write("mount/job/memory.max", "100\n");
  Write("mount/job/memory.current", "150\n");
  EXPECT_EQ(Left(), 0u);
}

TEST_F(MemoryLimitTest, NoLimit) {
  EXPECT_EQ(Left(), std::nullopt);  // no such file
  Write("groups", "0::/job\nnonsense\n");
  EXPECT_EQ(Left(), std::nullopt);
  Write("mount/job/memory.max", "max\n");
  Write("mount/job/memory.current", "150\n");
  EXPECT_EQ(Left(), std::nullopt);
}

TEST(AvailableMemory, IsPartOfWhatTheMachineHas) {
  const auto available = AvailableMemory();
  ASSERT_TRUE(available.has_value());
  EXPECT_GT(*available, 0u);
  EXPECT_LE(*available, static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE));
}

}  // namespace
}  // namespace scsa::tool
