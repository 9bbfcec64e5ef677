// SPDX-License-Identifier: Apache-2.0
#include "report_plots.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "gnuplot.h"

namespace scsa::tool {
namespace {

// Colours that differ for colour-blind readers, too (Okabe and Ito).
constexpr std::array kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                 "#56b4e9", "#e69f00", "#000000", "#7f7f7f"};
constexpr const char* kStyle =
    "set border 3 lc rgb '#555555'\nset tics nomirror textcolor rgb '#333333'\nset grid lc rgb '#dddddd' lw 1\n"
    "set key outside top horizontal width -1 samplen 2 font ',12'\n";

using Points = std::vector<std::pair<double, double>>;

// One curve; the second axis is the right one.
struct Series {
  std::string label;
  Points points;
  bool right = false;
};

std::string DataBlock(std::string_view name, const Points& points) {
  std::string text = fmt::format("${} << EOD\n", name);
  for (const auto& [x, y] : points) text += fmt::format("{:.9g} {:.9g}\n", x, y);
  return text + "EOD\n";
}

std::string CurvesScript(const std::string& settings, std::vector<Series> curves) {
  std::string data;
  std::string plot;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    std::sort(curves[i].points.begin(), curves[i].points.end());
    data += DataBlock(fmt::format("d{}", i), curves[i].points);
    plot += fmt::format("{}$d{} using 1:2 axes x1{} with linespoints lw 2 pt {} ps 0.6 lc rgb '{}' title {}",
                        i == 0 ? "plot " : ", ", i, curves[i].right ? "y2" : "y1", i % 8 + 4,
                        kColours[i % kColours.size()], GnuplotText(curves[i].label));
  }
  return kStyle + settings + data + plot + '\n';
}

std::string Axes(std::string_view x, std::string_view y) {
  return fmt::format("set xlabel {}\nset ylabel {}\n", GnuplotText(x), GnuplotText(y));
}

// Ranges that a single point does not collapse.
std::string WideRange(std::span<const Series> curves) {
  std::set<double> xs;
  for (const Series& curve : curves) {
    for (const auto& point : curve.points) xs.insert(point.first);
  }
  return xs.size() == 1 ? fmt::format("set xrange [{}:{}]\n", 0.0, 2.0 * *xs.begin()) : "";
}

// One curve per arm over the context lengths.
void AddOverContext(std::span<const Record> records, bool (*wanted)(const Record&), const char* field,
                    const std::string& title, const std::string& unit, const std::string& caption,
                    std::vector<Plot>& plots) {
  std::map<std::string, std::map<std::string, Points>> models;
  for (const Record& record : records) {
    const auto context = NumberIn(record, "context");
    const auto value = NumberIn(record, field);
    if (wanted(record) && context && value) {
      models[TextIn(record, "model")][ArmLabel(record)].emplace_back(*context, *value);
    }
  }
  for (const auto& [model, arms] : models) {
    std::vector<Series> curves;
    for (const auto& [label, points] : arms) curves.push_back({label, points});
    plots.push_back({fmt::format("{}: {}", title, model), caption,
                     CurvesScript(Axes("context, tokens", unit) + "set yrange [0:*]\n" + WideRange(curves), curves)});
  }
}

// A run of one model, preset and context, whose tolerances are compared.
using CurveKey = std::tuple<std::string, std::string, double>;

