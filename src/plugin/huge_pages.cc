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
constexpr int kMostRefusals = 3;  // of a page
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

void HugePages::Advance(const void* begin, std::size_t used, const void* buffer, std::size_t bytes) {
  const std::size_t page = HugePageBytes();
  if (!possible_ || page == 0 || bytes < page) return;
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const auto low = reinterpret_cast<std::uintptr_t>(buffer);
  Due* due = nullptr;
  try {
    due = &next_.try_emplace(begin, Due{first / page * page}).first->second;
  } catch (const std::bad_alloc&) {
    return;
  }
  due->page = std::max(due->page, (low + page - 1) / page * page);
  if (due->page >= first + used || due->page + page > low + bytes) return;
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  if (start < not_before_) return;
  void* at = reinterpret_cast<void*>(due->page);
  const int error = madvise(at, page, kCollapse) == 0 ? 0 : errno;
  if (error == EINVAL && madvise(at, page, MADV_HUGEPAGE) != 0) possible_ = false;
  // What the system refuses for the moment is asked for again, but nothing waits for it for ever.
  const bool again = error == EAGAIN && ++due->refusals < kMostRefusals;
  if (!again) *due = {due->page + page};
  const auto end = Clock::now();
  not_before_ = end + std::chrono::duration_cast<Clock::duration>((end - start) * (1.0 / share_ - 1.0));
}

}  // namespace scsa::plugin
