// SPDX-License-Identifier: Apache-2.0
#include "capture_file.h"

#include <fmt/format.h>
#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string_view>

#include "output_file.h"
#include "scsa/exact.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kVersion = 1;
constexpr int kMaxSteps = 1 << 20;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;

constexpr const char* kVersionKey = "scsa.capture.version";
constexpr const char* kModelKey = "scsa.capture.model";
constexpr const char* kArchitectureKey = "scsa.capture.model_architecture";
constexpr const char* kLlamaCppKey = "scsa.capture.llama_cpp";
constexpr const char* kDateKey = "scsa.capture.date";
constexpr const char* kNKvKey = "scsa.capture.n_kv";
constexpr const char* kStepsKey = "scsa.capture.steps";
constexpr const char* kQHeadsKey = "scsa.capture.q_heads";
constexpr const char* kKvHeadsKey = "scsa.capture.kv_heads";
constexpr const char* kHeadDimKey = "scsa.capture.head_dim";
constexpr const char* kScaleKey = "scsa.capture.scale";
constexpr const char* kLayersKey = "scsa.capture.layers";

struct FreeGguf {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using GgufContext = std::unique_ptr<gguf_context, FreeGguf>;
using TensorContext = std::unique_ptr<ggml_context, decltype(&ggml_free)>;

std::string TensorName(int layer, char tensor) { return fmt::format("layer.{}.{}", layer, tensor); }

struct TensorShape {
  ggml_type type;
  std::int64_t ne[3];  // ggml's order: the fastest dimension first

