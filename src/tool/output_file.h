// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <string_view>

namespace scsa::tool {

// Throws ToolError when a file could not be written there (checked before long work).
void CheckWritable(const std::string& path, std::string_view option);
// Writes the whole file or leaves the old one. ToolError on failure. `write` puts the content into the stream; it need
// not check for errors.
void WriteFileAtomically(const std::string& path, const std::function<void(std::ostream&)>& write);
void WriteFileAtomically(const std::string& path, std::string_view content);

}  // namespace scsa::tool
