// SPDX-License-Identifier: Apache-2.0
#include "core/block_tree.h"

#include <algorithm>
#include <array>

#include "core/kernels.h"
#include "core/parallel.h"

namespace scsa {
namespace {

using Sums = std::array<double, kMaxHeadDim>;

}  // namespace

NodeMoments BlockTree::moments(int level, std::int64_t index, int kv_head) const {
  const float* at =
      At(level, index).moments.get() + std::size_t{3} * static_cast<std::size_t>(kv_head) * shape_.head_dim;
  return {at, at + shape_.head_dim, at + std::ptrdiff_t{2} * shape_.head_dim};
}

void BlockTree::Update(const BlockPlan& plan, int n_threads) {
  if (changes_ == plan.changes()) return;
  changes_ = kNever;
  std::int64_t n = plan.n_blocks();
  for (std::size_t level = 0; n > 0; ++level) {
    if (level == levels_.size()) levels_.emplace_back();
    levels_[level].resize(static_cast<std::size_t>(n));
    if (n == 1) break;
    n = (n + kFanOut - 1) / kFanOut;
  }
  MarkStale(plan);
  std::vector<std::int64_t> stale;
  for (int level = 0; level < n_levels(); ++level) {
    std::vector<Node>& nodes = levels_[static_cast<std::size_t>(level)];
    stale.clear();
    for (std::int64_t i = 0; i < std::ssize(nodes); ++i) {
      if (!nodes[static_cast<std::size_t>(i)].stale) continue;
      Prepare(plan, level, i);
      stale.push_back(i);
    }
    ParallelFor(n_threads, std::ssize(stale) * shape_.kv_heads, [&](std::int64_t task, int) {
      const std::int64_t index = stale[static_cast<std::size_t>(task / shape_.kv_heads)];
      const auto kv_head = static_cast<int>(task % shape_.kv_heads);
      Node& node = nodes[static_cast<std::size_t>(index)];
      if (node.rows == 0) return;
      if (level == 0) {
        FromBlock(plan, index, kv_head, MomentsOf(node, kv_head));
      } else {
        FromChildren(level, index, kv_head, MomentsOf(node, kv_head));
      }
    });
    for (const std::int64_t i : stale) nodes[static_cast<std::size_t>(i)].stale = false;
  }
  changes_ = plan.changes();
}

// A node stays marked until it is computed, so that a call that runs out of memory loses nothing.
void BlockTree::MarkStale(const BlockPlan& plan) {
  for (std::int64_t b = 0; b < plan.n_blocks(); ++b) {
    Node& node = levels_[0][static_cast<std::size_t>(b)];
    const std::uint64_t version = plan.version(static_cast<int>(b));
    if (node.version == version) continue;
    node.version = version;
    std::int64_t index = b;
    for (std::vector<Node>& nodes : levels_) {
      nodes[static_cast<std::size_t>(index)].stale = true;
      index /= kFanOut;
    }
  }
}

void BlockTree::Prepare(const BlockPlan& plan, int level, std::int64_t index) {
  Node& node = levels_[static_cast<std::size_t>(level)][static_cast<std::size_t>(index)];
  std::int64_t rows = 0;
  if (level == 0) {
    const auto block = static_cast<int>(index);
    if (plan.built(block)) rows = plan.EndRow(block) - plan.FirstRow(block);
  } else {
    const std::int64_t end = std::min((index + 1) * kFanOut, n_nodes(level - 1));
    for (std::int64_t child = index * kFanOut; child < end; ++child) rows += At(level - 1, child).rows;
  }
  if (rows == 0) node.moments.reset();
  if (rows > 0 && node.moments == nullptr) {
    const std::size_t n = std::size_t{3} * static_cast<std::size_t>(shape_.kv_heads) * shape_.head_dim;
    node.moments = std::make_unique<float[]>(n);
  }
  node.rows = rows;
}

void BlockTree::FromBlock(const BlockPlan& plan, std::int64_t block, int kv_head, float* moments) const {
  const SummaryLayout& layout = plan.layout();
  const auto b = static_cast<int>(block);
  const ConstKeyRecord keys = layout.Keys(plan.key_record(kv_head, b));
  const ConstValueRecord values = layout.Values(plan.value_record(kv_head, b));
  const int head_dim = shape_.head_dim;
  // Sums over the stored integers z: a centroid is mean + step z, and so is a value mean.
  Sums first{};
  Sums second{};
  Sums value{};
  double members = 0;
  double trace = 0;
  for (int slot = 0; slot < layout.slots(); ++slot) {
    const double m = keys.counts[slot];
    if (m == 0) continue;
    members += m;
    trace += m * 2 * keys.half_traces[slot];
    for (int d = 0; d < head_dim; ++d) {
      const double z = keys.centroids[layout.CentroidAt(slot, d)];
      first[d] += m * z;
      second[d] += m * z * z;
      value[d] += m * values.means[layout.ValueAt(slot, d)];
    }
  }
  for (int d = 0; d < head_dim; ++d) {
    const double step = keys.step[d];
    const double mean = first[d] / members;
    const double between = std::max(0.0, second[d] / members - mean * mean);
    moments[d] = static_cast<float>(keys.mean[d] + step * mean);
    moments[head_dim + d] = static_cast<float>(trace / members * keys.shape[d] + step * step * between);
    moments[2 * head_dim + d] = static_cast<float>(values.mean[d] + values.step[d] * (value[d] / members));
  }
}

void BlockTree::FromChildren(int level, std::int64_t index, int kv_head, float* moments) const {
  const int head_dim = shape_.head_dim;
  const std::int64_t end = std::min((index + 1) * kFanOut, n_nodes(level - 1));
  const auto for_each_child = [&](auto&& visit) {
    for (std::int64_t child = index * kFanOut; child < end; ++child) {
      const auto n = static_cast<double>(rows(level - 1, child));
      if (n > 0) visit(n / static_cast<double>(rows(level, index)), this->moments(level - 1, child, kv_head));
    }
  };
  Sums mean{};
  Sums variance{};
  Sums value{};
  for_each_child([&](double share, const NodeMoments& child) {
    for (int d = 0; d < head_dim; ++d) {
      mean[d] += share * child.mean[d];
      value[d] += share * child.value_mean[d];
    }
  });
  for_each_child([&](double share, const NodeMoments& child) {
    for (int d = 0; d < head_dim; ++d) {
      const double deviation = child.mean[d] - mean[d];
      variance[d] += share * (child.variance[d] + deviation * deviation);
    }
  });
  for (int d = 0; d < head_dim; ++d) {
    moments[d] = static_cast<float>(mean[d]);
    moments[head_dim + d] = static_cast<float>(variance[d]);
    moments[2 * head_dim + d] = static_cast<float>(value[d]);
  }
}

}  // namespace scsa
