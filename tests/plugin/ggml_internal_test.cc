// SPDX-License-Identifier: Apache-2.0
//
// src/plugin/ggml_internal.h, which takes the place of ggml's internal header where ggml is installed, has the layout
// of that header.
#include <ggml-backend.h>
#include <gtest/gtest.h>

#include <cstddef>

namespace ggml {
#include <ggml-backend-impl.h>
}
#undef GGML_BACKEND_API_VERSION
namespace ours {
#include "plugin/ggml_internal.h"
}

namespace {

#define EXPECT_SAME_SIZE(TYPE) EXPECT_EQ(sizeof(ours::TYPE), sizeof(ggml::TYPE))
#define EXPECT_SAME_OFFSET(TYPE, FIELD) EXPECT_EQ(offsetof(ours::TYPE, FIELD), offsetof(ggml::TYPE, FIELD))

TEST(GgmlInternal, BuffersHaveGgmlsLayout) {
  EXPECT_SAME_SIZE(ggml_backend_buffer_type_i);
  EXPECT_SAME_OFFSET(ggml_backend_buffer_type_i, get_alignment);
  EXPECT_SAME_OFFSET(ggml_backend_buffer_type_i, is_host);
  EXPECT_SAME_SIZE(ggml_backend_buffer_type);
  EXPECT_SAME_OFFSET(ggml_backend_buffer_type, device);
  EXPECT_SAME_SIZE(ggml_backend_buffer_i);
  EXPECT_SAME_OFFSET(ggml_backend_buffer_i, free_buffer);
  EXPECT_SAME_OFFSET(ggml_backend_buffer_i, reset);
  EXPECT_SAME_SIZE(ggml_backend_buffer);
  EXPECT_SAME_OFFSET(ggml_backend_buffer, buft);
}

TEST(GgmlInternal, BackendsAndDevicesHaveGgmlsLayout) {
  EXPECT_SAME_SIZE(ggml_backend_i);
  EXPECT_SAME_OFFSET(ggml_backend_i, free);
  EXPECT_SAME_OFFSET(ggml_backend_i, synchronize);
  EXPECT_SAME_OFFSET(ggml_backend_i, graph_compute);
  EXPECT_SAME_SIZE(ggml_backend);
  EXPECT_SAME_OFFSET(ggml_backend, device);
  EXPECT_SAME_OFFSET(ggml_backend, context);
  EXPECT_SAME_SIZE(ggml_backend_device_i);
  EXPECT_SAME_OFFSET(ggml_backend_device_i, get_props);
  EXPECT_SAME_OFFSET(ggml_backend_device_i, init_backend);
  EXPECT_SAME_OFFSET(ggml_backend_device_i, get_buffer_type);
  EXPECT_SAME_OFFSET(ggml_backend_device_i, buffer_from_host_ptr);
  EXPECT_SAME_OFFSET(ggml_backend_device_i, supports_op);
  EXPECT_SAME_OFFSET(ggml_backend_device_i, supports_buft);
  EXPECT_SAME_SIZE(ggml_backend_device);
  EXPECT_SAME_OFFSET(ggml_backend_device, reg);
}

TEST(GgmlInternal, RegistryEntriesHaveGgmlsLayout) {
  EXPECT_SAME_SIZE(ggml_backend_reg_i);
  EXPECT_SAME_OFFSET(ggml_backend_reg_i, get_proc_address);
  EXPECT_SAME_SIZE(ggml_backend_reg);
  EXPECT_SAME_OFFSET(ggml_backend_reg, iface);
  EXPECT_SAME_OFFSET(ggml_backend_reg, context);
}

}  // namespace
