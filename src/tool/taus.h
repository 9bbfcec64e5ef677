// SPDX-License-Identifier: Apache-2.0
//
// Files of calibrated thresholds, and the model that they belong to.
#pragma once

#include <optional>
#include <string>

#include "scsa/taus.h"
#include "session.h"

namespace scsa::tool {

// Architecture, number of layers and a hash of the metadata that defines the model: its names, quantisation, tokenizer
// and every parameter of its architecture. Heads are left open: the hash covers them.
ModelIdentity IdentityOf(const Model& model);

// Reads a file. ToolError, in one line that begins with `option`, where it is absent or broken.
TausFile ReadTaus(const std::string& path, const std::string& option);

// What --taus, --preset and --tolerance of a command line come to.
struct TausChoice {
  TausFile file;
  std::string preset;               // the file's unless one was given; empty: neither says
  std::optional<double> tolerance;  // likewise
};
// Reads a file for the given preset and tolerance (empty: the user left it open). ToolError where it does not fit them.
TausChoice ChooseTaus(const std::string& path, const std::string& preset, std::optional<double> tolerance);
// ToolError where the thresholds belong to another model.
void CheckTausFit(const std::string& path, const TausFile& file, const Model& model);

}  // namespace scsa::tool
