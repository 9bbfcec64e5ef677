// SPDX-License-Identifier: Apache-2.0
#include "plugin_path.h"

#include <fmt/format.h>

#include <cstdlib>

#include "tool_error.h"

namespace scsa::tool {

namespace fs = std::filesystem;

fs::path FindPlugin() {
  constexpr const char* kName = "libggml-scsa.so";
  std::error_code error;
  if (const char* path = std::getenv("SCSA_PLUGIN"); path != nullptr && *path != '\0') {
    if (!fs::is_regular_file(path, error)) {
      throw ToolError(fmt::format("SCSA_PLUGIN names {}, which is no file: correct it or unset it", path));
    }
    return fs::absolute(path);
  }
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* folder : {".", "../" SCSA_INSTALL_LIBDIR, "../lib", "../plugin"}) {
    const fs::path candidate = (here / folder / kName).lexically_normal();
    if (fs::is_regular_file(candidate, error)) return candidate;
  }
  throw ToolError(
      fmt::format("{} not found beside {} or in its library folder: build target ggml-scsa, or set SCSA_PLUGIN to its "
                  "path",
                  kName, here.string()));
}

}  // namespace scsa::tool
