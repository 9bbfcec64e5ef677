// SPDX-License-Identifier: Apache-2.0
//
// Thresholds that the user gave in a file, in place of calibration.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "scsa/taus.h"

namespace scsa::plugin {

struct TausSource {
  std::string path;  // for messages
  TausFile file;
};

// Reads a file. Returns an empty string, or one line saying what is wrong; then *source is untouched.
std::string ReadTausSource(std::string_view path, std::shared_ptr<const TausSource>* source);

}  // namespace scsa::plugin
