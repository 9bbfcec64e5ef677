// SPDX-License-Identifier: Apache-2.0
#include "core/frontier_walk.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace scsa {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// exp(exponent - gauge), 0 for a mass that is nothing.
double Relative(double exponent, double gauge) { return exponent == kNothing ? 0.0 : std::exp(exponent - gauge); }

}  // namespace

void TreeCover::Find(const BlockTree& tree, const Coverage& coverage) {
  if (found_ && changes_ == tree.changes() && usable_ == coverage.usable) return;
  found_ = false;
  below_.resize(static_cast<std::size_t>(tree.n_levels()));
  for (int level = 0; level < tree.n_levels(); ++level) {
    std::vector<std::uint8_t>& below = below_[static_cast<std::size_t>(level)];
    below.assign(static_cast<std::size_t>(tree.n_nodes(level)), 0);
    if (level == 0) {
      for (std::size_t b = 0; b < below.size(); ++b) {
        if (tree.rows(0, static_cast<std::int64_t>(b)) == 0) continue;
        below[b] = b < coverage.usable.size() && coverage.usable[b] != 0 ? kUsable : kUnusable;
      }
      continue;
    }
    const std::vector<std::uint8_t>& children = below_[static_cast<std::size_t>(level) - 1];
    for (std::size_t child = 0; child < children.size(); ++child) below[child / BlockTree::kFanOut] |= children[child];
  }
  usable_ = coverage.usable;
  changes_ = tree.changes();
  found_ = true;
}

void FrontierWalk::Start(const WalkInputs& in) {
  in_ = in;
  queue_.clear();
  nodes_.clear();
  exponents_.clear();
  log_tails_.clear();
  blocks_.clear();
  data_.clear();
  block_gauges_.clear();
  block_closed_.clear();
  block_captured_.clear();
  estimates_.clear();
  tails_.clear();
  importances_.clear();
  open_.clear();
  best_.clear();
  opened_.clear();
  shares_.resize(Slots());
  squares_.resize(Group() * static_cast<std::size_t>(shape_.head_dim));
  std::transform(in.q, in.q + std::ssize(squares_), squares_.begin(), [](float x) { return x * x; });
  masses_.assign(Group(), {});
  for (std::size_t i = 0; i < Group(); ++i) {
    const double max = in.exact.max[i];
    const double sink = in.sinks != nullptr ? in.sinks[i] : kNothing;
    Mass& mass = masses_[i];
    mass.exact_gauge = std::max(max, sink);
    mass.exact = in.exact.sum[i] * Relative(max, mass.exact_gauge) + Relative(sink, mass.exact_gauge);
  }
  AddNodes(in.tree->n_levels() - 1, 0);
  Settle();
}

void FrontierWalk::Run(float tau) {
  while (!queue_.empty() && (overflow_ || !(ClosedShare() < tau))) {
    std::ranges::pop_heap(queue_, LessImportant());
    const std::int32_t place = queue_.back().place;
    queue_.pop_back();
    if (place >= 0) {
      OpenBestCluster(static_cast<std::size_t>(place));
    } else {
      Expand(static_cast<std::size_t>(~place));
    }
  }
}

// Adds the node to the frontier, or those below it where some of its blocks are not usable.
void FrontierWalk::AddNodes(int level, std::int64_t index) {
  if (in_.cover->Mixed(level, index)) {
    const std::int64_t end = std::min((index + 1) * BlockTree::kFanOut, in_.tree->n_nodes(level - 1));
    for (std::int64_t child = index * BlockTree::kFanOut; child < end; ++child) AddNodes(level - 1, child);
    return;
  }
  if (!in_.cover->Whole(level, index)) return;
  const NodeMoments moments = in_.tree->moments(level, index, in_.kv_head);
  const double log_rows = std::log(static_cast<double>(in_.tree->rows(level, index)));
  for (std::size_t i = 0; i < Group(); ++i) {
    const std::size_t at = i * static_cast<std::size_t>(shape_.head_dim);
    const double spread = 0.5 * Dot(squares_.data() + at, moments.variance, shape_.head_dim);
    const double log_mass = log_rows + Dot(in_.q + at, moments.mean, shape_.head_dim);
    const double exponent = log_mass + spread + kOptimism * std::sqrt(2 * spread);
    exponents_.push_back(exponent);
    log_tails_.push_back(log_mass + std::log1p(config_.tail_shrink * spread));
    masses_[i].closed += Relative(exponent, masses_[i].gauge);
  }
  nodes_.push_back({level, index, true});
}

BlockRange FrontierWalk::Range(std::size_t block) const {
  BlockRange range;
  range.layout = &in_.plan->layout();
  range.blocks = data_.data() + block;
  range.keys_at = in_.plan->KeysAt(in_.kv_head);
  range.values_at = in_.plan->ValuesAt(in_.kv_head);
  range.n_blocks = 1;
  return range;
}

