// SPDX-License-Identifier: Apache-2.0
//
// The device that SCSA_DEVICE=cpu asks for. ggml's rpc-server hands the graph of a client to one device, without the
// scheduler that would give each node to the device that takes it. So this device takes every node that ggml's CPU
// backend takes, computes attention and cache writes itself, and leaves the others to that backend.
#pragma once

#include "plugin/ggml_compat.h"

namespace scsa::plugin {

struct BackendState;

// Replaces what differs from the device that takes attention alone.
void MakeCpuDevice(ggml_backend_device_i* iface);

ggml_status ComputeWholeGraph(BackendState& state, ggml_cgraph* graph);

}  // namespace scsa::plugin
