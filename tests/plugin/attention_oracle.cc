// SPDX-License-Identifier: Apache-2.0
#include "tests/plugin/attention_oracle.h"

#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace scsa::plugin_test {
namespace {

// Both sides work in f32 from the same bytes: products of 32 terms, exponents up to about 16 and sums of up to 2,048
// weights each leave a relative error of some 2^-20. A margin of 2^6 covers reading masses off the outputs of two
// calls.
constexpr double kTolerance = 0x1p-14;

// The attention-sink masses of these two calls, relative to the exact mass of the block's rows.
constexpr double kSinkMass[2] = {0.25, 4.0};

float Dot(const float* a, const float* b, int n) {
  float sums[8] = {};
  for (int i = 0; i < n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

bool Visible(const std::uint64_t* words, std::int64_t row) { return (words[row / 64] >> (row % 64) & 1) != 0; }

Config ConfigOf(int block) {
  Config config = ConfigFor(Preset::kFast);
  // Only the first block of a cache leaves out rows.
  if (block > 0) config.sink = 0;
  return config;
}

int FirstRow(int block) { return block == 0 ? ConfigOf(0).sink : block * ConfigOf(0).block_size; }

bool Whole(const std::uint64_t* visible, int block) {
  const int end = (block + 1) * ConfigOf(block).block_size;
  for (int row = FirstRow(block); row < end; ++row) {
    if (!Visible(visible, row)) return false;
  }
  return true;
}

KvView ViewOf(const scsa_attention_call& call, const std::vector<std::byte>& k, const std::vector<std::byte>& v,
              const Config& config) {
  return {k.data(),           v.data(),          DType::kF16,        DType::kBF16,     call.k_row_stride,
          call.k_head_stride, call.v_row_stride, call.v_head_stride, config.block_size};
}

}  // namespace

// Exact partial sums over the rows of each whole block and over the others.
void AttentionOracle::ReadRows(const scsa_attention_call& call, const float* q, const std::uint64_t* visible) {
  const int d = call.head_dim;
  const int row_values = call.kv_heads * d;
  const int n_blocks = static_cast<int>(call.n_kv) / ConfigOf(0).block_size;
  std::vector<int> part_of(static_cast<std::size_t>(call.n_kv), n_blocks);
  for (int b = 0; b < n_blocks; ++b) {
    if (!Whole(visible, b)) continue;
    std::fill(part_of.begin() + FirstRow(b), part_of.begin() + (b + 1) * ConfigOf(b).block_size, b);
  }
  keys_.resize(static_cast<std::size_t>(call.n_kv) * row_values);
  values_.resize(keys_.size());
  for (std::int64_t r = 0; r < call.n_kv; ++r) {
    if (!Visible(visible, r)) continue;
    ggml_fp16_to_fp32_row(
        reinterpret_cast<const ggml_fp16_t*>(static_cast<const std::byte*>(call.k) + r * call.k_row_stride),
        keys_.data() + r * row_values, row_values);
    ggml_bf16_to_fp32_row(
        reinterpret_cast<const ggml_bf16_t*>(static_cast<const std::byte*>(call.v) + r * call.v_row_stride),
        values_.data() + r * row_values, row_values);
  }
  const auto heads = static_cast<std::size_t>(call.q_heads);
  exact_.assign(static_cast<std::size_t>(n_blocks) + 1,
                {std::vector<double>(heads * static_cast<std::size_t>(d)), std::vector<double>(heads)});
  gauge_.assign(heads, -INFINITY);
  value_size_.assign(heads, 0.0);
  std::vector<double> logits(static_cast<std::size_t>(call.n_kv));
  for (int h = 0; h < call.q_heads; ++h) {
    const int kv_head = h / (call.q_heads / call.kv_heads);
    double& gauge = gauge_[static_cast<std::size_t>(h)];
    for (std::int64_t r = 0; r < call.n_kv; ++r) {
      if (!Visible(visible, r)) continue;
      const float* key = keys_.data() + r * row_values + kv_head * d;
      const double x = static_cast<double>(Dot(q + h * call.q_head_stride, key, d)) * call.scale;
      logits[static_cast<std::size_t>(r)] = x;
      gauge = std::max(gauge, x);
    }
    double total = 0;
    double squares = 0;
    for (std::int64_t r = 0; r < call.n_kv; ++r) {
      if (!Visible(visible, r)) continue;
      const double w = std::exp(logits[static_cast<std::size_t>(r)] - gauge);
      Partial& part = exact_[static_cast<std::size_t>(part_of[static_cast<std::size_t>(r)])];
      const float* value = values_.data() + r * row_values + kv_head * d;
      double* num = part.num.data() + static_cast<std::ptrdiff_t>(h) * d;
      for (int i = 0; i < d; ++i) num[i] += w * value[i];
      part.mass[static_cast<std::size_t>(h)] += w;
      total += w;
      squares += w * Dot(value, value, d);
    }
    value_size_[static_cast<std::size_t>(h)] = std::sqrt(squares / total);
  }
}

AttentionOracle::Block& AttentionOracle::FreshBlock(const scsa_attention_call& call, int b) {
  Block& block = blocks_[{call.k, b}];
  const Config config = ConfigOf(b);
  const auto k_bytes = static_cast<std::size_t>(config.block_size * call.k_row_stride);
  const auto v_bytes = static_cast<std::size_t>(config.block_size * call.v_row_stride);
  const auto* k = static_cast<const std::byte*>(call.k) + static_cast<std::size_t>(b) * k_bytes;
  const auto* v = static_cast<const std::byte*>(call.v) + static_cast<std::size_t>(b) * v_bytes;
  if (block.layer != nullptr && std::memcmp(block.k.data(), k, k_bytes) == 0 &&
      std::memcmp(block.v.data(), v, v_bytes) == 0) {
    return block;
  }
  block.k.assign(k, k + k_bytes);
  block.v.assign(v, v + v_bytes);
  Status status = Layer::Create({call.q_heads, call.kv_heads, call.head_dim}, config, &block.layer);
  for (int h = 0; status.ok() && h < call.kv_heads; ++h) status = block.layer->SetTau(h, 1.0f);
  if (status.ok()) status = block.layer->Seal(ViewOf(call, block.k, block.v, config), config.block_size, 1);
  if (!status.ok()) throw std::runtime_error("the oracle cannot plan a block: " + status.message());
  return block;
}

// What the closed clusters of a block contribute. An attention sink of known mass takes part in the same softmax, so
// two calls with different sinks tell mass and numerator: with o_i = num / (mass + sink_i), o_1 / o_2 = (mass + sink_2)
// / (mass + sink_1). False where that is not possible: a cluster opens although the threshold is 1, or the values are
// zero.
bool AttentionOracle::Summarise(const scsa_attention_call& call, const float* q, int b, Block& block, Partial* tail) {
  const Config config = ConfigOf(b);
  const int d = call.head_dim;
  const auto heads = static_cast<std::size_t>(call.q_heads);
  const auto values = heads * static_cast<std::size_t>(d);
  const KvView kv = ViewOf(call, block.k, block.v, config);
  std::vector<std::uint64_t> visible(static_cast<std::size_t>(config.block_size) / 64, ~std::uint64_t{0});
  visible[0] <<= config.sink;
  const Partial& rows = exact_[static_cast<std::size_t>(b)];
  std::vector<float> outs[2];
  for (int i = 0; i < 2; ++i) {
    std::vector<float> sinks(heads);
    for (std::size_t h = 0; h < heads; ++h) {
      sinks[h] = static_cast<float>(gauge_[h] + std::log(rows.mass[h] * kSinkMass[i]));
    }
    outs[i].resize(values);
    const LayerStats before = block.layer->stats();
    const Status status = block.layer->Attend({q, call.q_row_stride, call.q_head_stride, 1}, kv, {visible.data(), 0},
                                              {call.scale, 0.0f, sinks.data()}, Verify::kNone, 1, workspace_,
                                              {outs[i].data(), static_cast<std::int64_t>(values), d});
    const LayerStats after = block.layer->stats();
    if (!status.ok() || after.sparse_steps == before.sparse_steps) {
      throw std::runtime_error("the oracle's plan of a block does not answer: " + status.message());
    }
    if (after.union_rows != before.union_rows) return false;
  }
  tail->num.resize(values);
  tail->mass.resize(heads);
  for (std::size_t h = 0; h < heads; ++h) {
    const float* a = outs[0].data() + h * static_cast<std::size_t>(d);
    const float* c = outs[1].data() + h * static_cast<std::size_t>(d);
    // Values that are all zero (cells of a stream that was copied before it held anything) tell no mass.
    if (Dot(c, c, d) == 0.0f) return false;
    const double ratio = static_cast<double>(Dot(a, c, d)) / Dot(c, c, d);
    // As the layer saw them: rounded to f32 as logits.
    double sink[2];
    for (int i = 0; i < 2; ++i) {
      sink[i] = std::exp(static_cast<double>(static_cast<float>(gauge_[h] + std::log(rows.mass[h] * kSinkMass[i]))) -
                         gauge_[h]);
    }
    tail->mass[h] = (sink[1] - ratio * sink[0]) / (ratio - 1.0);
    for (int j = 0; j < d; ++j) {
      tail->num[h * static_cast<std::size_t>(d) + static_cast<std::size_t>(j)] = a[j] * (tail->mass[h] + sink[0]);
    }
  }
  return true;
}

// Largest error of a head's output, relative to the length of the values that it attends to.
double AttentionOracle::Error(const scsa_attention_call& call, const float* out,
                              const std::vector<const Partial*>& parts) const {
  double worst = 0;
  for (int h = 0; h < call.q_heads; ++h) {
    double mass = 0;
    for (const Partial* part : parts) mass += part->mass[static_cast<std::size_t>(h)];
    double squares = 0;
    for (int i = 0; i < call.head_dim; ++i) {
      double num = 0;
      for (const Partial* part : parts) num += part->num[static_cast<std::size_t>(h * call.head_dim + i)];
      const double difference = out[h * call.out_head_stride + i] - num / mass;
      squares += difference * difference;
    }
    const double size = value_size_[static_cast<std::size_t>(h)];
    const double error = size > 0 ? std::sqrt(squares) / size : std::sqrt(squares);
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

// The least error over all choices of whole blocks that have a plan (that is the plugin's business) and together as
// many rows as its counters say. Infinite where there is no such choice.
double AttentionOracle::BestMatch(const scsa_attention_call& call, const float* out, const std::vector<int>& whole,
                                  const std::vector<Partial>& tails, std::int64_t summarised, int* n_closed) const {
  std::vector<const Partial*> parts;
  for (const Partial& part : exact_) parts.push_back(&part);
  double best = INFINITY;
  const auto choose = [&](const auto& self, std::size_t i, std::int64_t rows, int closed) -> void {
    if (i == whole.size()) {
      if (rows != summarised) return;
      const double error = Error(call, out, parts);
      if (error >= best) return;  // NaN counts
      best = error;
      *n_closed = closed;
      return;
    }
    const int b = whole[i];
    const Partial*& part = parts[static_cast<std::size_t>(b)];
    const Partial* const exact = part;
    self(self, i + 1, rows, closed);
    part = &tails[i];
    self(self, i + 1, rows + (b + 1) * ConfigOf(b).block_size - FirstRow(b), closed + 1);
    part = exact;
  };
  choose(choose, 0, 0, 0);
  return best;
}

std::string AttentionOracle::Check(const scsa_attention_call& call, std::uint64_t rows_read) {
  // Of several query rows one, in turn.
  const auto row = static_cast<std::int64_t>(counts_.exact % static_cast<std::uint64_t>(call.n_q));
  const std::uint64_t* visible = call.visible + row * call.visible_stride;
  const float* q = call.q + row * call.q_row_stride;
  const float* out = call.out + row * call.out_row_stride;
  std::int64_t n_visible = 0;
  for (std::int64_t r = 0; r < call.n_kv; ++r) n_visible += Visible(visible, r);
  if (n_visible == 0) return {};
  ReadRows(call, q, visible);

  const bool sparse = call.path == 1;
  std::vector<int> whole;
  std::vector<Partial> tails;   // of each whole block
  std::int64_t summarised = 0;  // rows that were answered from summaries
  if (sparse) {
    summarised = n_visible - static_cast<std::int64_t>(rows_read) / call.kv_heads;
    const int n_blocks = static_cast<int>(exact_.size()) - 1;
    for (int b = 0; b < n_blocks; ++b) {
      if (!Whole(visible, b)) continue;
      whole.push_back(b);
      if (!Summarise(call, q, b, FreshBlock(call, b), &tails.emplace_back())) {
        ++counts_.ambiguous;
        return {};
      }
    }
  }
  int best_blocks = 0;
  const double best = BestMatch(call, out, whole, tails, summarised, &best_blocks);
  if (best == INFINITY) {
    ++counts_.ambiguous;
    return {};
  }
  ++(sparse ? counts_.sparse : counts_.exact);
  counts_.blocks += static_cast<std::uint64_t>(best_blocks);
  if (best <= kTolerance) {
    counts_.worst_error = std::max(counts_.worst_error, best);
    return {};
  }
  return std::string("layer ") + std::to_string(call.layer) + ", " + (sparse ? "sparse" : "exact") + ", " +
         std::to_string(n_visible) + " cells visible, " + std::to_string(summarised) +
         " from summaries: the output does not follow from the cache, relative error " + std::to_string(best);
}

}  // namespace scsa::plugin_test