  std::size_t Bytes() const { return static_cast<std::size_t>(ne[0] * ne[1] * ne[2]) * ggml_type_size(type); }
};

TensorShape ShapeOf(const Capture& capture, char tensor) {
  const Shape& shape = capture.shape;
  if (tensor == 'q') return {GGML_TYPE_F32, {shape.head_dim, shape.q_heads, capture.steps}};
  return {GGML_TYPE_F16, {shape.head_dim, capture.rows(), shape.kv_heads}};
}

template <typename LayerType, typename Visitor>  // LayerType: CapturedLayer, const or not
void VisitTensors(LayerType& layer, const Visitor& visitor) {
  visitor('k', layer.k);
  visitor('v', layer.v);
  visitor('q', layer.q);
}

void WritePadding(std::ostream& file, std::size_t written, std::size_t alignment) {
  for (; written % alignment != 0; ++written) file.put('\0');
}

// Reads a capture; every problem becomes a ToolError that names the file. gguf's accessors abort on a key of another
// type, so that types are compared first.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  Capture Read() {
    Open();
    ReadMetadata();
    file_.open(path_, std::ios::binary);
    for (CapturedLayer& layer : capture_.layers) {
      VisitTensors(layer, [&](char tensor, auto& values) { ReadTensor(layer.layer, tensor, values); });
    }
    return std::move(capture_);
  }

 private:
  [[noreturn]] void Damaged(std::string_view what) const {
    throw ToolError(
        fmt::format("capture {} is cut off or damaged ({}): record it again with 'scsa capture'", path_, what));
  }

  void Open() {
    std::error_code error;
    if (!fs::exists(path_, error)) throw ToolError(fmt::format("capture file not found: {}", path_));
    if (fs::is_directory(path_, error)) {
      throw ToolError(fmt::format("capture {} is a folder: give a file that 'scsa capture' wrote", path_));
    }
    std::ifstream file(path_, std::ios::binary);
    char magic[4] = {};
    if (!file.read(magic, sizeof(magic)) || std::string_view(magic, sizeof(magic)) != "GGUF") {
      throw ToolError(fmt::format("{} is no GGUF file: give a file that 'scsa capture' wrote", path_));
    }
    ggml_context* tensors = nullptr;
    gguf_.reset(gguf_init_from_file(path_.c_str(), {.no_alloc = true, .ctx = &tensors}));
    tensors_.reset(tensors);
    if (gguf_ == nullptr) Damaged("its header cannot be read");
    size_ = fs::file_size(path_, error);
    if (error) Damaged("its size is unknown");
  }

  std::int64_t Key(const char* name, gguf_type type) const {
    const std::int64_t id = gguf_find_key(gguf_.get(), name);
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != type) {
      Damaged(fmt::format("{} is missing or of another type", name));
    }
    return id;
  }

  std::string Text(const char* name) const { return gguf_get_val_str(gguf_.get(), Key(name, GGUF_TYPE_STRING)); }

  // A number in [1, high].
  std::int64_t Count(const char* name, std::int64_t high) const {
    const std::uint32_t value = gguf_get_val_u32(gguf_.get(), Key(name, GGUF_TYPE_UINT32));
    if (value < 1 || value > high) Damaged(fmt::format("{} is {}", name, value));
    return value;
  }

  void ReadMetadata() {
    if (gguf_find_key(gguf_.get(), kVersionKey) < 0) {
      throw ToolError(fmt::format("{} is a GGUF file but no capture: give a file that 'scsa capture' wrote", path_));
    }
    const std::uint32_t version = gguf_get_val_u32(gguf_.get(), Key(kVersionKey, GGUF_TYPE_UINT32));
    if (version != kVersion) {
      throw ToolError(fmt::format("capture {} has version {} of the format, this program knows {}: record it again",
                                  path_, version, kVersion));
    }
    capture_.model = Text(kModelKey);
    capture_.architecture = Text(kArchitectureKey);
    capture_.llama_cpp_version = Text(kLlamaCppKey);
    capture_.date = Text(kDateKey);
    capture_.n_kv = Count(kNKvKey, kMaxRows);
    capture_.steps = static_cast<int>(Count(kStepsKey, kMaxSteps));
    capture_.shape = {.q_heads = static_cast<int>(Count(kQHeadsKey, kMaxQHeads)),
                      .kv_heads = static_cast<int>(Count(kKvHeadsKey, kMaxKvHeads)),
                      .head_dim = static_cast<int>(Count(kHeadDimKey, kMaxHeadDim))};
    if (const Status status = ValidateShape(capture_.shape); !status.ok()) Damaged(status.message());
    capture_.scale = gguf_get_val_f32(gguf_.get(), Key(kScaleKey, GGUF_TYPE_FLOAT32));
    if (!std::isfinite(capture_.scale)) Damaged(fmt::format("{} is not finite", kScaleKey));
    ReadLayerNumbers();
  }

  void ReadLayerNumbers() {
    const std::int64_t id = Key(kLayersKey, GGUF_TYPE_ARRAY);
    const std::size_t n = gguf_get_arr_n(gguf_.get(), id);
    if (gguf_get_arr_type(gguf_.get(), id) != GGUF_TYPE_INT32 || n == 0) {
      Damaged(fmt::format("{} is no list of layers", kLayersKey));
    }
    const auto* numbers = static_cast<const std::int32_t*>(gguf_get_arr_data(gguf_.get(), id));
    for (std::size_t i = 0; i < n; ++i) {
      if (numbers[i] < 0 || (i > 0 && numbers[i] <= numbers[i - 1])) {
        Damaged(fmt::format("{} is not ascending", kLayersKey));
      }
      capture_.layers.emplace_back().layer = numbers[i];
    }
  }

  template <typename T>
  void ReadTensor(int layer, char tensor, std::vector<T>& values) {
    const std::string name = TensorName(layer, tensor);
    const std::int64_t id = gguf_find_tensor(gguf_.get(), name.c_str());
    if (id < 0) Damaged(fmt::format("tensor {} is missing", name));
    const TensorShape shape = ShapeOf(capture_, tensor);
    const ggml_tensor* described = ggml_get_tensor(tensors_.get(), name.c_str());
    if (described->type != shape.type || !std::equal(shape.ne, shape.ne + 3, described->ne) || described->ne[3] != 1) {
      Damaged(fmt::format("tensor {} has another shape or type", name));
    }
    const std::uint64_t begin = gguf_get_data_offset(gguf_.get()) + gguf_get_tensor_offset(gguf_.get(), id);
    const std::uint64_t padded = GGML_PAD(shape.Bytes(), gguf_get_alignment(gguf_.get()));
    if (begin > size_ || padded > size_ - begin) Damaged(fmt::format("it ends before tensor {} does", name));
    values.resize(shape.Bytes() / sizeof(T));
    file_.seekg(static_cast<std::streamoff>(begin));
    if (!file_.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(shape.Bytes()))) {
      Damaged(fmt::format("tensor {} cannot be read", name));
    }
    if (!std::all_of(values.begin(), values.end(), [](T value) { return IsFinite(value); })) {
      Damaged(fmt::format("tensor {} holds values that are no numbers", name));
    }
  }

  static bool IsFinite(float value) { return std::isfinite(value); }
  static bool IsFinite(std::uint16_t f16) { return (f16 & 0x7c00) != 0x7c00; }

  std::string path_;
  std::uint64_t size_ = 0;
  GgufContext gguf_;
  TensorContext tensors_{nullptr, &ggml_free};  // shapes and types, no data
  std::ifstream file_;
  Capture capture_;
};

}  // namespace

