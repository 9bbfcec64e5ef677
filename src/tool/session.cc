// SPDX-License-Identifier: Apache-2.0
#include "session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "hash.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr int kBatch = 512;

std::string g_last_llama_error;  // llama.cpp reports the reason of a failure to its log alone

void LogCallback(ggml_log_level level, const char* text, void* verbose) {
  if (level == GGML_LOG_LEVEL_ERROR) g_last_llama_error = OneLine(text);
  if (verbose != nullptr) fmt::print(stderr, "{}", text);
}

std::string DecodeError() {
  return fmt::format("llama.cpp failed to decode ({})",
                     g_last_llama_error.empty() ? "context full" : g_last_llama_error);
}

}  // namespace

void ConfigureLlamaLog(bool verbose) {
  static char verbose_mark;
  llama_log_set(LogCallback, verbose ? &verbose_mark : nullptr);
}

Model::Model(const std::string& path) : path_(path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) throw ToolError(fmt::format("model file not found: {}", path));
  std::ifstream file(path, std::ios::binary);
  char magic[4] = {};
  if (!file.read(magic, sizeof(magic)) || std::string_view(magic, 4) != "GGUF") {
    throw ToolError(fmt::format("{} is no GGUF model file: give a .gguf file", path));
  }
  g_last_llama_error.clear();
  model_.reset(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
  if (model_ == nullptr) {
    throw ToolError(
        fmt::format("cannot load model {} ({}): the file may be cut off or of a kind that this llama.cpp "
                    "does not know; fetch it again",
                    path, g_last_llama_error.empty() ? "no reason given" : g_last_llama_error));
  }
  if (llama_model_has_encoder(model_.get()) || !llama_model_has_decoder(model_.get())) {
    throw ToolError(fmt::format("{} is no decoder-only language model", path));
  }
}

std::string Model::name() const {
  const std::filesystem::path file = std::filesystem::path(path_).filename();
  return file.extension() == ".gguf" ? file.stem().string() : file.string();
}

std::string Model::MetadataText(const char* key) const {
  char text[256];
  return llama_model_meta_val_str(model_.get(), key, text, sizeof(text)) < 0 ? "" : text;
}

std::uint64_t Model::Fingerprint() const {
  Hash hash;
  std::vector<char> buffer(1 << 16);
  for (std::int32_t i = 0; i < llama_model_meta_count(model_.get()); ++i) {
    if (llama_model_meta_key_by_index(model_.get(), i, buffer.data(), buffer.size()) >= 0) hash.Text(buffer.data());
    if (llama_model_meta_val_str_by_index(model_.get(), i, buffer.data(), buffer.size()) >= 0) hash.Text(buffer.data());
  }
  const std::uint64_t size = std::filesystem::file_size(path_);
  hash.Value(size);
  constexpr std::uint64_t kSamples = 16;
  std::ifstream file(path_, std::ios::binary);
  for (std::uint64_t i = 0; i < kSamples; ++i) {
    file.clear();
    file.seekg(static_cast<std::streamoff>(size * i / kSamples));
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    hash.Bytes(buffer.data(), static_cast<std::size_t>(file.gcount()));
  }
  return hash.value();
}

