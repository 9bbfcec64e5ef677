// SPDX-License-Identifier: Apache-2.0
#include "tests/plugin/cache_lockstep.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "tests/plugin/qwen3_model.h"

namespace scsa::plugin_test {
namespace {

constexpr int kLayers = 2;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kCells = 2048;           // of all sequences together, or
constexpr int kCellsPerStream = 1024;  // of each
constexpr int kMaxBatch = 512;

// What separates the contexts, on logits of attention whose standard deviation is about 2.3 by construction of the
// model:
// - ggml rounds queries to f16. Each of the 32 products in a logit is off by up to 2^-11 of itself, all independently:
//   2^-11 / sqrt(3) * 2.3 = 6.5e-4 of standard deviation, and an output moves by at most as much, relative to its
//   values.
// - So the inputs of layer 1 differ by that, and so do its keys and values before they are rounded. After rounding to
//   bf16, whose step is 2^-8 ... 2^-7, an entry differs by a whole step with probability 6.5e-4 / step: sqrt(6.5e-4 *
//   2^-7) = 2e-3 of standard deviation, where a single cell has all the mass; less where several share it.
// - f32 sums in another order: 2^-20.
// Nothing accumulates: cells of layer 0 depend on tokens and positions alone, layer 1 is the last one. The square sum
// of two layers is 2.3e-3 in the worst kind of step; a step of bf16, 2^-7, is 3.4 times that. A wrong or missing cell
// with a tenth of the mass in one head of four moves the output by at least 1 / 40.
constexpr double kTolerance = 0x1p-7;
// Preset seed reads q8_0 copies: entries are off by up to half of 1 / 127 of the largest of 32, which is 2.1 standard
// deviations. That is 4.8e-3 of values, 2.3 times as much of logits, and with the roundings to bf16 that follow from it
// 1.5e-2 in the worst kind of step. An outdated cluster has 128 rows of other texts.
constexpr double kPackedTolerance = 0x1p-5;

ContextOptions OptionsOf(bool unified) {
  ContextOptions o;
  // ggml sums the values of a bf16 cache in f32.
  o.k_type = GGML_TYPE_F16;
  o.v_type = GGML_TYPE_BF16;
  o.flash_attn = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  o.n_seq = kSequences;
  o.unified = unified;
  o.n_ctx = unified ? kCells : kCellsPerStream * kSequences;
  o.threads = 1;  // steps of a few 100 microseconds
  return o;
}

// A file with the same threshold for all heads: query heads of preset seed, KV heads of preset fast.
std::string TausFile(const char* name, Preset preset, const char* tau) {
  const std::string path = testing::TempDir() + "/scsa_cache_fuzz_" + std::to_string(getpid()) + name + ".json";
  const int heads = preset == Preset::kSeed ? kHeads : kKvHeads;
  std::ofstream file(path);
  for (int l = 0; l < kLayers; ++l) {
    for (int h = 0; h < heads; ++h) file << (l + h == 0 ? "{" : ", ") << '"' << l << ':' << h << "\": " << tau;
  }
  file << "}\n";
  return path;
}

int Modulo(int x, int n) { return (x % n + n) % n; }

llama_token TokenOf(int text, int i, int n_vocab) {
  const auto x = (static_cast<std::uint32_t>(text) * 7919u + static_cast<std::uint32_t>(i)) * 2654435761u;
  return static_cast<llama_token>((x >> 16) % static_cast<std::uint32_t>(n_vocab));
}

// A batch of single tokens; status of llama_decode.
template <typename Tokens>
int DecodeBatch(llama_context* context, const Tokens& tokens) {
  llama_batch batch = llama_batch_init(static_cast<std::int32_t>(tokens.size()), 0, 1);
  batch.n_tokens = static_cast<std::int32_t>(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    batch.token[i] = tokens[i].token;
    batch.pos[i] = tokens[i].pos;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = tokens[i].seq;
    batch.logits[i] = tokens[i].output;
  }
  const int status = llama_decode(context, batch);
  llama_batch_free(batch);
  return status;
}

}  // namespace

void WriteFuzzModel(const std::string& path) {
  Qwen3Size size;
  size.layers = kLayers;
  size.embd = 64;
  size.ff = 64;
  size.heads = kHeads;
  size.kv_heads = kKvHeads;
  size.head_dim = 32;
  size.token_sigma = 0.1f;
  size.vocab = 64;
  WriteQwen3(path, size);
}

CacheLockstep::CacheLockstep(llama_model* model, bool unified, Preset preset)
    : model_(model), unified_(unified), preset_(preset), n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  plugin.Set("preset", PresetName(preset));
  plugin.Set("crossover", "0");
  const char* const names[kSubjects] = {"without the plugin", "exact", "all clusters opened", "all clusters closed"};
  const char* const modes[kSubjects] = {"off", "exact", "auto", "auto"};
  for (int i = 0; i < Count(); ++i) {
    Subject& subject = subjects_[i];
    subject.name = names[i];
    subject.mode = modes[i];
    if (i == kOpened) subject.taus = TausFile("_opened", preset, "0");
    if (i == kClosed) subject.taus = TausFile("_closed", preset, "1");
    Use(subject);
    subject.context = MakeLlama(model, OptionsOf(unified));
  }
  for (Sequence& s : sequences_) s.group = next_group_++;
  rows_read_ = plugin.Stats().rows_read;
  plugin.SetObserver(Observe, this);
}

