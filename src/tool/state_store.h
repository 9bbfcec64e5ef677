// SPDX-License-Identifier: Apache-2.0
//
// Prefilled caches on disk, so that a long prompt is computed once.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "progress.h"
#include "session.h"

namespace scsa::tool {

// Everything that a saved cache depends on.
struct StateKey {
  std::string model_name;
  std::uint64_t model_fingerprint = 0;
  std::string llama_cpp_version;
  CacheType type = CacheType::kF16;
  std::span<const llama_token> tokens;  // the prompt
};

// "<model>-<tokens>-<type>-<hash>.state". Equal for equal keys, on any machine.
std::string StateFileName(const StateKey& key);

class StateStore {
 public:
  // Creates the folder where needed. An empty path: a temporary folder, removed with this object.
  // ToolError when the folder cannot be created or written to.
  explicit StateStore(const std::string& folder);
  ~StateStore();
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // Makes sure that the cache after the first n tokens of `tokens` is saved for each n of `lengths` (ascending).
  // What is missing is computed in one pass over the longest missing prompt, from the longest one that is there.
  // Files appear complete or not at all. Returns the tokens that had to be computed.
  int Prefill(const Model& model, std::span<const llama_token> tokens, std::span<const int> lengths, CacheType type,
              int threads, Progress& progress);

  // Restores the cache after `tokens` into an empty context. ToolError when the file is absent or damaged.
  void Load(const Model& model, std::span<const llama_token> tokens, CacheType type, Context& context) const;

  // Size of a saved state: near the memory that its cached rows take. 0 when absent.
  std::uint64_t SizeOf(const Model& model, std::span<const llama_token> tokens, CacheType type) const;

 private:
  std::filesystem::path PathOf(const Model& model, std::span<const llama_token> tokens, CacheType type) const;

  std::filesystem::path folder_;
  bool temporary_ = false;
};

}  // namespace scsa::tool
