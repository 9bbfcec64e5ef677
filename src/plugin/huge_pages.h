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
  // share: of the time, at most, that goes into moving pages, in (0, 1]. A page takes half a millisecond, or ten where
  // the system has to make room for it first.
  explicit HugePages(double share = 0.05) : share_(share) {}

  // What an attention call is about to read: `used` bytes of a tensor from `begin` on, in a buffer of `bytes` bytes at
  // `buffer`. At most one page that this overlaps, and that lies in the buffer as a whole, moves in each call.
  // Contents and addresses stay as they are. Does nothing where the system has none, where they are forbidden, and when
  // there is no memory.
  void Advance(const void* begin, std::size_t used, const void* buffer, std::size_t bytes);

 private:
  struct Due {
    std::uintptr_t page;
    int refusals = 0;  // of this page
  };
  std::unordered_map<const void*, Due> next_;  // by the beginning of a tensor
  bool possible_ = true;                       // until the system says that it is not
  double share_;
  std::chrono::steady_clock::time_point not_before_;  // the next page
};

// Bytes of a huge page of memory that can be asked for, 0 where there are none or they are forbidden.
std::size_t HugePageBytes();

}  // namespace scsa::plugin
