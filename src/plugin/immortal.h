// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <new>

namespace scsa::plugin {

// The one object of a type. Never destroyed, since threads of the program may still run while it exits. Not on the
// heap: ggml's C functions ask for it, through which no exception may pass.
template <class T>
T& Immortal() {
  alignas(T) static std::byte storage[sizeof(T)];
  static T* object = new (storage) T;
  return *object;
}

}  // namespace scsa::plugin
