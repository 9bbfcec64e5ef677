// SPDX-License-Identifier: Apache-2.0
//
// SIMD targets. Kernels are compiled for every target that the compiler can reach and chosen at run time. The
// environment variable SCSA_TARGET (for example "AVX2", "SSE4", "SCALAR") forces one for the whole process; it is read
// once, at the first use of the library. The portable target is called SCALAR when built with GCC 12, EMU128 with newer
// compilers or versions of Highway.
#pragma once

#include <string>
#include <vector>

#include "scsa/status.h"

namespace scsa {

// Names of the targets that this CPU can run, best first. The last one is always the portable scalar target.
std::vector<std::string> AvailableTargets();

// The target that kernels run on now.
std::string ActiveTarget();

// Forces a target by name (case does not matter); an empty name returns to the best one. kInvalidArgument names the
// targets to choose from. Must not run concurrently with other calls of the library.
Status ForceTarget(const std::string& name);

// The error of a bad SCSA_TARGET, or ok. A bad value leaves the best target in force.
Status TargetFromEnvironment();

}  // namespace scsa
