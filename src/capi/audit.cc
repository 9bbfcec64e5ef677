// SPDX-License-Identifier: Apache-2.0
#include "scsa/audit.h"

#include <algorithm>
#include <span>
#include <vector>

#include "capi/convert.h"
#include "capi/error.h"
#include "capi/handles.h"

namespace {

using scsa::AuditSample;
using scsa::Status;
using namespace scsa::capi;

}  // namespace

enum scsa_status scsa_layer_set_audit(scsa_layer* layer, const struct scsa_audit_config* config) {
  return WithLayer(layer, [&](scsa::Layer& target) -> Status {
    scsa::AuditConfig audit;
    if (Status status = ReadAuditConfig(config, &audit); !status.ok()) return status;
    return target.SetAudit(audit);
  });
}

enum scsa_status scsa_layer_audit_samples(const scsa_layer* layer, struct scsa_audit_sample* samples, size_t capacity,
                                          size_t* n_samples) {
  return WithLayer(layer, [&](const scsa::Layer& target) -> Status {
    Status status = AllOf(NotNull(n_samples, "n_samples"), capacity == 0 ? Status::Ok() : NotNull(samples, "samples"));
    if (!status.ok()) return status;
    const std::span<const AuditSample> kept = target.AuditSamples();
    for (std::size_t i = 0; i < std::min(capacity, kept.size()); ++i) {
      samples[i] = {kept[i].call, kept[i].error, kept[i].q_head, kept[i].together};
    }
    *n_samples = kept.size();
    return Status::Ok();
  });
}

enum scsa_status scsa_summarize_audit(const struct scsa_audit_sample* samples, size_t n,
                                      struct scsa_audit_summary* summary) {
  return Guard([&]() -> Status {
    Status status = n == 0 ? Status::Ok() : NotNull(samples, "samples");
    if (!status.ok()) return status;
    std::vector<AuditSample> copies(n);
    for (std::size_t i = 0; i < n; ++i) {
      copies[i] = {samples[i].call, samples[i].error, samples[i].q_head, samples[i].together};
    }
    scsa::AuditSummary figures;
    if (status = scsa::SummarizeAudit(copies, &figures); !status.ok()) return status;
    return WriteAuditSummary(figures, summary);
  });
}

enum scsa_status scsa_state_set_audit(scsa_state* state, const struct scsa_audit_config* config) {
  return WithState(state, [&](scsa::State& target) -> Status {
    scsa::AuditConfig audit;
    if (Status status = ReadAuditConfig(config, &audit); !status.ok()) return status;
    return target.SetAudit(audit);
  });
}

enum scsa_status scsa_state_summarize_audit(const scsa_state* state, struct scsa_audit_summary* summary) {
  return WithState(state, [&](const scsa::State& target) -> Status {
    scsa::AuditSummary figures;
    if (Status status = target.SummarizeAudit(&figures); !status.ok()) return status;
    return WriteAuditSummary(figures, summary);
  });
}
