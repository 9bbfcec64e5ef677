// SPDX-License-Identifier: Apache-2.0
#include "plugin/options.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <optional>

#include "plugin/immortal.h"
#include "scsa/audit.h"
#include "scsa/target.h"

namespace scsa::plugin {
namespace {

struct Variable {
  const char* option;
  const char* variable;
};
constexpr Variable kVariables[] = {
    {"mode", "SCSA_MODE"},           {"preset", "SCSA_PRESET"},
    {"selection", "SCSA_SELECTION"}, {"tolerance", "SCSA_TOLERANCE"},
    {"calibrate", "SCSA_CALIBRATE"}, {"crossover", "SCSA_CROSSOVER"},
    {"audit", "SCSA_AUDIT"},         {"prompt_tolerance", "SCSA_PROMPT_TOLERANCE"},
    {"progress", "SCSA_PROGRESS"},   {"stats", "SCSA_STATS"},
    {"max_mem", "SCSA_MAX_MEM"},     {"checks", "SCSA_CHECKS"},
    {"packed", "SCSA_PACKED"},
};

constexpr const char* kTausVariable = "SCSA_TAUS";
constexpr const char* kDeviceVariable = "SCSA_DEVICE";

constexpr Mode kModes[] = {Mode::kAuto, Mode::kExact, Mode::kOff, Mode::kLimit};

struct NamedSelection {
  std::string_view name;
  Selection selection;
};
constexpr NamedSelection kSelections[] = {
    {"auto", Selection::kAutomatic}, {"flat", Selection::kFlat}, {"hierarchical", Selection::kHierarchical}};

struct NamedFormat {
  std::string_view name;
  std::optional<PackedFormat> format;  // nullopt: the preset's
};
constexpr NamedFormat kFormats[] = {{"auto", std::nullopt},
                                    {"int8", PackedFormat::kInt8},
                                    {"q8_0", PackedFormat::kQ8_0},
                                    {"f16", PackedFormat::kF16},
                                    {"none", PackedFormat::kNone}};

bool SeedPacks(std::optional<PackedFormat> format) {
  return format != PackedFormat::kInt8 && format != PackedFormat::kNone;
}

std::string Bad(std::string_view value, std::string_view allowed) {
  std::string message = "\"";
  message.append(value).append("\" is not allowed; use ").append(allowed);
  return message;
}

template <typename T>
bool Parse(std::string_view text, T low, T high, T* value) {
  T parsed{};
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, parsed);
  // The comparisons are written so that NaN fails them.
  if (result.ec != std::errc() || result.ptr != end || !(parsed >= low && parsed <= high)) return false;
  *value = parsed;
  return true;
}

// "2G", "512M", "64K" (powers of 1024) or bytes.
bool ParseBytes(std::string_view text, std::uint64_t* bytes) {
  constexpr std::string_view kUnits = "KMG";
  int shift = 0;
  if (const std::size_t unit = text.empty() ? std::string_view::npos : kUnits.find(text.back());
      unit != std::string_view::npos) {
    shift = 10 * (static_cast<int>(unit) + 1);
    text.remove_suffix(1);
  }
  std::uint64_t value = 0;
  if (!Parse(text, std::uint64_t{0}, (kNoMemoryLimit - 1) >> shift, &value)) return false;
  *bytes = value << shift;
  return true;
}

struct Store {
  std::mutex mutex;
  Options options;
};
Store& GlobalStore() { return Immortal<Store>(); }
std::atomic<Mode> g_mode{Mode::kAuto};
std::atomic<std::int64_t> g_crossover{kAutoCrossover};
std::atomic<bool> g_progress{false};
std::atomic<bool> g_checks{true};

}  // namespace

const char* ModeName(Mode mode) {
  switch (mode) {
    case Mode::kAuto:
      return "auto";
    case Mode::kExact:
      return "exact";
    case Mode::kOff:
      return "off";
    case Mode::kLimit:
      return "limit";
  }
  return "";
}

