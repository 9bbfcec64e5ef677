// SPDX-License-Identifier: Apache-2.0
#include "state_store.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "hash.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

const std::vector<llama_token> kTokens = {1, 2, 3, 4};

StateKey Key() {
  StateKey key;
  key.model_name = "Model 1/B";
  key.model_fingerprint = 42;
  key.llama_cpp_version = "1/2";
  key.tokens = kTokens;
  return key;
}

TEST(Hash, IsFnv1a) {
  // Published test vectors of 64-bit FNV-1a.
  EXPECT_EQ(Hash().value(), 0xcbf29ce484222325ULL);
  Hash a;
  a.Bytes("a", 1);
  EXPECT_EQ(a.value(), 0xaf63dc4c8601ec8cULL);
  Hash foobar;
  foobar.Bytes("foobar", 6);
  EXPECT_EQ(foobar.value(), 0x85944171f73967e8ULL);
}

TEST(StateFileName, IsReadableAndHoldsNoSeparator) {
  const std::string name = StateFileName(Key());
  EXPECT_EQ(name.rfind("Model-1-B-4-f16-", 0), 0u) << name;
  EXPECT_EQ(name.find('/'), std::string::npos);
  EXPECT_EQ(std::filesystem::path(name).extension(), ".state");
  EXPECT_EQ(name, StateFileName(Key()));
}

TEST(StateFileName, DependsOnEverythingThatTheCacheDependsOn) {
  std::set<std::string> names = {StateFileName(Key())};
  StateKey key = Key();
  key.model_fingerprint = 43;
  EXPECT_TRUE(names.insert(StateFileName(key)).second);
  key = Key();
  key.llama_cpp_version = "1/3";
  EXPECT_TRUE(names.insert(StateFileName(key)).second);
  key = Key();
  key.type = CacheType::kQ8_0;
  EXPECT_TRUE(names.insert(StateFileName(key)).second);
  key = Key();
  key.tokens = key.tokens.first(3);
  EXPECT_TRUE(names.insert(StateFileName(key)).second);
  const std::vector<llama_token> other = {1, 2, 3, 5};
  key.tokens = other;
  EXPECT_TRUE(names.insert(StateFileName(key)).second);
}

TEST(StateStore, CreatesFoldersAndRefusesFiles) {
  const std::filesystem::path root = std::filesystem::path(testing::TempDir()) / "scsa_state_store";
  std::filesystem::remove_all(root);
  { const StateStore store((root / "a" / "b").string()); }
  EXPECT_TRUE(std::filesystem::is_directory(root / "a" / "b"));
  std::ofstream(root / "file") << "x";
  EXPECT_THROW(StateStore((root / "file").string()), ToolError);
  EXPECT_THROW(StateStore((root / "file" / "below").string()), ToolError);
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace scsa::tool
