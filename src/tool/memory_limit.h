// SPDX-License-Identifier: Apache-2.0
//
// How much memory a command may plan to use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace scsa::tool {

// Memory that can be allocated without swapping, in bytes: what the system has available, or less where a control group
// of this process allows less. Nothing where the system does not tell.
std::optional<std::uint64_t> AvailableMemory();

// What the memory control groups leave, the process's own and all above it; version 1 and 2. Page cache that the group
// can drop counts as free. Nothing without a limit. `groups`: /proc/self/cgroup or a file like it; `mount`: where
// control groups are mounted. Groups whose folder is not visible there (as inside a container) are passed over.
std::optional<std::uint64_t> ControlGroupMemory(const std::filesystem::path& groups,
                                                const std::filesystem::path& mount);

}  // namespace scsa::tool
