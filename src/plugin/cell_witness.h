// SPDX-License-Identifier: Apache-2.0
//
// Notices that a program changed cached cells in a way that no graph shows: a state was loaded, a stream copied.
//
// Whatever puts something else into a cell changes its token or its position, and with them its key in every layer. So
// one layer tells for all: the lowest, which an evaluation reaches first. There the first bytes of one key per visible
// cell are compared with those of the step before, at a small part of the cost of comparing all rows of all layers,
// which follows only where a cell differs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace scsa::plugin {

// Of one stream of the layers of a cache. Not thread-safe: used by the thread that evaluates the context's graphs.
class CellWitness {
 public:
  // Throws std::bad_alloc.
  explicit CellWitness(std::int64_t cells);

  // A layer of the stream exists; the lowest one so far is the witness. A new witness has seen no cells: it begins with
  // an alarm.
  void Join(int layer) { witness_ = std::min(witness_, layer); }
  bool IsWitness(int layer) const { return layer == witness_; }

  // Keys of the witness, of one KV head.
  struct Keys {
    const std::byte* first;  // of cell 0
    std::int64_t stride;     // bytes from cell to cell
    std::size_t bytes;       // of a key
  };
  // Remembers the keys of the visible cells. Whether one of them differs though it was seen and not written since.
  // Bitmaps of cells; `visible` may be the shortest.
  bool Look(const Keys& keys, std::span<const std::uint64_t> visible, std::span<const std::uint64_t> seen,
            std::span<const std::uint64_t> written);
  // The witness has looked. alarm: every layer has to compare what it planned over with the cache.
  void Report(bool alarm);

  // Counts of Report, for a layer to see what came since its last step.
  std::uint64_t reports() const { return reports_; }
  std::uint64_t alarms() const { return alarms_; }

 private:
  int witness_;
  std::uint64_t reports_ = 0;
  std::uint64_t alarms_ = 0;
  std::vector<std::byte> marks_;  // [cells][kMarkBytes]
};

}  // namespace scsa::plugin
