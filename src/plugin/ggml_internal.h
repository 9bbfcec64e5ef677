// SPDX-License-Identifier: Apache-2.0
//
// The structs that make up a ggml backend. ggml declares them in ggml-backend-impl.h, which an installed ggml comes
// without: then this is what the plugin is compiled with. They are no stable interface. cmake/ScsaLlamaCpp.cmake names
// the versions that have this layout, and ggml_internal_test compares it with the header of a source tree.
//
// Functions that the plugin neither calls nor offers have no type here.
#pragma once

#include "ggml-backend.h"

#define GGML_BACKEND_API_VERSION 2

extern "C" {

using scsa_unused_function = void (*)();

struct ggml_backend_buffer_type_i {
  const char* (*get_name)(ggml_backend_buffer_type_t type);
  ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t type, size_t size);
  size_t (*get_alignment)(ggml_backend_buffer_type_t type);
  scsa_unused_function get_max_size, get_alloc_size;
  bool (*is_host)(ggml_backend_buffer_type_t type);
};

struct ggml_backend_buffer_type {
  struct ggml_backend_buffer_type_i iface;
  ggml_backend_dev_t device;
  void* context;
};

struct ggml_backend_buffer_i {
  void (*free_buffer)(ggml_backend_buffer_t buffer);
  scsa_unused_function get_base, init_tensor, memset_tensor, set_tensor, get_tensor;
#if SCSA_GGML_VERSION_NUMBER >= 13001
  scsa_unused_function set_tensor_2d, get_tensor_2d;
#endif
  scsa_unused_function cpy_tensor, clear, reset;
};

struct ggml_backend_buffer {
  struct ggml_backend_buffer_i iface;
  ggml_backend_buffer_type_t buft;
  void* context;
  size_t size;
  enum ggml_backend_buffer_usage usage;
};

struct ggml_backend_i {
  const char* (*get_name)(ggml_backend_t backend);
  void (*free)(ggml_backend_t backend);
  scsa_unused_function set_tensor_async, get_tensor_async;
#if SCSA_GGML_VERSION_NUMBER >= 13001
  scsa_unused_function set_tensor_2d_async, get_tensor_2d_async;
#endif
  scsa_unused_function cpy_tensor_async, synchronize;
  scsa_unused_function graph_plan_create, graph_plan_free, graph_plan_update, graph_plan_compute;
  enum ggml_status (*graph_compute)(ggml_backend_t backend, struct ggml_cgraph* graph);
  scsa_unused_function event_record, event_wait, graph_optimize;
};

struct ggml_backend {
  ggml_guid_t guid;
  struct ggml_backend_i iface;
  ggml_backend_dev_t device;
  void* context;
};

struct ggml_backend_device_i {
  const char* (*get_name)(ggml_backend_dev_t device);
  const char* (*get_description)(ggml_backend_dev_t device);
  void (*get_memory)(ggml_backend_dev_t device, size_t* free, size_t* total);
  enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t device);
  void (*get_props)(ggml_backend_dev_t device, struct ggml_backend_dev_props* props);
  ggml_backend_t (*init_backend)(ggml_backend_dev_t device, const char* params);
  ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t device);
  scsa_unused_function get_host_buffer_type;
  ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t device, void* data, size_t size, size_t max_tensor);
  bool (*supports_op)(ggml_backend_dev_t device, const struct ggml_tensor* node);
  bool (*supports_buft)(ggml_backend_dev_t device, ggml_backend_buffer_type_t type);
  scsa_unused_function offload_op, event_new, event_free, event_synchronize;
};

struct ggml_backend_device {
  struct ggml_backend_device_i iface;
  ggml_backend_reg_t reg;
  void* context;
};

struct ggml_backend_reg_i {
  const char* (*get_name)(ggml_backend_reg_t reg);
  size_t (*get_device_count)(ggml_backend_reg_t reg);
  ggml_backend_dev_t (*get_device)(ggml_backend_reg_t reg, size_t index);
  void* (*get_proc_address)(ggml_backend_reg_t reg, const char* name);
};

struct ggml_backend_reg {
  int api_version;
  struct ggml_backend_reg_i iface;
  void* context;
};

}  // extern "C"
