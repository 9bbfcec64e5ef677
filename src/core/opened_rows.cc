// SPDX-License-Identifier: Apache-2.0
#include "core/opened_rows.h"

#include "core/int8_rows.h"
#include "core/plan.h"
#include "hwy/cache_control.h"

namespace scsa {

void OpenedRows::Find(const BlockPlan& plan, const KvView& kv, int kv_head, std::span<const std::int32_t> clusters) {
  head_dim_ = plan.layout().head_dim();
  size_ = 0;
  int8_ = plan.packed_format() == PackedFormat::kInt8 ? &plan.int8_layout() : nullptr;
  FindStretches(plan, kv_head, clusters);
  if (int8_ != nullptr) {
    FindPairs(plan, kv_head);
  } else {
    FindSingleRows(plan, kv, kv_head);
  }
}

// Clusters are looked up block by block. What tells where their rows lie in the cache is asked for ahead of its use.
void OpenedRows::FindStretches(const BlockPlan& plan, int kv_head, std::span<const std::int32_t> clusters) {
  const bool needs_members = plan.packed_format() == PackedFormat::kNone;
  const std::int32_t slots = plan.slots();
  stretches_.resize(clusters.size());
  n_rows_ = 0;
  std::int32_t block = 0;
  std::int32_t first = 0;  // cluster of the block
  const std::uint16_t* offsets = nullptr;
  const std::uint16_t* members = nullptr;
  for (std::size_t i = 0; i < clusters.size(); ++i) {
    if (offsets == nullptr || clusters[i] < first || clusters[i] >= first + slots) {
      block = clusters[i] / slots;
      first = block * slots;
      offsets = plan.offsets(kv_head, block);
      members = plan.members(kv_head, block);
    }
    const std::uint16_t* at = offsets + (clusters[i] - first);
    if (needs_members) hwy::Prefetch(members + at[0]);
    stretches_[i] = {block, at[0], at[1]};
    n_rows_ += at[1] - at[0];
  }
}

void OpenedRows::FindSingleRows(const BlockPlan& plan, const KvView& kv, int kv_head) {
  const bool packed = plan.packed_format() != PackedFormat::kNone;
  k_type_ = packed ? PackedType(plan.packed_format()) : kv.k_type;
  v_type_ = packed ? PackedType(plan.packed_format()) : kv.v_type;
  if (k_.size() < n_rows_) k_.resize(n_rows_);
  if (v_.size() < n_rows_) v_.resize(n_rows_);
  const std::size_t row_bytes = RowBytes(k_type_, head_dim_);
  std::size_t n = 0;
  for (const Stretch& stretch : stretches_) {
    if (packed) {
      const std::byte* k = plan.packed_k(kv_head, stretch.block);
      const std::byte* v = plan.packed_v(kv_head, stretch.block);
      for (std::size_t i = stretch.begin; i < stretch.end; ++i, ++n) {
        k_[n] = k + i * row_bytes;
        v_[n] = v + i * row_bytes;
      }
      continue;
    }
    const std::int64_t first = std::int64_t{stretch.block} * plan.block_rows();
    const std::uint16_t* members = plan.members(kv_head, stretch.block);
    for (std::size_t i = stretch.begin; i < stretch.end; ++i, ++n) {
      k_[n] = kv.KRow(first + members[i], kv_head);
      v_[n] = kv.VRow(first + members[i], kv_head);
    }
  }
  size_ = n;
}

void OpenedRows::FindPairs(const BlockPlan& plan, int kv_head) {
  // A stretch of m rows is at most m / 2 + 1 pairs.
  const std::size_t most = n_rows_ / 2 + stretches_.size();
  if (k_.size() < most) k_.resize(most);
  if (records_.size() < most) records_.resize(most);
  if (seen_.size() < most) seen_.resize(most);
  std::size_t n = 0;
  for (const Stretch& stretch : stretches_) {
    if (stretch.begin == stretch.end) continue;
    const std::byte* record = plan.int8_record(kv_head, stretch.block);
    int pair = stretch.begin / 2;
    const std::byte* keys = record + int8_->PairAt(pair);
    // A neighbour may have opened the other row of the first pair.
    if (stretch.begin % 2 == 1 && n > 0 && k_[n - 1] == keys) {
      seen_[n - 1] |= 2;
      ++pair;
      keys += int8_->PairBytes();
    }
    for (; 2 * pair < stretch.end; ++pair, ++n, keys += int8_->PairBytes()) {
      const bool even = 2 * pair >= stretch.begin;
      const bool odd = 2 * pair + 1 < stretch.end;
      k_[n] = keys;
      records_[n] = record;
      seen_[n] = static_cast<std::uint8_t>((even ? 1 : 0) + (odd ? 2 : 0));
    }
  }
  size_ = n;
}

RunArgs OpenedRows::Run(std::size_t first, std::size_t n) const {
  RunArgs args;
  args.head_dim = head_dim_;
  args.k_type = k_type_;
  args.v_type = v_type_;
  args.k_places = k_.data() + first;
  args.v_places = v_.data() + first;
  args.n_rows = static_cast<std::int64_t>(n);
  return args;
}

Int8RunArgs OpenedRows::Int8Run(std::size_t first, std::size_t n) const {
  return {.layout = int8_,
          .n_pairs = static_cast<std::int64_t>(n),
          .records = records_.data() + first,
          .pairs = k_.data() + first,
          .seen = seen_.data() + first};
}

void OpenedRows::Attend(std::size_t first, std::size_t n, const Queries& queries, const SoftmaxState& state) const {
  const auto attend = [&](auto args, auto&& kernel) {
    args.n = queries.n;
    args.q = queries.q;
    args.softcap = queries.softcap;
    kernel(args, state);
  };
  if (int8_ != nullptr) {
    attend(Int8Run(first, n), AttendInt8Rows);
  } else {
    attend(Run(first, n), AttendRun);
  }
}

std::pair<FetchHint, FetchHint> OpenedRows::FirstReads(std::size_t first, std::size_t n) const {
  if (int8_ != nullptr) {
    const Int8RunArgs run = Int8Run(first, n);
    return {Int8Keys(run, 0), Int8Values(run, 0)};
  }
  const RunArgs run = Run(first, n);
  return {ScatteredRows(run, run.k_places, run.k_type, 0), ScatteredRows(run, run.v_places, run.v_type, 0)};
}

}  // namespace scsa
