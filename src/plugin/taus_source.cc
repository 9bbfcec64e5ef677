// SPDX-License-Identifier: Apache-2.0
#include "plugin/taus_source.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <utility>

namespace scsa::plugin {

std::string ReadTausSource(std::string_view path, std::shared_ptr<const TausSource>* source) {
  try {
    auto read = std::make_shared<TausSource>();
    read->path = path;
    std::error_code error;
    // A pipe or a device might never end.
    if (!std::filesystem::is_regular_file(read->path, error)) {
      return "cannot read \"" + read->path + "\": " + (error ? error.message() : "it is no regular file");
    }
    std::ifstream stream(read->path, std::ios::binary);
    // One byte more than is allowed: ParseTaus says so.
    const std::uintmax_t size = std::filesystem::file_size(read->path, error);
    std::string text(error ? 0 : std::min<std::uintmax_t>(size, kMaxTausBytes + 1), '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (error || !stream) return "cannot read \"" + read->path + "\": " + std::strerror(errno);
    text.resize(static_cast<std::size_t>(stream.gcount()));
    const Status status = ParseTaus(text, &read->file);
    if (!status.ok()) return "\"" + read->path + "\": " + status.message();
    *source = std::move(read);
    return {};
  } catch (const std::bad_alloc&) {
    return "no memory to read the thresholds";
  }
}

}  // namespace scsa::plugin
