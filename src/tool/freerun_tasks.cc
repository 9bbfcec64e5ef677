// SPDX-License-Identifier: Apache-2.0
#include "freerun_tasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <random>
#include <set>
#include <utility>

#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr std::array kDepths = {0.1, 0.5, 0.9};
constexpr int kParts = 3;  // of a multi-needle question, and variables of a chain

// Facts of one haystack differ in every word that names them, so that they are told apart as facts of a text are.
constexpr std::array kKinds = {"pass key", "phone number", "badge number"};
constexpr std::array kOwners = {"castle", "bakery", "captain", "museum", "harbour", "dentist", "theatre", "stadium"};
// As many as there are owners, so that each hidden number has a kind of its own.
constexpr std::array kPasskeyKinds = {"pass key",      "phone number",   "badge number", "locker code",
                                      "ticket number", "account number", "room number",  "serial number"};
constexpr std::array kCities = {"Paris",  "Oslo",   "Lima",   "Cairo",  "Berlin", "Madrid", "Tokyo",  "Delhi",
                                "Rome",   "Athens", "Dublin", "Vienna", "Prague", "Warsaw", "Lisbon", "Sydney",
                                "Havana", "Boston", "Hanoi",  "Zurich", "Geneva", "Naples", "Dallas", "Denver"};

class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : random_(seed) {}

  std::string Next() {
    for (;;) {
      // The engine's own output: distributions differ between standard libraries.
      const auto number = static_cast<int>(10000 + random_() % 90000);
      if (used_.insert(number).second) return std::to_string(number);
    }
  }
  double Unit() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

 private:
  std::mt19937_64 random_;
  std::set<int> used_;
};

// Hides a number that has a name, and asks for it.
void AddPasskey(std::string_view kind, std::string_view owner, const std::string& key, int haystack, double depth,
                RetrievalSet* set) {
  const std::string name = fmt::format("{} of the {}", kind, owner);
  set->needles.push_back({depth, fmt::format("The {0} is {1}. Remember it: {1} is the {0}.", name, key)});
  RetrievalQuestion& question = set->questions.emplace_back();
  question.task = RetrievalTask::kPasskey;
  question.haystack = haystack;
  question.depth = depth;
  question.question = fmt::format("What is the {}?", name);
  question.answer_start = fmt::format("The {} is", name);
  question.expected = {key};
}

}  // namespace

RetrievalSet MakePasskeySet(std::uint64_t seed, int keys) {
  RetrievalSet set;
  Numbers numbers(seed);
  for (int i = 0; i < keys; ++i) {
    const auto at = static_cast<std::size_t>(i);
    AddPasskey(kPasskeyKinds[at % kPasskeyKinds.size()], kOwners[at % kOwners.size()], numbers.Next(), 0,
               (i + 0.5) / keys, &set);
  }
  return set;
}

std::string_view TaskName(RetrievalTask task) {
  constexpr std::array<std::string_view, 3> kNames = {"passkey", "multi-needle", "variables"};
  return kNames[static_cast<std::size_t>(task)];
}

RetrievalSet MakeRetrievalSet(std::uint64_t seed, int haystack) {
  RetrievalSet set;
  const auto h = static_cast<std::size_t>(haystack);
  Numbers numbers(seed * 0x9E3779B97F4A7C15 + h);
  const auto near = [&](double depth) { return depth + 0.06 * (numbers.Unit() - 0.5); };
  const auto question = [&](RetrievalTask task, double depth) -> RetrievalQuestion& {
    RetrievalQuestion& added = set.questions.emplace_back();
    added.task = task;
    added.haystack = haystack;
    added.depth = depth;
    return added;
  };
  for (std::size_t i = 0; i < kDepths.size(); ++i) {
    const std::string key = numbers.Next();
    AddPasskey(kKinds[(h + i) % kKinds.size()], kOwners[(kDepths.size() * h + i) % kOwners.size()], key, haystack,
               near(kDepths[i]), &set);
  }

  std::array<std::string_view, kParts> cities;
  RetrievalQuestion& multi = question(RetrievalTask::kMultiNeedle, near(0.2));
  for (std::size_t i = 0; i < kParts; ++i) {
    cities[i] = kCities[(kParts * h + i) % kCities.size()];
    multi.expected.push_back(numbers.Next());
    set.needles.push_back({i == 0 ? multi.depth : near(0.2 + 0.3 * static_cast<double>(i)),
                           fmt::format("The lucky number of {} is {}.", cities[i], multi.expected.back())});
  }
  multi.question = fmt::format("What are the lucky numbers of {}, {} and {}?", cities[0], cities[1], cities[2]);
  multi.answer_start = fmt::format("The lucky number of {} is", cities[0]);

  const char letter = static_cast<char>('A' + haystack % 26);
  RetrievalQuestion& chain = question(RetrievalTask::kVariables, near(0.3));
  chain.expected = {numbers.Next()};
  set.needles.push_back({chain.depth, fmt::format("The variable {}1 is assigned {}.", letter, chain.expected.front())});
  for (int i = 1; i < kParts; ++i) {
    set.needles.push_back(
        {near(0.3 + 0.2 * i),
         fmt::format("The variable {0}{1} is assigned the value of the variable {0}{2}.", letter, i + 1, i)});
  }
  chain.question = fmt::format("What is the value of the variable {}{}?", letter, kParts);
  chain.answer_start = fmt::format("The value of the variable {}{} is", letter, kParts);
  std::stable_sort(set.needles.begin(), set.needles.end(),
                   [](const Needle& a, const Needle& b) { return a.depth < b.depth; });
  return set;
}

