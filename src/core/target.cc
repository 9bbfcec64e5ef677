// SPDX-License-Identifier: Apache-2.0
#include "scsa/target.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdint>
#include <cstdlib>

#include "core/simd.h"
// After simd.h, which configures Highway.
#include "hwy/highway.h"

namespace scsa {
namespace {

constexpr std::size_t kUnset = ~std::size_t{0};

// Set at first use; later only by ForceTarget.
std::atomic<std::size_t> g_dispatch_index{kUnset};

std::vector<std::int64_t> UsableTargets() {
  std::vector<std::int64_t> targets;
  // A lower bit is a better target. The scalar one has the highest bit and runs everywhere.
  std::int64_t mask = (hwy::SupportedTargets() | HWY_SCALAR | HWY_EMU128) & HWY_TARGETS;
  for (; mask != 0; mask &= mask - 1) targets.push_back(mask & -mask);
  return targets;
}

std::size_t IndexOf(std::int64_t target) {
  if constexpr ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0) {
    return 0;  // Highway's tables have one entry then
  } else {
    hwy::ChosenTarget chosen;
    chosen.Update(target);
    return chosen.GetIndex();
  }
}

std::string Upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

// Dispatch index of the target called `name` (the best one when empty).
Status FindTarget(const std::string& name, std::size_t* index) {
  const std::vector<std::int64_t> targets = UsableTargets();
  if (name.empty()) {
    *index = IndexOf(targets.front());
    return Status::Ok();
  }
  std::string choices;
  for (const std::int64_t target : targets) {
    const std::string candidate = hwy::TargetName(target);
    if (candidate == Upper(name)) {
      *index = IndexOf(target);
      return Status::Ok();
    }
    choices += (choices.empty() ? "" : ", ") + candidate;
  }
  return Status::Invalid("SIMD target \"" + name + "\" is not available here; choose one of " + choices);
}

Status TargetOfEnvironment(std::size_t* index) {
  const char* name = std::getenv("SCSA_TARGET");
  Status status = FindTarget(name == nullptr ? "" : name, index);
  if (status.ok()) return status;
  const Status best = FindTarget("", index);
  (void)best;  // there always is a best target
  return {status.code(), "SCSA_TARGET: " + status.message()};
}

// The environment is read once, so that every thread and every call agree.
struct EnvironmentChoice {
  EnvironmentChoice() : status(TargetOfEnvironment(&index)) {}
  std::size_t index = 0;
  Status status;
};

const EnvironmentChoice& FromEnvironment() {
  static const EnvironmentChoice choice;
  return choice;
}

}  // namespace

std::size_t DispatchIndex() {
  std::size_t index = g_dispatch_index.load(std::memory_order_relaxed);
  if (index == kUnset) {
    index = FromEnvironment().index;
    g_dispatch_index.store(index, std::memory_order_relaxed);
  }
  return index;
}

std::vector<std::string> AvailableTargets() {
  std::vector<std::string> names;
  for (const std::int64_t target : UsableTargets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

std::string ActiveTarget() { return ExecutedTarget(); }

Status ForceTarget(const std::string& name) {
  std::size_t index = 0;
  Status status = FindTarget(name, &index);
  if (status.ok()) g_dispatch_index.store(index, std::memory_order_relaxed);
  return status;
}

Status TargetFromEnvironment() { return FromEnvironment().status; }

}  // namespace scsa