CacheLockstep::~CacheLockstep() {
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  plugin.SetObserver(nullptr, nullptr);
  plugin.Set("mode", "auto");
  plugin.Set("preset", "fast");
  plugin.Set("taus", "");
  plugin.Set("crossover", "4096");
  for (const Subject& subject : subjects_) {
    if (!subject.taus.empty()) std::remove(subject.taus.c_str());
  }
}

void CacheLockstep::Observe(void* user, const scsa_attention_call* call) {
  auto& self = *static_cast<CacheLockstep*>(user);
  const std::uint64_t rows_read = LoadedPlugin::Get().Stats().rows_read;
  if (self.active_ == kClosed && self.observed_.empty()) {
    self.observed_ = self.oracle_.Check(*call, rows_read - self.rows_read_);
  }
  self.rows_read_ = rows_read;
}

std::string CacheLockstep::Differs(int subject, const std::vector<float>& logits, const std::vector<float>& reference,
                                   const char* from, double* worst) const {
  const double difference = RelativeDifference(logits, reference);
  if (difference <= (subject == kOpened && preset_ == Preset::kSeed ? kPackedTolerance : kTolerance)) {
    *worst = std::max(*worst, difference);
    return {};
  }
  return std::string("logits of the context \"")
      .append(subjects_[subject].name)
      .append("\" differ from those of \"")
      .append(from)
      .append("\" by ")
      .append(std::to_string(difference));
}

void CacheLockstep::Use(const Subject& subject) const {
  const LoadedPlugin& plugin = LoadedPlugin::Get();
  plugin.Set("mode", off_ > 0 ? "off" : subject.mode);
  if (!subject.taus.empty()) plugin.Set("taus", subject.taus);
}

template <typename F>
void CacheLockstep::ForAll(const F& f) {
  for (Subject& subject : Subjects()) f(subject.context.get(), subject);
}

