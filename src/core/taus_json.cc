// SPDX-License-Identifier: Apache-2.0
#include "core/taus_json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <limits>
#include <map>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "core/json_reader.h"
#include "scsa/taus.h"

namespace scsa {
namespace {

constexpr std::string_view kFormatName = "scsa-taus";
constexpr int kMaxDepth = 4;  // of values that are skipped; the format itself needs two levels
// Smaller ones do not survive the way through text as floats; larger ones accept anything.
constexpr float kMinTolerance = std::numeric_limits<float>::min();
constexpr float kMaxTolerance = 1e6f;
constexpr const char* kWhatToDo = ": calibrate again (scsa calibrate)";

// Reads the name of an enumerator.
template <typename Enum, std::size_t kCount>
Status ReadEnum(JsonReader& json, const char* const (&names)[kCount], Enum* value) {
  const std::size_t start = json.at();
  std::string_view name;
  if (Status status = json.String(&name); !status.ok()) return status;
  const auto* found = std::ranges::find(names, name);
  if (found == std::end(names)) {
    return json.Fail(StatusCode::kInvalidArgument, start, "\"" + std::string(name) + "\" is not known here");
  }
  *value = static_cast<Enum>(found - std::begin(names));
  return Status::Ok();
}

class Parser {
 public:
  explicit Parser(std::string_view text) : json_(text) {}

  Status Parse(TausFile* file) {
    json_.SkipSpace();
    const std::size_t start = json_.at();
    // A key of the bare form begins with a digit. Whatever is neither is reported by the bare form's reader.
    Status status = json_.Accept('{') ? Status::Ok() : json_.Error("expected '{'");
    if (!status.ok()) return status;
    json_.SkipSpace();
    file->bare = !(json_.Peek() == '"' && json_.Peek(1) >= 'a' && json_.Peek(1) <= 'z');
    json_.MoveTo(start);
    status = file->bare ? ReadTaus(file) : FindSections();
    if (!status.ok()) return status;
    json_.SkipSpace();
    if (!json_.AtEnd()) return json_.Error("unexpected text after the object");
    return file->bare ? Status::Ok() : ReadSections(file);
  }

 private:
  enum Section { kFormat, kVersion, kPreset, kTolerance, kConfig, kModel, kTaus, kSections };
  static constexpr std::array<const char*, kSections> kSectionNames = {"format", "version", "preset", "tolerance",
                                                                       "config", "model",   "taus"};

  // Checks the whole text as JSON and notes where the sections are. They may stand in any order, and another version
  // may hold anything.
  Status FindSections() {
    return json_.Object([this]() -> Status {
      const std::size_t start = json_.at();
      std::string_view key;
      if (Status status = json_.String(&key); !status.ok()) return status;
      if (Status status = json_.Colon(); !status.ok()) return status;
      const auto section = std::ranges::find(kSectionNames, key) - kSectionNames.begin();
      if (section == kSections) {
        if (unknown_.empty()) {
          unknown_ = key;
          unknown_at_ = start;
        }
      } else if (found_[section] != 0) {
        return json_.Fail(StatusCode::kParseError, start, "this key occurs twice");
      } else {
        found_[section] = json_.at();
      }
      return json_.SkipValue(kMaxDepth);
    });
  }

  // Goes to a section that must be there.
  Status Enter(Section section) {
    if (found_[section] == 0) {
      return {StatusCode::kParseError, std::string("taus JSON: \"") + kSectionNames[section] + "\" is missing"};
    }
    json_.MoveTo(found_[section]);
    return Status::Ok();
  }

  Status ReadSections(TausFile* file) {
    if (Status status = CheckVersion(); !status.ok()) return status;
    if (!unknown_.empty()) {
      return json_.Fail(StatusCode::kParseError, unknown_at_, "\"" + std::string(unknown_) + "\" is not known");
    }
    if (Status status = Enter(kPreset); !status.ok()) return status;
    const char* const presets[] = {PresetName(Preset::kSeed), PresetName(Preset::kFast)};
    Preset preset = Preset::kSeed;
    if (Status status = ReadEnum(json_, presets, &preset); !status.ok()) return status;
    file->config = ConfigFor(preset);
    if (Status status = ReadConfig(&file->config); !status.ok()) return status;
    if (found_[kTolerance] != 0) {
      json_.MoveTo(found_[kTolerance]);
      double tolerance = 0;
      const Status status =
          json_.Number(kMinTolerance, kMaxTolerance, "the tolerance must be above 0 and below 1e6", &tolerance);
      if (!status.ok()) return status;
      file->tolerance = static_cast<float>(tolerance);
    }
    if (found_[kModel] != 0) {
      json_.MoveTo(found_[kModel]);
      if (Status status = ReadModel(&file->model.emplace()); !status.ok()) return status;
    }
    if (Status status = Enter(kTaus); !status.ok()) return status;
    if (Status status = ReadTaus(file); !status.ok()) return status;
    return CheckComplete(*file);
  }

