// SPDX-License-Identifier: Apache-2.0
//
// The clusters of a BlockPlan, decoded plainly, and the method of preset `fast` over them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <vector>

#include "core/block_plan.h"
#include "tests/core/synthetic.h"

namespace scsa::test {

// A cluster as the plan describes it.
struct PlainCluster {
  int block = 0;
  std::vector<std::int64_t> rows;
  Vector centroid, value_mean, shape;
  Vector block_value_mean;
  Vector key_step, value_step;
  double half_trace = 0;
};

// Those with members, of the blocks whose rows are all visible.
inline std::vector<PlainCluster> UsableClusters(const BlockPlan& plan, const Shape& shape, int kv_head,
                                                const std::vector<bool>& visible) {
  std::vector<PlainCluster> clusters;
  const SummaryLayout& layout = plan.layout();
  for (int b = 0; b < plan.n_blocks(); ++b) {
    bool usable = plan.built(b);
    for (std::int64_t r = plan.FirstRow(b); r < plan.EndRow(b); ++r) usable = usable && visible[r];
    if (!usable) continue;
    const ConstKeyRecord keys = layout.Keys(plan.key_record(kv_head, b));
    const ConstValueRecord values = layout.Values(plan.value_record(kv_head, b));
    for (int slot = 0; slot < plan.slots(); ++slot) {
      PlainCluster cluster;
      cluster.block = b;
      const std::uint16_t* offsets = plan.offsets(kv_head, b) + slot;
      for (int i = offsets[0]; i < offsets[1]; ++i) {
        cluster.rows.push_back(std::int64_t{b} * plan.block_rows() + plan.members(kv_head, b)[i]);
      }
      if (cluster.rows.empty()) continue;
      for (int d = 0; d < shape.head_dim; ++d) {
        cluster.centroid.push_back(keys.mean[d] +
                                   static_cast<double>(keys.step[d]) * keys.centroids[layout.CentroidAt(slot, d)]);
        cluster.value_mean.push_back(values.mean[d] +
                                     static_cast<double>(values.step[d]) * values.means[layout.ValueAt(slot, d)]);
      }
      cluster.block_value_mean = test::ToDouble(values.mean, shape.head_dim);
      cluster.shape = test::ToDouble(keys.shape, shape.head_dim);
      cluster.key_step = test::ToDouble(keys.step, shape.head_dim);
      cluster.value_step = test::ToDouble(values.step, shape.head_dim);
      cluster.half_trace = keys.half_traces[slot];
      EXPECT_EQ(keys.counts[slot], static_cast<float>(cluster.rows.size()));
      EXPECT_FLOAT_EQ(keys.log_counts[slot], std::log(static_cast<float>(cluster.rows.size())));
      clusters.push_back(cluster);
    }
  }
  return clusters;
}

// A query vector, not scaled, and the rows that it sees.
struct RestatedQuery {
  const float* q;
  int q_head;
  const std::vector<bool>* visible;
};

inline Vector ScaledQuery(const RestatedQuery& query, const Shape& shape, const LogitParams& params) {
  Vector qs = ToDouble(query.q, shape.head_dim);
  for (double& x : qs) x *= params.scale;
  return qs;
}

// What a query expects of a cluster (joint_operator.h), and what the cluster weighs when it stays closed.
struct ClusterWeights {
  double estimate;
  double tail;
};
inline ClusterWeights WeightsOf(const PlainCluster& cluster, const Vector& qs, const Config& config) {
  double spread = 0;
  for (std::size_t d = 0; d < qs.size(); ++d) spread += cluster.shape[d] * qs[d] * qs[d];
  const double s = cluster.half_trace * spread;
  const double mass = static_cast<double>(cluster.rows.size()) * std::exp(DotOf(qs, cluster.centroid));
  return {mass * std::exp(s), mass * (1 + config.tail_shrink * s)};
}

// The mass of the rows that a query sees and that are not covered, and of its attention sink.
inline double ExactMass(const SyntheticCache& cache, const LogitParams& params, int kv_head, const RestatedQuery& query,
                        const Vector& qs, const std::vector<bool>& covered) {
  double mass = params.sinks != nullptr ? std::exp(params.sinks[query.q_head]) : 0.0;
  for (std::int64_t r = 0; r < cache.n_rows(); ++r) {
    if ((*query.visible)[r] && !covered[r]) mass += std::exp(DotOf(qs, cache.DecodedKey(r, kv_head)));
  }
  return mass;
}

inline std::vector<bool> CoveredRows(const SyntheticCache& cache, const std::vector<PlainCluster>& clusters) {
  std::vector<bool> covered(cache.n_rows(), false);
  for (const PlainCluster& c : clusters) {
    for (const std::int64_t r : c.rows) covered[r] = true;
  }
  return covered;
}

// Outputs with these clusters opened and those closed; all other rows are exact. *rows_read: rows that some query sees
// outside the clusters, and those of opened ones.
inline std::vector<Vector> RestateOutputs(const SyntheticCache& cache, const Shape& shape, const Config& config,
                                          const LogitParams& params, int kv_head,
                                          const std::vector<PlainCluster>& opened,
                                          const std::vector<PlainCluster>& closed,
                                          const std::vector<RestatedQuery>& queries, std::int64_t* rows_read) {
  std::vector<bool> covered = CoveredRows(cache, opened);
  const std::vector<bool> covered_closed = CoveredRows(cache, closed);
  for (std::size_t r = 0; r < covered.size(); ++r) covered[r] = covered[r] || covered_closed[r];
  *rows_read = 0;
  for (std::int64_t r = 0; r < cache.n_rows(); ++r) {
    bool seen = false;
    for (const RestatedQuery& query : queries) seen = seen || (*query.visible)[r];
    *rows_read += seen && !covered[r];
  }
  for (const PlainCluster& cluster : opened) *rows_read += std::ssize(cluster.rows);
  std::vector<Vector> outputs;
  for (const RestatedQuery& query : queries) {
    const Vector qs = ScaledQuery(query, shape, params);
    PlainSoftmax softmax(shape.head_dim);
    const auto add_row = [&](std::int64_t r) {
      softmax.Add(DotOf(qs, cache.DecodedKey(r, kv_head)), cache.DecodedValue(r, kv_head));
    };
    for (std::int64_t r = 0; r < cache.n_rows(); ++r) {
      if ((*query.visible)[r] && !covered[r]) add_row(r);
    }
    for (const PlainCluster& cluster : opened) {
      for (const std::int64_t r : cluster.rows) add_row(r);
    }
    for (const PlainCluster& cluster : closed) {
      softmax.Add(std::log(WeightsOf(cluster, qs, config).tail), cluster.value_mean);
    }
    outputs.push_back(params.sinks == nullptr ? softmax.Output() : softmax.Output(params.sinks[query.q_head]));
  }
  return outputs;
}

// The whole method of joint_operator.h, in double, for queries of one KV head that open one set of the clusters
// together; what is closed of blocks with a share below light_share counts at the block's mean value. *rows_read as
// above. The outputs.
inline std::vector<Vector> RestateJointMethod(const SyntheticCache& cache, const Shape& shape, const Config& config,
                                              const LogitParams& params, int kv_head,
                                              const std::vector<PlainCluster>& clusters,
                                              const std::vector<RestatedQuery>& queries, double tau, double light_share,
                                              std::int64_t* rows_read) {
  const std::vector<bool> covered = CoveredRows(cache, clusters);
  std::vector<double> shares(clusters.size(), 0.0);
  for (const RestatedQuery& query : queries) {
    const Vector qs = ScaledQuery(query, shape, params);
    double total = ExactMass(cache, params, kv_head, query, qs, covered);
    std::vector<double> estimates;
    for (const PlainCluster& cluster : clusters) estimates.push_back(WeightsOf(cluster, qs, config).estimate);
    for (const double estimate : estimates) total += estimate;
    for (std::size_t c = 0; c < clusters.size(); ++c) {
      shares[c] += estimates[c] / total / static_cast<double>(queries.size());
    }
  }
  std::map<int, double> block_shares;
  for (std::size_t c = 0; c < clusters.size(); ++c) block_shares[clusters[c].block] += shares[c];
  std::vector<std::size_t> order(clusters.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
    return shares[a] / static_cast<double>(clusters[a].rows.size()) >
           shares[b] / static_cast<double>(clusters[b].rows.size());
  });
  std::vector<PlainCluster> opened;
  std::vector<PlainCluster> closed;
  double closed_share = 0;
  while (!order.empty() && closed_share + shares[order.back()] < tau) {
    closed_share += shares[order.back()];
    closed.push_back(clusters[order.back()]);
    if (block_shares[closed.back().block] < light_share) closed.back().value_mean = closed.back().block_value_mean;
    order.pop_back();
  }
  for (const std::size_t c : order) opened.push_back(clusters[c]);
  return RestateOutputs(cache, shape, config, params, kv_head, opened, closed, queries, rows_read);
}

}  // namespace scsa::test