std::string CacheLockstep::DecodeAll(const std::vector<Token>& tokens, bool* decoded) {
  int statuses[kSubjects];
  for (int i = 0; i < Count(); ++i) {
    active_ = i;
    Use(subjects_[i]);
    llama_context* context = subjects_[i].context.get();
    statuses[i] = DecodeBatch(context, tokens);
    logits_[i].clear();
    if (statuses[i] != 0) continue;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      if (!tokens[t].output) continue;
      const float* logits = llama_get_logits_ith(context, static_cast<std::int32_t>(t));
      logits_[i].emplace_back(logits, logits + n_vocab_);
    }
  }
  pending_ = false;
  for (int i = 0; i < Count(); ++i) {
    // 1: no room for the batch.
    if (statuses[i] == statuses[0] && (statuses[i] == 0 || statuses[i] == 1)) continue;
    return std::string("decoding ended with ")
        .append(std::to_string(statuses[i]))
        .append(" in the context \"")
        .append(subjects_[i].name)
        .append("\" and with ")
        .append(std::to_string(statuses[0]))
        .append(" in the first one");
  }
  *decoded = statuses[0] == 0;
  if (!observed_.empty()) return observed_;
  for (std::size_t t = 0; t < logits_[kWithout].size(); ++t) {
    const std::vector<float>& reference = logits_[kWithout][t];
    for (const auto& [i, worst] : {std::pair{kExact, &errors_.exact}, std::pair{kOpened, &errors_.opened}}) {
      const std::string error = Differs(i, logits_[i][t], reference, subjects_[kWithout].name, worst);
      if (!error.empty()) return error;
    }
  }
  return {};
}

std::string CacheLockstep::Append(const std::vector<int>& seqs, int n, int text) {
  std::vector<Token> tokens;
  for (int seq : seqs) {
    for (int i = 0; i < n; ++i) {
      tokens.push_back({TokenOf(text + seq, i, n_vocab_), Last(seq) + 1 + i, seq, i + 1 == n});
    }
  }
  bool decoded = false;
  const std::string error = DecodeAll(tokens, &decoded);
  if (!error.empty() || !decoded) return error;
  for (const Token& t : tokens) sequences_[static_cast<std::size_t>(t.seq)].tokens.push_back(t.token);
  return {};
}

// The longest sequence that some text still describes, from `seq` on among equals, and the same text from scratch.
std::string CacheLockstep::Fresh(int seq, int text) {
  int chosen = -1;
  for (int i = 0; i < kSequences; ++i) {
    const int s = (seq + i) % kSequences;
    const Sequence& sequence = sequences_[static_cast<std::size_t>(s)];
    if (!sequence.pure || sequence.tokens.empty()) continue;
    if (chosen < 0 || sequence.tokens.size() > sequences_[static_cast<std::size_t>(chosen)].tokens.size()) chosen = s;
  }
  if (chosen < 0) return {};
  const std::vector<llama_token>& tokens = sequences_[static_cast<std::size_t>(chosen)].tokens;
  const std::size_t before = tokens.size();
  std::string error = Append({chosen}, 1, text);
  if (!error.empty() || tokens.size() == before) return error;
  active_ = kWithout;
  Use(subjects_[kWithout]);
  ContextOptions options = OptionsOf(true);
  options.n_seq = 1;
  const LlamaContextPtr context = MakeLlama(model_, options);
  const std::vector<float> fresh = Decode(context.get(), tokens, 0);
  for (int i : {kWithout, kExact, kOpened}) {
    error = Differs(i, logits_[i][0], fresh, "a fresh one", &errors_.fresh);
    if (!error.empty()) return error;
  }
  ++fresh_comparisons_;
  return {};
}

void CacheLockstep::Remove(int seq, llama_pos begin, llama_pos end) {
  Sequence& s = sequences_[static_cast<std::size_t>(seq)];
  const bool suffix = end > Last(seq);
  ForAll([&](llama_context* c, Subject&) { llama_memory_seq_rm(llama_get_memory(c), seq, begin, end); });
  if (!s.pure) return;
  if (suffix) {
    s.tokens.resize(static_cast<std::size_t>(begin));
  } else {
    s.pure = false;
  }
}

