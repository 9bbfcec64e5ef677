// SPDX-License-Identifier: Apache-2.0
#include "state_store.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "hash.h"
#include "tool_error.h"
#include "version.h"

namespace scsa::tool {

namespace fs = std::filesystem;

namespace {

// libllama aborts on a state file that ends early, so each file ends in a record of its own length. libllama ignores
// what follows the state.
struct Footer {
  char magic[8] = {'S', 'C', 'S', 'A', 'E', 'N', 'D', '1'};
  std::uint64_t content_size = 0;

  bool operator==(const Footer&) const = default;
};

bool AppendFooter(const fs::path& path) {
  std::error_code error;
  Footer footer;
  footer.content_size = fs::file_size(path, error);
  if (error) return false;
  std::ofstream file(path, std::ios::binary | std::ios::app);
  file.write(reinterpret_cast<const char*>(&footer), sizeof(footer));
  file.close();
  return static_cast<bool>(file);
}

bool HasFooter(const fs::path& path) {
  std::error_code error;
  const std::uint64_t size = fs::file_size(path, error);
  if (error || size < sizeof(Footer)) return false;
  Footer expected;
  expected.content_size = size - sizeof(Footer);
  Footer found;
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(expected.content_size));
  file.read(reinterpret_cast<char*>(&found), sizeof(found));
  return file && found == expected;
}

}  // namespace

std::string StateFileName(const StateKey& key) {
  Hash hash;
  hash.Value(key.model_fingerprint);
  hash.Text(key.llama_cpp_version);
  hash.Text(CacheTypeName(key.type));
  for (const llama_token token : key.tokens) hash.Value(token);
  std::string name = key.model_name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.'; },
      '-');
  return fmt::format("{}-{}-{}-{:016x}.state", name, key.tokens.size(), CacheTypeName(key.type), hash.value());
}

StateStore::StateStore(const std::string& folder) : folder_(folder), temporary_(folder.empty()) {
  if (temporary_) {
    std::string pattern = (fs::temp_directory_path() / "scsa-states-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw ToolError(
          fmt::format("cannot create a temporary folder {} ({}): give --state-dir", pattern, std::strerror(errno)));
    }
    folder_ = pattern;
    return;
  }
  std::error_code error;
  fs::create_directories(folder_, error);
  std::error_code ignored;
  if (!fs::is_directory(folder_, ignored)) {
    throw ToolError(fmt::format("--state-dir: cannot create folder {} ({})", folder,
                                error ? error.message() : "a file of that name exists"));
  }
  if (access(folder_.c_str(), R_OK | W_OK | X_OK) != 0) {
    throw ToolError(fmt::format("--state-dir: folder {} is not writable ({})", folder, std::strerror(errno)));
  }
}

StateStore::~StateStore() {
  std::error_code ignored;  // a leftover in the temporary folder is no reason to fail
  if (temporary_) fs::remove_all(folder_, ignored);
}

fs::path StateStore::PathOf(const Model& model, std::span<const llama_token> tokens, CacheType type) const {
  return folder_ / StateFileName({.model_name = model.name(),
                                  .model_fingerprint = model.Fingerprint(),
                                  .llama_cpp_version = LlamaCppVersion(),
                                  .type = type,
                                  .tokens = tokens});
}

int StateStore::Prefill(const Model& model, std::span<const llama_token> tokens, std::span<const int> lengths,
                        CacheType type, int threads, Progress& progress) {
  std::vector<int> missing;
  int start = 0;  // longest saved prompt below the first missing one
  for (const int length : lengths) {
    if (!fs::exists(PathOf(model, tokens.first(length), type))) {
      missing.push_back(length);
    } else if (missing.empty()) {
      start = length;
    }
  }
  if (missing.empty()) return 0;

  Context context(model, missing.back(), type, threads);
  if (start > 0) Load(model, tokens.first(start), type, context);
  const auto begin = std::chrono::steady_clock::now();
  int done = start;
  for (const int length : missing) {
    context.Decode(tokens.subspan(done, length - done), [&](int n) {
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      progress.Show(fmt::format("prefill ({} cache): {}", CacheTypeName(type),
                                RateText(done + n - start, missing.back() - start, seconds)));
    });
    done = length;
    const fs::path path = PathOf(model, tokens.first(length), type);
    fs::path temporary = path;
    temporary += fmt::format(".{}.tmp", getpid());
    const bool saved = llama_state_seq_save_file(context.get(), temporary.c_str(), 0, tokens.data(), length) != 0 &&
                       AppendFooter(temporary);
    std::error_code error;
    if (saved) fs::rename(temporary, path, error);
    if (!saved || error) {
      fs::remove(temporary, error);
      throw ToolError(fmt::format("cannot save the prefilled state {}: is the disk full?", path.string()));
    }
  }
  progress.Clear();
  return missing.back() - start;
}

void StateStore::Load(const Model& model, std::span<const llama_token> tokens, CacheType type, Context& context) const {
  const fs::path path = PathOf(model, tokens, type);
  std::vector<llama_token> saved(tokens.size());
  std::size_t n = 0;
  const bool ok =
      HasFooter(path) &&
      llama_state_seq_load_file(context.get(), path.c_str(), 0, saved.data(), saved.size(), &n) != 0 &&
      std::equal(saved.begin(), saved.begin() + static_cast<std::ptrdiff_t>(n), tokens.begin(), tokens.end());
  if (!ok) {
    throw ToolError(fmt::format("the saved state {} is damaged: delete it and run again", path.string()));
  }
}

std::uint64_t StateStore::SizeOf(const Model& model, std::span<const llama_token> tokens, CacheType type) const {
  std::error_code error;
  const std::uint64_t size = fs::file_size(PathOf(model, tokens, type), error);
  return error ? 0 : size;
}

}  // namespace scsa::tool
