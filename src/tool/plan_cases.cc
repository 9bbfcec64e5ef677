// SPDX-License-Identifier: Apache-2.0
#include "plan_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <utility>

#include "core/block_plan.h"
#include "core/block_summaries.h"
#include "core/cluster.h"
#include "core/joint_kernels.h"
#include "core/kernels.h"
#include "core/plan.h"
#include "core/select.h"
#include "kernel_units.h"
#include "scsa/config.h"
#include "synthetic_cache.h"

namespace scsa::tool {
namespace {

constexpr int kRangeBlocks = 8;  // fast: blocks that the operator scores, or folds the tail of, in one part
constexpr int kDistinctBlocks = 13;

// Records of a KV head of preset `fast`, keys or values, in ranges of kRangeBlocks blocks.
struct FastRecords {
  FastRecords(const KernelSetup& setup, bool keys)
      : config(ConfigFor(Preset::kFast)),
        layout(setup.head_dim, config.block_size / config.cluster_size),
        clusters(kRangeBlocks * layout.slots()),
        range_bytes(kRangeBlocks * (keys ? layout.key_bytes() : layout.value_bytes())) {
    count = std::max<std::int64_t>(setup.threads, static_cast<std::int64_t>(setup.ColdBytes() / range_bytes));
    const std::size_t record_bytes = range_bytes / kRangeBlocks;
    std::vector<std::byte> distinct(kDistinctBlocks * record_bytes);
    const std::size_t block_values = static_cast<std::size_t>(layout.slots()) * setup.head_dim;
    const std::vector<float> vectors = RandomVector(kDistinctBlocks * block_values);
    const std::vector<float> counts(layout.slots(), static_cast<float>(config.cluster_size));
    for (std::size_t b = 0; b < kDistinctBlocks; ++b) {
      std::byte* record = distinct.data() + b * record_bytes;
      if (!keys) {
        StoreValueMeans(layout, vectors.data() + b * block_values, counts, layout.Values(record));
        continue;
      }
      const KeyRecord key = layout.Keys(record);
      StoreCentroids(layout, vectors.data() + b * block_values, counts, key);
      std::fill_n(key.shape, setup.head_dim, 1.0f / static_cast<float>(setup.head_dim));
      std::fill_n(key.log_counts, layout.slots(), std::log(counts[0]));
      std::fill_n(key.counts, layout.slots(), counts[0]);
      std::fill_n(key.half_traces, layout.slots(), 0.1f * static_cast<float>(setup.head_dim));
    }
    const std::size_t bytes = static_cast<std::size_t>(count) * range_bytes;
    memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
    for (std::size_t at = 0; at < bytes; at += distinct.size()) {
      std::memcpy(memory.get() + at, distinct.data(), std::min(distinct.size(), bytes - at));
    }
    for (std::size_t at = 0; at < bytes; at += record_bytes) pieces.push_back(memory.get() + at);
  }

  const std::byte* Range(std::int64_t unit) const {
    return memory.get() + static_cast<std::size_t>(unit) * range_bytes;
  }
  // Of keys or of values: what the operator does not read in the pass at hand is not there.
  BlockRange RangeOf(std::int64_t unit) const {
    return {.layout = &layout, .blocks = pieces.data() + unit * kRangeBlocks, .n_blocks = kRangeBlocks};
  }
  FetchHint Ahead(std::int64_t next) const {
    if (next == kNoUnit) return {};
    return {Range(next), static_cast<std::int64_t>(range_bytes)};
  }
  // Every cluster costs a dot product or a weighted value of each head, every block two more for its frame.
  Units UnitsOf(const KernelSetup& setup, int heads) const {
    return {.count = count,
            .per_pass = std::clamp<std::int64_t>(setup.rows / config.block_size / kRangeBlocks * kBenchKvHeads,
                                                 setup.threads, count),
            .rows = static_cast<double>(clusters),
            .bytes = static_cast<double>(range_bytes),
            .multiply_adds = (clusters + 2.0 * kRangeBlocks) * heads * setup.head_dim};
  }

