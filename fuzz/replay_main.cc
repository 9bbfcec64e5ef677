// SPDX-License-Identifier: Apache-2.0
//
// Stands in for libFuzzer's main where the compiler has none: runs the entry point on every file of the given folders,
// and on every prefix of each, which is what a cut-off file looks like.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  int files = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(argv[i])) {
      if (!entry.is_regular_file()) continue;
      std::ifstream stream(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
      for (std::size_t size = 0; size <= bytes.size(); ++size) {
        // A copy of exactly that size, so that AddressSanitizer sees a read past the end.
        const std::vector<std::uint8_t> input(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
        LLVMFuzzerTestOneInput(input.data(), input.size());
      }
      ++files;
    }
  }
  std::printf("replayed %d files and their prefixes\n", files);
  return files > 0 ? 0 : 1;
}