  Status CheckVersion() {
    std::string_view format;
    if (found_[kFormat] == 0) {
      return {StatusCode::kUnsupported, "taus JSON: \"format\" is missing: this is no file of thresholds"};
    }
    json_.MoveTo(found_[kFormat]);
    if (Status status = json_.String(&format); !status.ok()) return status;
    if (format != kFormatName) {
      return {StatusCode::kUnsupported, "taus JSON: the format is \"" + std::string(format) + "\", expected \"" +
                                            std::string(kFormatName) + "\""};
    }
    if (Status status = Enter(kVersion); !status.ok()) return status;
    int version = 0;
    if (Status status = json_.Integer(1, &version); !status.ok()) return status;
    if (version == kTausVersion) return Status::Ok();
    return {StatusCode::kUnsupported, "taus JSON: the version is " + std::to_string(version) + ", " +
                                          std::to_string(kTausVersion) + " is expected" + kWhatToDo};
  }

  Status ReadConfig(Config* config) {
    if (Status status = Enter(kConfig); !status.ok()) return status;
    const std::size_t start = json_.at();
    std::vector<std::string_view> seen;
    Status status = json_.Object([&]() -> Status {
      const std::size_t at = json_.at();
      std::string_view key;
      if (Status read = json_.String(&key); !read.ok()) return read;
      if (Status read = json_.Colon(); !read.ok()) return read;
      if (std::ranges::find(seen, key) != seen.end()) {
        return json_.Fail(StatusCode::kParseError, at, "this key occurs twice");
      }
      Status read = json_.Fail(StatusCode::kParseError, at,
                               "\"" + std::string(key) + "\" is no parameter of preset " + PresetName(config->preset));
      VisitTausConfig(*config, [&](const char* name, auto& member) {
        if (name == key) read = ReadParameter(&member);
      });
      seen.push_back(key);
      return read;
    });
    if (!status.ok()) return status;
    VisitTausConfig(*config, [&](const char* name, const auto&) {
      if (status.ok() && name != std::string_view(kSelectionKey) && std::ranges::find(seen, name) == seen.end()) {
        status = json_.Fail(StatusCode::kParseError, start, std::string("\"") + name + "\" is missing");
      }
    });
    if (!status.ok()) return status;
    const Status valid = ValidateConfig(*config);
    return valid.ok() ? valid : json_.Fail(valid.code(), start, valid.message());
  }
  Status ReadParameter(int* value) { return json_.Integer(0, value); }
  Status ReadParameter(float* value) {
    double number = 0;
    const Status status = json_.Number(0, 1, "must be in [0, 1]", &number);
    *value = static_cast<float>(number);
    return status;
  }
  Status ReadParameter(PackedFormat* value) { return ReadEnum(json_, kPackedFormatNames, value); }
  Status ReadParameter(CalibrationStatistic* value) { return ReadEnum(json_, kStatisticNames, value); }
  Status ReadParameter(Selection* value) {
    const std::size_t start = json_.at();
    if (Status status = ReadEnum(json_, kSelectionNames, value); !status.ok()) return status;
    if (*value != Selection::kAutomatic) return Status::Ok();
    return json_.Fail(StatusCode::kInvalidArgument, start, "thresholds are for flat or for hierarchical selection");
  }