void CacheLockstep::Copy(int from, int to, int n) {
  const bool part = unified_ && n > 0;
  if (from == to || Last(from) < 0) return;
  const llama_pos end = part ? First(from) + n : -1;
  const bool was_empty = Last(to) < 0;
  ForAll([&](llama_context* c, Subject&) { llama_memory_seq_cp(llama_get_memory(c), from, to, -1, end); });
  const Sequence& source = sequences_[static_cast<std::size_t>(from)];
  Sequence& target = sequences_[static_cast<std::size_t>(to)];
  if (!unified_) {
    // The cells are copied, in place of whatever was there.
    target.tokens = source.tokens;
    target.pure = source.pure;
    pending_ = true;
    return;
  }
  target.pure = source.pure && was_empty;
  if (target.pure) {
    target.tokens = source.tokens;
    if (part) target.tokens.resize(std::min(target.tokens.size(), static_cast<std::size_t>(n)));
  }
  const int old_group = target.group;
  for (Sequence& s : sequences_) {
    if (s.group == old_group) s.group = source.group;
  }
}

void CacheLockstep::Spoil(int seq) {
  const int group = sequences_[static_cast<std::size_t>(seq)].group;
  for (Sequence& s : sequences_) s.pure = s.pure && s.group != group;
}

void CacheLockstep::Add(int seq, llama_pos begin, int by) {
  ForAll([&](llama_context* c, Subject&) { llama_memory_seq_add(llama_get_memory(c), seq, begin, -1, by); });
  Spoil(seq);
  pending_ = true;
}

void CacheLockstep::Save(int seq, int slot) {
  ForAll([&](llama_context* c, Subject& subject) {
    std::vector<std::uint8_t>& state = subject.slots[static_cast<std::size_t>(slot)];
    state.resize(llama_state_seq_get_size(c, seq));
    state.resize(llama_state_seq_get_data(c, state.data(), state.size(), seq));
  });
  Sequence& saved = saved_[static_cast<std::size_t>(slot)];
  saved = sequences_[static_cast<std::size_t>(seq)];
  saved.pure = saved.pure && !pending_;
}

std::string CacheLockstep::Load(int seq, int slot) {
  if (subjects_[kWithout].slots[static_cast<std::size_t>(slot)].empty()) return {};
  std::size_t read[kSubjects];
  for (int i = 0; i < Count(); ++i) {
    const Subject& subject = subjects_[i];
    const std::vector<std::uint8_t>& state = subject.slots[static_cast<std::size_t>(slot)];
    read[i] = llama_state_seq_set_data(subject.context.get(), state.data(), state.size(), seq);
    if (read[i] != read[0]) return std::string("a state was read in one context only, not so: ") + subject.name;
  }
  Sequence& s = sequences_[static_cast<std::size_t>(seq)];
  s = saved_[static_cast<std::size_t>(slot)];
  s.group = next_group_++;
  // What was to be moved at the next decode is now moved over the new cells.
  if (pending_) {
    for (Sequence& any : sequences_) any.pure = false;
  }
  return {};
}

void CacheLockstep::SaveAll() {
  ForAll([&](llama_context* c, Subject& subject) {
    subject.whole.resize(llama_state_get_size(c));
    subject.whole.resize(llama_state_get_data(c, subject.whole.data(), subject.whole.size()));
  });
  saved_all_ = sequences_;
  for (Sequence& s : saved_all_) s.pure = s.pure && !pending_;
}

std::string CacheLockstep::LoadAll() {
  if (subjects_[kWithout].whole.empty()) return {};
  for (Subject& subject : Subjects()) {
    if (llama_state_set_data(subject.context.get(), subject.whole.data(), subject.whole.size()) == 0) {
      return std::string("the state was not read in the context ") + subject.name;
    }
  }
  sequences_ = saved_all_;
  if (pending_) {
    for (Sequence& s : sequences_) s.pure = false;
  }
  return {};
}

