// SPDX-License-Identifier: Apache-2.0
//
// The structs of scsa.h to and from those of the C++ interface.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>

#include "scsa/audit.h"
#include "scsa/config.h"
#include "scsa/exact.h"
#include "scsa/layer.h"
#include "scsa/scsa.h"
#include "scsa/taus.h"

namespace scsa::capi {

// struct_size is the caller's sizeof. It must cover the fields of the first version, which so far are all.
Status CheckSize(std::size_t struct_size, std::size_t known_size, const char* name);
// kUnsupported when a byte of `from` from known_size on is not zero: a field that this version does not know.
Status CheckRest(const void* from, std::size_t struct_size, std::size_t known_size, const char* name);

template <class T>
Status ReadStruct(const T* from, const char* name, T* to) {
  if (from == nullptr) return Status::Invalid(std::string(name) + " is a null pointer");
  if (Status status = CheckSize(from->struct_size, sizeof(T), name); !status.ok()) return status;
  if (Status status = CheckRest(from, from->struct_size, sizeof(T), name); !status.ok()) return status;
  *to = *from;
  return Status::Ok();
}

// Keeps to->struct_size.
template <class T>
Status WriteStruct(const T& from, const char* name, T* to) {
  if (to == nullptr) return Status::Invalid(std::string(name) + " is a null pointer");
  const std::size_t size = to->struct_size;
  if (Status status = CheckSize(size, sizeof(T), name); !status.ok()) return status;
  std::memcpy(to, &from, sizeof(T));
  std::memset(reinterpret_cast<std::byte*>(to) + sizeof(T), 0, size - sizeof(T));
  to->struct_size = size;
  return Status::Ok();
}

// kInvalidArgument as scsa.h says; `to` is untouched then. None of them checks more than that the values exist in C++.
Status ReadPreset(int preset, Preset* to);
Status ReadSelection(int selection, Selection* to);
Status ReadShape(const scsa_shape* from, Shape* to);
Status ReadConfig(const scsa_config* from, Config* to);
Status ReadAuditConfig(const scsa_audit_config* from, AuditConfig* to);
Status ReadKv(const scsa_kv* from, KvView* to);
// Checks the ranges, too.
Status ReadTauEntry(const scsa_tau_entry* from, TauEntry* to);
// nullptr: nothing is known of the model. May throw std::bad_alloc.
Status ReadModel(const scsa_model* from, ModelIdentity* to);

// The arguments of an attention call; `verify` holds its value unchecked.
struct AttendArgs {
  QueryView q;
  VisibleSets visible;
  LogitParams params;
  OutView out;
  int n_threads = 1;
  int verify = 0;
};
Status ReadAttendArgs(const scsa_attend_args* from, AttendArgs* to);
Status ReadVerify(int verify, Verify* to);

Status WriteShape(const Shape& from, scsa_shape* to);
Status WriteConfig(const Config& from, scsa_config* to);
Status WriteAuditSummary(const AuditSummary& from, scsa_audit_summary* to);
Status WritePromptHead(const PromptHead& from, scsa_prompt_head* to);
Status WriteStats(const LayerStats& from, scsa_stats* to);
Status WriteHeadReads(const HeadReads& from, scsa_head_reads* to);
// to's texts point into `from`.
Status WriteModel(const ModelIdentity& from, scsa_model* to);

// text, size and length are those of scsa_state_taus_to_json.
Status CheckText(const char* text, std::size_t size, const std::size_t* length);
void WriteText(const std::string& from, char* text, std::size_t size, std::size_t* length);

}  // namespace scsa::capi