  Status ReadModel(ModelIdentity* model) {
    const std::size_t start = json_.at();
    struct Text {
      const char* name;
      std::string* value;
      bool seen = false;
    } texts[] = {{"architecture", &model->architecture}, {"metadata_hash", &model->metadata_hash}};
    struct Count {
      const char* name;
      int* value;
      int low;
      bool seen = false;
    } counts[] = {{"layers", &model->layers, 1},
                  {"q_heads", &model->q_heads, 0},
                  {"kv_heads", &model->kv_heads, 0},
                  {"head_dim", &model->head_dim, 0}};
    const auto once = [this](bool* seen, std::size_t at) -> Status {
      if (std::exchange(*seen, true)) return json_.Fail(StatusCode::kParseError, at, "this key occurs twice");
      return Status::Ok();
    };
    Status status = json_.Object([&]() -> Status {
      const std::size_t at = json_.at();
      std::string_view key;
      if (Status read = json_.String(&key); !read.ok()) return read;
      if (Status read = json_.Colon(); !read.ok()) return read;
      for (Text& text : texts) {
        if (key != text.name) continue;
        if (Status first = once(&text.seen, at); !first.ok()) return first;
        std::string_view value;
        Status read = json_.String(&value);
        *text.value = value;
        return read;
      }
      for (Count& count : counts) {
        if (key != count.name) continue;
        if (Status first = once(&count.seen, at); !first.ok()) return first;
        return json_.Integer(count.low, count.value);
      }
      return json_.Fail(StatusCode::kParseError, at, "\"" + std::string(key) + "\" is not known");
    });
    if (!status.ok()) return status;
    for (const Count& count : counts) {
      if (!count.seen) {
        return json_.Fail(StatusCode::kParseError, start, std::string("\"") + count.name + "\" is missing");
      }
    }
    return Status::Ok();
  }

  // {"layer:head": tau, ...}
  Status ReadTaus(TausFile* file) {
    taus_at_ = json_.at();
    seen_.assign(std::size_t{kMaxTausLayers} * kMaxQHeads, false);
    return json_.Object([this, file]() -> Status {
      TauEntry entry;
      if (Status status = ReadKey(&entry); !status.ok()) return status;
      if (Status status = json_.Colon(); !status.ok()) return status;
      double tau = 0;
      if (Status status = json_.Number(0, 1, "a tau must be in [0, 1]", &tau); !status.ok()) return status;
      entry.tau = static_cast<float>(tau);
      file->taus.push_back(entry);
      return Status::Ok();
    });
  }

  Status ReadKey(TauEntry* entry) {
    const std::size_t start = json_.at();
    if (!json_.Accept('"')) return json_.Error("expected a key \"layer:head\"");
    if (!json_.Index(&entry->layer) || !json_.Accept(':') || !json_.Index(&entry->head) || !json_.Accept('"')) {
      return json_.Error("a key must be \"layer:head\" in decimal digits");
    }
    if (entry->layer >= kMaxTausLayers || entry->head >= kMaxQHeads) {
      return json_.Fail(StatusCode::kInvalidArgument, start,
                        "no model has so many " + std::string(entry->head >= kMaxQHeads ? "heads" : "layers"));
    }
    const std::size_t index = std::size_t{kMaxQHeads} * entry->layer + entry->head;
    if (seen_[index]) return json_.Fail(StatusCode::kParseError, start, "this key occurs twice");
    seen_[index] = true;
    return Status::Ok();
  }

  // All heads of a layer or none, and no layer or head that the model does not have.
  Status CheckComplete(const TausFile& file) const {
    struct Heads {
      int count = 0;
      int last = 0;
    };
    std::map<int, Heads> layers;
    for (const TauEntry& entry : file.taus) {
      Heads& heads = layers[entry.layer];
      ++heads.count;
      heads.last = std::max(heads.last, entry.head);
    }
    const bool by_kv_head = file.config.preset == Preset::kFast;
    const int known = !file.model ? 0 : by_kv_head ? file.model->kv_heads : file.model->q_heads;
    for (const auto& [layer, heads] : layers) {
      const std::string name = "layer " + std::to_string(layer);
      if (file.model && layer >= file.model->layers) {
        return json_.Fail(StatusCode::kParseError, taus_at_,
                          name + " does not exist, the model has " + std::to_string(file.model->layers) + " layers");
      }
      const int expected = known > 0 ? known : heads.last + 1;
      if (heads.count != expected || heads.last >= expected) {
        return json_.Fail(StatusCode::kParseError, taus_at_,
                          name + " must have a threshold for each of its " + std::to_string(expected) +
                              (by_kv_head ? " KV heads" : " query heads") + ": the file is not complete");
      }
    }
    return Status::Ok();
  }

