// SPDX-License-Identifier: Apache-2.0
//
// Functions without an object: versions, shapes, parameters, SIMD targets.
#include <string>
#include <vector>

#include "capi/convert.h"
#include "capi/error.h"
#include "scsa/target.h"

namespace {

using scsa::Status;
using namespace scsa::capi;

// Names with static storage. Empty when memory runs out.
const std::vector<std::string>& Targets() noexcept {
  static const std::vector<std::string> targets = [] {
    try {
      return scsa::AvailableTargets();
    } catch (const std::bad_alloc&) {
      return std::vector<std::string>();
    }
  }();
  return targets;
}

constexpr bool IsPreset(int preset) { return preset == SCSA_PRESET_SEED || preset == SCSA_PRESET_FAST; }

static_assert(SCSA_TAU_GRID_SIZE == scsa::kTauGridSize);
static_assert(SCSA_VERSION_MAJOR == SCSA_PROJECT_MAJOR && SCSA_VERSION_MINOR == SCSA_PROJECT_MINOR &&
                  SCSA_VERSION_PATCH == SCSA_PROJECT_PATCH,
              "scsa.h states another version than the project's");

}  // namespace

const char* scsa_version(void) { return SCSA_PROJECT_VERSION; }
const char* scsa_abi_version(void) { return SCSA_PROJECT_SOVERSION; }

size_t scsa_row_bytes(int dtype, int head_dim) {
  if (dtype < SCSA_F32 || dtype > SCSA_Q8_0 || head_dim < 1) return 0;
  return scsa::RowBytes(static_cast<scsa::DType>(dtype), head_dim);
}

enum scsa_status scsa_validate_shape(const struct scsa_shape* shape) {
  return Guard([&]() -> Status {
    scsa::Shape read;
    if (Status status = ReadShape(shape, &read); !status.ok()) return status;
    return scsa::ValidateShape(read);
  });
}

enum scsa_status scsa_config_init(int preset, struct scsa_config* config) {
  return Guard([&]() -> Status {
    scsa::Preset known;
    if (Status status = ReadPreset(preset, &known); !status.ok()) return status;
    return WriteConfig(scsa::ConfigFor(known), config);
  });
}

enum scsa_status scsa_validate_config(const struct scsa_config* config) {
  return Guard([&]() -> Status {
    scsa::Config read;
    if (Status status = ReadConfig(config, &read); !status.ok()) return status;
    return scsa::ValidateConfig(read);
  });
}

const char* scsa_preset_name(int preset) {
  return IsPreset(preset) ? scsa::PresetName(static_cast<scsa::Preset>(preset)) : nullptr;
}

enum scsa_status scsa_preset_from_name(const char* name, int* preset) {
  return Guard([&]() -> Status {
    if (Status status = AllOf(NotNull(name, "name"), NotNull(preset, "preset")); !status.ok()) return status;
    scsa::Preset known;
    if (!scsa::ParsePreset(name, &known)) {
      return Status::Invalid("there is no preset \"" + std::string(name) + "\": choose seed or fast");
    }
    *preset = static_cast<int>(known);
    return Status::Ok();
  });
}

float scsa_default_tolerance(int preset) {
  return IsPreset(preset) ? scsa::DefaultTolerance(static_cast<scsa::Preset>(preset)) : 0.0f;
}

const float* scsa_tau_grid(int preset) {
  return IsPreset(preset) ? scsa::TauGrid(static_cast<scsa::Preset>(preset)).data() : nullptr;
}

int scsa_n_targets(void) { return static_cast<int>(Targets().size()); }

const char* scsa_target_name(int index) {
  return index >= 0 && index < scsa_n_targets() ? Targets()[static_cast<std::size_t>(index)].c_str() : nullptr;
}

const char* scsa_active_target(void) {
  try {
    const std::string active = scsa::ActiveTarget();
    for (const std::string& name : Targets()) {
      if (name == active) return name.c_str();
    }
  } catch (const std::bad_alloc&) {
    return "";
  }
  return "";
}

enum scsa_status scsa_force_target(const char* name) {
  return Guard([&] { return scsa::ForceTarget(name == nullptr ? "" : name); });
}

enum scsa_status scsa_target_from_environment(void) {
  return Guard([] { return scsa::TargetFromEnvironment(); });
}
