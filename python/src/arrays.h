// SPDX-License-Identifier: Apache-2.0
//
// From numpy arrays to the library's views. Everything that can be wrong with an array is refused here, with its name.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "scsa/exact.h"

namespace scsa::python {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using BoolArray = nb::ndarray<const bool, nb::ro, nb::device::cpu>;
using FloatVector = nb::ndarray<const float, nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<nb::numpy, float>;

// Keys and values (n_kv, kv_heads, head_dim) as float32, float16 or uint16 (bfloat16), or (n_kv, kv_heads, bytes) as
// uint8 (q8_0). The last axis must be dense. ValueError or TypeError otherwise. The view does not own.
KvView ViewOfKv(const Array& k, const Array& v, int kv_heads, int head_dim);

// What exact and sparse attention have in common: the arguments of one call, checked, and its output.
class Call {
 public:
  // q: float32 (q_heads, head_dim) or (n_q, q_heads, head_dim). visible: bool (n_kv) or (n_q, n_kv). scale: nothing for
  // 1 / sqrt(head_dim). Takes copies of `visible`; the other arrays must outlive it.
  Call(const Array& q, const Array& k, const Array& v, int kv_heads, std::optional<float> scale, float softcap,
       const std::optional<FloatVector>& sinks, const std::optional<BoolArray>& visible);

  Shape shape;
  QueryView q;
  KvView kv;
  VisibleSets visible;
  LogitParams params;
  OutView out;

  // The output as an array of q's shape, which owns its memory. Once.
  FloatArray TakeOutput();

 private:
  std::vector<std::uint64_t> words_;
  std::unique_ptr<float[]> data_;
  std::vector<std::size_t> out_shape_;
};

// Number of KV heads of an array of keys; ValueError unless it has three axes.
int KvHeads(const Array& k);

// An array that owns `data`.
FloatArray OwningArray(std::unique_ptr<float[]> data, const std::vector<std::size_t>& shape);

// Raises the exception that goes with a status that is not ok.
void Raise(const Status& status);

}  // namespace scsa::python
