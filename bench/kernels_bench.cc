// SPDX-License-Identifier: Apache-2.0
//
// Row kernels, the exact path and the two limits of the machine. SCSA_TARGET chooses the SIMD target.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "core/roofline.h"
#include "scsa/exact.h"
#include "scsa/target.h"

namespace scsa {
namespace {

std::vector<float> RandomVector(std::size_t count) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Rows of random values. A few hundred different ones, repeated: encoding must not dominate the set-up.
std::vector<std::byte> RandomRows(DType type, int head_dim, std::int64_t count) {
  const std::size_t row_bytes = RowBytes(type, head_dim);
  const std::int64_t distinct = std::min<std::int64_t>(count, 251);
  std::vector<std::byte> rows(static_cast<std::size_t>(count) * row_bytes);
  for (std::int64_t r = 0; r < distinct; ++r) {
    const std::vector<float> values = RandomVector(static_cast<std::size_t>(head_dim));
    EncodeRow(values.data(), type, head_dim, rows.data() + static_cast<std::size_t>(r) * row_bytes);
  }
  for (std::int64_t r = distinct; r < count; ++r) {
    std::memcpy(rows.data() + static_cast<std::size_t>(r) * row_bytes,
                rows.data() + static_cast<std::size_t>(r % distinct) * row_bytes, row_bytes);
  }
  return rows;
}

void SetRates(benchmark::State& state, double rows, double bytes) {
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["rows/s"] = benchmark::Counter(rows * iterations, benchmark::Counter::kIsRate);
  state.counters["bytes/s"] =
      benchmark::Counter(bytes * iterations, benchmark::Counter::kIsRate, benchmark::Counter::kIs1024);
  state.SetLabel(ActiveTarget());
}

// One run of rows in the first cache levels. Arguments: type, head_dim, query vectors, integer dot products.
void BM_AttendRun(benchmark::State& state) {
  const auto type = static_cast<DType>(state.range(0));
  const int head_dim = static_cast<int>(state.range(1));
  const int n = static_cast<int>(state.range(2));
  const bool integer_scores = state.range(3) != 0;
  constexpr std::int64_t kRows = 256;
  const auto dims = static_cast<std::size_t>(head_dim);
  const auto vectors = static_cast<std::size_t>(n);
  const std::size_t row_bytes = RowBytes(type, head_dim);
  const std::vector<std::byte> k = RandomRows(type, head_dim, kRows);
  const std::vector<std::byte> v = RandomRows(type, head_dim, kRows);
  std::vector<float> q = RandomVector(vectors * dims);
  for (float& x : q) x /= std::sqrt(static_cast<float>(head_dim));
  const std::size_t padded = (dims + 31) / 32 * 32;
  std::vector<std::int8_t> q8(vectors * padded);
  std::vector<float> scales(vectors * padded / 32);
  std::vector<QuantizedQuery> quantized(vectors);
  for (std::size_t i = 0; i < vectors; ++i) {
    quantized[i] = {q8.data() + i * padded, scales.data() + i * padded / 32};
    QuantizeQuery(q.data() + i * dims, head_dim, 1.0f, q8.data() + i * padded, scales.data() + i * padded / 32);
  }
  std::vector<float> max(vectors);
  std::vector<float> sum(vectors);
  std::vector<float> num(vectors * dims);
  RunArgs args;
  args.head_dim = head_dim;
  args.n = n;
  args.q = q.data();
  args.quantized = integer_scores ? quantized.data() : nullptr;
  args.k = k.data();
  args.v = v.data();
  args.k_stride = args.v_stride = static_cast<std::int64_t>(row_bytes);
  args.k_type = args.v_type = type;
  args.n_rows = kRows;
  for (auto _ : state) {
    std::fill(max.begin(), max.end(), -HUGE_VALF);
    std::fill(sum.begin(), sum.end(), 0.0f);
    std::fill(num.begin(), num.end(), 0.0f);
    AttendRun(args, {max.data(), sum.data(), num.data()});
    benchmark::DoNotOptimize(num.data());
  }
  SetRates(state, kRows, 2.0 * kRows * static_cast<double>(row_bytes));
  state.counters["multiply-adds/s"] =
      benchmark::Counter(2.0 * kRows * static_cast<double>(vectors * dims) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}

// Arguments: type, head_dim, query vectors.
void BM_ScoreRows(benchmark::State& state) {
  const auto type = static_cast<DType>(state.range(0));
  const int head_dim = static_cast<int>(state.range(1));
  const int n = static_cast<int>(state.range(2));
  constexpr std::int64_t kRows = 256;
  const std::size_t row_bytes = RowBytes(type, head_dim);
  const std::vector<std::byte> rows = RandomRows(type, head_dim, kRows);
  const std::vector<float> q = RandomVector(static_cast<std::size_t>(n) * static_cast<std::size_t>(head_dim));
  std::vector<float> logits(static_cast<std::size_t>(n) * kRows);
  for (auto _ : state) {
    ScoreRows(head_dim, n, q.data(), rows.data(), static_cast<std::int64_t>(row_bytes), type, kRows, logits.data(),
              kRows);
    benchmark::DoNotOptimize(logits.data());
  }
  SetRates(state, kRows, kRows * static_cast<double>(row_bytes));
}

// Arguments: type, head_dim.
void BM_EncodeRow(benchmark::State& state) {
  const auto type = static_cast<DType>(state.range(0));
  const int head_dim = static_cast<int>(state.range(1));
  const std::vector<float> values = RandomVector(static_cast<std::size_t>(head_dim));
  std::vector<std::byte> row(RowBytes(type, head_dim));
  for (auto _ : state) {
    EncodeRow(values.data(), type, head_dim, row.data());
    benchmark::DoNotOptimize(row.data());
  }
  SetRates(state, 1.0, static_cast<double>(row.size()));
}

void BM_DecodeRow(benchmark::State& state) {
  const auto type = static_cast<DType>(state.range(0));
  const int head_dim = static_cast<int>(state.range(1));
  const std::vector<std::byte> row = RandomRows(type, head_dim, 1);
  std::vector<float> values(static_cast<std::size_t>(head_dim));
  for (auto _ : state) {
    DecodeRow(row.data(), type, head_dim, values.data());
    benchmark::DoNotOptimize(values.data());
  }
  SetRates(state, 1.0, static_cast<double>(row.size()));
}

void BM_SquaredDistance(benchmark::State& state) {
  const std::vector<float> a = RandomVector(static_cast<std::size_t>(state.range(0)));
  const std::vector<float> b = RandomVector(a.size());
  for (auto _ : state) benchmark::DoNotOptimize(SquaredDistance(a.data(), b.data(), state.range(0)));
  SetRates(state, 1.0, static_cast<double>(a.size()) * 8.0);
}

void BM_MergeStates(benchmark::State& state) {
  const int head_dim = static_cast<int>(state.range(0));
  const int n = 9;
  std::vector<float> max(9, 1.0f);
  std::vector<float> sum(9, 1.0f);
  std::vector<float> num = RandomVector(static_cast<std::size_t>(n * head_dim));
  std::vector<float> to_max(9, 1.5f);
  std::vector<float> to_sum(9, 1.0f);
  std::vector<float> to_num(num.size());
  for (auto _ : state) {
    MergeStates(head_dim, n, {max.data(), sum.data(), num.data()}, {to_max.data(), to_sum.data(), to_num.data()});
    benchmark::DoNotOptimize(to_num.data());
    std::fill(to_sum.begin(), to_sum.end(), 1.0f);
  }
  SetRates(state, n, static_cast<double>(num.size()) * 8.0);
}

// The exact path as a decoder calls it: the next layer's cache each time, so that the rows come from memory. Arguments:
// query heads, KV heads, head_dim, type, rows, threads. One iteration is one layer.
void BM_ExactAttention(benchmark::State& state) {
  const Shape shape{static_cast<int>(state.range(0)), static_cast<int>(state.range(1)),
                    static_cast<int>(state.range(2))};
  const auto type = static_cast<DType>(state.range(3));
  const std::int64_t n_kv = state.range(4);
  const int n_threads = static_cast<int>(state.range(5));
  const std::size_t row_bytes = RowBytes(type, shape.head_dim);
  const double layer_bytes = 2.0 * static_cast<double>(n_kv * shape.kv_heads) * static_cast<double>(row_bytes);
  // Beyond any last-level cache in sum.
  const int layers = static_cast<int>(std::clamp(256.0 * 1048576.0 / layer_bytes, 2.0, 64.0));
  std::vector<std::vector<std::byte>> k;
  std::vector<std::vector<std::byte>> v;
  for (int layer = 0; layer < layers; ++layer) {
    k.push_back(RandomRows(type, shape.head_dim, n_kv * shape.kv_heads));
    v.push_back(RandomRows(type, shape.head_dim, n_kv * shape.kv_heads));
  }
  const std::vector<float> q = RandomVector(static_cast<std::size_t>(shape.q_heads * shape.head_dim));
  std::vector<float> out(q.size());
  LogitParams params;
  params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  Workspace workspace;
  std::size_t layer = 0;
  for (auto _ : state) {
    KvView kv;
    kv.k = k[layer].data();
    kv.v = v[layer].data();
    kv.k_type = kv.v_type = type;
    kv.k_head_stride = kv.v_head_stride = static_cast<std::int64_t>(row_bytes);
    kv.k_row_stride = kv.v_row_stride = kv.k_head_stride * shape.kv_heads;
    kv.n_kv = n_kv;
    layer = (layer + 1) % k.size();
    const Status status = ExactAttention(shape, {q.data(), 0, shape.head_dim, 1}, kv, {}, params, n_threads, workspace,
                                         {out.data(), 0, shape.head_dim});
    if (!status.ok()) {
      state.SkipWithError(status.message().c_str());
      break;
    }
    benchmark::DoNotOptimize(out.data());
  }
  SetRates(state, static_cast<double>(n_kv * shape.kv_heads), layer_bytes);
  state.counters["multiply-adds/s"] = benchmark::Counter(
      2.0 * static_cast<double>(n_kv * shape.q_heads * shape.head_dim) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

void BM_ReadBandwidth(benchmark::State& state) {
  double best = 0.0;
  for (auto _ : state) best = std::max(best, MeasureReadBandwidth(static_cast<int>(state.range(0))));
  state.counters["bytes/s"] = benchmark::Counter(best, benchmark::Counter::kDefaults, benchmark::Counter::kIs1024);
  state.SetLabel(ActiveTarget());
}

void BM_MultiplyAddRate(benchmark::State& state) {
  double best = 0.0;
  for (auto _ : state) best = std::max(best, MeasureMultiplyAddRate(static_cast<int>(state.range(0))));
  state.counters["multiply-adds/s"] = best;
  state.SetLabel(ActiveTarget());
}

constexpr int kTypes[] = {static_cast<int>(DType::kF32), static_cast<int>(DType::kF16), static_cast<int>(DType::kBF16),
                          static_cast<int>(DType::kQ8_0)};

void RegisterAll() {
  for (const int type : kTypes) {
    const std::string name = DTypeName(static_cast<DType>(type));
    for (const int head_dim : {64, 128, 256}) {
      for (const int n : {1, 2, 3, 4, 7}) {
        benchmark::RegisterBenchmark(("AttendRun/" + name).c_str(), BM_AttendRun)->Args({type, head_dim, n, 0});
      }
      benchmark::RegisterBenchmark(("ScoreRows/" + name).c_str(), BM_ScoreRows)->Args({type, head_dim, 3});
      benchmark::RegisterBenchmark(("EncodeRow/" + name).c_str(), BM_EncodeRow)->Args({type, head_dim});
      benchmark::RegisterBenchmark(("DecodeRow/" + name).c_str(), BM_DecodeRow)->Args({type, head_dim});
    }
  }
  for (const int n : {1, 2, 3, 4, 7}) {
    benchmark::RegisterBenchmark("AttendRun/q8_0_integer", BM_AttendRun)
        ->Args({static_cast<int>(DType::kQ8_0), 64, n, 1})
        ->Args({static_cast<int>(DType::kQ8_0), 128, n, 1});
  }
  benchmark::RegisterBenchmark("SquaredDistance", BM_SquaredDistance)->Arg(64)->Arg(128);
  benchmark::RegisterBenchmark("MergeStates", BM_MergeStates)->Arg(64)->Arg(128);
  for (const int n_threads : {1, 2}) {
    for (const int type : {static_cast<int>(DType::kF16), static_cast<int>(DType::kQ8_0)}) {
      for (const std::int64_t n_kv : {1000, 8000, 32768}) {
        for (const Shape& shape : {Shape{9, 3, 64}, Shape{14, 2, 64}, Shape{16, 8, 128}, Shape{4, 1, 256}}) {
          benchmark::RegisterBenchmark((std::string("ExactAttention/") + DTypeName(static_cast<DType>(type))).c_str(),
                                       BM_ExactAttention)
              ->Args({shape.q_heads, shape.kv_heads, shape.head_dim, type, n_kv, n_threads})
              ->UseRealTime();
        }
      }
    }
    benchmark::RegisterBenchmark("ReadBandwidth", BM_ReadBandwidth)->Arg(n_threads)->Iterations(1)->UseRealTime();
    benchmark::RegisterBenchmark("MultiplyAddRate", BM_MultiplyAddRate)->Arg(n_threads)->Iterations(1)->UseRealTime();
  }
}

}  // namespace
}  // namespace scsa

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (const scsa::Status status = scsa::TargetFromEnvironment(); !status.ok()) {
    std::fprintf(stderr, "kernels_bench: %s\n", status.message().c_str());
    return 1;
  }
  scsa::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
