// SPDX-License-Identifier: Apache-2.0
#include "plugin/audit_log.h"

#include <charconv>
#include <cmath>
#include <new>
#include <utility>

#include "plugin/immortal.h"

namespace scsa::plugin {
namespace {

// Shortest text that gives the same number; JSON has no infinity.
std::string Number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  return {text, end};
}

std::string Object(const scsa_plugin_audit& figures) {
  const auto error = [&](double value) { return figures.samples == 0 ? std::string("null") : Number(value); };
  std::string text = "{\"outputs\": " + std::to_string(figures.outputs);
  text += ", \"samples\": " + std::to_string(figures.samples);
  text += ", \"observations\": " + std::to_string(figures.observations);
  text += ", \"mean\": " + error(figures.mean);
  text += ", \"median\": " + error(figures.median);
  text += ", \"median_low\": " + error(figures.median_low);
  text += ", \"median_high\": " + error(figures.median_high);
  text += ", \"p90\": " + error(figures.p90);
  text += ", \"p99\": " + error(figures.p99);
  return text + ", \"recalibrated_heads\": " + std::to_string(figures.recalibrated_heads) + "}";
}

}  // namespace

AuditLog& AuditLog::Get() { return Immortal<AuditLog>(); }

void AuditLog::Add(int layer, std::span<const AuditSample> samples, std::uint64_t recalibrated_heads) {
  const std::lock_guard lock(mutex_);
  LayerLog& log = layers_[layer];
  log.ring.reserve(kAuditCapacity);
  log.outputs += samples.size();
  log.recalibrated_heads += recalibrated_heads;
  for (const AuditSample& sample : samples) {
    if (log.ring.size() < kAuditCapacity) {
      log.ring.push_back(sample);
      continue;
    }
    log.ring[log.next] = sample;
    log.next = (log.next + 1) % kAuditCapacity;
  }
}

void AuditLog::Reset() {
  const std::lock_guard lock(mutex_);
  layers_.clear();
}

bool AuditLog::Figures(int layer, scsa_plugin_audit* figures) const {
  std::vector<AuditSample> samples;
  scsa_plugin_audit result{};
  AuditSummary summary;
  try {
    const std::lock_guard lock(mutex_);
    for (const auto& [index, log] : layers_) {
      if (layer >= 0 && index != layer) continue;
      result.outputs += log.outputs;
      result.recalibrated_heads += log.recalibrated_heads;
      samples.insert(samples.end(), log.ring.begin(), log.ring.end());
    }
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (!SummarizeAudit(samples, &summary).ok()) return false;
  result.samples = summary.outputs;
  result.observations = summary.observations;
  result.mean = summary.mean;
  result.median = summary.median;
  result.median_low = summary.median_low;
  result.median_high = summary.median_high;
  result.p90 = summary.p90;
  result.p99 = summary.p99;
  *figures = result;
  return true;
}

std::size_t AuditLog::Samples(scsa_plugin_audit_sample* samples, std::size_t count) const {
  const std::lock_guard lock(mutex_);
  std::size_t n = 0;
  for (const auto& [layer, log] : layers_) {
    for (std::size_t i = 0; i < log.ring.size(); ++i, ++n) {
      if (n >= count) continue;
      const AuditSample& sample = log.ring[(log.next + i) % log.ring.size()];
      samples[n] = {.layer = layer, .q_head = sample.q_head, .together = sample.together, .error = sample.error};
    }
  }
  return n;
}

std::string AuditLog::Json(double share) const {
  std::vector<int> indices;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [index, log] : layers_) {
      if (index >= 0) indices.push_back(index);
    }
  }
  scsa_plugin_audit figures{};
  const auto object = [&](int layer) {
    if (!Figures(layer, &figures)) throw std::bad_alloc();
    return Object(figures);
  };
  std::string text = "{\n  \"share\": " + Number(share) + ",\n  \"all\": " + object(-1) + ",\n  \"layers\": {";
  for (const int index : indices) {
    text += index == indices.front() ? "\n" : ",\n";
    text += "    \"" + std::to_string(index) + "\": " + object(index);
  }
  return text + (indices.empty() ? "}\n}\n" : "\n  }\n}\n");
}

}  // namespace scsa::plugin
