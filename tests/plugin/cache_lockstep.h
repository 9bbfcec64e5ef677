// SPDX-License-Identifier: Apache-2.0
//
// llama.cpp contexts that go through the same operations side by side, with and without the plugin.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/plugin/attention_oracle.h"
#include "tests/plugin/cache_ops.h"
#include "tests/plugin/llama_fixture.h"

namespace scsa::plugin_test {

// Largest difference of logits found, relative to their length.
struct LogitErrors {
  double exact = 0;   // mode exact against the context without the plugin
  double opened = 0;  // sparse with all clusters opened, likewise
  double fresh = 0;   // any of these three against a context that decoded nothing else
};

class CacheLockstep {
 public:
  // model: of file WriteFuzzModel. unified: all sequences share one stream of cells. Preset fast is judged with all
  // clusters opened, where it reads the cache itself, and with all closed. Preset seed is judged opened: it reads
  // copies of its own, so that an outdated plan shows.
  CacheLockstep(llama_model* model, bool unified, Preset preset);
  ~CacheLockstep();
  CacheLockstep(const CacheLockstep&) = delete;
  CacheLockstep& operator=(const CacheLockstep&) = delete;

  // Applies one operation to all contexts and compares what they answer. Empty where all is well.
  std::string Apply(const CacheOp& op);

  const LogitErrors& errors() const { return errors_; }
  const AttentionOracle::Counts& counts() const { return oracle_.counts(); }
  int fresh_comparisons() const { return fresh_comparisons_; }

 private:
  enum SubjectIndex { kWithout, kExact, kOpened, kClosed, kSubjects };  // kClosed: preset fast alone
  struct Subject {
    const char* name = "";
    const char* mode = "";
    std::string taus;  // a file of thresholds; empty: none needed
    LlamaContextPtr context;
    std::array<std::vector<std::uint8_t>, kSlots> slots;
    std::vector<std::uint8_t> whole;
  };
  // What a sequence should consist of.
  struct Sequence {
    std::vector<llama_token> tokens;  // where `pure`: these, at positions 0, 1, ...
    bool pure = true;                 // otherwise its cells are no longer those of decoding some text from the start
    int group = 0;                    // sequences of one group may share cells
  };
  using Sequences = std::array<Sequence, kSequences>;
  struct Token {
    llama_token token;
    llama_pos pos;
    llama_seq_id seq;
    bool output;
  };

  static void Observe(void* user, const scsa_attention_call* call);
  llama_memory_t Memory(int subject) const { return llama_get_memory(subjects_[subject].context.get()); }
  llama_pos First(int seq) const { return llama_memory_seq_pos_min(Memory(kWithout), seq); }
  llama_pos Last(int seq) const { return llama_memory_seq_pos_max(Memory(kWithout), seq); }
  int Count() const { return preset_ == Preset::kFast ? kSubjects : kClosed; }
  std::span<Subject> Subjects() { return std::span(subjects_).first(static_cast<std::size_t>(Count())); }
  std::string Differs(int subject, const std::vector<float>& logits, const std::vector<float>& reference,
                      const char* from, double* worst) const;
  void Use(const Subject& subject) const;
  template <typename F>
  void ForAll(const F& f);

  std::string Append(const std::vector<int>& seqs, int n, int text);
  std::string DecodeAll(const std::vector<Token>& tokens, bool* decoded);
  std::string Fresh(int seq, int text);
  void Remove(int seq, llama_pos begin, llama_pos end);
  void Copy(int from, int to, int n);
  void Add(int seq, llama_pos begin, int by);
  void Save(int seq, int slot);
  std::string Load(int seq, int slot);
  void SaveAll();
  std::string LoadAll();
  void Spoil(int seq);
  std::string CheckPositions();

  llama_model* model_;
  const bool unified_;
  const Preset preset_;
  const int n_vocab_;
  std::array<Subject, kSubjects> subjects_;
  Sequences sequences_;
  std::array<Sequence, kSlots> saved_;
  Sequences saved_all_;
  int next_group_ = 0;
  bool pending_ = false;  // llama.cpp moves cells or positions at the next decode only
  int off_ = 0;           // operations for which the plugin is still off
  int active_ = kWithout;
  std::vector<std::vector<float>> logits_[kSubjects];  // of the last decode, per output
  std::uint64_t rows_read_ = 0;
  std::string observed_;  // what the oracle objects to
  AttentionOracle oracle_;
  LogitErrors errors_;
  int fresh_comparisons_ = 0;
};

// A model of 2 layers with 4 query and 2 KV heads of size 32 and 64 tokens, random weights. Throws std::runtime_error.
void WriteFuzzModel(const std::string& path);

}  // namespace scsa::plugin_test
