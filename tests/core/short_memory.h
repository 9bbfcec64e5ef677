// SPDX-License-Identifier: Apache-2.0
//
// operator new that fails on purpose. Replaces it for the whole program: include it in one file of a test.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace scsa::test {

// Tests try each allocation in its turn. Under a sanitizer, which makes that slow, they try one in so many: there it is
// for leaks, races and what a failure leaves half done, and neighbours mostly fail on the same way.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr std::int64_t kAllocationStride = 7;
#else
inline constexpr std::int64_t kAllocationStride = 1;
#endif

// Of the allocations inside the calls of In, number `first` (counted from 1 on) fails, or all from that one on. One at
// a time.
class ShortMemory {
 public:
  ShortMemory(std::int64_t first, bool for_good) {
    count_ = 0;
    first_ = first;
    last_ = for_good ? INT64_MAX : first;
  }
  ShortMemory(const ShortMemory&) = delete;
  ShortMemory& operator=(const ShortMemory&) = delete;

  template <class F>
  auto In(F&& work) const {
    const Counting counting;
    return work();
  }
  bool failed() const { return count_ >= first_; }

  static bool TakeFails() noexcept {
    if (!counting_) return false;
    const std::int64_t number = ++count_;
    return number >= first_ && number <= last_;
  }

 private:
  struct Counting {
    Counting() { counting_ = true; }
    ~Counting() { counting_ = false; }
  };
  static inline std::atomic<bool> counting_{false};
  static inline std::atomic<std::int64_t> count_{0};
  static inline std::atomic<std::int64_t> first_{0};
  static inline std::atomic<std::int64_t> last_{0};
};

inline void* Allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (ShortMemory::TakeFails()) return nullptr;
  return std::aligned_alloc(alignment, (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
}

inline void* AllocateOrThrow(std::size_t bytes, std::size_t alignment) {
  void* p = Allocate(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace scsa::test

// Every form, for sanitizers bring replacements of their own, which do not mix. Not inlined: GCC would take the
// aligned_alloc of one and the free of the other for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t n) {
  return scsa::test::AllocateOrThrow(n, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new[](std::size_t n) {
  return scsa::test::AllocateOrThrow(n, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a) {
  return scsa::test::AllocateOrThrow(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t n, std::align_val_t a) {
  return scsa::test::AllocateOrThrow(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  return scsa::test::Allocate(n, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new[](std::size_t n, const std::nothrow_t&) noexcept {
  return scsa::test::Allocate(n, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return scsa::test::Allocate(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return scsa::test::Allocate(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, const std::nothrow_t&) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
