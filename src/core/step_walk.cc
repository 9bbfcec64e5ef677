// SPDX-License-Identifier: Apache-2.0
//
// Hierarchical selection in a decode step of preset `seed`: each query head walks on its own. Nothing here loops over
// all clusters.
#include <algorithm>
#include <array>

#include "core/cluster_walk.h"
#include "core/parallel.h"
#include "core/relative_error.h"
#include "core/softmax_state.h"
#include "core/step_parts.h"

namespace scsa {

using namespace step_parts;

namespace {

ClusterWalk StartWalk(const StepArgs& args, const Prepared& p, const ClusterWalk::Scratch& walks, std::int64_t q_head) {
  const WalkQuery query = {.kv_head = static_cast<int>(q_head) / p.group,
                           .q = p.qs + q_head * p.head_dim,
                           .q_squared = p.qs_squared + q_head * p.head_dim,
                           .log_exact_mass = p.log_exact_mass[q_head]};
  const ClusterWalk::Scratch scratch =
      ClusterWalk::At(walks, static_cast<std::size_t>(q_head), static_cast<std::size_t>(p.n_clusters));
  return {args.regions, p.head_dim, args.config.rank, query, scratch};
}

struct InRegion {
  const Region& region;
  int cluster;  // of the region
};

InRegion Find(std::span<const Region> regions, std::int32_t cluster) {
  const auto after = std::ranges::upper_bound(regions, cluster, {}, &Region::first_cluster);
  return {after[-1], cluster - after[-1].first_cluster};
}

std::size_t SummaryBytes(const Prepared& p, int rank, const ClusterRange& range) {
  const std::size_t vector = sizeof(float) * static_cast<std::size_t>(p.head_dim);
  return range.IsCluster() ? (3 + static_cast<std::size_t>(rank)) * vector + sizeof(float) : 3 * vector;
}

// Where the query heads of a group have a node among the members of their walks.
using Places = std::array<std::int32_t, kMaxQHeads>;

// Goes down the walks of a KV head together, from the node that `heads` of them have at `at`: what they opened becomes
// runs, and what they looked at is counted once. walks[h]: the members of head h.
void MergeWalks(const StepArgs& args, const Prepared& p, int kv_head, const ClusterWalk::Member* const* walks,
                const HeadSet& heads, const Places& at, const Selected& out) {
  HeadSet opened;
  HeadSet refined;
  Places children;
  ClusterRange range;
  for (int h = 0; h < p.group; ++h) {
    if (!heads.test(static_cast<std::size_t>(h))) continue;
    const ClusterWalk::Member& member = walks[h][at[h]];
    range = member.range;
    opened.set(static_cast<std::size_t>(h), member.place == ClusterWalk::Place::kOpened);
    refined.set(static_cast<std::size_t>(h), member.place == ClusterWalk::Place::kRefined);
    if (member.place == ClusterWalk::Place::kRefined) children[h] = member.children;
  }
  out.summary_bytes[kv_head] += SummaryBytes(p, args.config.rank, range);
  if (opened.any()) {
    const Region& region = args.regions[range.first_region];
    AddOpened(p, kv_head, region.heads[kv_head], range.first - region.first_cluster, opened, out);
  }
  if (refined.none()) return;
  MergeWalks(args, p, kv_head, walks, refined, children, out);
  for (int h = 0; h < p.group; ++h) {
    if (refined.test(static_cast<std::size_t>(h))) ++children[h];
  }
  MergeWalks(args, p, kv_head, walks, refined, children, out);
}

}  // namespace

void step_parts::SelectByWalk(const StepArgs& args, const Prepared& p, std::span<const float> taus,
                              const ClusterWalk::Scratch& walks, const Selected& out) {
  std::array<std::span<const ClusterWalk::Member>, kMaxQHeads> members;
  ParallelFor(args.n_threads, args.shape.q_heads, [&](std::int64_t h, int) {
    ClusterWalk walk = StartWalk(args, p, walks, h);
    walk.Run(taus[h]);
    const SoftmaxState state = At(out.tail, h, p.head_dim);
    ClearStates(state, 1, p.head_dim);
    walk.FoldTail(state);
    members[h] = walk.members();
  });
  ParallelFor(args.n_threads, args.shape.kv_heads, [&](std::int64_t kv_head, int) {
    out.scored[kv_head] = 0;
    out.summary_bytes[kv_head] = 0;
    std::array<const ClusterWalk::Member*, kMaxQHeads> of_group;
    HeadSet all;
    for (int h = 0; h < p.group; ++h) {
      const std::span<const ClusterWalk::Member> walked = members[kv_head * p.group + h];
      of_group[h] = walked.data();
      all.set(static_cast<std::size_t>(h));
      out.scored[kv_head] += std::ssize(walked);
    }
    MergeWalks(args, p, static_cast<int>(kv_head), of_group.data(), all, Places{}, out);
  });
}

// One walk passes all thresholds in play. Where it passes one, the output is that of the clusters opened so far and of
// the tail of the frontier as it is there.
Status step_parts::RecordWalk(const StepArgs& args, const OutView& exact_output, CalibrationWindow* window) {
  const int q_heads = args.shape.q_heads;
  Prepared p;
  if (Status status = Prepare(args, &p); !status.ok()) return status;
  enum : std::int64_t { kOpen, kTail, kTotal, kStates };
  SoftmaxState states;  // [q_heads][kStates]
  std::int32_t* in_play = nullptr;
  ClusterWalk::Scratch walks;
  const auto lay_out = [&](void* memory) {
    ScratchLayout layout(memory);
    states = TakeStates(layout, kStates * q_heads, p.head_dim);
    in_play = layout.Take<std::int32_t>(q_heads);
    walks = ClusterWalk::Take(layout, static_cast<std::size_t>(q_heads), static_cast<std::size_t>(p.n_clusters));
    return layout.bytes();
  };
  void* memory = Reserve(args, ScratchUser::kCalibration, lay_out(nullptr));
  if (memory == nullptr) return OutOfMemory();
  lay_out(memory);
  if (!BeginRecording(args, window, in_play)) return OutOfMemory();

  ParallelFor(args.n_threads, q_heads, [&](std::int64_t h, int) {
    const auto cleared = [&](std::int64_t which) {
      const SoftmaxState state = At(states, kStates * h + which, p.head_dim);
      ClearStates(state, 1, p.head_dim);
      return state;
    };
    const SoftmaxState open = cleared(kOpen);
    MergeStates(p.head_dim, 1, At(p.exact, h, p.head_dim), open);
    ClusterWalk walk = StartWalk(args, p, walks, h);
    std::size_t done = 0;
    std::array<float, kMaxHeadDim> output;
    std::array<float, kTauGridSize> errors;
    for (int g = 0; g < in_play[h]; ++g) {
      walk.Run(kTauGrid[g]);
      const std::span<std::int32_t> opened = walk.opened().subspan(done);
      done += opened.size();
      std::ranges::sort(opened);
      for (const std::int32_t cluster : opened) {
        const auto [region, c] = Find(args.regions, cluster);
        const Block& block = region.heads[h / p.group];
        AttendPacked(args, p.head_dim, 1, p.qs + h * p.head_dim, p.quantized == nullptr ? nullptr : p.quantized + h,
                     block, block.partition.offsets[c], block.partition.offsets[c + 1], open);
      }
      const SoftmaxState tail = cleared(kTail);
      walk.FoldTail(tail);
      const SoftmaxState total = cleared(kTotal);
      MergeStates(p.head_dim, 1, open, total);
      MergeStates(p.head_dim, 1, tail, total);
      WriteOutput(total, SinkLogit(args.params, static_cast<int>(h)), p.head_dim, output.data());
      errors[g] = RelativeError(output.data(), exact_output.data + h * exact_output.head_stride, p.head_dim);
    }
    // Thresholds out of play share the error of the last one that is not.
    std::fill(errors.begin() + in_play[h], errors.end(), errors[in_play[h] - 1]);
    window->Record(static_cast<int>(h), errors.data());
  });
  return Status::Ok();
}

}  // namespace scsa