// Adds the clusters of a block to the frontier.
void FrontierWalk::AddClusters(std::int64_t block) {
  const std::size_t at = blocks_.size();
  blocks_.push_back(static_cast<std::int32_t>(block));
  data_.push_back(in_.plan->data(static_cast<int>(block)));
  block_gauges_.resize(block_gauges_.size() + Group());
  block_closed_.resize(block_closed_.size() + Group());
  block_captured_.resize(block_captured_.size() + Group(), 0.0);
  importances_.resize(importances_.size() + Slots());
  best_.resize(best_.size() + 1);
  estimates_.resize(estimates_.size() + Group() * Slots());
  tails_.resize(tails_.size() + Group() * Slots());
  open_.resize(open_.size() + Slots());
  std::array<EstimateSums, kMaxQHeads> sums;
  EstimateArgs args;
  args.n = shape_.group();
  args.q = in_.q;
  args.tail_shrink = config_.tail_shrink;
  args.stride = std::ssize(shares_);
  EstimateClusters(Range(at), args, estimates_.data() + WeightsAt(at, 0), tails_.data() + WeightsAt(at, 0),
                   sums.data());
  for (std::size_t i = 0; i < Group(); ++i) {
    const double gauge = block_gauges_[at * Group() + i] = sums[i].gauge;
    const float* estimates = estimates_.data() + WeightsAt(at, i);
    double sum = 0;
    for (std::size_t c = 0; c < Slots(); ++c) sum += estimates[c];
    block_closed_[at * Group() + i] = sum;
    masses_[i].closed += sum * Relative(gauge, masses_[i].gauge);
  }
}

double FrontierWalk::ClosedShare() const {
  double share = 0;
  // What the subtractions leave of an empty sum may be below 0.
  for (const Mass& mass : masses_) share += std::max(0.0, mass.closed) / mass.total();
  return share / static_cast<double>(Group());
}

bool FrontierWalk::Settled() const {
  return overflow_ || std::ranges::all_of(masses_, [](const Mass& mass) {
           return mass.total() >= mass.settled / 2 && mass.total() <= 2 * mass.settled;
         });
}

// Sums the masses of a query head anew, relative to its largest exponent.
void FrontierWalk::Weigh(std::size_t head) {
  Mass& mass = masses_[head];
  mass.gauge = mass.exact_gauge;
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    if (nodes_[n].closed) mass.gauge = std::max(mass.gauge, exponents_[n * Group() + head]);
  }
  for (std::size_t b = 0; b < blocks_.size(); ++b) mass.gauge = std::max(mass.gauge, block_gauges_[b * Group() + head]);
  mass.closed = 0;
  mass.captured = mass.exact * Relative(mass.exact_gauge, mass.gauge);
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    if (nodes_[n].closed) mass.closed += Relative(exponents_[n * Group() + head], mass.gauge);
  }
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const std::size_t at = b * Group() + head;
    const double factor = Relative(block_gauges_[at], mass.gauge);
    mass.closed += factor * std::max(0.0, block_closed_[at]);
    mass.captured += factor * block_captured_[at];
  }
  mass.settled = mass.total();
  overflow_ |= !std::isfinite(mass.total());
}

void FrontierWalk::Settle() {
  overflow_ = false;
  for (std::size_t i = 0; i < Group(); ++i) Weigh(i);
  queue_.clear();
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    if (nodes_[n].closed) PushNode(n);
  }
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    WeighClusters(b);
    PushBestCluster(b);
  }
}

void FrontierWalk::Push(float importance, std::int32_t place) {
  queue_.push_back({importance, place});
  std::ranges::push_heap(queue_, LessImportant());
}

void FrontierWalk::PushNode(std::size_t node) {
  double importance = 0;
  for (std::size_t i = 0; i < Group() && !overflow_; ++i) {
    importance += Relative(exponents_[node * Group() + i], masses_[i].gauge) / masses_[i].settled;
  }
  Push(static_cast<float>(importance / static_cast<double>(Group())), ~static_cast<std::int32_t>(node));
}

void FrontierWalk::WeighClusters(std::size_t block) {
  std::array<float, kMaxQHeads> factors{};
  for (std::size_t i = 0; i < Group() && !overflow_; ++i) {
    const double factor = Relative(block_gauges_[block * Group() + i], masses_[i].gauge);
    factors[i] =
        static_cast<float>(factor * config_.cluster_size / (masses_[i].settled * static_cast<double>(Group())));
  }
  float* importances = importances_.data() + block * Slots();
  SharesAndKeys(Range(block), shape_.group(), estimates_.data() + WeightsAt(block, 0), std::ssize(shares_),
                factors.data(), shares_.data(), importances, nullptr);
  for (std::size_t c = 0; c < Slots(); ++c) {
    if (open_[block * Slots() + c] != 0) {
      importances[c] = -1.0f;
    } else if (overflow_ && importances[c] != -1.0f) {
      importances[c] = 0.0f;  // estimates that are no numbers give none either
    }
  }
}

void FrontierWalk::PushBestCluster(std::size_t block) {
  const float* importances = importances_.data() + block * Slots();
  const float* best = std::max_element(importances, importances + Slots());
  if (*best < 0.0f) return;
  best_[block] = static_cast<std::int32_t>(best - importances);
  Push(*best, static_cast<std::int32_t>(block));
}

