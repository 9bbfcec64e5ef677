// SPDX-License-Identifier: Apache-2.0
//
// The SIMD targets that this library compiles, the same in every file that includes Highway. Include it before any
// Highway header.
#pragma once

// Every target that the compiler can reach, the portable scalar one included, so that it can be forced and tested.
#define HWY_COMPILE_ALL_ATTAINABLE
#define HWY_WANT_AVX3_DL 1
// Targets to leave out, as a mask of HWY_ constants: sanitizer builds, which are slow, leave out some.
#ifndef SCSA_DISABLED_TARGETS
#define SCSA_DISABLED_TARGETS 0
#endif
// Register blocking keeps vectors in arrays, which sizeless vector types (SVE, RVV) do not allow; such machines run the
// fixed-width target instead.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | SCSA_DISABLED_TARGETS)

#include <cstddef>

namespace scsa {

// Index into Highway's dispatch tables of the target in force (target.cc). Not Highway's own choice, which is global to
// the process: forcing a target here must not change other users of Highway.
std::size_t DispatchIndex();

// Name of the target that the row kernels were compiled for, told by the code that a dispatched call reaches.
const char* ExecutedTarget();

}  // namespace scsa

// Calls the compiled version of a function of HWY_EXPORT that the target in force selects.
#define SCSA_DISPATCH(FUNC_NAME) (*(HWY_DISPATCH_TABLE(FUNC_NAME)[::scsa::DispatchIndex()]))
