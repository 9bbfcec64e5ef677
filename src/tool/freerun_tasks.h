// SPDX-License-Identifier: Apache-2.0
//
// What `scsa eval freerun` asks a model, and how answers are scored: facts hidden in a long text, and loops.
#pragma once

#include <llama.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace scsa::tool {

enum class RetrievalTask { kPasskey, kMultiNeedle, kVariables };
std::string_view TaskName(RetrievalTask task);  // "passkey", "multi-needle", "variables"

// One question about the facts in a haystack.
struct RetrievalQuestion {
  RetrievalTask task = RetrievalTask::kPasskey;
  int haystack = 0;
  double depth = 0.0;                 // of its first fact: 0 is the beginning of the haystack
  std::string question;               // what the user asks
  std::string answer_start;           // words that the answer begins with, put into the model's mouth
  std::vector<std::string> expected;  // numbers that the answer must hold
};

// A sentence with a fact, and where it is hidden.
struct Needle {
  double depth = 0.0;  // 0 ... 1
  std::string text;
};

struct RetrievalSet {
  std::vector<Needle> needles;  // by depth
  std::vector<RetrievalQuestion> questions;
};

// The facts and questions of one haystack: three pass keys (or the like) near depths 0.1, 0.5 and 0.9, three numbers
// that are asked for together, and a chain of three variables. Numbers have five digits and are all different. Depends
// on the arguments alone.
RetrievalSet MakeRetrievalSet(std::uint64_t seed, int haystack);

// Pass keys (or the like) alone, as many as asked for, 1 ... 8, at depths spread evenly. Depends on the arguments
// alone.
RetrievalSet MakePasskeySet(std::uint64_t seed, int keys);

// Puts the needles between the paragraphs of `text` (its lines where no line is blank), each as a paragraph of its own,
// and cuts the text so that there are exactly `length` tokens. ToolError when the needles do not fit, or the text is
// too short.
std::vector<llama_token> BuildHaystack(const std::function<std::vector<llama_token>(std::string_view)>& tokenize,
                                       std::string_view text, std::span<const Needle> needles, int length);

// Which of the numbers stand in the answer, as numbers of their own: "12345" is not in "912345".
std::vector<bool> FoundNumbers(std::string_view answer, std::span<const std::string> expected);

// From so many tokens on, a periodic run is a loop.
inline constexpr int kLoopTokens = 32;

// Length of the longest run that repeats itself: tokens[i] == tokens[i - p] for a period p that the run holds at least
// twice. 0 when nothing repeats.
int LongestPeriodicRun(std::span<const llama_token> tokens);

}  // namespace scsa::tool
