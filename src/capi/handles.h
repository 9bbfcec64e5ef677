// SPDX-License-Identifier: Apache-2.0
//
// What is behind the opaque types of scsa.h.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "scsa/exact.h"
#include "scsa/layer.h"
#include "scsa/scsa.h"
#include "scsa/state.h"
#include "scsa/taus.h"

struct scsa_workspace {
  scsa::Workspace workspace;
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