  Config config;
  SummaryLayout layout;
  int clusters;  // of a range
  std::size_t range_bytes;
  std::int64_t count = 0;  // ranges
  std::unique_ptr<std::byte[]> memory;
  std::vector<const std::byte*> pieces;  // the records in it
};

}  // namespace

std::vector<KernelCase> SeedEstimateCases(const KernelSetup& setup) {
  const Config config = ConfigFor(Preset::kSeed);
  const int head_dim = setup.head_dim;
  const int rank = config.rank;
  const int clusters = config.block_size / config.cluster_size;
  const std::size_t summary = static_cast<std::size_t>(clusters) * head_dim;
  Block block;
  block.n_clusters = clusters;
  block.centroids = RandomVector(summary);
  block.directions = RandomVector(summary * rank, 0.1f);
  block.residuals = RandomVector(summary, 0.1f);
  for (float& x : block.residuals) x = std::fabs(x);
  block.log_counts.assign(clusters, std::log(static_cast<float>(config.cluster_size)));
  const double cluster_bytes = 4.0 * ((rank + 2.0) * head_dim + 1.0);
  const std::int64_t count = std::max<std::int64_t>(
      setup.threads, static_cast<std::int64_t>(static_cast<double>(setup.ColdBytes()) / (cluster_bytes * clusters)));
  const auto blocks = std::make_shared<std::vector<Block>>();
  for (std::int64_t b = 0; b < count; ++b) {
    Block& copy = blocks->emplace_back();
    copy.n_clusters = clusters;
    copy.centroids = block.centroids;
    copy.directions = block.directions;
    copy.residuals = block.residuals;
    copy.log_counts = block.log_counts;
  }

  std::vector<KernelCase> cases;
  for (const int heads : setup.heads) {
    const auto queries = std::make_shared<const Queries>(heads, head_dim);
    const auto squares = std::make_shared<std::vector<float>>(queries->vectors);
    for (float& x : *squares) x *= x;
    const std::size_t estimates = static_cast<std::size_t>(heads) * clusters;
    const auto memory = PerThread(setup.threads, 2 * estimates + EstimateScratch(heads, clusters, rank));
    const UnitKernel kernel = [=](std::int64_t unit, std::int64_t, int thread) {
      float* out = (*memory)[thread].data();
      EstimateBlock((*blocks)[unit], head_dim, rank, heads, queries->vectors.data(), squares->data(),
                    {out, out + estimates, clusters}, out + 2 * estimates);
    };
    AppendHotAndCold(
        {.primitive = "estimate-seed", .format = "f32", .heads = heads},
        {.count = count,
         .per_pass = std::clamp<std::int64_t>(setup.rows / config.block_size * kBenchKvHeads, setup.threads, count),
         .rows = static_cast<double>(clusters),
         .bytes = cluster_bytes * clusters,
         .multiply_adds = (rank + 2.0) * heads * head_dim * clusters},
        setup.threads, kernel, cases);
  }
  return cases;
}

std::vector<KernelCase> FastEstimateCases(const KernelSetup& setup) {
  const auto records = std::make_shared<const FastRecords>(setup, true);
  std::vector<KernelCase> cases;
  for (const int heads : setup.heads) {
    const auto queries = std::make_shared<const Queries>(heads, setup.head_dim);
    const std::size_t estimates = static_cast<std::size_t>(heads) * records->clusters;
    const auto memory = PerThread(setup.threads, 2 * estimates);
    const auto sums =
        std::make_shared<std::vector<std::vector<EstimateSums>>>(setup.threads, std::vector<EstimateSums>(heads));
    const UnitKernel kernel = [=](std::int64_t unit, std::int64_t next, int thread) {
      EstimateArgs args;
      args.n = heads;
      args.q = queries->vectors.data();
      args.tail_shrink = records->config.tail_shrink;
      args.stride = records->clusters;
      args.next[0] = records->Ahead(next);
      float* out = (*memory)[thread].data();
      EstimateClusters(records->RangeOf(unit), args, out, out + estimates, (*sums)[thread].data());
    };
    AppendHotAndCold({.primitive = "estimate-fast", .format = "8-bit", .heads = heads}, records->UnitsOf(setup, heads),
                     setup.threads, kernel, cases);
  }
  return cases;
}

std::vector<KernelCase> FastTailCases(const KernelSetup& setup) {
  const auto records = std::make_shared<const FastRecords>(setup, false);
  std::vector<KernelCase> cases;
  for (const int heads : setup.heads) {
    const auto weights =
        std::make_shared<std::vector<float>>(RandomVector(static_cast<std::size_t>(heads) * records->clusters));
    for (float& weight : *weights) weight = std::fabs(weight);
    const States states(setup.threads, heads, setup.head_dim);
    const UnitKernel kernel = [=](std::int64_t unit, std::int64_t next, int thread) {
      TailArgs args;
      args.n = heads;
      args.weights = weights->data();
      args.weights_stride = records->clusters;
      args.next[0] = records->Ahead(next);
      const SoftmaxState state = states.Cleared(thread);
      FoldValueMeans(records->RangeOf(unit), args, state.sum, state.num);
    };
    AppendHotAndCold({.primitive = "tail-fast", .format = "8-bit", .heads = heads}, records->UnitsOf(setup, heads),
                     setup.threads, kernel, cases);
  }
  return cases;
}

std::vector<KernelCase> SeedClusterCases(const KernelSetup& setup) {
  const Config config = ConfigFor(Preset::kSeed);
  const int head_dim = setup.head_dim;
  const std::int64_t unit_rows = config.block_size;
  const std::int64_t count = std::int64_t{2} * setup.threads;
  const SyntheticCache cache({1, 1, head_dim}, count * unit_rows, 1, setup.threads);
  const KvView kv = cache.View(count * unit_rows);
  const auto keys = std::make_shared<std::vector<float>>(static_cast<std::size_t>(count * unit_rows) * head_dim);
  for (std::int64_t r = 0; r < count * unit_rows; ++r) {
    DecodeRow(kv.KRow(r, 0), kv.k_type, head_dim, keys->data() + r * head_dim);
  }
  struct Thread {
    MomentScratch scratch;
    std::vector<float> centroid, directions, residual;
  };
  const auto threads = std::make_shared<std::vector<Thread>>(setup.threads);
  for (Thread& thread : *threads) {
    thread.centroid.resize(head_dim);
    thread.directions.resize(static_cast<std::size_t>(head_dim) * config.rank);
    thread.residual.resize(head_dim);
  }
  const UnitKernel kernel = [=](std::int64_t unit, std::int64_t, int thread) {
    Thread& memory = (*threads)[thread];
    const float* first = keys->data() + unit * unit_rows * head_dim;
    const Partition partition = SplitFarthestDirection(first, unit_rows, head_dim, config.cluster_size);
    for (std::size_t c = 0; c + 1 < partition.offsets.size(); ++c) {
      const std::span members(partition.members.data() + partition.offsets[c],
                              static_cast<std::size_t>(partition.offsets[c + 1] - partition.offsets[c]));
      ClusterMoments(first, members, head_dim, config.rank, config.power_iterations, memory.scratch,
                     memory.centroid.data(), memory.directions.data(), memory.residual.data());
    }
  };
  return {PassingCase({.primitive = "cluster-seed", .format = "f32"}, CacheState::kAny,
                      {.count = count,
                       .per_pass = setup.threads,
                       .rows = static_cast<double>(unit_rows),
                       .bytes = 4.0 * static_cast<double>(unit_rows) * head_dim,
                       .multiply_adds = {}},
                      setup.threads, kernel)};
}

std::vector<KernelCase> FastClusterCases(const KernelSetup& setup) {
  Config config = ConfigFor(Preset::kFast);
  config.sink = 0;  // every unit is the first block of a plan of its own, and has all its rows
  const int head_dim = setup.head_dim;
  const std::int64_t unit_rows = config.block_size;
  const std::int64_t count = std::int64_t{32} * setup.threads;
  const auto cache = std::make_shared<const SyntheticCache>(Shape{1, 1, head_dim}, count * unit_rows, 1, setup.threads);
  struct Thread {
    Thread(const Shape& shape, const Config& parameters) : plan(shape, parameters) {}
    BlockPlan plan;
    Status status;
  };
  const auto threads = std::make_shared<std::deque<Thread>>();
  for (int thread = 0; thread < setup.threads; ++thread) threads->emplace_back(Shape{1, 1, head_dim}, config);
  KernelCase result =
      PassingCase({.primitive = "cluster-fast", .format = "f16"}, CacheState::kAny,
                  {.count = count,
                   .per_pass = std::int64_t{8} * setup.threads,
                   .rows = static_cast<double>(unit_rows),
                   .bytes = 2.0 * static_cast<double>(unit_rows) * static_cast<double>(RowBytes(DType::kF16, head_dim)),
                   .multiply_adds = {}},
                  setup.threads, [=](std::int64_t unit, std::int64_t, int thread) {
                    KvView kv = cache->View(count * unit_rows);
                    kv.k = kv.KRow(unit * unit_rows, 0);
                    kv.v = kv.VRow(unit * unit_rows, 0);
                    kv.n_kv = unit_rows;
                    constexpr int kFirst[] = {0};
                    (*threads)[thread].status = (*threads)[thread].plan.Build(kv, kFirst, 1).status;
                  });
  result.run = [run = std::move(result.run), threads](std::int64_t repeats) {
    run(repeats);
    for (const Thread& thread : *threads) Require(thread.status);
  };
  return {std::move(result)};
}

}  // namespace scsa::tool
