// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "scsa/exact.h"
#include "scsa/status.h"

namespace scsa {

inline constexpr std::size_t kScratchAlignment = 64;

// Grow-only block of aligned memory. Contents are not kept when it grows.
class ScratchBuffer {
 public:
  // At least `bytes` bytes, or nullptr when memory is short; the old block then stays.
  void* Reserve(std::size_t bytes) {
    if (bytes > size_) {
      auto* grown = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kScratchAlignment}, std::nothrow));
      if (grown == nullptr) return nullptr;
      data_.reset(grown);
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{kScratchAlignment}); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
};

// Who owns a block of a workspace. The sparse operator calls the exact one with the same workspace, so each has its
// own.
enum class ScratchUser : std::uint8_t { kExact, kTile, kLayer, kSelect, kCalibration, kCount };

struct Workspace::Impl {
  std::array<ScratchBuffer, static_cast<std::size_t>(ScratchUser::kCount)> buffers;

  void* Reserve(ScratchUser user, std::size_t bytes) { return buffers[static_cast<std::size_t>(user)].Reserve(bytes); }
};

inline Status NoExactScratch(std::size_t bytes) noexcept {
  try {
    return {StatusCode::kOutOfMemory, "out of memory: exact attention needs " + std::to_string(bytes) + " bytes"};
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("out of memory");
  }
}

// Hands out aligned arrays one after the other. Run it once without memory to learn the size, then again over the block
// of that size.
class ScratchLayout {
 public:
  explicit ScratchLayout(void* block) : block_(static_cast<std::byte*>(block)) {}

  template <class T>
  T* Take(std::size_t count) {
    T* array = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + used_);
    const std::size_t bytes = count * sizeof(T);
    used_ += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    return array;
  }
  std::size_t bytes() const { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

}  // namespace scsa
