// SPDX-License-Identifier: Apache-2.0
#include "scsa/taus.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capi/convert.h"
#include "capi/error.h"
#include "capi/handles.h"

namespace {

using scsa::Status;
using scsa::StatusCode;
using namespace scsa::capi;

template <class Handle, class Body>
scsa_status WithTaus(Handle* taus, Body&& body) noexcept {
  return Guard([&]() -> Status {
    if (Status status = NotNull(taus, "taus"); !status.ok()) return status;
    return body(*taus);
  });
}

int Key(const scsa::TauEntry& entry) { return entry.layer * scsa::kMaxQHeads + entry.head; }

Status Unknown(const char* what) {
  return {StatusCode::kNotFound, std::string("the thresholds do not state their ") + what};
}

Status CheckRange(const char* name, int value, int low, int high) {
  if (value >= low && value <= high) return Status::Ok();
  return Status::Invalid(std::string(name) + " of the model is " + std::to_string(value) + ", must be " +
                         std::to_string(low) + " ... " + std::to_string(high));
}

// What FormatTaus refuses of the origin, and what ParseTaus would refuse of the text.
Status CheckOrigin(const scsa::TausFile& file) {
  if (Status status = scsa::ValidateConfig(file.config); !status.ok()) return status;
  if (file.model) {
    const scsa::ModelIdentity& model = *file.model;
    Status status = AllOf(CheckRange("layers", model.layers, 1, scsa::kMaxTausLayers),
                          CheckRange("q_heads", model.q_heads, 0, scsa::kMaxQHeads),
                          CheckRange("kv_heads", model.kv_heads, 0, scsa::kMaxKvHeads),
                          CheckRange("head_dim", model.head_dim, 0, scsa::kMaxHeadDim));
    if (!status.ok()) return status;
  }
  std::string text;
  return scsa::FormatTaus(file, &text);
}

}  // namespace

enum scsa_status scsa_taus_create(const struct scsa_config* config, float tolerance, const struct scsa_model* model,
                                  scsa_taus** taus) {
  return Guard([&]() -> Status {
    if (Status status = NotNull(taus, "taus"); !status.ok()) return status;
    *taus = nullptr;
    auto handle = std::make_unique<scsa_taus>();
    scsa::TausFile& file = handle->file;
    file.bare = config == nullptr;
    if (!file.bare) {
      if (Status status = ReadConfig(config, &file.config); !status.ok()) return status;
      if (tolerance != 0.0f) file.tolerance = tolerance;
      if (model != nullptr) {
        if (Status status = ReadModel(model, &file.model.emplace()); !status.ok()) return status;
      }
      if (Status status = CheckOrigin(file); !status.ok()) return status;
    }
    *taus = handle.release();
    return Status::Ok();
  });
}

enum scsa_status scsa_taus_parse(const char* text, size_t length, scsa_taus** taus) {
  return Guard([&]() -> Status {
    if (Status status = NotNull(taus, "taus"); !status.ok()) return status;
    *taus = nullptr;
    if (Status status = NotNull(text, "text"); !status.ok()) return status;
    auto handle = std::make_unique<scsa_taus>();
    if (Status status = scsa::ParseTaus({text, length}, &handle->file); !status.ok()) return status;
    for (std::size_t i = 0; i < handle->file.taus.size(); ++i) handle->places[Key(handle->file.taus[i])] = i;
    *taus = handle.release();
    return Status::Ok();
  });
}

void scsa_taus_destroy(scsa_taus* taus) { delete taus; }

enum scsa_status scsa_taus_to_json(const scsa_taus* taus, char* text, size_t size, size_t* length) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    if (Status status = CheckText(text, size, length); !status.ok()) return status;
    std::string json;
    if (Status status = scsa::FormatTaus(handle.file, &json); !status.ok()) return status;
    WriteText(json, text, size, length);
    return Status::Ok();
  });
}

