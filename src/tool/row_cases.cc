// SPDX-License-Identifier: Apache-2.0
#include "row_cases.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <utility>

#include "core/int8_rows.h"
#include "core/kernels.h"
#include "kernel_units.h"
#include "scsa/config.h"
#include "scsa/exact.h"

namespace scsa::tool {
namespace {

constexpr std::int64_t kTileRows = 64;
// Different rows of a data set; the set repeats them, for encoding every row would dominate the set-up. A prime, so
// that neither units nor pages are alike.
constexpr std::int64_t kDistinctRows = 251;
constexpr int kGatherBlocks = 8;  // fast: blocks whose rows one unit of gathering reads an eighth of

std::unique_ptr<std::byte[]> RandomRows(DType type, int head_dim, std::int64_t n_rows) {
  const std::size_t row_bytes = RowBytes(type, head_dim);
  const std::size_t block = static_cast<std::size_t>(kDistinctRows) * row_bytes;
  const std::vector<float> values = RandomVector(static_cast<std::size_t>(kDistinctRows) * head_dim);
  std::vector<std::byte> distinct(block);
  for (std::int64_t r = 0; r < kDistinctRows; ++r) {
    EncodeRow(values.data() + r * head_dim, type, head_dim, distinct.data() + static_cast<std::size_t>(r) * row_bytes);
  }
  const std::size_t bytes = static_cast<std::size_t>(n_rows) * row_bytes;
  auto rows = std::make_unique_for_overwrite<std::byte[]>(bytes);
  for (std::size_t at = 0; at < bytes; at += block) {
    std::memcpy(rows.get() + at, distinct.data(), std::min(block, bytes - at));
  }
  return rows;
}

// Units of rows: half the second-level cache each, whole tiles, `row_bytes` being what the kernel reads of a row.
std::int64_t UnitRows(const KernelSetup& setup, const RowData& data, std::size_t row_bytes) {
  const auto fitting = static_cast<std::int64_t>(setup.caches.l2 / 2 / row_bytes) / kTileRows * kTileRows;
  return std::clamp(fitting, kTileRows, std::max(kTileRows, data.pass_rows / setup.threads / kTileRows * kTileRows));
}

Units RowUnits(const RowData& data, std::int64_t unit_rows, double row_bytes, double multiply_adds) {
  const auto rows = static_cast<double>(unit_rows);
  return {.count = data.n_rows / unit_rows,
          .per_pass = std::max<std::int64_t>(1, data.pass_rows / unit_rows),
          .rows = rows,
          .bytes = rows * row_bytes,
          .multiply_adds = rows * multiply_adds};
}

// Per-thread memory of exact attention.
struct ExactThread {
  Workspace workspace;
  std::vector<float> out;
  Status status;
};

KvView ViewOf(const RowData& data, std::int64_t first_row, std::int64_t n_kv, int kv_heads) {
  KvView kv;
  kv.k = data.k.get() + static_cast<std::size_t>(first_row) * data.row_bytes;
  kv.v = data.v.get() + static_cast<std::size_t>(first_row) * data.row_bytes;
  kv.k_type = kv.v_type = data.type;
  kv.k_head_stride = kv.v_head_stride = static_cast<std::int64_t>(data.row_bytes);
  kv.k_row_stride = kv.v_row_stride = kv.k_head_stride * kv_heads;
  kv.n_kv = n_kv;
  return kv;
}

RunArgs RunOf(const RowData& data, const Queries& queries, std::int64_t first_row, std::int64_t n_rows, int row_step) {
  RunArgs args;
  args.head_dim = data.head_dim;
  args.n = static_cast<int>(queries.quantized.size());
  args.q = queries.vectors.data();
  args.k = data.k.get() + static_cast<std::size_t>(first_row) * data.row_bytes;
  args.v = data.v.get() + static_cast<std::size_t>(first_row) * data.row_bytes;
  args.k_stride = args.v_stride = static_cast<std::int64_t>(data.row_bytes) * row_step;
  args.k_type = args.v_type = data.type;
  args.n_rows = n_rows;
  return args;
}

}  // namespace

RowData::RowData(DType row_type, const KernelSetup& setup)
    : type(row_type),
      head_dim(setup.head_dim),
      row_bytes(RowBytes(row_type, setup.head_dim)),
      pass_rows(setup.rows * kBenchKvHeads) {
  const auto bytes = std::max(setup.ColdBytes(), setup.threads * setup.caches.l2);
  const std::int64_t passes =
      std::max<std::int64_t>(2, (static_cast<std::int64_t>(bytes / row_bytes) + pass_rows - 1) / pass_rows);
  n_rows = passes * pass_rows;
  k = RandomRows(type, head_dim, n_rows);
  v = RandomRows(type, head_dim, n_rows);
}

void AppendAttend(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases) {
  const int head_dim = setup.head_dim;
  const LogitParams params{.scale = 1.0f / std::sqrt(static_cast<float>(head_dim))};
  const auto q = std::make_shared<const std::vector<float>>(
      RandomVector(static_cast<std::size_t>(heads) * kBenchKvHeads * head_dim));
  const auto threads = std::make_shared<std::vector<ExactThread>>(setup.threads);
  for (ExactThread& thread : *threads) thread.out.resize(q->size());
  const auto attend = [=](int kv_heads, std::int64_t first, std::int64_t n_kv, int n_threads, ExactThread& thread) {
    thread.status = ExactAttention({heads * kv_heads, kv_heads, head_dim}, {q->data(), 0, head_dim, 1},
                                   ViewOf(*data, first, n_kv, kv_heads), {}, params, n_threads, thread.workspace,
                                   {thread.out.data(), 0, head_dim});
  };
  const CaseLabel label{.primitive = "attend", .format = DTypeName(data->type), .heads = heads};
  const double row_bytes = 2.0 * static_cast<double>(data->row_bytes);
  const double multiply_adds = 2.0 * heads * head_dim;

  const std::int64_t unit_rows = UnitRows(setup, *data, 2 * data->row_bytes);
  const Units hot = RowUnits(*data, unit_rows, row_bytes, multiply_adds);
  KernelCase hot_case = HotCase(label, hot, setup.threads, [=](std::int64_t unit, std::int64_t, int thread) {
    attend(1, unit * unit_rows, unit_rows, 1, (*threads)[thread]);
  });
  hot_case.run = [run = std::move(hot_case.run), threads](std::int64_t repeats) {
    run(repeats);
    for (const ExactThread& thread : *threads) Require(thread.status);
  };
  cases.push_back(std::move(hot_case));

  const Units cold = RowUnits(*data, data->pass_rows, row_bytes, multiply_adds);
  cases.push_back(MakeCase(
      label, CacheState::kCold, cold, 1,
      [=, rows = setup.rows, n_threads = setup.threads, layer = std::int64_t{0}](std::int64_t repeats) mutable {
        for (std::int64_t i = 0; i < repeats; ++i) {
          attend(kBenchKvHeads, layer * data->pass_rows, rows, n_threads, threads->front());
          Require(threads->front().status);
          layer = (layer + 1) % cold.count;
        }
      }));
}

void AppendPacked(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases) {
  const auto queries = std::make_shared<const Queries>(heads, setup.head_dim);
  const std::int64_t unit_rows = UnitRows(setup, *data, 2 * data->row_bytes);
  const States states(setup.threads, heads, setup.head_dim);
  const UnitKernel kernel = [=](std::int64_t unit, std::int64_t, int thread) {
    RunArgs args = RunOf(*data, *queries, unit * unit_rows, unit_rows, 1);
    args.quantized = queries->quantized.data();
    AttendRun(args, states.Cleared(thread));
  };
  AppendHotAndCold({.primitive = "packed", .format = "q8_0 int8", .heads = heads},
                   RowUnits(*data, unit_rows, 2.0 * static_cast<double>(data->row_bytes), 2.0 * heads * setup.head_dim),
                   setup.threads, kernel, cases);
}

// Where scattered rows are.
struct RowPlaces {
  std::vector<const std::byte*> k;
  std::vector<const std::byte*> v;
};

void AppendGather(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases) {
  const Config config = ConfigFor(Preset::kFast);
  const auto queries = std::make_shared<const Queries>(heads, setup.head_dim);
  const States states(setup.threads, heads, setup.head_dim);
  // Rows of one KV head, clusters of random members one after the other, ascending inside a cluster.
  const std::int64_t span = std::int64_t{kGatherBlocks} * config.block_size;
  std::vector<std::int32_t> rows;
  std::mt19937 random(1);
  for (int b = 0; b < kGatherBlocks; ++b) {
    std::vector<std::int32_t> block(config.block_size);
    std::iota(block.begin(), block.end(), b * config.block_size);
    std::ranges::shuffle(block, random);
    block.resize(config.block_size / kGatherBlocks);
    for (auto at = block.begin(); at != block.end(); at += config.cluster_size) {
      std::sort(at, at + config.cluster_size);
    }
    rows.insert(rows.end(), block.begin(), block.end());
  }
  const std::int64_t count = data->n_rows / span / kBenchKvHeads * kBenchKvHeads;
  const auto unit_rows = static_cast<double>(rows.size());
  const auto places = std::make_shared<std::vector<RowPlaces>>(static_cast<std::size_t>(count));
  for (std::int64_t unit = 0; unit < count; ++unit) {
    RowPlaces& own = (*places)[static_cast<std::size_t>(unit)];
    const std::int64_t first = unit / kBenchKvHeads * span * kBenchKvHeads + unit % kBenchKvHeads;
    for (const std::int64_t row : rows) {
      const std::size_t at = static_cast<std::size_t>(first + row * kBenchKvHeads) * data->row_bytes;
      own.k.push_back(data->k.get() + at);
      own.v.push_back(data->v.get() + at);
    }
  }
  const UnitKernel kernel = [=](std::int64_t unit, std::int64_t next, int thread) {
    const auto run_of = [&](std::int64_t place) {
      const RowPlaces& own = (*places)[static_cast<std::size_t>(place % count)];  // hot units are as many as threads
      RunArgs args = RunOf(*data, *queries, 0, std::ssize(own.k), kBenchKvHeads);
      args.k_places = own.k.data();
      args.v_places = own.v.data();
      return args;
    };
    RunArgs args = run_of(unit);
    if (next != kNoUnit) {
      const RunArgs after = run_of(next);
      args.next_k = ScatteredRows(after, after.k_places, after.k_type, 0);
      args.next_v = ScatteredRows(after, after.v_places, after.v_type, 0);
    }
    AttendRun(args, states.Cleared(thread));
  };
  AppendHotAndCold({.primitive = "gather", .format = DTypeName(data->type), .heads = heads},
                   {.count = count,
                    .per_pass = std::max<std::int64_t>(setup.threads, data->pass_rows / span),
                    .rows = unit_rows,
                    .bytes = unit_rows * 2.0 * static_cast<double>(data->row_bytes),
                    .multiply_adds = unit_rows * 2.0 * heads * setup.head_dim},
                   setup.threads, kernel, cases);
}

std::vector<KernelCase> Int8RowCases(const KernelSetup& setup) {
  const Config config = ConfigFor(Preset::kFast);
  const int head_dim = setup.head_dim;
  const auto layout = std::make_shared<const Int8RowLayout>(head_dim, config.block_size);
  const std::size_t record_bytes = (layout->bytes() + 63) / 64 * 64;
  const std::int64_t pass_blocks = std::max<std::int64_t>(1, setup.rows * kBenchKvHeads / config.block_size);
  const std::int64_t pass_units = std::max<std::int64_t>(1, pass_blocks / kGatherBlocks);
  const std::int64_t passes = static_cast<std::int64_t>(setup.ColdBytes() / record_bytes) / pass_blocks + 2;
  const std::int64_t count = std::max<std::int64_t>(setup.threads, passes * pass_units);
  // All blocks hold the same rows, at different places.
  const std::shared_ptr<std::byte> records(
      static_cast<std::byte*>(std::aligned_alloc(64, record_bytes * static_cast<std::size_t>(count * kGatherBlocks))),
      &std::free);
  if (records == nullptr) throw std::bad_alloc();
  std::vector<std::uint16_t> order(config.block_size);
  std::iota(order.begin(), order.end(), std::uint16_t{0});
  const std::vector<float> keys = RandomVector(order.size() * static_cast<std::size_t>(head_dim));
  const std::vector<float> values = RandomVector(keys.size());
  StoreInt8Rows(*layout, keys.data(), values.data(), order, records.get());
  for (std::int64_t b = 1; b < count * kGatherBlocks; ++b) {
    std::memcpy(records.get() + static_cast<std::size_t>(b) * record_bytes, records.get(), record_bytes);
  }
  // An eighth of the clusters of each block, whose rows are neighbours.
  const int cluster_pairs = config.cluster_size / 2;
  const int clusters = config.block_size / config.cluster_size;
  struct Pairs {
    std::vector<const std::byte*> records, pairs;
  };
  const auto units = std::make_shared<std::vector<Pairs>>(static_cast<std::size_t>(count));
  std::mt19937 random(1);
  for (std::int64_t unit = 0; unit < count; ++unit) {
    Pairs& own = (*units)[static_cast<std::size_t>(unit)];
    for (int b = 0; b < kGatherBlocks; ++b) {
      const std::byte* record = records.get() + static_cast<std::size_t>(unit * kGatherBlocks + b) * record_bytes;
      std::vector<int> chosen(clusters);
      std::iota(chosen.begin(), chosen.end(), 0);
      std::ranges::shuffle(chosen, random);
      chosen.resize(clusters / kGatherBlocks);
      std::ranges::sort(chosen);
      for (const int cluster : chosen) {
        for (int p = 0; p < cluster_pairs; ++p) {
          own.records.push_back(record);
          own.pairs.push_back(record + layout->PairAt(cluster * cluster_pairs + p));
        }
      }
    }
  }
  const std::size_t n_pairs = units->front().pairs.size();
  const auto seen = std::make_shared<const std::vector<std::uint8_t>>(n_pairs, std::uint8_t{3});
  const auto rows = 2.0 * static_cast<double>(n_pairs);
  std::vector<KernelCase> cases;
  for (const int heads : setup.heads) {
    const auto queries = std::make_shared<const Queries>(heads, head_dim);
    const States states(setup.threads, heads, head_dim);
    const UnitKernel kernel = [=, keep = records](std::int64_t unit, std::int64_t, int thread) {
      const Pairs& own = (*units)[static_cast<std::size_t>(unit)];
      AttendInt8Rows({.layout = layout.get(),
                      .n = heads,
                      .q = queries->vectors.data(),
                      .n_pairs = static_cast<std::int64_t>(n_pairs),
                      .records = own.records.data(),
                      .pairs = own.pairs.data(),
                      .seen = seen->data()},
                     states.Cleared(thread));
    };
    AppendHotAndCold({.primitive = "gather-int8", .format = "int8", .heads = heads},
                     {.count = count,
                      .per_pass = pass_units,
                      .rows = rows,
                      .bytes = rows * 2.0 * static_cast<double>(layout->dims()),
                      .multiply_adds = rows * 2.0 * heads * head_dim},
                     setup.threads, kernel, cases);
  }
  return cases;
}

void AppendScore(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases) {
  const int head_dim = setup.head_dim;
  const auto queries = std::make_shared<const Queries>(heads, head_dim);
  const std::int64_t unit_rows = UnitRows(setup, *data, data->row_bytes);
  const auto stride = static_cast<std::int64_t>(data->row_bytes);
  const auto logits = PerThread(setup.threads, static_cast<std::size_t>(heads * unit_rows));
  const UnitKernel kernel = [=](std::int64_t unit, std::int64_t, int thread) {
    ScoreRows(head_dim, heads, queries->vectors.data(), data->k.get() + unit * unit_rows * stride, stride, data->type,
              unit_rows, (*logits)[thread].data(), unit_rows);
  };
  AppendHotAndCold(
      {.primitive = "score", .format = DTypeName(data->type), .heads = heads},
      RowUnits(*data, unit_rows, static_cast<double>(data->row_bytes), static_cast<double>(heads) * head_dim),
      setup.threads, kernel, cases);
}

void AppendAccumulate(const KernelSetup& setup, const RowDataRef& data, int heads, std::vector<KernelCase>& cases) {
  const int head_dim = setup.head_dim;
  const std::int64_t unit_rows = UnitRows(setup, *data, data->row_bytes);
  const auto weights =
      std::make_shared<const std::vector<float>>(RandomVector(static_cast<std::size_t>(heads * unit_rows)));
  const auto sums = PerThread(setup.threads, static_cast<std::size_t>(heads) * head_dim);
  const UnitKernel kernel = [=](std::int64_t unit, std::int64_t, int thread) {
    std::ranges::fill((*sums)[thread], 0.0f);
    AccumulateRows(head_dim, heads, weights->data(), unit_rows,
                   data->v.get() + static_cast<std::size_t>(unit * unit_rows) * data->row_bytes,
                   static_cast<std::int64_t>(data->row_bytes), data->type, unit_rows, (*sums)[thread].data());
  };
  AppendHotAndCold(
      {.primitive = "accumulate", .format = DTypeName(data->type), .heads = heads},
      RowUnits(*data, unit_rows, static_cast<double>(data->row_bytes), static_cast<double>(heads) * head_dim),
      setup.threads, kernel, cases);
}

}  // namespace scsa::tool
