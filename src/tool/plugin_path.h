// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

namespace scsa::tool {

// Where libggml-scsa.so is: the environment variable SCSA_PLUGIN when set, else the first that exists of the folder of
// this program, the library folder of the same installation, and the plugin's folder in the same build tree. Absolute.
// ToolError when there is none.
std::filesystem::path FindPlugin();

}  // namespace scsa::tool
