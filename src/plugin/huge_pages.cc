// SPDX-License-Identifier: Apache-2.0
#include "plugin/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <new>
#include <string>

namespace scsa::plugin {
namespace {

// Since Linux 6.1; older C libraries do not know the name.
constexpr int kCollapse = 25;
constexpr int kMostRefusals = 3;
// Larger ones (64 KiB base pages have those of 512 MiB) are no gain here.
constexpr std::size_t kLargest = std::size_t{2} << 20;

std::size_t ReadHugePageBytes() {
  const std::string folder = "/sys/kernel/mm/transparent_hugepage/";
  std::ifstream enabled(folder + "enabled");
  std::string choices;
  std::getline(enabled, choices);
  if (!enabled || choices.find("[never]") != std::string::npos) return 0;
  std::ifstream size(folder + "hpage_pmd_size");
  std::size_t bytes = 0;
  size >> bytes;
  return size && bytes <= kLargest ? bytes : 0;
}

}  // namespace

std::size_t HugePageBytes() {
  static const std::size_t bytes = [] {
    try {
      return ReadHugePageBytes();
    } catch (const std::bad_alloc&) {
      return std::size_t{0};
    }
  }();
  return bytes;
}

void HugePages::Advance(Range used, Range tensor, Range buffer) {
  const std::size_t page = HugePageBytes();
  if (!possible_ || page == 0 || buffer.bytes < page) return;
  const Range target = used.bytes >= tensor.bytes / 2 ? buffer : used;
  const auto begin = reinterpret_cast<std::uintptr_t>(target.begin);
  const auto low = reinterpret_cast<std::uintptr_t>(buffer.begin);
  Due* due = nullptr;
  try {
    due = &next_.try_emplace(target.begin, Due{begin / page * page}).first->second;
  } catch (const std::bad_alloc&) {
    return;
  }
  due->page = std::max(due->page, (low + page - 1) / page * page);
  // Up to the last page that overlaps the target and lies in the buffer.
  const std::uintptr_t end = std::min((begin + target.bytes + page - 1) / page, (low + buffer.bytes) / page) * page;
  if (due->page >= end) return;
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  if (start < not_before_) return;
  void* at = reinterpret_cast<void*>(due->page);
  const std::size_t bytes = std::min<std::size_t>(end - due->page, kMostPages * page);
  const int error = madvise(at, bytes, kCollapse) == 0 ? 0 : errno;
  if (error == EINVAL && madvise(at, bytes, MADV_HUGEPAGE) != 0) possible_ = false;
  // What the system refuses for the moment is asked for again, but nothing waits for it for ever.
  const bool again = error == EAGAIN && ++due->refusals < kMostRefusals;
  if (!again) *due = {due->page + bytes};
  const auto stop = Clock::now();
  not_before_ = stop + std::chrono::duration_cast<Clock::duration>((stop - start) * (1.0 / share_ - 1.0));
}

}  // namespace scsa::plugin