void AddOverTolerance(std::span<const Record> records, std::vector<Plot>& plots) {
  std::map<CurveKey, std::vector<const Record*>> groups;
  for (const Record& record : records) {
    if (IsDecode(record) && NumberIn(record, "tolerance") && NumberIn(record, "context")) {
      groups[{TextIn(record, "model"), TextIn(record, "preset"), *NumberIn(record, "context")}].push_back(&record);
    }
  }
  for (const auto& [key, group] : groups) {
    const auto& [model, preset, context] = key;
    const auto curve = [&](const char* label, const char* field, double factor, bool right) {
      Series series{label, {}, right};
      for (const Record* record : group) {
        if (const auto value = NumberIn(*record, field)) {
          series.points.emplace_back(*NumberIn(*record, "tolerance"), factor * *value);
        }
      }
      return series;
    };
    const Series agreement = curve("agreement, %", "agreement", 100.0, false);
    const Series speed = curve("tokens per second (right)", "tok_s", 1.0, true);
    if (speed.points.size() < 2) continue;
    const std::string where = fmt::format("{}, {}, {} tokens", model, preset, context);
    plots.push_back(
        {fmt::format("Speed and agreement over tolerance: {}", where),
         "Agreement: share of steps whose most likely token is that of exact attention.",
         CurvesScript(
             Axes("tolerance", "agreement, %") +
                 "set logscale x\nset autoscale xfix\nset ytics nomirror\nset y2tics\nset y2label 'tokens per second'\n"
                 "set y2range [0:*]\nset yrange [*:100]\n",
             {agreement, speed})});
    std::vector<Series> errors = {curve("attention error, mean", "attn_err_mean", 1.0, false),
                                  curve("KL divergence, nats", "kl_mean", 1.0, false)};
    for (const Record& record : records) {  // dense llama.cpp's own KL, for comparison
      const auto kl = NumberIn(record, "kl_mean");
      if (!IsDecode(record) || TextIn(record, "arm") != "llama" || !kl || TextIn(record, "model") != model ||
          NumberIn(record, "context") != context) {
        continue;
      }
      const auto [least, most] = std::minmax_element(speed.points.begin(), speed.points.end());
      errors.push_back({"KL of dense llama.cpp", {{least->first, *kl}, {most->first, *kl}}});
      break;
    }
    // A logarithmic axis has no place for an error of 0.
    for (Series& series : errors) std::erase_if(series.points, [](const auto& point) { return point.second <= 0.0; });
    std::erase_if(errors, [](const Series& series) { return series.points.empty(); });
    if (errors.empty()) continue;
    plots.push_back(
        {fmt::format("Error over tolerance: {}", where),
         "Attention error: relative L2 error of a query head's output against double precision. KL: of the "
         "next token's distribution from that of exact attention.",
         CurvesScript(Axes("tolerance", "error") + "set logscale xy\nset autoscale xfix\nset format y '%.0e'\n",
                      errors)});
  }
}

// The sparse records that hold `field`, an array, with the largest `measure`: one per model and preset, of equals the
// first.
std::vector<const Record*> LargestSparse(std::span<const Record> records, const char* field, const char* measure) {
  std::map<std::pair<std::string, std::string>, const Record*> largest;
  for (const Record& record : records) {
    const auto size = NumberIn(record, measure);
    const auto value = record.find(field);
    if (!IsDecode(record) || !size || !NumberIn(record, "context") || value == record.end() || !value->is_array() ||
        value->empty())
      continue;
    const Record*& best = largest[{TextIn(record, "model"), TextIn(record, "preset")}];
    if (best == nullptr || *NumberIn(*best, measure) < *size) best = &record;
  }
  std::vector<const Record*> found;
  for (const auto& [key, record] : largest) found.push_back(record);
  return found;
}

std::string WhereText(const Record& record) {
  return fmt::format("{}, {}, {} tokens", TextIn(record, "model"), ArmLabel(record), *NumberIn(record, "context"));
}

void AddHeatMaps(std::span<const Record> records, const char* field, double factor, const std::string& title,
                 const std::string& unit, std::vector<Plot>& plots) {
  for (const Record* record : LargestSparse(records, field, "context")) {
    std::string data = "$d0 << EOD\n";
    bool any = false;
    const Record& layers = (*record)[field];
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      if (!layers[layer].is_array()) continue;
      for (std::size_t head = 0; head < layers[layer].size(); ++head) {
        if (!layers[layer][head].is_number()) continue;
        data += fmt::format("{} {} {:.6g}\n", layer, head, factor * layers[layer][head].get<double>());
        any = true;
      }
    }
    if (!any) continue;
    plots.push_back(
        {fmt::format("{}: {}", title, WhereText(*record)),
         fmt::format("Per layer and KV head, {}, over the timed steps.", unit),
         fmt::format("{}set xtics 5\nset ytics 1\nset cblabel {}\nset cbrange [0:*]\nset autoscale fix\n"
                     "unset key\nunset grid\nset palette defined (0 '#f7fbff', 0.5 '#4292c6', 1 '#08306b')\n"
                     "{}EOD\nplot $d0 using 1:2:3 with image pixels\n",
                     Axes("layer", "KV head"), GnuplotText(unit), data)});
  }
}

