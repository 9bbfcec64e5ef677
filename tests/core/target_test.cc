// SPDX-License-Identifier: Apache-2.0
#include "scsa/target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "core/simd.h"

namespace scsa {
namespace {

class TargetTest : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(ForceTarget("").ok()); }
};

TEST_F(TargetTest, EveryForcedTargetIsTheOneThatRuns) {
  for (const std::string& name : AvailableTargets()) {
    ASSERT_TRUE(ForceTarget(name).ok()) << name;
    EXPECT_EQ(ExecutedTarget(), name);
    EXPECT_EQ(ActiveTarget(), name);
  }
}

TEST_F(TargetTest, TheLastTargetIsThePortableOne) {
  const std::vector<std::string> targets = AvailableTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_TRUE(targets.back() == "SCALAR" || targets.back() == "EMU128") << targets.back();
}

TEST_F(TargetTest, NamesAreUnique) {
  std::vector<std::string> targets = AvailableTargets();
  std::sort(targets.begin(), targets.end());
  EXPECT_EQ(std::adjacent_find(targets.begin(), targets.end()), targets.end());
}

TEST_F(TargetTest, EmptyNameReturnsToTheBestTarget) {
  ASSERT_TRUE(ForceTarget(AvailableTargets().back()).ok());
  ASSERT_TRUE(ForceTarget("").ok());
  EXPECT_EQ(ActiveTarget(), AvailableTargets().front());
}

TEST_F(TargetTest, CaseDoesNotMatter) {
  std::string name = AvailableTargets().back();
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  ASSERT_TRUE(ForceTarget(name).ok());
  EXPECT_EQ(ActiveTarget(), AvailableTargets().back());
}

TEST_F(TargetTest, UnknownNameIsRefusedAndChangesNothing) {
  const std::string portable = AvailableTargets().back();
  ASSERT_TRUE(ForceTarget(portable).ok());
  const Status status = ForceTarget("ABACUS");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("ABACUS"), std::string::npos);
  for (const std::string& name : AvailableTargets()) {
    EXPECT_NE(status.message().find(name), std::string::npos) << "the message offers " << name;
  }
  EXPECT_EQ(ActiveTarget(), portable);
}

// The variable is read once per process, so each case runs in a process of its own. It exits with 0 when all is as
// expected.
class TargetDeathTest : public TargetTest {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(TargetDeathTest, EnvironmentForcesATarget) {
  const std::string portable = AvailableTargets().back();
  EXPECT_EXIT(
      {
        ::setenv("SCSA_TARGET", portable.c_str(), 1);
        const bool good = ActiveTarget() == portable && TargetFromEnvironment().ok();
        std::exit(good ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(TargetDeathTest, BadEnvironmentLeavesTheBestTarget) {
  EXPECT_EXIT(
      {
        ::setenv("SCSA_TARGET", "ABACUS", 1);
        const Status status = TargetFromEnvironment();
        const bool good = ActiveTarget() == AvailableTargets().front() &&
                          status.code() == StatusCode::kInvalidArgument &&
                          status.message().find("SCSA_TARGET") != std::string::npos;
        std::exit(good ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace scsa
