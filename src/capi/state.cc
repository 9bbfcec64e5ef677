// SPDX-License-Identifier: Apache-2.0
#include "scsa/state.h"

#include <memory>
#include <string>

#include "capi/convert.h"
#include "capi/error.h"
#include "capi/handles.h"

namespace {

using scsa::Status;
using namespace scsa::capi;

}  // namespace

enum scsa_status scsa_state_create(int num_layers, const struct scsa_shape* shape, const struct scsa_config* config,
                                   scsa_state** state) {
  return Guard([&]() -> Status {
    if (Status status = NotNull(state, "state"); !status.ok()) return status;
    *state = nullptr;
    scsa::Shape dims;
    scsa::Config parameters;
    if (Status status = AllOf(ReadShape(shape, &dims), ReadConfig(config, &parameters)); !status.ok()) return status;
    auto handle = std::make_unique<scsa_state>();
    if (Status status = scsa::State::Create(num_layers, dims, parameters, &handle->state); !status.ok()) return status;
    handle->layers.resize(static_cast<std::size_t>(num_layers));
    for (int i = 0; i < num_layers; ++i) handle->layers[static_cast<std::size_t>(i)].layer = &handle->state->layer(i);
    *state = handle.release();
    return Status::Ok();
  });
}

void scsa_state_destroy(scsa_state* state) { delete state; }

int scsa_state_num_layers(const scsa_state* state) { return state == nullptr ? 0 : state->state->num_layers(); }

scsa_layer* scsa_state_layer(scsa_state* state, int index) {
  scsa_layer* layer = nullptr;
  Guard([&]() -> Status {
    if (Status status = NotNull(state, "state"); !status.ok()) return status;
    if (index < 0 || index >= state->state->num_layers()) {
      return Status::Invalid("there is no layer " + std::to_string(index) + ", there are " +
                             std::to_string(state->state->num_layers()));
    }
    layer = &state->layers[static_cast<std::size_t>(index)];
    return Status::Ok();
  });
  return layer;
}

enum scsa_status scsa_state_start_calibration(scsa_state* state, float tolerance) {
  return WithState(state, [&](scsa::State& target) { return target.StartCalibration(tolerance); });
}

enum scsa_status scsa_state_finish_calibration(scsa_state* state) {
  return WithState(state, [](scsa::State& target) { return target.FinishCalibration(); });
}

enum scsa_status scsa_state_set_serial(scsa_state* state, int serial) {
  return WithState(state, [&](scsa::State& target) {
    target.set_serial(serial != 0);
    return Status::Ok();
  });
}

enum scsa_status scsa_state_get_stats(const scsa_state* state, struct scsa_stats* stats) {
  return WithState(state, [&](const scsa::State& target) { return WriteStats(target.stats(), stats); });
}

enum scsa_status scsa_state_taus_to_json(const scsa_state* state, const struct scsa_model* model, char* text,
                                         size_t size, size_t* length) {
  return WithState(state, [&](const scsa::State& target) -> Status {
    scsa::TausFile origin;
    if (Status status = ReadModel(model, &origin.model.emplace()); !status.ok()) return status;
    if (Status status = CheckText(text, size, length); !status.ok()) return status;
    // The texts of the model are what can be refused: TausToJson gives no reason.
    std::string json;
    if (Status status = scsa::FormatTaus(origin, &json); !status.ok()) return status;
    json = target.TausToJson(*origin.model);
    if (json.empty()) return scsa::Status::OutOfMemory("no memory to write taus JSON");
    WriteText(json, text, size, length);
    return Status::Ok();
  });
}

enum scsa_status scsa_state_load_taus_json(scsa_state* state, const char* text, size_t length,
                                           const struct scsa_model* model) {
  return WithState(state, [&](scsa::State& target) -> Status {
    scsa::ModelIdentity identity;
    if (Status status = AllOf(NotNull(text, "text"), ReadModel(model, &identity)); !status.ok()) return status;
    return target.LoadTausJson({text, length}, identity);
  });
}