void AddAudit(std::span<const Record> records, std::vector<Plot>& plots) {
  for (const Record* record : LargestSparse(records, "audit_windows", "steps")) {
    std::string band;
    Points median, p90, p99;
    for (const Record& window : (*record)["audit_windows"]) {
      const auto end = NumberIn(window, "end");
      if (!end) continue;
      const auto add = [&](const char* field, Points& points) {
        const auto value = NumberIn(window, field);
        if (value && *value > 0.0) points.emplace_back(*end, *value);  // a logarithmic axis has no place for 0
      };
      add("median", median);
      add("p90", p90);
      add("p99", p99);
      const auto low = NumberIn(window, "median_low");
      const auto high = NumberIn(window, "median_high");
      if (low && high && *low > 0.0) band += fmt::format("{} {:.6g} {:.6g}\n", *end, *low, *high);
    }
    if (median.size() < 2) continue;
    std::string script = kStyle + Axes("timed step", "attention error") + "set logscale y\nset format y '%.0e'\n";
    script += fmt::format("$band << EOD\n{}EOD\n", band);
    std::string plot = "plot ";
    if (!band.empty()) {
      plot += "$band using 1:2:3 with filledcurves fc rgb '#c6dbef' title 'median, 95 % interval', ";
    }
    const std::array<std::pair<const char*, const Points*>, 3> curves = {
        {{"median", &median}, {"p90", &p90}, {"p99", &p99}}};
    for (std::size_t i = 0; i < curves.size(); ++i) {
      script += DataBlock(fmt::format("d{}", i), *curves[i].second);
      plot += fmt::format("{}$d{} using 1:2 with lines lw 2 lc rgb '{}' title '{}'", i == 0 ? "" : ", ", i, kColours[i],
                          curves[i].first);
    }
    if (const auto tolerance = NumberIn(*record, "tolerance")) {
      plot += fmt::format(", {} with lines dt 2 lc rgb '#555555' title 'tolerance'", *tolerance);
    }
    plots.push_back({fmt::format("Audited error over time: {}", WhereText(*record)),
                     "Relative L2 error of the sparse outputs that the audit computed exactly as well, in windows of "
                     "steps.",
                     script + plot + '\n'});
  }
}

}  // namespace

std::optional<double> NumberIn(const Record& record, const char* field) {
  if (!record.is_object()) return std::nullopt;
  const auto value = record.find(field);
  if (value == record.end() || !value->is_number()) return std::nullopt;
  return value->get<double>();
}

std::string TextIn(const Record& record, const char* field) {
  if (!record.is_object()) return "";
  const auto value = record.find(field);
  return value == record.end() || !value->is_string() ? "" : value->get<std::string>();
}

bool IsPrefill(const Record& record) {
  return !TextIn(record, "arm").empty() && (NumberIn(record, "ttft_s") || NumberIn(record, "perplexity"));
}
bool IsDecode(const Record& record) {
  return !TextIn(record, "arm").empty() && NumberIn(record, "tok_s") && !IsPrefill(record);
}

std::string ArmLabel(const Record& record) {
  std::string label = TextIn(record, "arm");
  if (label == "sparse") return fmt::format("{} {}", label, NumberIn(record, "prompt_tolerance").value_or(0.0));
  if (label != "scsa") return label;
  if (const std::string preset = TextIn(record, "preset"); !preset.empty()) label += ' ' + preset;
  if (const auto tolerance = NumberIn(record, "tolerance")) label += fmt::format(" {}", *tolerance);
  return label;
}

std::vector<Plot> PlotsOf(std::span<const Record> records) {
  std::vector<Plot> plots;
  AddOverContext(records, IsDecode, "tok_s", "Speed", "tokens per second", "Timed steps over their total time.", plots);
  AddOverContext(records, IsDecode, "ms_median", "Step time", "milliseconds", "Median time of a decode step.", plots);
  AddOverContext(records, IsPrefill, "ttft_s", "Time to the first token", "seconds", "Reading a prompt of that length.",
                 plots);
  AddOverContext(records, IsPrefill, "attention_s", "Attention in prompts", "seconds",
                 "Part of the time to the first token.", plots);
  AddOverTolerance(records, plots);
  AddHeatMaps(records, "head_rows_read", 100.0, "Rows read", "rows read, % of the visible", plots);
  AddHeatMaps(records, "head_bytes_read", 1e-3, "Bytes read", "kB per step", plots);
  AddAudit(records, plots);
  return plots;
}

}  // namespace scsa::tool
