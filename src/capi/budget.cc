// SPDX-License-Identifier: Apache-2.0
//
// The limit on the memory of plans.
#include <cstdint>
#include <memory>

#include "capi/error.h"
#include "capi/handles.h"
#include "scsa/memory_budget.h"

namespace {

using scsa::Status;
using namespace scsa::capi;

std::shared_ptr<scsa::MemoryBudget> Shared(const scsa_budget* budget) {
  return budget == nullptr ? nullptr : budget->budget;
}

}  // namespace

enum scsa_status scsa_budget_create(uint64_t limit, scsa_budget** budget) {
  return Guard([&]() -> Status {
    if (Status status = NotNull(budget, "budget"); !status.ok()) return status;
    *budget = nullptr;
    auto handle = std::make_unique<scsa_budget>();
    if (Status status = scsa::MemoryBudget::Create(limit, &handle->budget); !status.ok()) return status;
    *budget = handle.release();
    return Status::Ok();
  });
}

void scsa_budget_destroy(scsa_budget* budget) { delete budget; }

enum scsa_status scsa_budget_set_limit(scsa_budget* budget, uint64_t limit) {
  return Guard([&]() -> Status {
    if (Status status = NotNull(budget, "budget"); !status.ok()) return status;
    budget->budget->SetLimit(limit);
    return Status::Ok();
  });
}

uint64_t scsa_budget_used(const scsa_budget* budget) { return budget == nullptr ? 0 : budget->budget->used(); }

enum scsa_status scsa_layer_set_budget(scsa_layer* layer, const scsa_budget* budget) {
  return WithLayer(layer, [&](scsa::Layer& target) { return target.SetBudget(Shared(budget)); });
}

enum scsa_status scsa_state_set_budget(scsa_state* state, const scsa_budget* budget) {
  return WithState(state, [&](scsa::State& target) { return target.SetBudget(Shared(budget)); });
}