// All contexts agree on which positions each sequence has, and so does the text that it should consist of.
std::string CacheLockstep::CheckPositions() {
  for (int seq = 0; seq < kSequences; ++seq) {
    const llama_pos first = First(seq);
    const llama_pos last = Last(seq);
    for (int i = 1; i < Count(); ++i) {
      if (llama_memory_seq_pos_min(Memory(i), seq) == first && llama_memory_seq_pos_max(Memory(i), seq) == last)
        continue;
      return std::string("sequence ")
          .append(std::to_string(seq))
          .append(" has other positions in the context \"")
          .append(subjects_[i].name)
          .append("\"");
    }
    Sequence& s = sequences_[static_cast<std::size_t>(seq)];
    if (last < 0) {
      s = {};
      s.group = next_group_++;
    } else if (s.pure && (first != 0 || last + 1 != static_cast<llama_pos>(s.tokens.size()))) {
      return std::string("sequence ")
          .append(std::to_string(seq))
          .append(" reaches from ")
          .append(std::to_string(first))
          .append(" to ")
          .append(std::to_string(last))
          .append(", should have ")
          .append(std::to_string(s.tokens.size()))
          .append(" tokens");
    }
  }
  return {};
}

std::string CacheLockstep::Apply(const CacheOp& op) {
  // Any numbers make sense: a list may have been written by hand.
  const int seq = Modulo(op.seq, kSequences);
  const int other = Modulo(op.x, kSequences);
  const int slot = Modulo(op.x, kSlots);
  const int n = std::clamp(op.x, 1, kMaxBatch);
  const int count = std::clamp(op.y, 1, kCells);
  const llama_pos first = First(seq);
  const llama_pos last = Last(seq);
  const bool empty = last < 0;
  const llama_pos from = empty ? 0 : first + Modulo(op.x, last - first + 1);
  std::string error;
  switch (op.kind) {
    case CacheOp::kAppend:
      error = Append({seq}, n, op.y);
      break;
    case CacheOp::kAppendSeveral: {
      std::vector<int> seqs;
      for (int s = 0; s < kSequences; ++s) {
        if ((op.seq >> s & 1) != 0) seqs.push_back(s);
      }
      if (!seqs.empty()) error = Append(seqs, std::min(n, kMaxBatch / kSequences), op.y);
      break;
    }
    case CacheOp::kRemoveSuffix:
      if (!empty) Remove(seq, std::max(first, last + 1 - n), last + 1);
      break;
    case CacheOp::kRemoveMiddle:
      if (!empty) Remove(seq, from, from + count);
      break;
    case CacheOp::kRemoveAll:
      if (!empty) Remove(seq, first, last + 1);
      break;
    case CacheOp::kCopy:
      Copy(seq, other, std::min(op.y, kCells));
      break;
    case CacheOp::kShift:
      if (!empty) {
        Remove(seq, from, from + count);
        Add(seq, from + count, -count);
      }
      break;
    case CacheOp::kAdd:
      if (!empty) Add(seq, from, std::clamp(op.y, -kCells, kCells));
      break;
    case CacheOp::kKeep:
      ForAll([&](llama_context* c, Subject&) { llama_memory_seq_keep(llama_get_memory(c), seq); });
      break;
    case CacheOp::kClear:
      ForAll([&](llama_context* c, Subject&) { llama_memory_clear(llama_get_memory(c), op.x % 2 != 0); });
      break;
    case CacheOp::kSave:
      if (!empty) Save(seq, slot);
      break;
    case CacheOp::kLoad:
      error = Load(seq, slot);
      break;
    case CacheOp::kSaveAll:
      SaveAll();
      break;
    case CacheOp::kLoadAll:
      error = LoadAll();
      break;
    case CacheOp::kOff:
      off_ = n + 1;
      break;
    case CacheOp::kFresh:
      error = Fresh(seq, op.y);
      break;
    case CacheOp::kKinds:
      break;
  }
  if (off_ > 0) --off_;
  return error.empty() ? CheckPositions() : error;
}

}  // namespace scsa::plugin_test
