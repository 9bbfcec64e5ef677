// SPDX-License-Identifier: Apache-2.0
#include "core/cluster_walk.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace scsa {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

}  // namespace

ClusterWalk::Scratch ClusterWalk::Take(ScratchLayout& layout, std::size_t n_walks, std::size_t n_clusters) {
  Scratch all;
  all.members = layout.Take<Member>(n_walks * 2 * n_clusters);
  all.queue = layout.Take<std::int32_t>(n_walks * n_clusters);
  all.opened = layout.Take<std::int32_t>(n_walks * n_clusters);
  return all;
}

ClusterWalk::Scratch ClusterWalk::At(const Scratch& all, std::size_t walk, std::size_t n_clusters) {
  const std::size_t at = walk * n_clusters;
  return {all.members + 2 * at, all.queue + at, all.opened + at};
}

ClusterWalk::ClusterWalk(std::span<const Region> regions, int head_dim, int rank, const WalkQuery& query,
                         const Scratch& scratch)
    : regions_(regions), head_dim_(head_dim), rank_(rank), query_(query), scratch_(scratch) {
  opens_all_ = !(query.log_exact_mass < std::numeric_limits<double>::infinity());
  Score(Root(regions));
  Settle();
}

// Whether member a is refined before member b.
bool ClusterWalk::Before(std::int32_t a, std::int32_t b) const {
  const Member& x = scratch_.members[a];
  const Member& y = scratch_.members[b];
  return x.priority != y.priority ? x.priority > y.priority : x.range.first < y.range.first;
}

double ClusterWalk::Relative(double exponent) const { return exponent == kNothing ? 0.0 : std::exp(exponent - gauge_); }

// Adds a node or cluster to the frontier.
void ClusterWalk::Score(const ClusterRange& range) {
  Member& member = scratch_.members[n_members_];
  member.range = range;
  member.place = Place::kClosed;
  float variance = 0;
  if (range.IsCluster()) {
    const Region& region = regions_[range.first_region];
    const Block& block = region.heads[query_.kv_head];
    const std::int64_t cluster = range.first - region.first_cluster;
    const float* directions = block.directions.data() + cluster * rank_ * head_dim_;
    variance = Dot(query_.q_squared, block.residuals.data() + cluster * head_dim_, head_dim_);
    for (int j = 0; j < rank_; ++j) {
      const float along = Dot(query_.q, directions + std::int64_t{j} * head_dim_, head_dim_);
      variance += along * along;
    }
    member.log_tail =
        Dot(query_.q, block.centroids.data() + cluster * head_dim_, head_dim_) + block.log_counts[cluster];
  } else {
    const TreeMoments moments = MomentsOf(regions_, range, query_.kv_head, head_dim_);
    variance = Dot(query_.q_squared, moments.variance, head_dim_);
    member.log_tail = Dot(query_.q, moments.mean, head_dim_) + std::log(static_cast<float>(RowsOf(regions_, range)));
  }
  member.priority = member.log_tail + 0.5f * variance;
  if (!std::isfinite(member.priority)) {
    opens_all_ = true;
    member.priority = 0.0f;  // the queue's order must be one
  }
  closed_ += Relative(member.priority);
  scratch_.queue[n_queued_++] = static_cast<std::int32_t>(n_members_++);
  std::push_heap(scratch_.queue, scratch_.queue + n_queued_,
                 [this](std::int32_t a, std::int32_t b) { return Before(b, a); });
}

// The stop rule without its division: a share next to 1 would be rounded to it.
bool ClusterWalk::Stops(double tau) const { return (1.0 - tau) * closed_ < tau * captured_; }

bool ClusterWalk::Settled() const {
  const double total = closed_ + captured_;
  return total >= settled_ / 2 && total <= 2 * settled_;
}

// Adds the masses up anew. Estimates of nodes may be too large by many orders of magnitude: once they are refined, the
// rounding that the subtractions leave would be all that the sums hold.
void ClusterWalk::Settle() {
  const auto exponent = [](const Member& member) -> double {
    return member.place == Place::kOpened ? member.log_tail : member.priority;
  };
  gauge_ = query_.log_exact_mass;
  for (const Member& member : members()) {
    if (member.place != Place::kRefined) gauge_ = std::max(gauge_, exponent(member));
  }
  closed_ = 0;
  captured_ = Relative(query_.log_exact_mass);
  for (const Member& member : members()) {
    if (member.place == Place::kClosed) closed_ += Relative(exponent(member));
    if (member.place == Place::kOpened) captured_ += Relative(exponent(member));
  }
  settled_ = closed_ + captured_;
}

void ClusterWalk::Run(float tau) {
  while (n_queued_ > 0 && (opens_all_ || !Stops(tau))) {
    std::pop_heap(scratch_.queue, scratch_.queue + n_queued_,
                  [this](std::int32_t a, std::int32_t b) { return Before(b, a); });
    Member& member = scratch_.members[scratch_.queue[--n_queued_]];
    closed_ = std::max(0.0, closed_ - Relative(member.priority));
    if (member.range.IsCluster()) {
      member.place = Place::kOpened;
      captured_ += Relative(member.log_tail);
      scratch_.opened[n_opened_++] = member.range.first;
    } else {
      member.place = Place::kRefined;
      member.children = static_cast<std::int32_t>(n_members_);
      const auto [lower, upper] = Children(regions_, member.range);
      Score(lower);
      Score(upper);
    }
    if (!opens_all_ && !Settled()) Settle();
  }
}

const float* ClusterWalk::ValueMean(const Member& member) const {
  if (!member.range.IsCluster()) return MomentsOf(regions_, member.range, query_.kv_head, head_dim_).value_mean;
  const Region& region = regions_[member.range.first_region];
  return region.heads[query_.kv_head].value_means.data() +
         std::int64_t{member.range.first - region.first_cluster} * head_dim_;
}

void ClusterWalk::FoldTail(const SoftmaxState& state) const {
  float gauge = -std::numeric_limits<float>::infinity();
  for (const Member& member : members()) {
    if (member.place == Place::kClosed) gauge = std::max(gauge, member.log_tail);
  }
  double sum = 0;
  for (const Member& member : members()) {
    if (member.place != Place::kClosed) continue;
    const float weight = std::exp(member.log_tail - gauge);
    sum += weight;
    AddScaled(state.num, ValueMean(member), weight, head_dim_);
  }
  state.max[0] = gauge;
  state.sum[0] = static_cast<float>(sum);
}

}  // namespace scsa
