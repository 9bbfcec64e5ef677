// SPDX-License-Identifier: Apache-2.0
#include "core/audit.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <new>
#include <string>

#include "core/audit_statistics.h"
#include "core/relative_error.h"

namespace scsa {
namespace {

// SplitMix64's output function.
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Status ValidateAuditConfig(const AuditConfig& config) {
  const auto refuse = [](const char* name, const std::string& value, const char* range) {
    return Status::Invalid(std::string(name) + " is " + value + ", must be " + range);
  };
  if (config.share != 0 && !(config.share >= kMinAuditShare && config.share <= 1)) {
    return refuse("the audit's share", std::to_string(config.share), "0 or 1e-9 ... 1");
  }
  if (config.capacity < 1 || config.capacity > kMaxAuditCapacity) {
    return refuse("the audit's capacity", std::to_string(config.capacity), "1 ... 1048576");
  }
  if (!(config.tolerance >= 0 && std::isfinite(config.tolerance))) {
    return refuse("the audit's tolerance", std::to_string(config.tolerance), "finite and at least 0");
  }
  if (!(config.drift_factor >= 1 && std::isfinite(config.drift_factor))) {
    return refuse("the audit's drift_factor", std::to_string(config.drift_factor), "finite and at least 1");
  }
  if (config.window < 1 || config.window > kMaxAuditWindow) {
    return refuse("the audit's window", std::to_string(config.window), "1 ... 65536");
  }
  return Status::Ok();
}

AuditSchedule::AuditSchedule(double share, std::uint64_t seed) : period_(1 / share), seed_(Mix(seed)) { ChooseNext(); }

std::optional<std::uint64_t> AuditSchedule::TakeDue(std::uint64_t end) {
  if (next_ >= end) return std::nullopt;
  const std::uint64_t due = next_;
  ++stretch_;
  ChooseNext();
  return due;
}

void AuditSchedule::ChooseNext() {
  const auto first = static_cast<std::uint64_t>(static_cast<double>(stretch_) * period_);
  const auto end = static_cast<std::uint64_t>(static_cast<double>(stretch_ + 1) * period_);
  next_ = first + Mix(seed_ ^ stretch_) % (end - first);
}

Audit::Audit(const Shape& shape, const Config& layer_config, const AuditConfig& config, std::size_t n_taus)
    : shape_(shape),
      statistic_(layer_config.statistic),
      config_(config),
      schedule_(config.share, config.seed),
      ring_(std::size_t{2} * static_cast<std::size_t>(config.capacity)),
      heads_(n_taus),
      exact_(static_cast<std::size_t>(shape.group()) * static_cast<std::size_t>(shape.head_dim)),
      errors_(static_cast<std::size_t>(shape.group())),
      window_taus_(n_taus),
      window_(shape.q_heads, TauGrid(layer_config.preset)) {
  for (HeadErrors& head : heads_) head.recent.reserve(kMaxDriftSpan);
}

void Audit::Check(const LayerCall& call, const OutView& out, float calibrated_tolerance, std::span<const float> taus,
                  LayerStats* stats) {
  ++calls_;
  const std::uint64_t first = slots_;
  slots_ += static_cast<std::uint64_t>(call.q.n_q) * static_cast<std::uint64_t>(shape_.kv_heads);
  auto due = schedule_.TakeDue(slots_);
  if (!due) return;
  const auto start = std::chrono::steady_clock::now();
  const float tolerance = config_.tolerance > 0 ? config_.tolerance : calibrated_tolerance;
  for (; due; due = schedule_.TakeDue(slots_)) {
    const auto slot = static_cast<int>(*due - first);
    const int kv_head = slot % shape_.kv_heads;
    if (!CheckHead(call, out, slot / shape_.kv_heads, kv_head)) {
      ++stats->audit_failures;
      continue;
    }
    stats->audited_outputs += errors_.size();
    if (tolerance > 0) TestHeads(kv_head, tolerance, taus);
  }
  stats->audit_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

// The exact output of the query heads of one KV head at one query row, by a view of the call that holds nothing else.
bool Audit::CheckHead(const LayerCall& call, const OutView& out, int row, int kv_head) {
  const int group = shape_.group();
  const int first_head = kv_head * group;
  const QueryView q{call.q.data + row * call.q.row_stride + first_head * call.q.head_stride, call.q.row_stride,
                    call.q.head_stride, 1};
  KvView kv = call.kv;
  kv.k = call.kv.KRow(0, kv_head);
  kv.v = call.kv.VRow(0, kv_head);
  VisibleSets visible = call.visible;
  if (visible.words != nullptr) visible.words += row * visible.row_stride;
  LogitParams params = call.params;
  if (params.sinks != nullptr) params.sinks += first_head;
  const OutView exact{exact_.data(), 0, shape_.head_dim};
  if (!ExactAttention({group, 1, shape_.head_dim}, q, kv, visible, params, call.n_threads, call.workspace, exact)
           .ok()) {
    return false;
  }
  for (int i = 0; i < group; ++i) {
    const int head = first_head + i;
    const float* output = out.data + row * out.row_stride + head * out.head_stride;
    errors_[i] = RelativeError(output, exact_.data() + i * shape_.head_dim, shape_.head_dim);
    AddSample({calls_ - 1, errors_[i], static_cast<std::int16_t>(head), static_cast<std::int16_t>(group)});
  }
  return true;
}

void Audit::AddSample(const AuditSample& sample) {
  const auto capacity = static_cast<std::size_t>(config_.capacity);
  ring_[next_] = sample;
  ring_[next_ + capacity] = sample;
  next_ = (next_ + 1) % capacity;
  n_samples_ = std::min(n_samples_ + 1, capacity);
}

std::span<const AuditSample> Audit::samples() const {
  const auto capacity = static_cast<std::size_t>(config_.capacity);
  return {ring_.data() + next_ + capacity - n_samples_, n_samples_};
}

// Adds errors_ to the heads that have a threshold: the KV head gets their mean, query heads each its own.
void Audit::TestHeads(int kv_head, float tolerance, std::span<const float> taus) {
  const bool per_q_head = std::ssize(heads_) == shape_.q_heads;
  const std::size_t n = per_q_head ? errors_.size() : 1;
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t index = static_cast<std::size_t>(kv_head) * n + i;
    HeadErrors& head = heads_[index];
    float error = errors_[i];
    if (!per_q_head) {
      error = 0;
      for (const float e : errors_) error += e / static_cast<float>(errors_.size());
    }
    if (head.recent.size() == kMaxDriftSpan) head.recent.erase(head.recent.begin());
    head.recent.push_back(error);
    // Where the smallest threshold is in force already, a window would change nothing.
    if (taus[index] <= window_.grid().back()) continue;
    if (!HasDrifted(head.recent, statistic_, static_cast<double>(tolerance) * config_.drift_factor)) continue;
    head.drifted = true;
    if (!window_.open()) window_.Start(tolerance);
  }
}

void Audit::AfterWindowStep(bool recorded, float tau_default, std::span<float> taus, LayerStats* stats) {
  if (!recorded) {
    ++stats->audit_failures;
    CloseWindow();
    return;
  }
  if (window_.steps() < config_.window) return;
  try {
    window_.Finish(statistic_, tau_default, window_taus_);
  } catch (const std::bad_alloc&) {
    ++stats->audit_failures;
    CloseWindow();
    return;
  }
  for (std::size_t head = 0; head < heads_.size(); ++head) {
    if (!heads_[head].drifted) continue;
    taus[head] = window_taus_[head];
    ++stats->recalibrated_heads;
  }
  CloseWindow();
}

// The errors that led to the window are forgotten: the heads start anew whatever came of it.
void Audit::CloseWindow() {
  window_.Cancel();
  for (HeadErrors& head : heads_) {
    if (head.drifted) head.recent.clear();
    head.drifted = false;
  }
}

void Audit::ForgetHead(std::size_t head) {
  heads_[head].recent.clear();
  CloseWindow();
}

void Audit::ForgetHeads() {
  for (HeadErrors& head : heads_) head.recent.clear();
  CloseWindow();
}

}  // namespace scsa
