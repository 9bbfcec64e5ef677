// SPDX-License-Identifier: Apache-2.0
//
// What a report says about the machine, and what defaults depend on.
#pragma once

#include <cstddef>
#include <string>

namespace scsa::tool {

// Physical cores that this process may use: its CPU affinity, SMT siblings counted once, cut to the CPU quota of its
// control group. At least 1.
int UsableCores();

std::string CpuName();  // as the kernel names it, or "unknown CPU"
std::string UtcDate();  // "2026-01-31"

// Sizes of the caches that one core reaches, in bytes.
struct CacheSizes {
  std::size_t l2 = 0;
  std::size_t last_level = 0;  // 0: the second level is the last
  std::size_t largest() const { return last_level > l2 ? last_level : l2; }
};
// As the kernel tells them; 512 KiB and 32 MiB where it does not.
CacheSizes CoreCaches();

// What the threads of this machine do together at best.
struct MachineRates {
  double bandwidth = 0.0;          // bytes read from memory per second
  double multiply_add_rate = 0.0;  // f32, per second
};
MachineRates MeasureMachineRates(int threads);

}  // namespace scsa::tool
