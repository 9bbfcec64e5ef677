// SPDX-License-Identifier: Apache-2.0
#include "capi/error.h"

#include <algorithm>
#include <cstring>

namespace scsa::capi {
namespace {

constexpr std::size_t kMessageSize = 1024;
thread_local char g_message[kMessageSize] = "";

static_assert(static_cast<int>(StatusCode::kOk) == SCSA_OK);
static_assert(static_cast<int>(StatusCode::kInvalidArgument) == SCSA_INVALID_ARGUMENT);
static_assert(static_cast<int>(StatusCode::kUnsupported) == SCSA_UNSUPPORTED);
static_assert(static_cast<int>(StatusCode::kOutOfMemory) == SCSA_OUT_OF_MEMORY);
static_assert(static_cast<int>(StatusCode::kNotFound) == SCSA_NOT_FOUND);
static_assert(static_cast<int>(StatusCode::kParseError) == SCSA_PARSE_ERROR);
static_assert(static_cast<int>(StatusCode::kIoError) == SCSA_IO_ERROR);
static_assert(static_cast<int>(StatusCode::kFailedPrecondition) == SCSA_FAILED_PRECONDITION);

}  // namespace

scsa_status Fail(scsa_status code, std::string_view message) noexcept {
  const std::size_t length = std::min(message.size(), kMessageSize - 1);
  std::memcpy(g_message, message.data(), length);
  g_message[length] = '\0';
  return code;
}

scsa_status Report(const Status& status) noexcept {
  if (status.ok()) return SCSA_OK;
  return Fail(static_cast<scsa_status>(status.code()), status.message());
}

}  // namespace scsa::capi

const char* scsa_last_error(void) { return scsa::capi::g_message; }
