// SPDX-License-Identifier: Apache-2.0
#include "version.h"

#include <fmt/format.h>
#include <llama.h>

#include "scsa/target.h"

namespace scsa::tool {

std::string VersionText() {
  return fmt::format("scsa {} ({}, llama.cpp {}, ggml {})", SCSA_TOOL_VERSION, ActiveTarget(), llama_version(),
                     ggml_version());
}

std::string LlamaCppVersion() { return fmt::format("{}/{}", llama_version(), ggml_version()); }

}  // namespace scsa::tool