  JsonReader json_;
  std::array<std::size_t, kSections> found_{};  // where the value begins; 0: nowhere
  std::string_view unknown_;                    // the first key that is not known
  std::size_t unknown_at_ = 0;
  std::size_t taus_at_ = 0;
  std::vector<bool> seen_;
};

std::string Digits(float value) {
  char digits[32];
  const auto result = std::to_chars(digits, digits + sizeof(digits), value);
  return {digits, result.ptr};
}

std::string Quoted(std::string_view text) { return '"' + std::string(text) + '"'; }

// One "name": value of an object on one line.
void Append(std::string* text, const char* name, const std::string& value) {
  if (text->back() != '{') *text += ", ";
  *text += Quoted(name) + ": " + value;
}

std::string ConfigText(const Config& config) {
  std::string text = "{";
  VisitTausConfig(config, [&](const char* name, const auto& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, int>) {
      Append(&text, name, std::to_string(member));
    } else if constexpr (std::is_same_v<Member, float>) {
      Append(&text, name, Digits(member));
    } else if constexpr (std::is_same_v<Member, PackedFormat>) {
      Append(&text, name, Quoted(kPackedFormatNames[static_cast<int>(member)]));
    } else if constexpr (std::is_same_v<Member, Selection>) {
      if (member != Selection::kFlat) Append(&text, name, Quoted(kSelectionNames[static_cast<int>(member)]));
    } else {
      static_assert(std::is_same_v<Member, CalibrationStatistic>);
      Append(&text, name, Quoted(kStatisticNames[static_cast<int>(member)]));
    }
  });
  return text + '}';
}

std::string ModelText(const ModelIdentity& model) {
  std::string text = "{";
  if (!model.architecture.empty()) Append(&text, "architecture", Quoted(model.architecture));
  Append(&text, "layers", std::to_string(model.layers));
  Append(&text, "q_heads", std::to_string(model.q_heads));
  Append(&text, "kv_heads", std::to_string(model.kv_heads));
  Append(&text, "head_dim", std::to_string(model.head_dim));
  if (!model.metadata_hash.empty()) Append(&text, "metadata_hash", Quoted(model.metadata_hash));
  return text + '}';
}

std::string TausText(std::span<const TauEntry> taus, const std::string& indent) {
  std::string text = "{";
  const char* separator = "\n";
  for (const TauEntry& entry : taus) {
    text += separator + indent + "  \"" + std::to_string(entry.layer) + ":" + std::to_string(entry.head) +
            "\": " + Digits(entry.tau);
    separator = ",\n";
  }
  return text + (taus.empty() ? "}" : "\n" + indent + "}");
}

bool IsPlain(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
}

std::string FileText(const TausFile& file) {
  if (file.bare) return TausText(file.taus, "") + '\n';
  std::string text = "{\n  \"format\": " + Quoted(kFormatName) + ",\n  \"version\": " + std::to_string(kTausVersion) +
                     ",\n  \"preset\": " + Quoted(PresetName(file.config.preset));
  if (file.tolerance) text += ",\n  \"tolerance\": " + Digits(*file.tolerance);
  text += ",\n  \"config\": " + ConfigText(file.config);
  if (file.model) text += ",\n  \"model\": " + ModelText(*file.model);
  return text + ",\n  \"taus\": " + TausText(file.taus, "  ") + "\n}\n";
}

}  // namespace

Status ParseTaus(std::string_view text, TausFile* file) {
  if (text.size() > kMaxTausBytes) {
    return {StatusCode::kParseError, "taus JSON is larger than " + std::to_string(kMaxTausBytes) + " bytes"};
  }
  try {
    TausFile parsed;
    if (Status status = Parser(text).Parse(&parsed); !status.ok()) return status;
    *file = std::move(parsed);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory to read taus JSON");
  }
}

Status FormatTaus(const TausFile& file, std::string* text) {
  if (file.model && !(IsPlain(file.model->architecture) && IsPlain(file.model->metadata_hash))) {
    return Status::Invalid("the model's architecture and metadata_hash must be plain ASCII text");
  }
  if (file.config.selection > Selection::kHierarchical) {
    return Status::Invalid("thresholds are for flat or for hierarchical selection: the file must say which");
  }
  if (file.tolerance && !(*file.tolerance >= kMinTolerance && *file.tolerance <= kMaxTolerance)) {
    return Status::Invalid("the tolerance is " + std::to_string(*file.tolerance) + ", must be above 0 and below 1e6");
  }
  try {
    *text = FileText(file);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory to write taus JSON");
  }
}

}  // namespace scsa
