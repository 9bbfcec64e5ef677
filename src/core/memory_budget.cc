// SPDX-License-Identifier: Apache-2.0
#include "scsa/memory_budget.h"

#include <algorithm>
#include <new>
#include <tuple>
#include <utility>

#include "core/plan_memory.h"

namespace scsa {
namespace {

// Calls of a layer after which a block that none of them used counts as idle. Building a block takes as long as some 70
// exact reads of it, so that sequences that take turns spend most of their time on something else.
constexpr std::uint64_t kIdleCalls = 256;
// A block of which more is read saves too little, and is not built again for a while.
constexpr float kMostlyRead = 0.75f;
constexpr std::uint64_t kPauseCalls = 4096;
// Looking for room again costs a walk over all blocks.
constexpr std::uint64_t kRetryCalls = 16;

}  // namespace

MemoryBudget::MemoryBudget(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MemoryBudget::~MemoryBudget() = default;

Status MemoryBudget::Create(std::uint64_t limit, std::shared_ptr<MemoryBudget>* budget) {
  try {
    budget->reset(new MemoryBudget(std::make_unique<Impl>(limit)));
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory("no memory for a memory budget");
  }
}

std::uint64_t MemoryBudget::limit() const { return impl_->limit_.load(std::memory_order_relaxed); }
std::uint64_t MemoryBudget::used() const { return impl_->used_.load(std::memory_order_relaxed); }
std::uint64_t MemoryBudget::evicted_blocks() const { return impl_->evicted_.load(std::memory_order_relaxed); }
std::uint64_t MemoryBudget::refused_blocks() const { return impl_->refused_.load(std::memory_order_relaxed); }

void MemoryBudget::SetLimit(std::uint64_t limit) {
  const std::lock_guard lock(impl_->mutex_);
  impl_->limit_.store(limit, std::memory_order_relaxed);
  impl_->returns_.fetch_add(1, std::memory_order_relaxed);
  impl_->Shed(nullptr);
}

void MemoryBudget::Impl::Shed(const PlanMemory* by) {
  while (used_.load(std::memory_order_relaxed) > limit_.load(std::memory_order_relaxed) && EvictOne(by, true)) {
  }
}

bool MemoryBudget::Impl::Take(std::uint64_t bytes, const PlanMemory& by) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t limit = limit_.load(std::memory_order_relaxed);
  const auto fits = [&] { return bytes <= limit && used_.load(std::memory_order_relaxed) <= limit - bytes; };
  while (!fits()) {
    if (bytes > limit || !EvictOne(&by, false)) return false;
  }
  used_.fetch_add(bytes, std::memory_order_relaxed);
  return true;
}

bool MemoryBudget::Impl::EvictOne(const PlanMemory* by, bool any_use) {
  const std::uint64_t now = clock();
  const auto idle = [now](const BlockUse& use) { return now - std::min(now, use.last) > kIdleCalls; };
  // The larger, the less useful.
  const auto rank = [&](const BlockUse& use) {
    return idle(use) ? std::tuple(1, now - use.last, 0.0f) : std::tuple(0, std::uint64_t{0}, use.read);
  };
  PlanMemory* owner = nullptr;
  EvictablePlan::Candidate least;
  std::unique_lock<std::mutex> owner_lock;
  for (PlanMemory* member : members_) {
    std::unique_lock<std::mutex> lock(member->mutex_, std::defer_lock);
    if (member != by && !lock.try_lock()) continue;
    const EvictablePlan::Candidate candidate = member->plan_->LeastUseful();
    if (candidate.block < 0 || (owner != nullptr && rank(candidate.use) <= rank(least.use))) continue;
    owner = member;
    least = candidate;
    owner_lock = std::move(lock);
  }
  if (owner == nullptr) return false;
  const bool mostly_read = !idle(least.use) && least.use.read > kMostlyRead;
  if (!any_use && !idle(least.use) && !mostly_read) return false;
  used_.fetch_sub(owner->plan_->Evict(least.block, mostly_read ? now + kPauseCalls : 0), std::memory_order_relaxed);
  ++owner->evicted_blocks_;
  evicted_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void PlanMemory::Join(std::shared_ptr<MemoryBudget> budget, EvictablePlan* plan) {
  Leave();
  budget_ = nullptr;
  if (budget == nullptr) return;
  MemoryBudget::Impl& impl = budget->impl();
  const std::lock_guard lock(impl.mutex_);
  impl.members_.push_back(this);
  plan_ = plan;
  budget_ = std::move(budget);
}

void PlanMemory::Leave() {
  if (budget_ == nullptr) return;
  MemoryBudget::Impl& impl = budget_->impl();
  const std::lock_guard lock(impl.mutex_);
  std::erase(impl.members_, this);
}

void PlanMemory::StartCall() {
  if (budget_ == nullptr) return;
  MemoryBudget::Impl& impl = budget_->impl();
  std::uint64_t clock = impl.clock();
  // Its second call since the clock advanced: a new round of calls begins.
  if (clock == call_) {
    impl.clock_.compare_exchange_strong(clock, clock + 1, std::memory_order_relaxed);
    clock = impl.clock();
  }
  call_ = clock;
  if (impl.used_.load(std::memory_order_relaxed) <= impl.limit_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(impl.mutex_);
  impl.Shed(this);
}

bool PlanMemory::Take(std::uint64_t bytes) {
  if (budget_ == nullptr) return true;
  MemoryBudget::Impl& impl = budget_->impl();
  const std::uint64_t returns = impl.returns_.load(std::memory_order_relaxed);
  refused_ = !impl.Take(bytes, *this);
  if (refused_) {
    refused_at_ = impl.clock();
    refused_returns_ = returns;
  }
  return !refused_;
}

void PlanMemory::Give(std::uint64_t bytes) {
  if (budget_ == nullptr || bytes == 0) return;
  MemoryBudget::Impl& impl = budget_->impl();
  impl.used_.fetch_sub(bytes, std::memory_order_relaxed);
  impl.returns_.fetch_add(1, std::memory_order_relaxed);
}

void PlanMemory::CountRefused(std::uint64_t blocks) {
  if (budget_ == nullptr) return;
  refused_blocks_ += blocks;
  budget_->impl().refused_.fetch_add(blocks, std::memory_order_relaxed);
}

bool PlanMemory::RefusalStands() const {
  if (!refused_) return false;
  const MemoryBudget::Impl& impl = budget_->impl();
  return impl.returns_.load(std::memory_order_relaxed) == refused_returns_ && impl.clock() < refused_at_ + kRetryCalls;
}

}  // namespace scsa