std::vector<llama_token> Model::Tokenize(std::string_view text, bool add_special, bool parse_special) const {
  const auto length = static_cast<std::int32_t>(text.size());
  std::vector<llama_token> tokens(text.size() + 8);
  std::int32_t n = llama_tokenize(vocab(), text.data(), length, tokens.data(), static_cast<std::int32_t>(tokens.size()),
                                  add_special, parse_special);
  if (n < 0) {
    tokens.resize(static_cast<std::size_t>(-n));
    n = llama_tokenize(vocab(), text.data(), length, tokens.data(), -n, add_special, parse_special);
  }
  if (n < 0) throw ToolError("the text cannot be split into tokens: is it plain text?");
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

std::string Model::Piece(llama_token token) const {
  std::string piece(64, '\0');
  std::int32_t n =
      llama_token_to_piece(vocab(), token, piece.data(), static_cast<std::int32_t>(piece.size()), 0, false);
  if (n < 0) {
    piece.resize(static_cast<std::size_t>(-n));
    n = llama_token_to_piece(vocab(), token, piece.data(), -n, 0, false);
  }
  piece.resize(static_cast<std::size_t>(std::max(n, 0)));
  return piece;
}

std::string_view CacheTypeName(CacheType type) { return type == CacheType::kF16 ? "f16" : "q8_0"; }

Context::Context(const Model& model, int n_ctx, CacheType type, int threads) : n_vocab_(model.n_vocab()) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(n_ctx);
  params.n_batch = kBatch;
  params.n_ubatch = kBatch;
  params.n_seq_max = 1;
  params.n_threads = threads;
  params.n_threads_batch = threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.type_k = params.type_v = type == CacheType::kF16 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
  params.no_perf = true;
  g_last_llama_error.clear();
  context_.reset(llama_init_from_model(model.get(), params));
  if (context_ == nullptr) {
    throw ToolError(fmt::format("cannot create a context of {} tokens with a {} cache ({}): is there enough memory?",
                                n_ctx, CacheTypeName(type),
                                g_last_llama_error.empty() ? "no reason given" : g_last_llama_error));
  }
}

void Context::Decode(std::span<const llama_token> tokens, const std::function<void(int)>& progress) {
  for (std::size_t begin = 0; begin < tokens.size();) {
    const std::size_t n = std::min<std::size_t>(kBatch, tokens.size() - begin);
    // llama_batch_get_one takes the tokens as mutable and does not change them.
    auto* first = const_cast<llama_token*>(tokens.data() + begin);
    if (llama_decode(get(), llama_batch_get_one(first, static_cast<std::int32_t>(n))) != 0) {
      throw ToolError(DecodeError());
    }
    begin += n;
    if (progress) progress(static_cast<int>(begin));
  }
  llama_synchronize(get());
}

void Context::DecodeAll(std::span<const llama_token> tokens,
                        const std::function<void(std::size_t, std::span<const float>)>& visit) {
  const llama_pos position = llama_memory_seq_pos_max(llama_get_memory(get()), 0) + 1;
  llama_batch batch = llama_batch_init(kBatch, 0, 1);
  const std::unique_ptr<llama_batch, void (*)(llama_batch*)> guard(&batch,
                                                                   [](llama_batch* b) { llama_batch_free(*b); });
  for (std::size_t begin = 0; begin < tokens.size(); begin += kBatch) {
    const std::size_t n = std::min<std::size_t>(kBatch, tokens.size() - begin);
    batch.n_tokens = static_cast<std::int32_t>(n);
    for (std::size_t i = 0; i < n; ++i) {
      batch.token[i] = tokens[begin + i];
      batch.pos[i] = position + static_cast<llama_pos>(begin + i);
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    if (llama_decode(get(), batch) != 0) throw ToolError(DecodeError());
    for (std::size_t i = 0; i < n; ++i) {
      const float* logits = llama_get_logits_ith(get(), static_cast<std::int32_t>(i));
      if (logits == nullptr) throw ToolError("llama.cpp returned no logits");
      visit(begin + i, {logits, static_cast<std::size_t>(n_vocab_)});
    }
  }
}

bool Context::Truncate(int length) {
  llama_memory_t memory = llama_get_memory(get());
  return llama_memory_seq_pos_min(memory, 0) == 0 && llama_memory_seq_rm(memory, 0, length, -1);
}

std::span<const float> Context::Logits() const {
  const float* logits = llama_get_logits_ith(get(), -1);
  if (logits == nullptr) throw ToolError("llama.cpp returned no logits");
  return {logits, static_cast<std::size_t>(n_vocab_)};
}

}  // namespace scsa::tool
