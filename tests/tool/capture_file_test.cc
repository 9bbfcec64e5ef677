// SPDX-License-Identifier: Apache-2.0
#include "capture_file.h"

#include <gguf.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "session.h"
#include "synthetic_capture.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

namespace fs = std::filesystem;

constexpr Shape kShape = {.q_heads = 4, .kv_heads = 2, .head_dim = 8};

class CaptureFileTest : public testing::Test {
 protected:
  void SetUp() override {
    ConfigureLlamaLog(false);
    folder_ = fs::path(testing::TempDir()) /
              (std::string("scsa_capture_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    path_ = (folder_ / "capture.gguf").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void Write(std::string_view content) const { std::ofstream(path_, std::ios::binary) << content; }
  std::string Error() const {
    try {
      ReadCapture(path_);
    } catch (const ToolError& e) {
      return e.what();
    }
    return "";
  }
  // Writes a good capture whose metadata `change` has changed.
  void WriteChanged(const std::function<void(gguf_context*)>& change) const {
    WriteCapture(path_, SyntheticCapture(kShape, 5, 3, {2, 7}));
    const std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf(
        gguf_init_from_file(path_.c_str(), {.no_alloc = true, .ctx = nullptr}), &gguf_free);
    const std::string tensors = Content().substr(gguf_get_data_offset(gguf.get()));
    change(gguf.get());
    std::string header(gguf_get_meta_size(gguf.get()), '\0');
    gguf_get_meta_data(gguf.get(), header.data());
    Write(header + tensors);
  }

  fs::path folder_;
  std::string path_;
};

TEST_F(CaptureFileTest, KeepsEverything) {
  const Capture written = SyntheticCapture(kShape, 5, 3, {2, 7});
  WriteCapture(path_, written);
  const Capture read = ReadCapture(path_);
  EXPECT_EQ(read.model, written.model);
  EXPECT_EQ(read.architecture, written.architecture);
  EXPECT_EQ(read.llama_cpp_version, written.llama_cpp_version);
  EXPECT_EQ(read.date, written.date);
  EXPECT_EQ(read.shape.q_heads, 4);
  EXPECT_EQ(read.shape.kv_heads, 2);
  EXPECT_EQ(read.shape.head_dim, 8);
  EXPECT_EQ(read.scale, 0.5f);
  EXPECT_EQ(read.n_kv, 5);
  EXPECT_EQ(read.steps, 3);
  EXPECT_EQ(read.rows(), 7);  // the first step sees 5 rows, the third one 7
  ASSERT_EQ(read.layers.size(), 2u);
  EXPECT_EQ(read.layers[0].layer, 2);
  EXPECT_EQ(read.layers[1].layer, 7);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(read.layers[i].k, written.layers[i].k);
    EXPECT_EQ(read.layers[i].v, written.layers[i].v);
    EXPECT_EQ(read.layers[i].q, written.layers[i].q);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);  // no temporary file
}

TEST_F(CaptureFileTest, TensorsHaveTheDocumentedNamesAndShapes) {
  WriteCapture(path_, SyntheticCapture(kShape, 5, 3, {2}));
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf(
      gguf_init_from_file(path_.c_str(), {.no_alloc = true, .ctx = nullptr}), &gguf_free);
  ASSERT_NE(gguf, nullptr);
  const auto shape = [&](const char* name) {
    const std::int64_t* ne = gguf_get_tensor_ne(gguf.get(), gguf_find_tensor(gguf.get(), name));
    return std::vector<std::int64_t>(ne, ne + 3);
  };
  // ggml's order: the fastest dimension first.
  EXPECT_EQ(shape("layer.2.k"), (std::vector<std::int64_t>{8, 7, 2}));
  EXPECT_EQ(shape("layer.2.v"), (std::vector<std::int64_t>{8, 7, 2}));
  EXPECT_EQ(shape("layer.2.q"), (std::vector<std::int64_t>{8, 4, 3}));
  EXPECT_EQ(gguf_get_tensor_type(gguf.get(), 0), GGML_TYPE_F16);
}

TEST_F(CaptureFileTest, EveryCutIsAnError) {
  WriteCapture(path_, SyntheticCapture(kShape, 5, 3, {2, 7}));
  const std::string content = Content();
  for (std::size_t size = 0; size < content.size(); ++size) {
    Write(content.substr(0, size));
    const std::string error = Error();
    ASSERT_NE(error, "") << size;
    ASSERT_EQ(error.find('\n'), std::string::npos) << error;
    ASSERT_NE(error.find(size < 4 ? "no GGUF" : "cut off"), std::string::npos) << size << ": " << error;
  }
  Write(content);
  EXPECT_EQ(Error(), "");
}

// Whatever bytes are changed, the reader returns a capture that keeps its promises or throws.
TEST_F(CaptureFileTest, ChangedBytesNeverCrash) {
  WriteCapture(path_, SyntheticCapture(kShape, 5, 3, {2, 7}));
  const std::string content = Content();
  std::mt19937 random(1);
  int errors = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string changed = content;
    const int bytes = 1 + static_cast<int>(random() % 3);
    for (int b = 0; b < bytes; ++b) changed[random() % changed.size()] = static_cast<char>(random());
    Write(changed);
    try {
      const Capture capture = ReadCapture(path_);
      ASSERT_FALSE(capture.layers.empty());
      ASSERT_GE(capture.steps, 1);
      ASSERT_GE(capture.n_kv, 1);
      for (const CapturedLayer& layer : capture.layers) {
        ASSERT_EQ(layer.k.size(),
                  static_cast<std::size_t>(capture.shape.kv_heads * capture.rows()) * capture.shape.head_dim);
        ASSERT_EQ(layer.q.size(),
                  static_cast<std::size_t>(capture.steps * capture.shape.q_heads) * capture.shape.head_dim);
      }
    } catch (const ToolError&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, 400);
}

TEST_F(CaptureFileTest, OtherFiles) {
  EXPECT_NE(Error().find("not found"), std::string::npos);
  Write("GIF89a");
  EXPECT_NE(Error().find("no GGUF"), std::string::npos);
  Write("");
  EXPECT_NE(Error().find("no GGUF"), std::string::npos);
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> empty(gguf_init_empty(), &gguf_free);
  ASSERT_TRUE(gguf_write_to_file(empty.get(), path_.c_str(), false));
  EXPECT_NE(Error().find("no capture"), std::string::npos);
  path_ = folder_.string();
  EXPECT_NE(Error().find("is a folder"), std::string::npos);
}

TEST_F(CaptureFileTest, WrongMetadata) {
  WriteChanged([](gguf_context* g) { gguf_set_val_u32(g, "scsa.capture.version", 2); });
  EXPECT_NE(Error().find("version 2"), std::string::npos) << Error();
  for (const char* key : {"version", "model", "model_architecture", "n_kv", "steps", "q_heads", "kv_heads", "head_dim",
                          "scale", "layers"}) {
    const std::string name = std::string("scsa.capture.") + key;
    WriteChanged([&](gguf_context* g) { gguf_set_val_bool(g, name.c_str(), true); });
    EXPECT_NE(Error().find(name + " is missing or of another type"), std::string::npos) << Error();
  }
  for (const char* key : {"n_kv", "steps", "q_heads", "kv_heads", "head_dim"}) {
    const std::string name = std::string("scsa.capture.") + key;
    for (const std::uint32_t value : {0u, 0xffffffffu}) {
      WriteChanged([&](gguf_context* g) { gguf_set_val_u32(g, name.c_str(), value); });
      EXPECT_NE(Error().find(name + " is "), std::string::npos) << Error();
    }
  }
  WriteChanged([](gguf_context* g) { gguf_set_val_u32(g, "scsa.capture.steps", 4); });
  EXPECT_NE(Error().find("layer.2.k has another shape"), std::string::npos) << Error();
  WriteChanged([](gguf_context* g) { gguf_set_val_u32(g, "scsa.capture.q_heads", 3); });  // no multiple of kv_heads
  EXPECT_NE(Error().find("damaged"), std::string::npos) << Error();
  WriteChanged(
      [](gguf_context* g) { gguf_set_val_f32(g, "scsa.capture.scale", std::numeric_limits<float>::infinity()); });
  EXPECT_NE(Error().find("scale is not finite"), std::string::npos) << Error();
  for (const std::vector<std::int32_t>& layers : {std::vector<std::int32_t>{}, {7, 2}, {-1, 2}, {2, 2}}) {
    WriteChanged([&](gguf_context* g) {
      gguf_set_arr_data(g, "scsa.capture.layers", GGUF_TYPE_INT32, layers.data(), layers.size());
    });
    EXPECT_NE(Error().find("scsa.capture.layers"), std::string::npos) << Error();
  }
  WriteChanged([](gguf_context* g) {
    const std::int32_t layers[] = {2, 8};
    gguf_set_arr_data(g, "scsa.capture.layers", GGUF_TYPE_INT32, layers, 2);
  });
  EXPECT_NE(Error().find("tensor layer.8.k is missing"), std::string::npos) << Error();
}

TEST_F(CaptureFileTest, ValuesThatAreNoNumbers) {
  Capture capture = SyntheticCapture(kShape, 5, 3, {2});
  capture.layers[0].v[9] = 0x7c00;  // f16 infinity
  WriteCapture(path_, capture);
  EXPECT_NE(Error().find("layer.2.v holds values that are no numbers"), std::string::npos) << Error();
  capture = SyntheticCapture(kShape, 5, 3, {2});
  capture.layers[0].q[9] = std::nanf("");
  WriteCapture(path_, capture);
  EXPECT_NE(Error().find("layer.2.q holds values that are no numbers"), std::string::npos) << Error();
}

TEST_F(CaptureFileTest, ADiskThatFillsUpLeavesTheOldFile) {
  WriteCapture(path_, SyntheticCapture(kShape, 5, 3, {2}));
  const std::string old = Content();
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {.rlim_cur = 100000, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string error;
  try {
    WriteCapture(path_, SyntheticCapture(kShape, 5000, 3, {2}));
  } catch (const ToolError& e) {
    error = e.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(error.find("is the disk full?"), std::string::npos) << error;
  EXPECT_EQ(Content(), old);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

}  // namespace
}  // namespace scsa::tool
