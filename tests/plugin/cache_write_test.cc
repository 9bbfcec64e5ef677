// SPDX-License-Identifier: Apache-2.0
//
// SET_ROWS on cache tensors: the plugin's bytes are ggml-cpu's.
#include "plugin_fixture.h"

namespace scsa::plugin_test {
namespace {

constexpr std::int64_t kRow = 192;
constexpr std::int64_t kCells = 640;

// Writes rows into a fresh cache and returns its bytes.
std::vector<std::uint8_t> Write(bool with_plugin, ggml_type type, ggml_type index_type, int n,
                                const std::vector<float>& rows, int streams, bool* on_plugin) {
  Cache cache(64, 3, kCells, streams, type, type);
  // Something stands in every cell: a long context.
  std::memset(cache.k->data, 0x11, ggml_nbytes(cache.k));
  const Session session(with_plugin);
  ContextPtr context = MakeContext();
  ggml_context* c = context.get();
  ggml_tensor* source = ggml_new_tensor_2d(c, GGML_TYPE_F32, kRow, n);
  ggml_tensor* cells = ggml_new_tensor_1d(c, index_type, n);
  ggml_set_input(source);
  ggml_set_input(cells);
  ggml_tensor* target = streams > 1 ? ggml_reshape_2d(c, cache.k, kRow, kCells * streams) : cache.k;
  ggml_tensor* write = ggml_set_rows(c, target, source, cells);
  ggml_cgraph* graph = ggml_new_graph(c);
  ggml_build_forward_expand(graph, write);
  EXPECT_TRUE(ggml_backend_sched_alloc_graph(session.sched(), graph));
  *on_plugin = std::string(ggml_backend_name(ggml_backend_sched_get_tensor_backend(session.sched(), write))) == "SCSA";
  ggml_backend_tensor_set(source, rows.data(), 0, ggml_nbytes(source));
  for (int i = 0; i < n; ++i) {
    const std::int64_t cell = (i * 37 + 5) % (kCells * streams);
    const auto narrow = static_cast<std::int32_t>(cell);
    if (index_type == GGML_TYPE_I64) {
      ggml_backend_tensor_set(cells, &cell, static_cast<std::size_t>(i) * sizeof(cell), sizeof(cell));
    } else {
      ggml_backend_tensor_set(cells, &narrow, static_cast<std::size_t>(i) * sizeof(narrow), sizeof(narrow));
    }
  }
  EXPECT_EQ(ggml_backend_sched_graph_compute(session.sched(), graph), GGML_STATUS_SUCCESS);
  std::vector<std::uint8_t> bytes(ggml_nbytes(cache.k));
  std::memcpy(bytes.data(), cache.k->data, bytes.size());
  return bytes;
}

std::string NameOf(const testing::TestParamInfo<ggml_type>& type) { return ggml_type_name(type.param); }

class CacheWrite : public testing::TestWithParam<ggml_type> {
 protected:
  void SetUp() override { Plugin::Get().Set("mode", "exact"); }
};

TEST_P(CacheWrite, GivesGgmlsBits) {
  for (int n : {1, 3, 300}) {
    std::vector<float> rows = Normal(static_cast<std::size_t>(kRow) * n, 5, 3.0f);
    // Values that fall between two codes, tiny ones, huge ones, zeros of both signs.
    for (std::size_t i = 0; i + 32 <= rows.size(); i += 96) {
      for (std::size_t j = 0; j < 32; ++j) rows[i + j] = (static_cast<float>(j) - 15.5f) * 127.0f / 127.0f;
      rows[i] = 127.0f;
      rows[i + 31] = -0.0f;
    }
    rows[40] = 1e-42f;
    rows[41] = 6e-8f;
    rows[42] = 70000.0f;
    rows[43] = 2049.0f;
    rows[44] = 0.1f;
    for (ggml_type index_type : {GGML_TYPE_I64, GGML_TYPE_I32}) {
      for (int streams : {1, 2}) {
        bool on_plugin = false;
        const auto ours = Write(true, GetParam(), index_type, n, rows, streams, &on_plugin);
        EXPECT_TRUE(on_plugin);
        const auto theirs = Write(false, GetParam(), index_type, n, rows, streams, &on_plugin);
        EXPECT_FALSE(on_plugin);
        EXPECT_TRUE(ours == theirs) << ggml_type_name(GetParam()) << " n " << n << " streams " << streams;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CacheWrite, testing::Values(GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0), NameOf);

TEST(CacheWriteClaim, LeavesTypesThatAttentionDoesNotHandle) {
  Plugin::Get().Set("mode", "exact");
  for (ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_F32}) {
    bool on_plugin = true;
    Write(true, type, GGML_TYPE_I64, 1, Normal(kRow, 5), 1, &on_plugin);
    EXPECT_FALSE(on_plugin) << ggml_type_name(type);
  }
}

TEST(CacheWriteClaim, LeavesEverythingInModeOff) {
  Plugin::Get().Set("mode", "off");
  bool on_plugin = true;
  Write(true, GGML_TYPE_F16, GGML_TYPE_I64, 1, Normal(kRow, 5), 1, &on_plugin);
  EXPECT_FALSE(on_plugin);
}

}  // namespace
}  // namespace scsa::plugin_test
