// SPDX-License-Identifier: Apache-2.0
//
// What is behind the opaque types of scsa.h.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "capi/error.h"
#include "scsa/exact.h"
#include "scsa/layer.h"
#include "scsa/memory_budget.h"
#include "scsa/scsa.h"
#include "scsa/state.h"
#include "scsa/taus.h"

struct scsa_workspace {
  scsa::Workspace workspace;
};

struct scsa_budget {
  std::shared_ptr<scsa::MemoryBudget> budget;
};

struct scsa_layer {
  scsa::Layer* layer = nullptr;
  std::unique_ptr<scsa::Layer> owned;  // empty for a layer of a state
};

struct scsa_state {
  std::unique_ptr<scsa::State> state;
  std::vector<scsa_layer> layers;
};

struct scsa_taus {
  scsa::TausFile file;
  std::unordered_map<int, std::size_t> places;  // of a head's entry in file.taus, by layer * kMaxQHeads + head
};

namespace scsa::capi {

// Run `body` with the C++ object behind a handle.
template <class Handle, class Body>
scsa_status WithLayer(Handle* layer, Body&& body) noexcept {
  return Guard([&]() -> Status {
    if (Status status = NotNull(layer, "layer"); !status.ok()) return status;
    return body(*layer->layer);
  });
}

template <class Handle, class Body>
scsa_status WithState(Handle* state, Body&& body) noexcept {
  return Guard([&]() -> Status {
    if (Status status = NotNull(state, "state"); !status.ok()) return status;
    return body(*state->state);
  });
}

}  // namespace scsa::capi
