// SPDX-License-Identifier: Apache-2.0
//
// What a report says about the machine, and what defaults depend on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace scsa::tool {

// Physical cores that this process may use: its CPU affinity, SMT siblings counted once, cut to the CPU quota of its
// control group. At least 1.
int UsableCores();

std::string CpuName();  // as the kernel names it, or "unknown CPU"
std::string UtcDate();  // "2026-01-31"

// Memory that can be allocated without swapping, in bytes; nothing where the system does not tell.
std::optional<std::uint64_t> AvailableMemory();

}  // namespace scsa::tool
