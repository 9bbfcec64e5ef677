// SPDX-License-Identifier: Apache-2.0
//
// Whether thresholds from a file may be used here.
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/taus_json.h"
#include "scsa/taus.h"

namespace scsa {
namespace {

std::string Text(const std::string& value) { return value; }
std::string Text(int value) { return std::to_string(value); }
std::string Text(float value) { return std::to_string(value); }
std::string Text(PackedFormat value) { return kPackedFormatNames[static_cast<int>(value)]; }
std::string Text(CalibrationStatistic value) { return kStatisticNames[static_cast<int>(value)]; }
std::string Text(Selection value) { return kSelectionNames[static_cast<int>(value)]; }

template <typename T>
bool Same(const T& there, const T& here) {
  return there == here;
}
// A layer that chooses by itself takes either.
bool Same(const Selection& there, const Selection& here) { return here == Selection::kAutomatic || there == here; }

template <typename T>
Status Differs(const char* name, const T& there, const T& here, std::string_view what_to_do) {
  return Status::Invalid(std::string("the thresholds are for ") + name + " " + Text(there) + ", here it is " +
                         Text(here) + ": " + std::string(what_to_do));
}

constexpr std::string_view kSameModel = "use a file that was calibrated on this model (scsa calibrate)";
constexpr std::string_view kSameConfig = "use the same parameters or calibrate again";

// Compares what both sides know.
template <typename T>
Status Compare(const char* name, const T& there, const T& here) {
  if (there == T{} || here == T{} || there == here) return Status::Ok();
  return Differs(name, there, here, kSameModel);
}

Status CompareShape(const ModelIdentity& there, int q_heads, int kv_heads, int head_dim) {
  if (Status status = Compare("q_heads", there.q_heads, q_heads); !status.ok()) return status;
  if (Status status = Compare("kv_heads", there.kv_heads, kv_heads); !status.ok()) return status;
  return Compare("head_dim", there.head_dim, head_dim);
}

}  // namespace

Status CheckTausConfig(const TausFile& file, const Config& config) {
  if (file.bare) return Status::Ok();
  const char* preset = PresetName(file.config.preset);
  if (file.config.preset != config.preset) {
    return Status::Invalid(std::string("the thresholds are for preset ") + preset + ", here it is " +
                           PresetName(config.preset) + ": use preset " + preset + " or calibrate again");
  }
  Status result;
  VisitTausConfig(file.config, [&](std::string_view name, const auto& there) {
    VisitTausConfig(config, [&](const char* other, const auto& here) {
      if constexpr (std::is_same_v<decltype(there), decltype(here)>) {
        if (result.ok() && name == other && !Same(there, here)) result = Differs(other, there, here, kSameConfig);
      }
    });
  });
  return result;
}

Status CheckTausModel(const TausFile& file, const ModelIdentity& model) {
  if (!file.model) return Status::Ok();
  const ModelIdentity& there = *file.model;
  if (Status status = Compare("architecture", there.architecture, model.architecture); !status.ok()) return status;
  if (Status status = Compare("layers", there.layers, model.layers); !status.ok()) return status;
  if (Status status = CompareShape(there, model.q_heads, model.kv_heads, model.head_dim); !status.ok()) return status;
  return Compare("metadata_hash", there.metadata_hash, model.metadata_hash);
}

Status TausOfLayer(const TausFile& file, int layer, const Shape& shape, Preset preset, std::vector<float>* taus) {
  const int heads = TauHeads(preset, shape);
  const std::string name = "layer " + std::to_string(layer);
  if (file.model) {
    if (layer >= file.model->layers) {
      return Status::Invalid("the thresholds are for a model of " + std::to_string(file.model->layers) + " layers, " +
                             name + " exists here: " + std::string(kSameModel));
    }
    if (Status status = CompareShape(*file.model, shape.q_heads, shape.kv_heads, shape.head_dim); !status.ok()) {
      return status;
    }
  }
  try {
    std::vector<float> found(static_cast<std::size_t>(heads));
    int count = 0;  // no head occurs twice
    bool beyond = false;
    for (const TauEntry& entry : file.taus) {
      if (entry.layer != layer) continue;
      ++count;
      if (entry.head < heads) {
        found[static_cast<std::size_t>(entry.head)] = entry.tau;
      } else {
        beyond = true;
      }
    }
    if (count == 0) {
      found.clear();
    } else if (count != heads || beyond) {
      return Status::Invalid(name + " has " + std::to_string(count) + " thresholds, preset " + PresetName(preset) +
                             " needs one for each of " + std::to_string(heads) +
                             (preset == Preset::kFast ? " KV heads: " : " query heads: ") + std::string(kSameModel));
    }
    *taus = std::move(found);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory for the thresholds of a layer");
  }
}

}  // namespace scsa
