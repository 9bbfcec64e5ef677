// SPDX-License-Identifier: Apache-2.0
#include "core/tile.h"

#include "core/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/tile.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "core/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace scsa {
namespace HWY_NAMESPACE {

int TilePanelTarget() { return static_cast<int>(kPanel); }

std::size_t TileScratchBytesTarget(int head_dim, int n) {
  return TileScratch(nullptr, static_cast<std::size_t>(head_dim), static_cast<std::size_t>(n)).bytes;
}

void AttendTileTarget(const TileArgs& args, void* scratch) { AttendTileWith(args, scratch); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace scsa
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace scsa {

HWY_EXPORT(TilePanelTarget);
HWY_EXPORT(TileScratchBytesTarget);
HWY_EXPORT(AttendTileTarget);

int TilePanel() { return SCSA_DISPATCH(TilePanelTarget)(); }
std::size_t TileScratchBytes(int head_dim, int n) { return SCSA_DISPATCH(TileScratchBytesTarget)(head_dim, n); }
void AttendTile(const TileArgs& args, void* scratch) { SCSA_DISPATCH(AttendTileTarget)(args, scratch); }

}  // namespace scsa
#endif  // HWY_ONCE
