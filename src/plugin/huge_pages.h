// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace scsa::plugin {

// Moves caches into huge pages while they are used. A pass over a cache in pages of 4 KiB misses the TLB at every page
// and stops the hardware's prefetchers there; llama.cpp's memory has such pages wherever huge ones are given on request
// alone. One of these per context; not thread-safe.
class HugePages {
 public:
  // share: of the time, at most, that goes into moving pages, in (0, 1]. A call to the system takes some ten
  // milliseconds while other threads keep all cores busy, and a quarter of one for each page.
  explicit HugePages(double share = 0.1) : share_(share) {}

  struct Range {
    const void* begin;
    std::size_t bytes;
  };
  // What an attention call is about to read, part of a tensor in a buffer. Some of the pages that this overlaps move,
  // kMostPages in a call at most; of the whole buffer, where at least half of the tensor is in use, since other layers
  // are in the same state. Pages that the buffer has to itself alone: contents and addresses stay as they are. Does
  // nothing where the system has none, where they are forbidden, and when there is no memory.
  void Advance(Range used, Range tensor, Range buffer);
  static constexpr std::size_t kMostPages = 64;

 private:
  struct Due {
    std::uintptr_t page;
    int refusals = 0;  // in a row
  };
  std::unordered_map<const void*, Due> next_;  // by the beginning of a tensor or buffer
  bool possible_ = true;                       // until the system says that it is not
  double share_;
  std::chrono::steady_clock::time_point not_before_;  // the next call to the system
};

// Bytes of a huge page of memory that can be asked for, 0 where there are none or they are forbidden.
std::size_t HugePageBytes();

}  // namespace scsa::plugin
