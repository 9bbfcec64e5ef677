// SPDX-License-Identifier: Apache-2.0
//
// The plugin's options. The environment sets them at load (SCSA_MODE, ...), scsa_plugin_set at run time (mode, ...).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "plugin/taus_source.h"
#include "scsa/config.h"

namespace scsa::plugin {

enum class Mode : std::uint8_t {
  kAuto,   // sparse from the crossover on, exact below
  kExact,  // the exact kernel always
  kOff,    // everything is ggml's
  kLimit,  // attention answers zeros at no cost: the floor of a decode step's time
};

// The plugin finds by its own measurements from where on the sparse operator answers.
inline constexpr std::int64_t kAutoCrossover = -1;

// Share of sparse outputs whose error is measured: less than 1 % of the time of decoding.
inline constexpr double kDefaultAuditShare = 1.0 / 256;

inline constexpr std::uint64_t kNoMemoryLimit = std::numeric_limits<std::uint64_t>::max();

inline constexpr Preset kDefaultPreset = Preset::kFast;

struct Options {
  Mode mode = Mode::kAuto;
  Config config = ConfigFor(kDefaultPreset);
  std::optional<PackedFormat> packed;                  // otherwise the preset's
  float tolerance = DefaultTolerance(kDefaultPreset);  // accepted relative error of a head's output
  bool tolerance_chosen = false;                       // otherwise it follows the preset
  int calibrate = 32;  // steps of the calibration window; 0: none, every head keeps the preset's threshold
  std::int64_t crossover = kAutoCrossover;  // or the cached rows from which the sparse operator answers
  std::shared_ptr<const TausSource> taus;   // thresholds in place of a calibration window; nullptr: none
  double audit = kDefaultAuditShare;        // AuditConfig::share
  float prompt_tolerance = 0;               // PromptConfig::tolerance
  bool progress = false;                    // show the reading of prompts on a terminal
  bool stats = false;                       // print a summary at exit
  std::uint64_t max_mem = kNoMemoryLimit;   // bytes that all plans may hold together
  bool checks = true;                       // compare cached rows with what plans were built from; false: to time that
  bool cpu_device = false;                  // offer a device for whole graphs; fixed when the library loads
};

const char* ModeName(Mode mode);

// Changes one option. Returns an empty string, or one line saying what is wrong; then nothing was changed.
std::string SetOption(std::string_view name, std::string_view value, Options* options);

// Reads every SCSA_ variable but SCSA_TAUS. Returns an empty string, or one line about the first bad one.
std::string OptionsFromEnvironment(Options* options);
// Reads SCSA_TAUS, after the others. A file that cannot be used is no reason to stay inactive: returns one line about
// it, and there are no thresholds then.
std::string TausFromEnvironment(Options* options);

// Why options.taus, which is set, does not fit the other options: one line, or empty where it does.
std::string TausMisfit(const Options& options);

// The options in force. Thread-safe; the single ones cost one atomic load.
Options CurrentOptions();
Mode CurrentMode();
std::int64_t CurrentCrossover();
bool CurrentProgress();
bool CurrentChecks();
void InstallOptions(const Options& options);

}  // namespace scsa::plugin
