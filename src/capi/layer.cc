// SPDX-License-Identifier: Apache-2.0
//
// Attention: the workspace, the exact path and one sparse layer.
#include "scsa/layer.h"

#include <algorithm>
#include <memory>
#include <span>

#include "capi/convert.h"
#include "capi/error.h"
#include "capi/handles.h"

namespace {

using scsa::Status;
using namespace scsa::capi;

Status CheckKvHead(const scsa::Layer& layer, int kv_head) {
  const int kv_heads = layer.shape().kv_heads;
  if (kv_head >= 0 && kv_head < kv_heads) return Status::Ok();
  return Status::Invalid("kv_head is " + std::to_string(kv_head) + ", must be 0 ... " + std::to_string(kv_heads - 1));
}

// One of the two ways of a layer to answer.
enum scsa_status AttendWith(scsa_layer* layer, const scsa_kv* kv, const scsa_attend_args* args,
                            scsa_workspace* workspace, decltype(&scsa::Layer::Attend) attend) {
  return WithLayer(layer, [&](scsa::Layer& target) -> Status {
    scsa::KvView view;
    AttendArgs call;
    if (Status status = AllOf(ReadKv(kv, &view), ReadAttendArgs(args, &call), NotNull(workspace, "workspace"));
        !status.ok()) {
      return status;
    }
    scsa::Verify verify;
    if (Status status = ReadVerify(call.verify, &verify); !status.ok()) return status;
    return (target.*attend)(call.q, view, call.visible, call.params, verify, call.n_threads, workspace->workspace,
                            call.out);
  });
}

}  // namespace

enum scsa_status scsa_workspace_create(scsa_workspace** workspace) {
  return Guard([&]() -> Status {
    if (Status status = NotNull(workspace, "workspace"); !status.ok()) return status;
    *workspace = nullptr;
    *workspace = std::make_unique<scsa_workspace>().release();
    return Status::Ok();
  });
}

void scsa_workspace_destroy(scsa_workspace* workspace) { delete workspace; }

enum scsa_status scsa_exact_attention(const struct scsa_shape* shape, const struct scsa_kv* kv,
                                      const struct scsa_attend_args* args, scsa_workspace* workspace) {
  return Guard([&]() -> Status {
    scsa::Shape dims;
    scsa::KvView view;
    AttendArgs call;
    Status status =
        AllOf(ReadShape(shape, &dims), ReadKv(kv, &view), ReadAttendArgs(args, &call), NotNull(workspace, "workspace"));
    if (!status.ok()) return status;
    return scsa::ExactAttention(dims, call.q, view, call.visible, call.params, call.n_threads, workspace->workspace,
                                call.out);
  });
}

enum scsa_status scsa_layer_create(const struct scsa_shape* shape, const struct scsa_config* config,
                                   scsa_layer** layer) {
  return Guard([&]() -> Status {
    if (Status status = NotNull(layer, "layer"); !status.ok()) return status;
    *layer = nullptr;
    scsa::Shape dims;
    scsa::Config parameters;
    if (Status status = AllOf(ReadShape(shape, &dims), ReadConfig(config, &parameters)); !status.ok()) return status;
    auto handle = std::make_unique<scsa_layer>();
    if (Status status = scsa::Layer::Create(dims, parameters, &handle->owned); !status.ok()) return status;
    handle->layer = handle->owned.get();
    *layer = handle.release();
    return Status::Ok();
  });
}

void scsa_layer_destroy(scsa_layer* layer) {
  if (layer != nullptr && layer->owned != nullptr) delete layer;
}

enum scsa_status scsa_layer_attend(scsa_layer* layer, const struct scsa_kv* kv, const struct scsa_attend_args* args,
                                   scsa_workspace* workspace) {
  return AttendWith(layer, kv, args, workspace, &scsa::Layer::Attend);
}

enum scsa_status scsa_layer_attend_prompt(scsa_layer* layer, const struct scsa_kv* kv,
                                          const struct scsa_attend_args* args, scsa_workspace* workspace) {
  return AttendWith(layer, kv, args, workspace, &scsa::Layer::AttendPrompt);
}

enum scsa_status scsa_layer_set_prompt(scsa_layer* layer, float tolerance, double share) {
  return WithLayer(layer, [&](scsa::Layer& target) {
    scsa::PromptConfig config;
    config.tolerance = tolerance;
    config.share = share;
    return target.SetPrompt(config);
  });
}

enum scsa_status scsa_layer_get_prompt_head(const scsa_layer* layer, int kv_head, struct scsa_prompt_head* head) {
  return WithLayer(layer, [&](const scsa::Layer& target) -> Status {
    if (Status status = CheckKvHead(target, kv_head); !status.ok()) return status;
    return WritePromptHead(target.prompt_heads()[static_cast<std::size_t>(kv_head)], head);
  });
}

enum scsa_status scsa_layer_seal(scsa_layer* layer, const struct scsa_kv* kv, int64_t end_row, int n_threads) {
  return WithLayer(layer, [&](scsa::Layer& target) -> Status {
    scsa::KvView view;
    if (Status status = ReadKv(kv, &view); !status.ok()) return status;
    return target.Seal(view, end_row, n_threads);
  });
}

