// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

#include <cmath>
#include <new>
#include <stdexcept>
#include <string>

namespace scsa::python {
namespace {

[[noreturn]] void BadValue(const std::string& message) { throw nb::value_error(message.c_str()); }
[[noreturn]] void BadType(const std::string& message) { throw nb::type_error(message.c_str()); }

bool IsType(const Array& array, nb::dlpack::dtype_code code, int bits) {
  return array.dtype().code == static_cast<std::uint8_t>(code) && array.dtype().bits == bits &&
         array.dtype().lanes == 1;
}

DType RowType(const Array& array, const char* name) {
  using Code = nb::dlpack::dtype_code;
  if (IsType(array, Code::Float, 32)) return DType::kF32;
  if (IsType(array, Code::Float, 16)) return DType::kF16;
  if (IsType(array, Code::UInt, 16) || IsType(array, Code::Bfloat, 16)) return DType::kBF16;
  if (IsType(array, Code::UInt, 8)) return DType::kQ8_0;
  BadType(std::string(name) + " must be float32, float16, uint16 (bfloat16) or uint8 (q8_0)");
}

std::string ShapeOf(const Array& array) {
  std::string text = "(";
  for (std::size_t i = 0; i < array.ndim(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(array.shape(i));
  return text + ")";
}

void RequireDenseRows(const Array& array, const char* name) {
  const std::size_t last = array.ndim() - 1;
  if (array.shape(last) > 1 && array.stride(last) != 1) {
    BadValue(std::string(name) + ": the last axis must be dense; use numpy.ascontiguousarray");
  }
}

struct Rows {
  const void* data;
  DType type;
  std::int64_t row_stride, head_stride;  // bytes
};

Rows RowsOf(const Array& array, const char* name, int kv_heads, int head_dim) {
  const DType type = RowType(array, name);
  const auto item = static_cast<std::int64_t>(array.itemsize());
  const std::size_t wanted = RowBytes(type, head_dim) / static_cast<std::size_t>(item);
  if (array.ndim() != 3 || array.shape(1) != static_cast<std::size_t>(kv_heads) || array.shape(2) != wanted) {
    BadValue(std::string(name) + " has shape " + ShapeOf(array) + ", expected (n_kv, " + std::to_string(kv_heads) +
             ", " + std::to_string(wanted) + ")");
  }
  RequireDenseRows(array, name);
  return {array.data(), type, array.stride(0) * item, array.stride(1) * item};
}

}  // namespace

void Raise(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
    case StatusCode::kParseError:
      BadValue(status.message());
    case StatusCode::kOutOfMemory:
      throw std::bad_alloc();
    default:
      throw std::runtime_error(status.message());
  }
}

int KvHeads(const Array& k) {
  if (k.ndim() != 3) BadValue("k has shape " + ShapeOf(k) + ", expected (n_kv, kv_heads, head_dim)");
  return static_cast<int>(k.shape(1));
}

KvView ViewOfKv(const Array& k, const Array& v, int kv_heads, int head_dim) {
  const Rows keys = RowsOf(k, "k", kv_heads, head_dim);
  const Rows values = RowsOf(v, "v", kv_heads, head_dim);
  if (k.shape(0) != v.shape(0)) {
    BadValue("k has " + std::to_string(k.shape(0)) + " rows, v has " + std::to_string(v.shape(0)));
  }
  KvView kv;
  kv.k = keys.data;
  kv.v = values.data;
  kv.k_type = keys.type;
  kv.v_type = values.type;
  kv.k_row_stride = keys.row_stride;
  kv.k_head_stride = keys.head_stride;
  kv.v_row_stride = values.row_stride;
  kv.v_head_stride = values.head_stride;
  kv.n_kv = static_cast<std::int64_t>(k.shape(0));
  return kv;
}

Call::Call(const Array& q_array, const Array& k, const Array& v, int kv_heads, std::optional<float> scale,
           float softcap, const std::optional<FloatVector>& sinks, const std::optional<BoolArray>& visible_array) {
  if (!IsType(q_array, nb::dlpack::dtype_code::Float, 32)) BadType("q must be float32");
  const std::size_t ndim = q_array.ndim();
  if (ndim != 2 && ndim != 3) {
    BadValue("q has shape " + ShapeOf(q_array) + ", expected (q_heads, head_dim) or (n_q, q_heads, head_dim)");
  }
  RequireDenseRows(q_array, "q");
  const std::size_t n_q = ndim == 3 ? q_array.shape(0) : 1;
  const std::size_t q_heads = q_array.shape(ndim - 2);
  const std::size_t head_dim = q_array.shape(ndim - 1);
  shape = {.q_heads = static_cast<int>(q_heads), .kv_heads = kv_heads, .head_dim = static_cast<int>(head_dim)};
  Raise(ValidateShape(shape));

  q = {.data = static_cast<const float*>(q_array.data()),
       .row_stride = ndim == 3 ? q_array.stride(0) : 0,
       .head_stride = q_array.stride(ndim - 2),
       .n_q = static_cast<int>(n_q)};
  kv = ViewOfKv(k, v, kv_heads, shape.head_dim);
  params = {.scale = scale.value_or(1.0f / std::sqrt(static_cast<float>(head_dim))), .softcap = softcap};
  if (sinks) {
    if (sinks->shape(0) != q_heads) {
      BadValue("sinks has " + std::to_string(sinks->shape(0)) + " values, expected " + std::to_string(q_heads));
    }
    params.sinks = sinks->data();
  }
  if (visible_array) {
    const BoolArray& seen = *visible_array;
    const std::size_t n_kv = k.shape(0);
    const bool fits = (seen.ndim() == 1 && seen.shape(0) == n_kv && n_q == 1) ||
                      (seen.ndim() == 2 && seen.shape(0) == n_q && seen.shape(1) == n_kv);
    if (!fits) BadValue("visible must have shape (n_kv,) for one query row, or (n_q, n_kv)");
    const std::size_t row_words = (n_kv + 63) / 64;
    words_.resize(n_q * row_words + 1);
    for (std::size_t i = 0; i < n_q; ++i) {
      const bool* row = seen.data() + (seen.ndim() == 2 ? static_cast<std::int64_t>(i) * seen.stride(0) : 0);
      const std::int64_t step = seen.stride(seen.ndim() - 1);
      for (std::size_t r = 0; r < n_kv; ++r) {
        if (row[static_cast<std::int64_t>(r) * step]) words_[i * row_words + r / 64] |= std::uint64_t{1} << (r % 64);
      }
    }
    visible = {.words = words_.data(), .row_stride = static_cast<std::int64_t>(row_words)};
  }

  data_ = std::make_unique<float[]>(n_q * q_heads * head_dim);
  out = {.data = data_.get(),
         .row_stride = static_cast<std::int64_t>(q_heads * head_dim),
         .head_stride = static_cast<std::int64_t>(head_dim)};
  if (ndim == 3) out_shape_.push_back(n_q);
  out_shape_.push_back(q_heads);
  out_shape_.push_back(head_dim);
}

FloatArray Call::TakeOutput() { return OwningArray(std::move(data_), out_shape_); }

FloatArray OwningArray(std::unique_ptr<float[]> data, const std::vector<std::size_t>& shape) {
  nb::capsule owner(data.get(), [](void* memory) noexcept { delete[] static_cast<float*>(memory); });
  return FloatArray(data.release(), shape.size(), shape.data(), owner);
}

}  // namespace scsa::python
