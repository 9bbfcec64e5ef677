// SPDX-License-Identifier: Apache-2.0
#include "core/tile.h"

#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/tile.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/tile-inl.h"
#include "core/tile_clusters-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

int TilePanelTarget() { return static_cast<int>(kPanel); }

std::size_t TileScratchBytesTarget(int head_dim, int n) {
  TileArgs args;
  args.head_dim = head_dim;
  args.n = n;
  return TileScratch(args, nullptr).bytes;
}
void BeginTileTarget(const TileArgs& args, void* scratch) { BeginTileWith(args, scratch); }
void AttendTileTarget(const TileArgs& args, const TileRows& rows, void* scratch) {
  AttendTileWith(args, rows, scratch);
}
void FinishTileTarget(const TileArgs& args, void* scratch) { FinishTileWith(args, scratch); }

std::size_t TileEstimatesBytesTarget(int n, int n_blocks, int slots) {
  return TileEstimates(nullptr, hwy::RoundUpTo(static_cast<std::size_t>(n), kPanel), static_cast<std::size_t>(n_blocks),
                       static_cast<std::size_t>(slots))
      .bytes;
}
std::size_t TileTailBytesTarget(int head_dim, int n) {
  ScratchLayout layout(nullptr);
  TileState(layout, static_cast<std::size_t>(head_dim), hwy::RoundUpTo(static_cast<std::size_t>(n), kPanel));
  return layout.bytes();
}
void EstimateTileTarget(const TileArgs& args, const BlockRange& range, float tail_shrink, void* scratch,
                        void* estimates, float* shares, float* keys) {
  EstimateTileWith(args, range, tail_shrink, scratch, estimates, shares, keys);
}
void ClearTailTarget(const TileArgs& args, void* estimates, void* tail) { ClearTailWith(args, estimates, tail); }
void FoldTailTarget(const TileArgs& args, const BlockRange& range, const std::int32_t* clusters,
                    std::int64_t n_clusters, void* estimates, void* scratch, void* tail) {
  FoldTailWith(args, range, clusters, n_clusters, estimates, scratch, tail);
}
void AddTailTarget(const TileArgs& args, void* tail, void* scratch) { AddTailWith(args, tail, scratch); }
void OutputWithTailTarget(const TileArgs& args, void* scratch, void* tail) { OutputWithTailWith(args, scratch, tail); }
float MeanTileErrorTarget(const TileArgs& args, void* outputs, void* scratch) {
  return MeanTileErrorWith(args, outputs, scratch);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scsa {

HWY_EXPORT(TilePanelTarget);
HWY_EXPORT(TileScratchBytesTarget);
HWY_EXPORT(BeginTileTarget);
HWY_EXPORT(AttendTileTarget);
HWY_EXPORT(FinishTileTarget);
HWY_EXPORT(TileEstimatesBytesTarget);
HWY_EXPORT(TileTailBytesTarget);
HWY_EXPORT(EstimateTileTarget);
HWY_EXPORT(ClearTailTarget);
HWY_EXPORT(FoldTailTarget);
HWY_EXPORT(AddTailTarget);
HWY_EXPORT(OutputWithTailTarget);
HWY_EXPORT(MeanTileErrorTarget);

int TilePanel() { return SCSA_DISPATCH(TilePanelTarget)(); }
std::size_t TileScratchBytes(int head_dim, int n) { return SCSA_DISPATCH(TileScratchBytesTarget)(head_dim, n); }
void BeginTile(const TileArgs& args, void* scratch) { SCSA_DISPATCH(BeginTileTarget)(args, scratch); }
void AttendTile(const TileArgs& args, const TileRows& rows, void* scratch) {
  SCSA_DISPATCH(AttendTileTarget)(args, rows, scratch);
}
void FinishTile(const TileArgs& args, void* scratch) { SCSA_DISPATCH(FinishTileTarget)(args, scratch); }

std::size_t TileEstimatesBytes(int n, int n_blocks, int slots) {
  return SCSA_DISPATCH(TileEstimatesBytesTarget)(n, n_blocks, slots);
}
std::size_t TileTailBytes(int head_dim, int n) { return SCSA_DISPATCH(TileTailBytesTarget)(head_dim, n); }
void EstimateTile(const TileArgs& args, const BlockRange& range, float tail_shrink, void* scratch, void* estimates,
                  float* shares, float* keys) {
  SCSA_DISPATCH(EstimateTileTarget)(args, range, tail_shrink, scratch, estimates, shares, keys);
}
void ClearTail(const TileArgs& args, void* estimates, void* tail) {
  SCSA_DISPATCH(ClearTailTarget)(args, estimates, tail);
}
void FoldTail(const TileArgs& args, const BlockRange& range, const std::int32_t* clusters, std::int64_t n_clusters,
              void* estimates, void* scratch, void* tail) {
  SCSA_DISPATCH(FoldTailTarget)(args, range, clusters, n_clusters, estimates, scratch, tail);
}
void AddTail(const TileArgs& args, void* tail, void* scratch) { SCSA_DISPATCH(AddTailTarget)(args, tail, scratch); }
void OutputWithTail(const TileArgs& args, void* scratch, void* tail) {
  SCSA_DISPATCH(OutputWithTailTarget)(args, scratch, tail);
}
float MeanTileError(const TileArgs& args, void* outputs, void* scratch) {
  return SCSA_DISPATCH(MeanTileErrorTarget)(args, outputs, scratch);
}

}  // namespace scsa
#endif  // HWY_ONCE
