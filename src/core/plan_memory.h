// SPDX-License-Identifier: Apache-2.0
//
// What ties a plan to a MemoryBudget.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "scsa/memory_budget.h"
#include "scsa/status.h"

namespace scsa {

// How useful a block is.
struct BlockUse {
  std::uint64_t last = 0;  // MemoryBudget::Impl::clock() of the last call that used it
  float read = 0.0f;       // share of its rows that such calls read, a moving average
};

// The plan of a layer, as its budget sees it. Called with PlanMemory::mutex() held.
class EvictablePlan {
 public:
  virtual ~EvictablePlan() = default;
  struct Candidate {
    int block = -1;  // -1: there is nothing to take away
    BlockUse use;
  };
  virtual Candidate LeastUseful() const = 0;
  // Frees the memory of the block and returns how much that was. It is not built again before clock() is `not_before`.
  virtual std::uint64_t Evict(int block, std::uint64_t not_before) = 0;
};

// One layer's part of a budget, or of none. The mutex guards the plan: other layers take blocks of it.
class PlanMemory {
 public:
  PlanMemory() = default;
  PlanMemory(const PlanMemory&) = delete;
  PlanMemory& operator=(const PlanMemory&) = delete;
  ~PlanMemory() { Leave(); }

  std::mutex& mutex() const { return mutex_; }
  // Whether it matters which blocks are of use: noting it costs time in every call.
  bool limited() const { return budget_ != nullptr && budget_->limit() != std::numeric_limits<std::uint64_t>::max(); }

  // Throws std::bad_alloc. `plan` holds nothing yet.
  void Join(std::shared_ptr<MemoryBudget> budget, EvictablePlan* plan);
  // Before the plan is destroyed: nothing is taken away from then on.
  void Leave();

  // All of these with the mutex held.
  // Begins a call of the layer: a round of calls of all layers has the same number. Sheds blocks if the limit was
  // lowered.
  void StartCall();
  std::uint64_t now() const { return call_; }
  bool Take(std::uint64_t bytes);  // false: there is no room
  void Give(std::uint64_t bytes);
  void CountRefused(std::uint64_t blocks);
  // Whether a refusal would only be repeated: no memory was given back since, and hardly any time has passed.
  bool RefusalStands() const;
  std::uint64_t evicted_blocks() const { return evicted_blocks_; }
  std::uint64_t refused_blocks() const { return refused_blocks_; }
  void ResetCounters() { evicted_blocks_ = refused_blocks_ = 0; }

 private:
  friend class MemoryBudget::Impl;

  mutable std::mutex mutex_;
  std::shared_ptr<MemoryBudget> budget_;
  EvictablePlan* plan_ = nullptr;
  std::uint64_t call_ = 0;
  bool refused_ = false;
  std::uint64_t refused_at_ = 0;
  std::uint64_t refused_returns_ = 0;
  std::uint64_t evicted_blocks_ = 0;
  std::uint64_t refused_blocks_ = 0;
};

class MemoryBudget::Impl {
 public:
  explicit Impl(std::uint64_t limit) : limit_(limit) {}

 private:
  friend class MemoryBudget;
  friend class PlanMemory;

  bool Take(std::uint64_t bytes, const PlanMemory& by);
  // Frees the least useful block of all layers but those at work; `by` is locked already. False: there is none, or
  // (unless any_use) none of little use.
  bool EvictOne(const PlanMemory* by, bool any_use);
  void Shed(const PlanMemory* by);
  std::uint64_t clock() const { return clock_.load(std::memory_order_relaxed); }

  std::mutex mutex_;
  std::vector<PlanMemory*> members_;
  std::atomic<std::uint64_t> limit_;
  std::atomic<std::uint64_t> used_{0};
  std::atomic<std::uint64_t> clock_{1};
  std::atomic<std::uint64_t> returns_{0};  // how often memory was given back or the limit changed
  std::atomic<std::uint64_t> evicted_{0};
  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace scsa
