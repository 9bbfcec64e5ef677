// SPDX-License-Identifier: Apache-2.0
//
// libllama behind RAII types and one-line errors.
#pragma once

#include <llama.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace scsa::tool {

// Silences llama.cpp and ggml, unless `verbose`. Call before anything else of llama.cpp.
void ConfigureLlamaLog(bool verbose);

class Model {
 public:
  // ToolError: no such file, no GGUF, cut off, unknown architecture (with llama.cpp's last message).
  explicit Model(const std::string& path);

  llama_model* get() const { return model_.get(); }
  const llama_vocab* vocab() const { return llama_model_get_vocab(model_.get()); }
  int n_ctx_train() const { return llama_model_n_ctx_train(model_.get()); }
  int n_vocab() const { return llama_vocab_n_tokens(vocab()); }
  const std::string& path() const { return path_; }
  std::string name() const;  // file name without folder and ".gguf"
  // Value of a metadata key of the file as text; empty when there is none.
  std::string MetadataText(const char* key) const;
  // Of the file's size, its metadata and samples of its content: independent of its place and dates.
  std::uint64_t Fingerprint() const;

  // add_special: the model's own start token; parse_special: text such as "<|im_end|>" becomes a control token.
  std::vector<llama_token> Tokenize(std::string_view text, bool add_special, bool parse_special) const;
  std::string Piece(llama_token token) const;

 private:
  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::string path_;
  std::unique_ptr<llama_model, Free> model_;
};

enum class CacheType { kF16, kQ8_0 };
std::string_view CacheTypeName(CacheType type);  // "f16", "q8_0"

// One sequence (id 0) with flash attention on.
class Context {
 public:
  // n_ctx: cells at least. ToolError when llama.cpp cannot create it.
  Context(const Model& model, int n_ctx, CacheType type, int threads);

  llama_context* get() const { return context_.get(); }

  // Appends the tokens in batches; the logits of the last one stay readable. `progress(done)` after each batch, if any.
  // ToolError when decoding fails.
  void Decode(std::span<const llama_token> tokens, const std::function<void(int)>& progress = {});
  // The same, with the logits after every token: `visit(i, logits)` for each, in order.
  void DecodeAll(std::span<const llama_token> tokens,
                 const std::function<void(std::size_t, std::span<const float>)>& visit);
  // Forgets what was decoded from position `length` on. False where the cache cannot be brought back to what it was
  // then, as with layers that see a sliding window and have dropped rows since; its content is undefined then.
  bool Truncate(int length);
  // Logits after the last decoded token; valid until the next Decode.
  std::span<const float> Logits() const;

 private:
  struct Free {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  std::unique_ptr<llama_context, Free> context_;
  int n_vocab_;
};

}  // namespace scsa::tool
