// SPDX-License-Identifier: Apache-2.0
//
// How a C function reports what its body returns or throws.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "scsa/scsa.h"
#include "scsa/status.h"

namespace scsa::capi {

// Keeps `message` for scsa_last_error and returns `code`. Allocates nothing.
scsa_status Fail(scsa_status code, std::string_view message) noexcept;
scsa_status Report(const Status& status) noexcept;

// Runs `body`, which returns a Status and may throw.
template <class Body>
scsa_status Guard(Body&& body) noexcept {
  try {
    return Report(std::forward<Body>(body)());
  } catch (const std::bad_alloc&) {
    return Fail(SCSA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return Fail(SCSA_INTERNAL_ERROR, e.what());
  } catch (...) {
    return Fail(SCSA_INTERNAL_ERROR, "an exception of an unknown type");
  }
}

// kInvalidArgument for a null pointer. `name` as the header calls it.
inline Status NotNull(const void* pointer, const char* name) {
  return pointer != nullptr ? Status::Ok() : Status::Invalid(std::string(name) + " is a null pointer");
}

// The first failure.
template <class... Rest>
Status AllOf(Status first, Rest... rest) {
  if constexpr (sizeof...(rest) == 0) {
    return first;
  } else {
    return first.ok() ? AllOf(std::move(rest)...) : first;
  }
}

}  // namespace scsa::capi
