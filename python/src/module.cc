// SPDX-License-Identifier: Apache-2.0
//
// The module scsa._core: the operator for numpy arrays. Every call that computes releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "arrays.h"
#include "scsa/audit.h"
#include "scsa/layer.h"
#include "scsa/target.h"

namespace scsa::python {
namespace {

// force_target must not run beside other calls.
std::shared_mutex g_target_mutex;

Workspace& ThreadWorkspace() {
  static thread_local Workspace workspace;
  return workspace;
}

Preset PresetOf(const std::string& name) {
  Preset preset;
  if (!ParsePreset(name, &preset)) throw nb::value_error("preset must be \"fast\" or \"seed\"");
  return preset;
}

// Names of an enumeration's values, in order.
template <typename E, std::size_t kCount>
struct Names {
  const char* names[kCount];
  const char* refusal;

  E Value(const std::string& name) const {
    const auto* found = std::find(std::begin(names), std::end(names), name);
    if (found == std::end(names)) throw nb::value_error(refusal);
    return static_cast<E>(found - std::begin(names));
  }
  std::string Name(E value) const { return names[static_cast<int>(value)]; }
};
constexpr Names<Verify, 3> kVerify = {{"none", "sample", "full"}, "verify must be \"none\", \"sample\" or \"full\""};
constexpr Names<PackedFormat, 4> kPacked = {{"q8_0", "f16", "none", "int8"},
                                            "packed_format must be \"q8_0\", \"f16\", \"none\" or \"int8\""};
constexpr Names<CalibrationStatistic, 2> kStatistic = {{"median", "mean"}, "statistic must be \"median\" or \"mean\""};
constexpr Names<Selection, 3> kSelection = {{"flat", "hierarchical", "automatic"},
                                            "selection must be \"flat\", \"hierarchical\" or \"automatic\""};

template <typename Range>
FloatArray Copied(const Range& values) {
  auto data = std::make_unique<float[]>(values.size());
  std::copy(values.begin(), values.end(), data.get());
  return OwningArray(std::move(data), {values.size()});
}

// A layer that threads may share: calls wait for each other, with the GIL released.
class PyLayer {
 public:
  PyLayer(int q_heads, int kv_heads, int head_dim, const Config& config) {
    Raise(Layer::Create({.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim}, config, &layer_));
  }

  // f(layer) without the GIL, alone.
  template <typename F>
  auto Alone(F f) {
    nb::gil_scoped_release released;
    std::shared_lock target(g_target_mutex);
    std::lock_guard lock(mutex_);
    return f(*layer_);
  }

  const Shape& shape() const { return layer_->shape(); }
  const Config& config() const { return layer_->config(); }

