// SPDX-License-Identifier: Apache-2.0
#include "tests/plugin/cache_ops.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <sstream>
#include <stdexcept>

namespace scsa::plugin_test {
namespace {

constexpr int kFreshInterval = 50;

struct KindInfo {
  const char* name;
  int weight;
};
// Decoding single tokens is what finds a wrong plan; everything else prepares the ground. The rare ones change every
// cell, which costs a new plan each time.
constexpr KindInfo kInfo[] = {
    {"append", 620},    {"append_several", 80}, {"remove_suffix", 70}, {"remove_middle", 30},
    {"remove_all", 14}, {"copy", 35},           {"shift", 14},         {"add", 10},
    {"keep", 8},        {"clear", 8},           {"save", 30},          {"load", 30},
    {"save_all", 8},    {"load_all", 8},        {"off", 12},           {"fresh", 0},
};
static_assert(std::size(kInfo) == CacheOp::kKinds);

// Not std::uniform_int_distribution, whose numbers depend on the standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  int Below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  bool Chance(int percent) { return Below(100) < percent; }

 private:
  std::mt19937_64 engine_;
};

int AppendSize(Random& random) {
  const int kind = random.Below(100);
  if (kind < 84) return 1;
  if (kind < 96) return 2 + random.Below(15);  // a batch that the plugin takes
  return 17 + random.Below(284);               // a prefill, which ggml keeps
}

CacheOp RandomOp(Random& random) {
  int total = 0;
  for (const KindInfo& info : kInfo) total += info.weight;
  int at = random.Below(total);
  int kind = 0;
  while (at >= kInfo[kind].weight) at -= kInfo[kind++].weight;
  CacheOp op;
  op.kind = static_cast<CacheOp::Kind>(kind);
  // Mostly one sequence, so that it becomes long and its cells lie together.
  op.seq = random.Chance(70) ? 0 : random.Below(kSequences);
  switch (op.kind) {
    case CacheOp::kAppend:
      op.x = AppendSize(random);
      op.y = random.Below(1000);
      break;
    case CacheOp::kAppendSeveral:
      op.seq = 1 + random.Below((1 << kSequences) - 1);
      op.x = random.Chance(80) ? 1 : 1 + random.Below(4);
      op.y = random.Below(1000);
      break;
    case CacheOp::kRemoveSuffix:
      op.x = random.Chance(70) ? 1 + random.Below(16) : 1 + random.Below(400);
      break;
    case CacheOp::kRemoveMiddle:
    case CacheOp::kShift:
      op.x = random.Below(2048);
      op.y = random.Chance(70) ? 1 + random.Below(16) : 1 + random.Below(200);
      break;
    case CacheOp::kCopy:
      op.x = random.Below(kSequences);
      op.y = random.Chance(50) ? 0 : 1 + random.Below(2048);
      break;
    case CacheOp::kAdd:
      op.x = random.Below(2048);
      op.y = random.Below(17) - 8;
      break;
    case CacheOp::kClear:
      op.x = random.Below(2);
      break;
    case CacheOp::kSave:
    case CacheOp::kLoad:
      op.x = random.Below(kSlots);
      break;
    case CacheOp::kOff:
      op.x = 1 + random.Below(6);
      break;
    default:
      break;
  }
  return op;
}

}  // namespace

std::vector<CacheOp> RandomOps(std::uint64_t seed, int n) {
  Random random(seed);
  std::vector<CacheOp> ops;
  // Something to work on: cells that lie together, more than the plugin leaves to ggml.
  const auto prefill = [&](int seq) {
    ops.push_back({CacheOp::kAppend, seq, 270, random.Below(1000)});
    ops.push_back({CacheOp::kAppend, seq, 250 + random.Below(200), random.Below(1000)});
  };
  prefill(0);
  while (static_cast<int>(ops.size()) < n) {
    const CacheOp op = RandomOp(random);
    ops.push_back(op);
    if (op.kind == CacheOp::kClear || op.kind == CacheOp::kRemoveAll) prefill(op.seq);
    if (ops.size() % kFreshInterval == 0)
      ops.push_back({CacheOp::kFresh, random.Below(kSequences), 0, random.Below(1000)});
  }
  return ops;
}

std::string ToText(const std::vector<CacheOp>& ops) {
  std::ostringstream text;
  for (const CacheOp& op : ops) text << kInfo[op.kind].name << ' ' << op.seq << ' ' << op.x << ' ' << op.y << '\n';
  return text.str();
}

std::vector<CacheOp> FromText(std::istream& text) {
  std::vector<CacheOp> ops;
  std::string name;
  while (text >> name) {
    const auto* info =
        std::find_if(std::begin(kInfo), std::end(kInfo), [&](const KindInfo& i) { return name == i.name; });
    CacheOp op;
    if (info == std::end(kInfo) || !(text >> op.seq >> op.x >> op.y)) {
      throw std::runtime_error("\"" + name + "\": expected an operation, a sequence and two numbers");
    }
    op.kind = static_cast<CacheOp::Kind>(info - std::begin(kInfo));
    ops.push_back(op);
  }
  return ops;
}

}  // namespace scsa::plugin_test
