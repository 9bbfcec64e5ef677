// SPDX-License-Identifier: Apache-2.0
//
// One line on a terminal that says how far the reading of a prompt is.
#pragma once

#include <cstdint>

namespace scsa::plugin {

// A batch of n_q rows of a prompt reached an attention layer; `visible`: rows of its cache by then. The first layer
// that is seen of a prompt counts for all of them. Thread-safe; nothing happens where stderr is no terminal.
void ShowPromptBatch(int layer, int n_q, std::uint64_t visible);
// A decode step: the prompt, if there was one, is over, and its line too.
void EndPromptProgress();

}  // namespace scsa::plugin