 private:
  std::mutex mutex_;
  std::unique_ptr<Layer> layer_;
};

FloatArray PyExactAttention(const Array& q, const Array& k, const Array& v, std::optional<float> scale, float softcap,
                            const std::optional<FloatVector>& sinks, const std::optional<BoolArray>& visible,
                            int n_threads) {
  Call call(q, k, v, KvHeads(k), scale, softcap, sinks, visible);
  Status status;
  {
    nb::gil_scoped_release released;
    std::shared_lock target(g_target_mutex);
    status =
        ExactAttention(call.shape, call.q, call.kv, call.visible, call.params, n_threads, ThreadWorkspace(), call.out);
  }
  Raise(status);
  return call.TakeOutput();
}

FloatArray Attend(PyLayer& layer, const Array& q, const Array& k, const Array& v, std::optional<float> scale,
                  float softcap, const std::optional<FloatVector>& sinks, const std::optional<BoolArray>& visible,
                  const std::string& verify, int n_threads) {
  Call call(q, k, v, layer.shape().kv_heads, scale, softcap, sinks, visible);
  if (call.shape.q_heads != layer.shape().q_heads || call.shape.head_dim != layer.shape().head_dim) {
    throw nb::value_error("q does not have the layer's q_heads and head_dim");
  }
  const Verify how = kVerify.Value(verify);
  Raise(layer.Alone([&](Layer& one) {
    return one.Attend(call.q, call.kv, call.visible, call.params, how, n_threads, ThreadWorkspace(), call.out);
  }));
  return call.TakeOutput();
}

FloatArray CalibrationErrors(PyLayer& layer) {
  std::vector<float> errors;
  std::size_t steps = 0;
  const auto heads = static_cast<std::size_t>(layer.shape().q_heads);
  layer.Alone([&](Layer& one) {
    for (int head = 0; head < one.shape().q_heads; ++head) {
      for (int i = 0; i < kTauGridSize; ++i) {
        const auto recorded = one.CalibrationErrors(head, i);
        steps = recorded.size();
        errors.insert(errors.end(), recorded.begin(), recorded.end());
      }
    }
  });
  auto data = std::make_unique<float[]>(errors.size());
  std::copy(errors.begin(), errors.end(), data.get());
  return OwningArray(std::move(data), {heads, kTauGridSize, steps});
}

AuditSummary Summary(PyLayer& layer) {
  AuditSummary summary;
  Raise(layer.Alone([&](Layer& one) { return SummarizeAudit(one.AuditSamples(), &summary); }));
  return summary;
}

void BindConfig(nb::module_& m) {
  nb::class_<Config>(m, "Config", "Parameters of the sparse operator; docs/operator.md says what they mean.")
      .def(
          "__init__", [](Config* self, const std::string& preset) { new (self) Config(ConfigFor(PresetOf(preset))); },
          nb::arg("preset") = "fast", "The parameters of a preset, \"fast\" or \"seed\".")
      .def_prop_ro("preset", [](const Config& c) { return std::string(PresetName(c.preset)); })
      .def_rw("cluster_size", &Config::cluster_size)
      .def_rw("rebuild_interval", &Config::rebuild_interval)
      .def_rw("block_size", &Config::block_size)
      .def_rw("sink", &Config::sink)
      .def_rw("recent", &Config::recent)
      .def_rw("seal_delay", &Config::seal_delay)
      .def_rw("tau_default", &Config::tau_default)
      .def_prop_rw(
          "packed_format", [](const Config& c) { return kPacked.Name(c.packed_format); },
          [](Config& c, const std::string& name) { c.packed_format = kPacked.Value(name); })
      .def_rw("rank", &Config::rank)
      .def_rw("power_iterations", &Config::power_iterations)
      .def_rw("kmeans_rounds", &Config::kmeans_rounds)
      .def_rw("tail_shrink", &Config::tail_shrink)
      .def_prop_rw(
          "statistic", [](const Config& c) { return kStatistic.Name(c.statistic); },
          [](Config& c, const std::string& name) { c.statistic = kStatistic.Value(name); })
      .def_prop_rw(
          "selection", [](const Config& c) { return kSelection.Name(c.selection); },
          [](Config& c, const std::string& name) { c.selection = kSelection.Value(name); });
}

void BindFigures(nb::module_& m) {
  nb::class_<LayerStats>(m, "Stats", "What happened so far in a layer; include/scsa/layer.h says how rows are counted.")
      .def_ro("rebuild_count", &LayerStats::rebuild_count)
      .def_ro("stat_opened_rows", &LayerStats::stat_opened_rows)
      .def_ro("stat_exact_rows", &LayerStats::stat_exact_rows)
      .def_ro("stat_scored", &LayerStats::stat_scored)
      .def_ro("stat_calls", &LayerStats::stat_calls)
      .def_ro("union_rows", &LayerStats::union_rows)
      .def_ro("visible_rows", &LayerStats::visible_rows)
      .def_ro("bytes_read", &LayerStats::bytes_read)
      .def_ro("sparse_steps", &LayerStats::sparse_steps)
      .def_ro("calibration_steps", &LayerStats::calibration_steps)
      .def_ro("exact_steps", &LayerStats::exact_steps)
      .def_ro("build_failures", &LayerStats::build_failures)
      .def_ro("dropped_blocks", &LayerStats::dropped_blocks)
      .def_ro("build_ns", &LayerStats::build_ns)
      .def_ro("plan_bytes", &LayerStats::plan_bytes)
      .def_ro("audited_outputs", &LayerStats::audited_outputs)
      .def_ro("recalibrated_heads", &LayerStats::recalibrated_heads)
      .def_ro("audit_failures", &LayerStats::audit_failures)
      .def_ro("audit_ns", &LayerStats::audit_ns)
      .def_ro("step_failures", &LayerStats::step_failures)
      .def_ro("evicted_blocks", &LayerStats::evicted_blocks)
      .def_ro("refused_blocks", &LayerStats::refused_blocks);
  nb::class_<AuditSample>(m, "AuditSample", "The error of one audited output.")
      .def_ro("call", &AuditSample::call)
      .def_ro("error", &AuditSample::error)
      .def_ro("q_head", &AuditSample::q_head)
      .def_ro("together", &AuditSample::together);
  nb::class_<AuditSummary>(m, "AuditSummary", "Relative L2 errors of the audited outputs that a layer keeps.")
      .def_ro("outputs", &AuditSummary::outputs)
      .def_ro("observations", &AuditSummary::observations)
      .def_ro("mean", &AuditSummary::mean)
      .def_ro("median", &AuditSummary::median)
      .def_ro("median_low", &AuditSummary::median_low)
      .def_ro("median_high", &AuditSummary::median_high)
      .def_ro("p90", &AuditSummary::p90)
      .def_ro("p99", &AuditSummary::p99);
}

void BindLayer(nb::module_& m) {
  using nb::arg;
  nb::class_<PyLayer>(m, "Layer",
                      "The sparse operator of one attention layer: its plan, calibration window, thresholds and "
                      "counters. Threads may share it; their calls wait for each other.")
      .def(
          "__init__",
          [](PyLayer* self, int q_heads, int kv_heads, int head_dim, const std::optional<Config>& config) {
            new (self) PyLayer(q_heads, kv_heads, head_dim, config ? *config : ConfigFor(Preset::kFast));
          },
          arg("q_heads"), arg("kv_heads"), arg("head_dim"), arg("config").none() = nb::none(),
          "config: None for Config(\"fast\").")
      .def("attend", &Attend, arg("q"), arg("k"), arg("v"), nb::kw_only(), arg("scale").none() = nb::none(),
           arg("softcap") = 0.0f, arg("sinks").none() = nb::none(), arg("visible").none() = nb::none(),
           arg("verify") = "sample", arg("n_threads") = 1,
           "Sparse attention; arguments and result as in exact_attention. Builds blocks that are due, and answers "
           "exactly inside a calibration window and where no plan applies. verify: how changed rows are looked for, "
           "\"none\", \"sample\" or \"full\".")
      .def(
          "seal",
          [](PyLayer& self, const Array& k, const Array& v, std::optional<std::int64_t> end_row, int n_threads) {
            const KvView kv = ViewOfKv(k, v, self.shape().kv_heads, self.shape().head_dim);
            Raise(self.Alone([&](Layer& one) { return one.Seal(kv, end_row.value_or(kv.n_kv), n_threads); }));
          },
          arg("k"), arg("v"), arg("end_row").none() = nb::none(), arg("n_threads") = 1,
          "Builds every block of preset fast inside rows [0, end_row); None: all rows.")
      .def(
          "notify_writes",
          [](PyLayer& self, const std::vector<std::int64_t>& rows) {
            self.Alone([&](Layer& one) { one.NotifyWrites(rows); });
          },
          arg("rows"), "Rows that were overwritten: blocks that cover one of them are dropped.")
      .def(
          "drop_plans", [](PyLayer& self) { self.Alone([](Layer& one) { one.DropPlans(); }); },
          "Forgets every block; thresholds and counters stay.")
      .def(
          "start_calibration",
          [](PyLayer& self, std::optional<float> tolerance) {
            const float wanted = tolerance.value_or(DefaultTolerance(self.config().preset));
            Raise(self.Alone([&](Layer& one) { return one.StartCalibration(wanted); }));
          },
          arg("tolerance").none() = nb::none(),
          "Until finish_calibration attend answers exactly and records the error that each threshold of the grid would "
          "have caused. tolerance: relative L2 error of a head's output; None: the preset's.")
      .def(
          "finish_calibration",
          [](PyLayer& self) { Raise(self.Alone([](Layer& one) { return one.FinishCalibration(); })); },
          "Chooses the thresholds. RuntimeError outside a window.")
      .def_prop_ro("calibrating",
                   [](PyLayer& self) { return self.Alone([](Layer& one) { return one.calibrating(); }); })
      .def_prop_ro("calibration_steps",
                   [](PyLayer& self) { return self.Alone([](Layer& one) { return one.calibration_steps(); }); })
      .def_prop_ro(
          "selection",
          [](PyLayer& self) { return kSelection.Name(self.Alone([](Layer& one) { return one.selection(); })); },
          "How clusters are found now, and what the thresholds are for: \"flat\" or \"hierarchical\".")
      .def("calibration_errors", &CalibrationErrors,
           "Recorded errors, float32 (q_heads, thresholds of the grid, steps), of the present or last window.")
      .def_prop_ro(
          "taus",
          [](PyLayer& self) {
            return Copied(self.Alone([](Layer& one) {
              const auto taus = one.taus();
              return std::vector<float>(taus.begin(), taus.end());
            }));
          },
          nb::rv_policy::automatic, "A copy of the thresholds: per KV head with fast, per query head with seed.")
      .def(
          "set_tau",
          [](PyLayer& self, int head, float tau) {
            Raise(self.Alone([&](Layer& one) { return one.SetTau(head, tau); }));
          },
          arg("head"), arg("tau"), "tau in [0, 1]; 0 opens every cluster.")
      .def(
          "set_audit",
          [](PyLayer& self, double share, std::uint64_t seed, int capacity, float tolerance, float drift_factor,
             int window) {
            const AuditConfig config{.share = share,
                                     .seed = seed,
                                     .capacity = capacity,
                                     .tolerance = tolerance,
                                     .drift_factor = drift_factor,
                                     .window = window};
            Raise(self.Alone([&](Layer& one) { return one.SetAudit(config); }));
          },
          arg("share"), nb::kw_only(), arg("seed") = 0, arg("capacity") = 256, arg("tolerance") = 0.0f,
          arg("drift_factor") = 2.0f, arg("window") = 32,
          "Compares that share of the sparse outputs with exact ones; 0 ends the audit.")
      .def(
          "audit_samples",
          [](PyLayer& self) {
            return self.Alone([](Layer& one) {
              const auto samples = one.AuditSamples();
              return std::vector<AuditSample>(samples.begin(), samples.end());
            });
          },
          "The last samples, oldest first.")
      .def("audit_summary", &Summary, "Figures over the samples.")
      .def_prop_ro("stats", [](PyLayer& self) { return self.Alone([](Layer& one) { return one.stats(); }); })
      .def("reset_stats", [](PyLayer& self) { self.Alone([](Layer& one) { one.ResetStats(); }); })
      .def(
          "set_serial", [](PyLayer& self, bool serial) { self.Alone([&](Layer& one) { one.set_serial(serial); }); },
          arg("serial"), "Runs the per-head work on the calling thread (diagnosis); results are the same bits.")
      .def_prop_ro(
          "sealed_end", [](PyLayer& self) { return self.Alone([](Layer& one) { return one.sealed_end(); }); },
          "Rows [config.sink, sealed_end) are covered by blocks.")
      .def_prop_ro("q_heads", [](const PyLayer& self) { return self.shape().q_heads; })
      .def_prop_ro("kv_heads", [](const PyLayer& self) { return self.shape().kv_heads; })
      .def_prop_ro("head_dim", [](const PyLayer& self) { return self.shape().head_dim; })
      .def_prop_ro(
          "config", [](const PyLayer& self) { return Config(self.config()); }, "A copy.");
}

void BindFunctions(nb::module_& m) {
  using nb::arg;
  m.def("exact_attention", &PyExactAttention, arg("q"), arg("k"), arg("v"), nb::kw_only(),
        arg("scale").none() = nb::none(), arg("softcap") = 0.0f, arg("sinks").none() = nb::none(),
        arg("visible").none() = nb::none(), arg("n_threads") = 1,
        "Exact attention of decoded tokens, accumulated in float32.\n\n"
        "q: float32 (q_heads, head_dim) or (n_q, q_heads, head_dim). k, v: (n_kv, kv_heads, head_dim) as float32, "
        "float16 or uint16 (bfloat16 bits), or (n_kv, kv_heads, bytes) as uint8 (q8_0). The last axis is dense, others "
        "may be strided. scale: None for 1 / sqrt(head_dim). sinks: a logit per query head. visible: bool (n_kv,) or "
        "(n_q, n_kv). Returns float32 of q's shape. ValueError or TypeError for arrays that do not fit.");
  m.def(
      "default_tolerance", [](const std::string& preset) { return DefaultTolerance(PresetOf(preset)); },
      arg("preset") = "fast", "The calibration tolerance that a preset is meant for.");
  m.def(
      "tau_grid", [](const std::string& preset) { return Copied(TauGrid(PresetOf(preset))); }, arg("preset") = "fast",
      "The thresholds at which a calibration window replays the stop rule, largest first.");
  m.def("targets", &AvailableTargets, "SIMD targets that this CPU can run, best first.");
  m.def("active_target", &ActiveTarget, "The SIMD target in force.");
  m.def(
      "force_target",
      [](const std::string& name) {
        Status status;
        {
          nb::gil_scoped_release released;
          std::unique_lock alone(g_target_mutex);
          status = ForceTarget(name);
        }
        Raise(status);
      },
      arg("name"), "Forces a SIMD target by name; \"\" returns to the best one.");
  m.attr("__version__") = SCSA_PYTHON_VERSION;
  m.attr("GGML_VERSION") = SCSA_PYTHON_GGML_VERSION;
}

}  // namespace
}  // namespace scsa::python

NB_MODULE(_core, m) {
  m.doc() = "The operator of libscsa for numpy arrays.";
  scsa::python::BindConfig(m);
  scsa::python::BindFigures(m);
  scsa::python::BindLayer(m);
  scsa::python::BindFunctions(m);
}
