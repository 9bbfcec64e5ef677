// SPDX-License-Identifier: Apache-2.0
//
// Operations on llama.cpp's KV cache as plain data: made from a seed, written and read as text. Each makes sense in
// every state of a cache (numbers are taken modulo what there is), so that a list stays valid when some are left out.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace scsa::plugin_test {

inline constexpr int kSequences = 4;
inline constexpr int kSlots = 3;  // of saved states, apart from the one of the whole context

struct CacheOp {
  enum Kind : std::uint8_t {
    kAppend,         // x tokens of text y to sequence `seq`
    kAppendSeveral,  // in one batch x tokens of text y to each sequence whose bit is set in `seq`
    kRemoveSuffix,   // the last x positions
    kRemoveMiddle,   // y positions from the x-th on
    kRemoveAll,
    kCopy,   // to sequence x; y > 0: the first y positions only, where all sequences share one stream
    kShift,  // as servers do when the context is full: y positions from the x-th on go, later ones move up
    kAdd,    // moves the positions from the x-th on by y
    kKeep,   // removes all other sequences
    kClear,  // x: with data
    kSave,   // into slot x
    kLoad,   // from slot x, into `seq`
    kSaveAll,
    kLoadAll,
    kOff,    // the next x operations run with the plugin in mode off
    kFresh,  // compares with a new context that decodes the same tokens
    kKinds,
  };
  Kind kind = kAppend;
  int seq = 0;
  int x = 0;
  int y = 0;
};

// n operations; the same for the same seed on every machine.
std::vector<CacheOp> RandomOps(std::uint64_t seed, int n);

// One line each: name, seq, x, y.
std::string ToText(const std::vector<CacheOp>& ops);
// Reads such lines up to the end. Throws std::runtime_error on others.
std::vector<CacheOp> FromText(std::istream& text);

}  // namespace scsa::plugin_test
