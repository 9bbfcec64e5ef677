// SPDX-License-Identifier: Apache-2.0
#include "taus.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <vector>

#include "hash.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

// Besides everything below "<architecture>.".
constexpr std::array<std::string_view, 9> kDefiningKeys = {
    "general.architecture", "general.name",      "general.basename",     "general.finetune",  "general.version",
    "general.size_label",   "general.file_type", "tokenizer.ggml.model", "tokenizer.ggml.pre"};

// All metadata but arrays, which libllama does not report.
std::map<std::string, std::string> Metadata(const Model& model) {
  std::map<std::string, std::string> metadata;
  std::vector<char> buffer(1 << 16);
  for (std::int32_t i = 0; i < llama_model_meta_count(model.get()); ++i) {
    if (llama_model_meta_key_by_index(model.get(), i, buffer.data(), buffer.size()) < 0) continue;
    std::string& value = metadata[buffer.data()];
    if (llama_model_meta_val_str_by_index(model.get(), i, buffer.data(), buffer.size()) >= 0) value = buffer.data();
  }
  return metadata;
}

void Require(const Status& status, const std::string& path) {
  if (!status.ok()) throw ToolError(fmt::format("--taus: {}: {}", path, status.message()));
}

}  // namespace

ModelIdentity IdentityOf(const Model& model) {
  const std::map<std::string, std::string> metadata = Metadata(model);
  ModelIdentity identity;
  if (const auto found = metadata.find("general.architecture"); found != metadata.end()) {
    identity.architecture = found->second;
  }
  identity.layers = llama_model_n_layer(model.get());
  Hash hash;
  for (const auto& [key, value] : metadata) {  // in the order of the keys, whatever that of the file
    const bool defines = key.starts_with(identity.architecture + ".") ||
                         std::find(kDefiningKeys.begin(), kDefiningKeys.end(), key) != kDefiningKeys.end();
    if (!defines) continue;
    hash.Text(key);
    hash.Text(value);
  }
  identity.metadata_hash = fmt::format("{:016x}", hash.value());
  return identity;
}

TausFile ReadTaus(const std::string& path, const std::string& option) {
  TausFile file;
  const Status status = ParseTaus(ReadFile(path, "thresholds"), &file);
  if (!status.ok()) throw ToolError(fmt::format("{}: {}: {}", option, path, status.message()));
  return file;
}

TausChoice ChooseTaus(const std::string& path, const std::string& preset, std::optional<double> tolerance) {
  TausChoice choice{ReadTaus(path, "--taus"), preset, tolerance};
  const TausFile& file = choice.file;
  if (file.bare) return choice;
  if (preset.empty()) choice.preset = PresetName(file.config.preset);
  Preset known;
  // A name that is no preset is the plugin's to refuse.
  if (ParsePreset(choice.preset, &known)) {
    Config config = ConfigFor(known);
    config.selection = file.config.selection;  // the plugin takes either
    Require(CheckTausConfig(file, config), path);
  }
  if (!file.tolerance) return choice;
  if (tolerance && static_cast<float>(*tolerance) != *file.tolerance) {
    throw ToolError(
        fmt::format("--taus: {}: the thresholds are for tolerance {}, --tolerance is {}: leave it out or "
                    "calibrate again (scsa calibrate)",
                    path, *file.tolerance, *tolerance));
  }
  choice.tolerance = *file.tolerance;
  return choice;
}

void CheckTausFit(const std::string& path, const TausFile& file, const Model& model) {
  Require(CheckTausModel(file, IdentityOf(model)), path);
}

}  // namespace scsa::tool