std::string SetOption(std::string_view name, std::string_view value, Options* options) {
  if (name == "mode") {
    for (Mode mode : kModes) {
      if (value == ModeName(mode)) {
        options->mode = mode;
        return {};
      }
    }
    return Bad(value, "auto, exact, off or limit");
  }
  if (name == "preset") {
    Preset preset;
    if (!ParsePreset(value, &preset)) return Bad(value, "fast or seed");
    if (preset == Preset::kSeed && !SeedPacks(options->packed)) {
      return "preset seed packs rows as q8_0 or f16: set packed to one of them or to auto";
    }
    const Selection selection = options->config.selection;
    options->config = ConfigFor(preset);
    options->config.selection = selection;
    if (options->packed) options->config.packed_format = *options->packed;
    if (!options->tolerance_chosen) options->tolerance = DefaultTolerance(preset);
    return {};
  }
  if (name == "selection") {
    const auto* found = std::ranges::find(kSelections, value, &NamedSelection::name);
    if (found == std::end(kSelections)) return Bad(value, "auto, flat or hierarchical");
    options->config.selection = found->selection;
    return {};
  }
  if (name == "packed") {
    const auto* found = std::ranges::find(kFormats, value, &NamedFormat::name);
    if (found == std::end(kFormats)) return Bad(value, "auto, int8, q8_0, f16 or none");
    const Preset preset = options->config.preset;
    if (preset == Preset::kSeed && !SeedPacks(found->format)) {
      return "preset seed packs rows as q8_0 or f16: use one of them or auto";
    }
    options->packed = found->format;
    options->config.packed_format = found->format.value_or(ConfigFor(preset).packed_format);
    return {};
  }
  if (name == "tolerance") {
    float tolerance = 0;
    if (!Parse(value, 0.0f, 1.0f, &tolerance) || tolerance == 0.0f) {
      return Bad(value, "a number above 0 and at most 1, for example 0.025");
    }
    options->tolerance = tolerance;
    options->tolerance_chosen = true;
    return {};
  }
  if (name == "calibrate") {
    return Parse(value, 0, 65536, &options->calibrate) ? "" : Bad(value, "a number of steps, 0 to 65536");
  }
  if (name == "crossover") {
    if (value == "auto") {
      options->crossover = kAutoCrossover;
      return {};
    }
    return Parse(value, std::int64_t{0}, std::int64_t{1} << 40, &options->crossover)
               ? ""
               : Bad(value, "auto or a number of cached rows, 0 or more");
  }
  if (name == "taus") {
    if (value.empty()) {
      options->taus.reset();
      return {};
    }
    return ReadTausSource(value, &options->taus);
  }
  if (name == "audit") {
    double share = 0;
    if (!Parse(value, 0.0, 1.0, &share) || (share != 0 && share < kMinAuditShare)) {
      return Bad(value, "a share of the outputs, 0 (none) or 1e-9 to 1, for example 0.004");
    }
    options->audit = share;
    return {};
  }
  if (name == "prompt_tolerance") {
    return Parse(value, 0.0f, 1.0f, &options->prompt_tolerance)
               ? ""
               : Bad(value, "a number from 0 (prompts are exact) to 1, for example 0.025");
  }
  if (name == "progress") {
    if (value != "0" && value != "1") return Bad(value, "0 or 1");
    options->progress = value == "1";
    return {};
  }
  if (name == "stats") {
    if (value != "0" && value != "1") return Bad(value, "0 or 1");
    options->stats = value == "1";
    return {};
  }
  if (name == "max_mem") {
    if (value == "none") {
      options->max_mem = kNoMemoryLimit;
      return {};
    }
    return ParseBytes(value, &options->max_mem) ? "" : Bad(value, "bytes, for example 512M or 2G, or none");
  }
  if (name == "checks") {
    if (value != "on" && value != "off") return Bad(value, "on or off");
    options->checks = value == "on";
    return {};
  }
  std::string message = "unknown option \"";
  return message.append(name).append(
      "\"; there are mode, preset, selection, tolerance, calibrate, crossover, taus, audit, prompt_tolerance, "
      "progress, stats, max_mem, checks and packed");
}

std::string OptionsFromEnvironment(Options* options) {
  for (const Variable& v : kVariables) {
    const char* value = std::getenv(v.variable);
    if (value == nullptr || *value == '\0') continue;
    const std::string error = SetOption(v.option, value, options);
    if (!error.empty()) return std::string(v.variable) + ": " + error;
  }
  if (const char* device = std::getenv(kDeviceVariable); device != nullptr && *device != '\0') {
    const std::string_view value = device;
    if (value != "attention" && value != "cpu") {
      return std::string(kDeviceVariable) + ": " + Bad(value, "attention or cpu");
    }
    options->cpu_device = value == "cpu";
  }
  const Status target = TargetFromEnvironment();
  if (!target.ok()) return target.message();
  return {};
}

std::string TausFromEnvironment(Options* options) {
  const char* path = std::getenv(kTausVariable);
  if (path == nullptr || *path == '\0') return {};
  std::string error = SetOption("taus", path, options);
  if (error.empty()) error = TausMisfit(*options);
  if (error.empty()) return {};
  options->taus.reset();
  return std::string(kTausVariable) + ": " + error;
}

std::string TausMisfit(const Options& options) {
  const TausSource& source = *options.taus;
  const std::string place = "\"" + source.path + "\": ";
  if (const Status status = CheckTausConfig(source.file, options.config); !status.ok()) {
    return place + status.message();
  }
  if (options.tolerance_chosen && source.file.tolerance && *source.file.tolerance != options.tolerance) {
    char text[128];
    std::snprintf(text, sizeof(text), "the thresholds are for tolerance %g, %g is set: unset it or calibrate again",
                  static_cast<double>(*source.file.tolerance), static_cast<double>(options.tolerance));
    return place + text;
  }
  return {};
}

Options CurrentOptions() {
  std::lock_guard lock(GlobalStore().mutex);
  return GlobalStore().options;
}

Mode CurrentMode() { return g_mode.load(std::memory_order_relaxed); }

bool CurrentProgress() { return g_progress.load(std::memory_order_relaxed); }

std::int64_t CurrentCrossover() { return g_crossover.load(std::memory_order_relaxed); }

bool CurrentChecks() { return g_checks.load(std::memory_order_relaxed); }

void InstallOptions(const Options& options) {
  std::lock_guard lock(GlobalStore().mutex);
  GlobalStore().options = options;
  g_mode.store(options.mode, std::memory_order_relaxed);
  g_crossover.store(options.crossover, std::memory_order_relaxed);
  g_progress.store(options.progress, std::memory_order_relaxed);
  g_checks.store(options.checks, std::memory_order_relaxed);
}

}  // namespace scsa::plugin
