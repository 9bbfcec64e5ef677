// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "plugin/ggml_compat.h"

namespace scsa::plugin {

// Name of the backend and of its one device.
inline constexpr char kBackendName[] = "SCSA";

ggml_backend_reg_t BackendReg();

struct BackendState;

// Computes a node that ClaimsNode took.
ggml_status ComputeNode(BackendState& state, ggml_tensor* node);

}  // namespace scsa::plugin
