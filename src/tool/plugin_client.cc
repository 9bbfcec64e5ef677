// SPDX-License-Identifier: Apache-2.0
#include "plugin_client.h"

#include <fmt/format.h>
#include <ggml-backend.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "plugin_path.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

// Collects what is written to stderr. The plugin speaks there when it loads, which is right in a program that does not
// know it and noise in this one, unless it is a refusal.
class StderrCapture {
 public:
  StderrCapture() {
    std::fflush(stderr);
    buffer_ = memfd_create("scsa-stderr", MFD_CLOEXEC);
    if (buffer_ < 0) return;
    saved_ = dup(STDERR_FILENO);
    dup2(buffer_, STDERR_FILENO);
  }
  ~StderrCapture() { Finish(); }
  StderrCapture(const StderrCapture&) = delete;
  StderrCapture& operator=(const StderrCapture&) = delete;

  std::string Finish() {
    std::string text;
    if (buffer_ < 0) return text;
    std::fflush(stderr);
    dup2(saved_, STDERR_FILENO);
    close(saved_);
    lseek(buffer_, 0, SEEK_SET);
    char chunk[512];
    for (ssize_t n; (n = read(buffer_, chunk, sizeof(chunk))) > 0;) text.append(chunk, static_cast<std::size_t>(n));
    close(buffer_);
    buffer_ = -1;
    return text;
  }

 private:
  int buffer_ = -1;
  int saved_ = -1;
};

// What the plugin said when it loaded: its warnings ("scsa: ...") always, the rest on demand.
void ShowStart(const std::string& said, bool verbose) {
  std::istringstream lines(said);
  for (std::string line; std::getline(lines, line);) {
    if (verbose || line.starts_with("scsa: ")) fmt::print(stderr, "{}\n", line);
  }
}

ggml_backend_reg_t FindRegistered() {
  for (std::size_t i = 0; i < ggml_backend_reg_count(); ++i) {
    ggml_backend_reg_t reg = ggml_backend_reg_get(i);
    if (ggml_backend_reg_get_proc_address(reg, SCSA_PLUGIN_SET) != nullptr) return reg;
  }
  return nullptr;
}

template <typename Function>
Function Lookup(ggml_backend_reg_t reg, const char* name) {
  auto function = reinterpret_cast<Function>(ggml_backend_reg_get_proc_address(reg, name));
  if (function == nullptr) {
    throw ToolError(fmt::format("the loaded plugin has no function {}: use the plugin of this version", name));
  }
  return function;
}

}  // namespace

PluginClient::PluginClient(bool verbose) {
  ggml_backend_reg_t reg = FindRegistered();
  if (reg == nullptr) {
    const std::filesystem::path path = FindPlugin();
    StderrCapture capture;
    reg = ggml_backend_load(path.c_str());
    const std::string said = capture.Finish();
    if (reg == nullptr) {
      const std::string reason = OneLine(said);
      throw ToolError(reason.starts_with("scsa: ")
                          ? reason.substr(6)  // the plugin's own refusal
                          : fmt::format("cannot load {}: {}", path.string(),
                                        reason.empty() ? "no plugin of this ggml; rebuild it" : reason));
    }
    ShowStart(said, verbose);
  }
  set_ = Lookup<scsa_plugin_set_t>(reg, SCSA_PLUGIN_SET);
  get_stats_ = Lookup<scsa_plugin_get_stats_t>(reg, SCSA_PLUGIN_GET_STATS);
  get_audit_ = Lookup<scsa_plugin_get_audit_t>(reg, SCSA_PLUGIN_GET_AUDIT);
  get_audit_samples_ = Lookup<scsa_plugin_get_audit_samples_t>(reg, SCSA_PLUGIN_GET_AUDIT_SAMPLES);
  get_head_reads_ = Lookup<scsa_plugin_get_head_reads_t>(reg, SCSA_PLUGIN_GET_HEAD_READS);
  reset_audit_ = Lookup<scsa_plugin_reset_audit_t>(reg, SCSA_PLUGIN_RESET_AUDIT);
  get_taus_ = Lookup<scsa_plugin_get_taus_t>(reg, SCSA_PLUGIN_GET_TAUS);
  set_observer_ = Lookup<scsa_plugin_set_observer_t>(reg, SCSA_PLUGIN_SET_OBSERVER);
}

void PluginClient::Set(const char* name, const std::string& value) const {
  if (const char* message = set_(name, value.c_str())) throw ToolError(OneLine(message));
}

scsa_plugin_stats PluginClient::Stats() const {
  scsa_plugin_stats stats{};
  stats.struct_size = sizeof(stats);
  get_stats_(&stats);
  return stats;
}