void WriteCapture(const std::string& path, const Capture& capture) {
  const GgufContext gguf(gguf_init_empty());
  // No model architecture: a llama.cpp program that is given the file says so.
  gguf_set_val_str(gguf.get(), "general.architecture", "scsa-capture");
  gguf_set_val_u32(gguf.get(), kVersionKey, kVersion);
  gguf_set_val_str(gguf.get(), kModelKey, capture.model.c_str());
  gguf_set_val_str(gguf.get(), kArchitectureKey, capture.architecture.c_str());
  gguf_set_val_str(gguf.get(), kLlamaCppKey, capture.llama_cpp_version.c_str());
  gguf_set_val_str(gguf.get(), kDateKey, capture.date.c_str());
  gguf_set_val_u32(gguf.get(), kNKvKey, static_cast<std::uint32_t>(capture.n_kv));
  gguf_set_val_u32(gguf.get(), kStepsKey, static_cast<std::uint32_t>(capture.steps));
  gguf_set_val_u32(gguf.get(), kQHeadsKey, static_cast<std::uint32_t>(capture.shape.q_heads));
  gguf_set_val_u32(gguf.get(), kKvHeadsKey, static_cast<std::uint32_t>(capture.shape.kv_heads));
  gguf_set_val_u32(gguf.get(), kHeadDimKey, static_cast<std::uint32_t>(capture.shape.head_dim));
  gguf_set_val_f32(gguf.get(), kScaleKey, capture.scale);
  std::vector<std::int32_t> numbers;
  for (const CapturedLayer& layer : capture.layers) numbers.push_back(layer.layer);
  gguf_set_arr_data(gguf.get(), kLayersKey, GGUF_TYPE_INT32, numbers.data(), numbers.size());

  const TensorContext tensors(ggml_init({.mem_size = (3 * capture.layers.size() + 1) * ggml_tensor_overhead(),
                                         .mem_buffer = nullptr,
                                         .no_alloc = true}),
                              &ggml_free);
  for (const CapturedLayer& layer : capture.layers) {
    VisitTensors(layer, [&](char name, const auto&) {
      const TensorShape shape = ShapeOf(capture, name);
      ggml_tensor* tensor = ggml_new_tensor_3d(tensors.get(), shape.type, shape.ne[0], shape.ne[1], shape.ne[2]);
      ggml_set_name(tensor, TensorName(layer.layer, name).c_str());
      gguf_add_tensor(gguf.get(), tensor);
    });
  }
  std::vector<char> header(gguf_get_meta_size(gguf.get()));
  gguf_get_meta_data(gguf.get(), header.data());

  // gguf_write_to_file does not notice a disk that is full when the file is closed.
  WriteFileAtomically(path, [&](std::ostream& file) {
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    for (const CapturedLayer& layer : capture.layers) {
      VisitTensors(layer, [&](char, const auto& values) {
        const std::size_t bytes = values.size() * sizeof(values[0]);
        file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(bytes));
        WritePadding(file, bytes, gguf_get_alignment(gguf.get()));
      });
    }
  });
}

Capture ReadCapture(const std::string& path) { return Reader(path).Read(); }

}  // namespace scsa::tool
