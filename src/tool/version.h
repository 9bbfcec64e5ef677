// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace scsa::tool {

// "scsa 0.1.0 (AVX2, llama.cpp 0.5.0, ggml 0.25.3)": this tool, the SIMD target in force, the libraries loaded.
std::string VersionText();
// "0.5.0/0.25.3": llama.cpp and ggml as loaded; part of the name of a state file.
std::string LlamaCppVersion();

}  // namespace scsa::tool