void FrontierWalk::OpenBestCluster(std::size_t block) {
  const auto slot = static_cast<std::size_t>(best_[block]);
  open_[block * Slots() + slot] = 1;
  importances_[block * Slots() + slot] = -1.0f;
  opened_.push_back(static_cast<std::int32_t>(static_cast<std::size_t>(blocks_[block]) * Slots() + slot));
  for (std::size_t i = 0; i < Group(); ++i) {
    const std::size_t at = block * Group() + i;
    const double estimate = estimates_[WeightsAt(block, i) + slot];
    block_closed_[at] -= estimate;
    block_captured_[at] += estimate;
    const double factor = Relative(block_gauges_[at], masses_[i].gauge);
    masses_[i].closed -= factor * estimate;
    masses_[i].captured += factor * estimate;
  }
  PushBestCluster(block);
}

void FrontierWalk::Expand(std::size_t node) {
  nodes_[node].closed = false;
  const auto [level, index, closed] = nodes_[node];
  for (std::size_t i = 0; i < Group(); ++i) {
    masses_[i].closed -= Relative(exponents_[node * Group() + i], masses_[i].gauge);
  }
  const std::size_t first_node = nodes_.size();
  const std::size_t first_block = blocks_.size();
  if (level == 0) {
    AddClusters(index);
  } else {
    const std::int64_t end = std::min((index + 1) * BlockTree::kFanOut, in_.tree->n_nodes(level - 1));
    for (std::int64_t child = index * BlockTree::kFanOut; child < end; ++child) AddNodes(level - 1, child);
  }
  if (!Settled()) {
    Settle();
    return;
  }
  for (std::size_t n = first_node; n < nodes_.size(); ++n) PushNode(n);
  for (std::size_t b = first_block; b < blocks_.size(); ++b) {
    WeighClusters(b);
    PushBestCluster(b);
  }
}

void FrontierWalk::WeighTail() {
  tail_gauges_.assign(Group(), kNothing);
  node_weights_.assign(nodes_.size() * Group(), 0.0f);
  block_weights_.assign(tails_.size(), 0.0f);
  for (std::size_t i = 0; i < Group(); ++i) {
    double& gauge = tail_gauges_[i];
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (nodes_[n].closed) gauge = std::max(gauge, log_tails_[n * Group() + i]);
    }
    // The gauge of a block is that of its estimates, which may lie far above its tails.
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      float largest = 0.0f;
      for (std::size_t c = 0; c < Slots(); ++c) {
        if (open_[b * Slots() + c] == 0) largest = std::max(largest, tails_[WeightsAt(b, i) + c]);
      }
      if (largest > 0.0f) gauge = std::max(gauge, block_gauges_[b * Group() + i] + std::log(largest));
    }
    if (gauge == kNothing) continue;  // everything is open
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      const std::size_t at = n * Group() + i;
      if (nodes_[n].closed) node_weights_[at] = static_cast<float>(Relative(log_tails_[at], gauge));
    }
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      const double factor = Relative(block_gauges_[b * Group() + i], gauge);
      for (std::size_t c = 0; c < Slots(); ++c) {
        const std::size_t at = WeightsAt(b, i) + c;
        if (open_[b * Slots() + c] == 0) block_weights_[at] = static_cast<float>(factor * tails_[at]);
      }
    }
  }
}

void FrontierWalk::FoldTail(int part, int n_parts, const SoftmaxState& state) const {
  const auto share = [&](std::size_t n, int p) {
    return n * static_cast<std::size_t>(p) / static_cast<std::size_t>(n_parts);
  };
  for (std::size_t n = share(nodes_.size(), part); n < share(nodes_.size(), part + 1); ++n) {
    if (!nodes_[n].closed) continue;
    const NodeMoments moments = in_.tree->moments(nodes_[n].level, nodes_[n].index, in_.kv_head);
    for (std::size_t i = 0; i < Group(); ++i) {
      const float weight = node_weights_[n * Group() + i];
      state.sum[i] += weight;
      AddScaled(state.num + i * static_cast<std::size_t>(shape_.head_dim), moments.value_mean, weight, shape_.head_dim);
    }
  }
  std::array<float, kMaxQHeads> sums;
  const std::size_t end = share(blocks_.size(), part + 1);
  for (std::size_t b = share(blocks_.size(), part); b < end; ++b) {
    TailArgs args;
    args.n = shape_.group();
    args.weights = block_weights_.data() + WeightsAt(b, 0);
    args.weights_stride = std::ssize(shares_);
    if (b + 1 < end) {
      const BlockRange next = Range(b + 1);
      args.next[0] = {.data = next.blocks[0] + next.values_at,
                      .row_bytes = static_cast<std::int64_t>(next.layout->value_bytes())};
    }
    FoldValueMeans(Range(b), args, sums.data(), state.num);
    for (std::size_t i = 0; i < Group(); ++i) state.sum[i] += sums[i];
  }
  for (std::size_t i = 0; i < Group(); ++i) {
    if (state.sum[i] > 0.0f) state.max[i] = static_cast<float>(tail_gauges_[i]);
  }
}

}  // namespace scsa
