// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace scsa::tool {

// 64-bit FNV-1a, for names of files in our own cache: stable across runs and machines, not cryptographic.
class Hash {
 public:
  void Bytes(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < size; ++i) value_ = (value_ ^ bytes[i]) * 0x100000001b3ULL;
  }
  template <typename T>
  void Value(const T& value) {
    static_assert(std::has_unique_object_representations_v<T>, "padding and floats have no stable bytes");
    Bytes(&value, sizeof(value));
  }
  // Length first, so that {"ab", "c"} and {"a", "bc"} differ.
  void Text(std::string_view text) {
    Value(static_cast<std::uint64_t>(text.size()));
    Bytes(text.data(), text.size());
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace scsa::tool