std::vector<llama_token> BuildHaystack(const std::function<std::vector<llama_token>(std::string_view)>& tokenize,
                                       std::string_view text, std::span<const Needle> needles, int length) {
  std::vector<std::vector<llama_token>> facts;
  std::size_t fact_tokens = 0;
  for (const Needle& needle : needles) {
    facts.push_back(tokenize(needle.text + "\n\n"));
    fact_tokens += facts.back().size();
  }
  const auto total = static_cast<std::size_t>(length);
  // More facts than text is no haystack.
  if (2 * fact_tokens > total) {
    throw ToolError(
        fmt::format("the facts to find take {} tokens, too many for a text of {}: use fewer --seeds or a "
                    "longer context",
                    fact_tokens, total));
  }
  const std::size_t text_tokens = total - fact_tokens;
  // A text without paragraphs has lines.
  const std::string_view separator = text.find("\n\n") == std::string_view::npos ? "\n" : "\n\n";
  std::vector<llama_token> tokens;
  std::size_t next = 0;
  std::size_t used = 0;  // of the text
  for (std::size_t begin = 0; begin < text.size() && used < text_tokens;) {
    const auto due = [&] {
      return next < needles.size() &&
             static_cast<double>(used) >= needles[next].depth * static_cast<double>(text_tokens);
    };
    for (; due(); ++next) tokens.insert(tokens.end(), facts[next].begin(), facts[next].end());
    const std::size_t gap = text.find(separator, begin);
    const std::size_t end = gap == std::string_view::npos ? text.size() : gap + separator.size();
    std::vector<llama_token> paragraph = tokenize(text.substr(begin, end - begin));
    paragraph.resize(std::min(paragraph.size(), text_tokens - used));
    tokens.insert(tokens.end(), paragraph.begin(), paragraph.end());
    used += paragraph.size();
    begin = end;
  }
  // What a long last paragraph left over comes before its end would.
  for (; next < needles.size(); ++next) tokens.insert(tokens.end(), facts[next].begin(), facts[next].end());
  if (used < text_tokens) {
    throw ToolError(fmt::format("the text has {} tokens, {} are needed: use a longer text or a shorter context", used,
                                text_tokens));
  }
  return tokens;
}

std::vector<bool> FoundNumbers(std::string_view answer, std::span<const std::string> expected) {
  std::set<std::string_view> numbers;
  const auto is_digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  for (auto begin = answer.begin(); begin != answer.end();) {
    begin = std::find_if(begin, answer.end(), is_digit);
    const auto end = std::find_if_not(begin, answer.end(), is_digit);
    numbers.insert(std::string_view(begin, end));
    begin = end;
  }
  std::vector<bool> found;
  for (const std::string& number : expected) found.push_back(numbers.contains(number));
  return found;
}

int LongestPeriodicRun(std::span<const llama_token> tokens) {
  const auto n = static_cast<int>(tokens.size());
  int longest = 0;
  for (int period = 1; 2 * period <= n; ++period) {
    int matches = 0;  // in a row, at a distance of one period
    for (int i = period; i < n; ++i) {
      matches = tokens[i] == tokens[i - period] ? matches + 1 : 0;
      if (matches >= period) longest = std::max(longest, matches + period);
    }
  }
  return longest;
}

}  // namespace scsa::tool