scsa_plugin_audit PluginClient::Audit() const {
  scsa_plugin_audit audit{};
  audit.struct_size = sizeof(audit);
  if (get_audit_(-1, &audit) == 0) throw ToolError("no memory for the figures of the audit");
  return audit;
}

std::vector<AuditSample> PluginClient::AuditSamples() const {
  std::vector<scsa_plugin_audit_sample> found(get_audit_samples_(nullptr, 0));
  found.resize(std::min(get_audit_samples_(found.data(), found.size()), found.size()));
  std::vector<AuditSample> samples;
  for (const scsa_plugin_audit_sample& sample : found) {
    samples.push_back({.call = 0,
                       .error = sample.error,
                       .q_head = static_cast<std::int16_t>(sample.q_head),
                       .together = static_cast<std::int16_t>(sample.together)});
  }
  return samples;
}

std::vector<HeadReads> PluginClient::ReadsOf(int layer) const {
  std::vector<scsa_plugin_head_reads> found(get_head_reads_(layer, nullptr, 0));
  found.resize(std::min(get_head_reads_(layer, found.data(), found.size()), found.size()));
  std::vector<HeadReads> reads;
  for (const scsa_plugin_head_reads& head : found) {
    reads.push_back({.rows_read = head.rows_read, .rows_visible = head.rows_visible, .bytes_read = head.bytes_read});
  }
  return reads;
}

void PluginClient::ResetAudit() const { reset_audit_(); }

std::string PluginClient::Taus() const {
  std::string text(get_taus_(nullptr, 0) + 1, '\0');
  text.resize(std::min(get_taus_(text.data(), text.size()), text.size() - 1));
  return text;
}

void PluginClient::SetObserver(scsa_plugin_observer_t observer, void* user) const { set_observer_(observer, user); }

namespace {

constexpr std::uint64_t scsa_plugin_stats::*kTotals[] = {
    &scsa_plugin_stats::attn_ns,
    &scsa_plugin_stats::attn_calls,
    &scsa_plugin_stats::set_rows_ns,
    &scsa_plugin_stats::sparse_calls,
    &scsa_plugin_stats::exact_calls,
    &scsa_plugin_stats::calibration_calls,
    &scsa_plugin_stats::limit_calls,
    &scsa_plugin_stats::rows_read,
    &scsa_plugin_stats::rows_visible,
    &scsa_plugin_stats::bytes_read,
    &scsa_plugin_stats::plan_build_ns,
    &scsa_plugin_stats::rebuild_count,
    &scsa_plugin_stats::dropped_blocks,
    &scsa_plugin_stats::failures,
    &scsa_plugin_stats::audited_outputs,
    &scsa_plugin_stats::recalibrated_heads,
    &scsa_plugin_stats::audit_failures,
    &scsa_plugin_stats::audit_ns,
    &scsa_plugin_stats::prompt_rows,
    &scsa_plugin_stats::prompt_ns,
    &scsa_plugin_stats::prompt_tiles,
    &scsa_plugin_stats::prompt_sparse_tiles,
    &scsa_plugin_stats::prompt_measured_tiles,
    &scsa_plugin_stats::prompt_rows_read,
    &scsa_plugin_stats::prompt_rows_visible,
    &scsa_plugin_stats::prompt_audited_tiles,
    &scsa_plugin_stats::prompt_error_millionths,
    &scsa_plugin_stats::evicted_blocks,
    &scsa_plugin_stats::refused_blocks,
    &scsa_plugin_stats::crossover_trials,
};

}  // namespace

scsa_plugin_stats StatsDifference(const scsa_plugin_stats& later, const scsa_plugin_stats& earlier) {
  scsa_plugin_stats difference = later;
  for (const auto field : kTotals) difference.*field -= earlier.*field;
  return difference;
}

void AddStats(scsa_plugin_stats& sum, const scsa_plugin_stats& part) {
  for (const auto field : kTotals) sum.*field += part.*field;
  sum.plan_bytes = part.plan_bytes;
  sum.max_mem = part.max_mem;
  sum.crossover = part.crossover;
  sum.calibrated_layers = part.calibrated_layers;
}

std::optional<double> PromptRowsRead(const scsa_plugin_stats& stats) {
  if (stats.prompt_rows_visible == 0) return std::nullopt;
  return static_cast<double>(stats.prompt_rows_read) / static_cast<double>(stats.prompt_rows_visible);
}

std::optional<double> PromptError(const scsa_plugin_stats& stats) {
  if (stats.prompt_audited_tiles == 0) return std::nullopt;
  return 1e-6 * static_cast<double>(stats.prompt_error_millionths) / static_cast<double>(stats.prompt_audited_tiles);
}

}  // namespace scsa::tool