size_t scsa_taus_count(const scsa_taus* taus) { return taus == nullptr ? 0 : taus->file.taus.size(); }

enum scsa_status scsa_taus_get(const scsa_taus* taus, size_t index, struct scsa_tau_entry* entry) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    if (index >= handle.file.taus.size()) {
      return {StatusCode::kNotFound, "there is no threshold " + std::to_string(index) + ", there are " +
                                         std::to_string(handle.file.taus.size())};
    }
    const scsa::TauEntry& found = handle.file.taus[index];
    return WriteStruct({sizeof(scsa_tau_entry), found.layer, found.head, found.tau, 0}, "scsa_tau_entry", entry);
  });
}

enum scsa_status scsa_taus_set(scsa_taus* taus, const struct scsa_tau_entry* entry) {
  return WithTaus(taus, [&](scsa_taus& handle) -> Status {
    scsa::TauEntry added;
    if (Status status = ReadTauEntry(entry, &added); !status.ok()) return status;
    const auto [place, is_new] = handle.places.try_emplace(Key(added), handle.file.taus.size());
    if (!is_new) {
      handle.file.taus[place->second] = added;
      return Status::Ok();
    }
    try {
      handle.file.taus.push_back(added);
    } catch (const std::bad_alloc&) {
      handle.places.erase(place);
      throw;
    }
    return Status::Ok();
  });
}

enum scsa_status scsa_taus_get_config(const scsa_taus* taus, struct scsa_config* config) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    return handle.file.bare ? Unknown("parameters") : WriteConfig(handle.file.config, config);
  });
}

enum scsa_status scsa_taus_get_tolerance(const scsa_taus* taus, float* tolerance) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    if (Status status = NotNull(tolerance, "tolerance"); !status.ok()) return status;
    if (!handle.file.tolerance) return Unknown("tolerance");
    *tolerance = *handle.file.tolerance;
    return Status::Ok();
  });
}

enum scsa_status scsa_taus_get_model(const scsa_taus* taus, struct scsa_model* model) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    return handle.file.model ? WriteModel(*handle.file.model, model) : Unknown("model");
  });
}

enum scsa_status scsa_taus_check_config(const scsa_taus* taus, const struct scsa_config* config) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    scsa::Config read;
    if (Status status = ReadConfig(config, &read); !status.ok()) return status;
    return scsa::CheckTausConfig(handle.file, read);
  });
}

enum scsa_status scsa_taus_check_model(const scsa_taus* taus, const struct scsa_model* model) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    scsa::ModelIdentity identity;
    if (Status status = AllOf(NotNull(model, "model"), ReadModel(model, &identity)); !status.ok()) return status;
    return scsa::CheckTausModel(handle.file, identity);
  });
}

enum scsa_status scsa_taus_apply(const scsa_taus* taus, int index, scsa_layer* layer) {
  return WithTaus(taus, [&](const scsa_taus& handle) -> Status {
    if (Status status = NotNull(layer, "layer"); !status.ok()) return status;
    if (index < 0) return Status::Invalid("index is " + std::to_string(index) + ", must be at least 0");
    scsa::Layer& target = *layer->layer;
    if (Status status = scsa::CheckTausConfig(handle.file, target.config()); !status.ok()) return status;
    std::vector<float> values;
    Status status = scsa::TausOfLayer(handle.file, index, target.shape(), target.config().preset, &values);
    if (!status.ok()) return status;
    if (values.empty()) {
      return {StatusCode::kNotFound, "there are no thresholds of layer " + std::to_string(index)};
    }
    if (!handle.file.bare) {
      if (status = target.SetSelection(handle.file.config.selection); !status.ok()) return status;
    }
    for (std::size_t head = 0; head < values.size(); ++head) {
      if (status = target.SetTau(static_cast<int>(head), values[head]); !status.ok()) return status;
    }
    return Status::Ok();
  });
}
