// SPDX-License-Identifier: Apache-2.0
//
// The two limits of the machine that bound exact attention, measured with the kernels' own SIMD target and threads.
#pragma once

namespace scsa {

// Bytes per second that n_threads threads read together from a buffer well beyond the last-level cache (best of several
// passes). Takes some tenths of a second and 512 MiB; 0 when that much memory is not to be had.
double MeasureReadBandwidth(int n_threads);

// f32 multiply-adds per second that n_threads threads reach together on registers alone.
double MeasureMultiplyAddRate(int n_threads);

}  // namespace scsa