enum scsa_status scsa_layer_notify_writes(scsa_layer* layer, const int64_t* rows, size_t n_rows) {
  return WithLayer(layer, [&](scsa::Layer& target) -> Status {
    if (n_rows == 0) return Status::Ok();
    if (Status status = NotNull(rows, "rows"); !status.ok()) return status;
    target.NotifyWrites(std::span<const std::int64_t>(rows, n_rows));
    return Status::Ok();
  });
}

enum scsa_status scsa_layer_drop_plans(scsa_layer* layer) {
  return WithLayer(layer, [](scsa::Layer& target) {
    target.DropPlans();
    return Status::Ok();
  });
}

enum scsa_status scsa_layer_start_calibration(scsa_layer* layer, float tolerance) {
  return WithLayer(layer, [&](scsa::Layer& target) { return target.StartCalibration(tolerance); });
}

enum scsa_status scsa_layer_finish_calibration(scsa_layer* layer) {
  return WithLayer(layer, [](scsa::Layer& target) { return target.FinishCalibration(); });
}

int scsa_layer_calibrating(const scsa_layer* layer) { return layer != nullptr && layer->layer->calibrating() ? 1 : 0; }

int scsa_layer_calibration_steps(const scsa_layer* layer) {
  return layer == nullptr ? 0 : layer->layer->calibration_steps();
}

enum scsa_status scsa_layer_calibration_errors(const scsa_layer* layer, int q_head, int grid_index,
                                               const float** errors, size_t* n_errors) {
  return WithLayer(layer, [&](const scsa::Layer& target) -> Status {
    if (Status status = AllOf(NotNull(errors, "errors"), NotNull(n_errors, "n_errors")); !status.ok()) return status;
    if (q_head < 0 || q_head >= target.shape().q_heads) {
      return Status::Invalid("q_head is " + std::to_string(q_head) + ", must be 0 ... " +
                             std::to_string(target.shape().q_heads - 1));
    }
    if (grid_index < 0 || grid_index >= scsa::kTauGridSize) {
      return Status::Invalid("grid_index is " + std::to_string(grid_index) + ", must be 0 ... " +
                             std::to_string(scsa::kTauGridSize - 1));
    }
    const std::span<const float> recorded = target.CalibrationErrors(q_head, grid_index);
    *errors = recorded.empty() ? nullptr : recorded.data();
    *n_errors = recorded.size();
    return Status::Ok();
  });
}

int scsa_layer_n_taus(const scsa_layer* layer) {
  return layer == nullptr ? 0 : static_cast<int>(layer->layer->taus().size());
}

enum scsa_status scsa_layer_get_taus(const scsa_layer* layer, float* taus, size_t capacity) {
  return WithLayer(layer, [&](const scsa::Layer& target) -> Status {
    if (Status status = NotNull(taus, "taus"); !status.ok()) return status;
    const std::span<const float> present = target.taus();
    if (capacity < present.size()) {
      return Status::Invalid("capacity is " + std::to_string(capacity) + ", must be at least " +
                             std::to_string(present.size()));
    }
    std::copy(present.begin(), present.end(), taus);
    return Status::Ok();
  });
}

enum scsa_status scsa_layer_set_tau(scsa_layer* layer, int head, float tau) {
  return WithLayer(layer, [&](scsa::Layer& target) { return target.SetTau(head, tau); });
}

int scsa_layer_selection(const scsa_layer* layer) {
  return layer == nullptr ? SCSA_SELECTION_FLAT : static_cast<int>(layer->layer->selection());
}

enum scsa_status scsa_layer_set_selection(scsa_layer* layer, int selection) {
  return WithLayer(layer, [&](scsa::Layer& target) -> Status {
    scsa::Selection read;
    if (Status status = ReadSelection(selection, &read); !status.ok()) return status;
    return target.SetSelection(read);
  });
}

enum scsa_status scsa_layer_set_serial(scsa_layer* layer, int serial) {
  return WithLayer(layer, [&](scsa::Layer& target) {
    target.set_serial(serial != 0);
    return Status::Ok();
  });
}

enum scsa_status scsa_layer_get_shape(const scsa_layer* layer, struct scsa_shape* shape) {
  return WithLayer(layer, [&](const scsa::Layer& target) { return WriteShape(target.shape(), shape); });
}

enum scsa_status scsa_layer_get_config(const scsa_layer* layer, struct scsa_config* config) {
  return WithLayer(layer, [&](const scsa::Layer& target) { return WriteConfig(target.config(), config); });
}

int64_t scsa_layer_sealed_end(const scsa_layer* layer) { return layer == nullptr ? 0 : layer->layer->sealed_end(); }

enum scsa_status scsa_layer_get_stats(const scsa_layer* layer, struct scsa_stats* stats) {
  return WithLayer(layer, [&](const scsa::Layer& target) { return WriteStats(target.stats(), stats); });
}

enum scsa_status scsa_layer_get_head_reads(const scsa_layer* layer, int kv_head, struct scsa_head_reads* reads) {
  return WithLayer(layer, [&](const scsa::Layer& target) -> Status {
    if (Status status = CheckKvHead(target, kv_head); !status.ok()) return status;
    return WriteHeadReads(target.head_reads()[static_cast<std::size_t>(kv_head)], reads);
  });
}

enum scsa_status scsa_layer_reset_stats(scsa_layer* layer) {
  return WithLayer(layer, [](scsa::Layer& target) {
    target.ResetStats();
    return Status::Ok();
  });
}
