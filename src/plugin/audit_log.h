// SPDX-License-Identifier: Apache-2.0
//
// What the audits of all layers found, kept beyond the contexts that they belong to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "scsa/audit.h"
#include "scsa/plugin.h"

namespace scsa::plugin {

// Samples kept per layer of a model, the last ones.
inline constexpr int kAuditCapacity = 256;

// Thread-safe.
class AuditLog {
 public:
  // Never destroyed: threads of the program may still compute while it exits.
  static AuditLog& Get();

  // layer: of the model, -1 where that is not known. Throws std::bad_alloc and is unchanged then.
  void Add(int layer, std::span<const AuditSample> samples, std::uint64_t recalibrated_heads);
  void Reset();

  // Of one layer, or of all where `layer` is -1. False when memory runs out.
  bool Figures(int layer, scsa_plugin_audit* figures) const;
  // As scsa_plugin_get_audit_samples_t says.
  std::size_t Samples(scsa_plugin_audit_sample* samples, std::size_t count) const;
  // As scsa_plugin_get_audit_json_t says. Throws std::bad_alloc.
  std::string Json(double share) const;

 private:
  struct LayerLog {
    std::uint64_t outputs = 0;
    std::uint64_t recalibrated_heads = 0;
    std::vector<AuditSample> ring;  // the oldest one is overwritten next
    std::size_t next = 0;
  };

  mutable std::mutex mutex_;
  std::map<int, LayerLog> layers_;
};

}  // namespace scsa::plugin
