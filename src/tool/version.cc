// SPDX-License-Identifier: Apache-2.0
#include "version.h"

#include <fmt/format.h>
#include <llama.h>

#include "scsa/target.h"

// For versions of llama.cpp that do not tell theirs (ggml before 0.20). llama.cpp's own function, where there is one,
// is no template and so preferred.
template <typename = void>
static const char* llama_version() {
  return "of unknown version";
}

namespace scsa::tool {

std::string VersionText() {
  return fmt::format("scsa {} ({}, llama.cpp {}, ggml {})", SCSA_TOOL_VERSION, ActiveTarget(), llama_version(),
                     ggml_version());
}

std::string LlamaCppVersion() { return fmt::format("{}/{}", llama_version(), ggml_version()); }

}  // namespace scsa::tool
