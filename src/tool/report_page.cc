// SPDX-License-Identifier: Apache-2.0
#include "report_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "report_plots.h"

namespace scsa::tool {
namespace {

constexpr std::string_view kStyle = R"(
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ccc; }
p.where { color: #444; margin: .2rem 0; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
th { background: #f3f3f3; }
.pass { color: #00693e; font-weight: 600; }
.fail { color: #b00020; font-weight: 600; }
.none { color: #555; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 1.5rem; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; }
figure h3 { font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
figcaption { font-size: .875rem; color: #444; }
)";

bool IsGate(const Record& record) { return !TextIn(record, "gate").empty() && NumberIn(record, "context"); }

struct Cell {
  std::string text;
  std::string style;  // class of the cell; empty: none
};
using Row = std::vector<Cell>;

std::string Table(const std::vector<std::string>& header, const std::vector<Row>& rows) {
  std::string html = "<div class=\"table\" tabindex=\"0\"><table><thead><tr>";
  for (const std::string& title : header) html += fmt::format("<th scope=\"col\">{}</th>", HtmlText(title));
  html += "</tr></thead><tbody>\n";
  for (const Row& row : rows) {
    html += "<tr>";
    for (const Cell& cell : row) {
      html += cell.style.empty() ? "<td>" : fmt::format("<td class=\"{}\">", cell.style);
      html += HtmlText(cell.text) + "</td>";
    }
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string Value(const Record& record, const char* field, const char* format, double factor = 1.0) {
  const auto value = NumberIn(record, field);
  return value ? fmt::format(fmt::runtime(format), *value * factor) : "-";
}

std::string WhereLines(std::span<const Record> records) {
  std::set<std::string> lines;
  for (const Record& record : records) {
    lines.insert(fmt::format("{} | {}, {}, {} threads | llama.cpp {} | {}", TextIn(record, "model"),
                             TextIn(record, "cpu"), TextIn(record, "simd_target"), Value(record, "threads", "{:.0f}"),
                             TextIn(record, "llama_cpp"), TextIn(record, "date")));
  }
  std::string html;
  for (const std::string& line : lines) html += fmt::format("<p class=\"where\">{}</p>\n", HtmlText(line));
  return html;
}

Row GateRow(const Record& record) {
  const std::string gate = TextIn(record, "gate");
  const bool nll = gate == "nll";
  const double factor = nll ? 1.0 : 100.0;
  const char* value = nll ? "{:.3f}" : "{:.1f} %";
  const char* figure = nll ? "{:+.3f}" : gate == "loops" ? "{:+.1f} pp" : "{:.1f} %";
  const std::string verdict = TextIn(record, "verdict");
  const std::string low = Value(record, "figure_low", figure, factor);
  return {{gate, ""},
          {Value(record, "context", "{:.0f}"), ""},
          {fmt::format("{} {}", TextIn(record, "preset"), Value(record, "tolerance", "{}")), ""},
          verdict == "pass"   ? Cell{"PASS", "pass"}
          : verdict == "fail" ? Cell{"FAIL", "fail"}
                              : Cell{"dense fails: no verdict", "none"},
          {Value(record, "trials", "{:.0f}"), ""},
          {Value(record, "dense", value, factor), ""},
          {Value(record, "scsa", value, factor), ""},
          {Value(record, "figure", figure, factor), ""},
          {low == "-" ? "-" : fmt::format("{} to {}", low, Value(record, "figure_high", figure, factor)), ""},
          {fmt::format("{} {}", TextIn(record, "limit_kind"), Value(record, "limit", figure, factor)), ""}};
}

Row DecodeRow(const Record& record) {
  const bool sparse = TextIn(record, "arm") == "scsa";
  return {{ArmLabel(record), ""},
          {Value(record, "context", "{:.0f}"), ""},
          {Value(record, "tok_s", "{:.1f}"), ""},
          {Value(record, "ms_median", "{:.1f}"), ""},
          {Value(record, "ms_p99", "{:.1f}"), ""},
          {Value(record, "speedup_vs_llama", "{:.2f} x"), ""},
          {Value(record, "rows_read", "{:.1f} %", 100.0), ""},
          {Value(record, "agreement", "{:.1f} %", 100.0), ""},
          {Value(record, "kl_mean", "{:.4f}"), ""},
          {Value(record, "attn_err_mean", "{:.2g}"), ""},
          {sparse ? Value(record, "audit_err_median", "{:.4f}") : "-", ""},
          {sparse ? Value(record, "plan_build_ms", "{:.0f}") : "-", ""},
          {sparse ? Value(record, "plan_bytes", "{:.1f}", 1e-6) : "-", ""}};
}

Row PrefillRow(const Record& record) {
  const std::string found = Value(record, "found", "{:.0f}");
  return {{ArmLabel(record), ""},
          {Value(record, "context", "{:.0f}"), ""},
          {Value(record, "ttft_s", "{:.2f}"), ""},
          {Value(record, "tok_s", "{:.0f}"), ""},
          {Value(record, "speedup_vs_llama", "{:.2f} x"), ""},
          {Value(record, "attention_s", "{:.2f}"), ""},
          {Value(record, "first_step_ms", "{:.1f}"), ""},
          {Value(record, "rows_read", "{:.1f} %", 100.0), ""},
          {Value(record, "error_mean", "{:.4f}"), ""},
          {Value(record, "perplexity", "{:.3f}"), ""},
          {Value(record, "kl_mean", "{:.4f}"), ""},
          {Value(record, "nll_delta", "{:+.4f}"), ""},
          {found == "-" ? found : fmt::format("{}/{}", found, Value(record, "hidden", "{:.0f}")), ""}};
}

// A table for each model, below `title`; nothing where there are no such records.
std::string Tables(std::span<const Record> records, const std::string& title, bool (*wanted)(const Record&),
                   Row (*row)(const Record&), const std::vector<std::string>& header) {
  std::map<std::string, std::vector<Row>> models;
  for (const Record& record : records) {
    if (wanted(record)) models[TextIn(record, "model")].push_back(row(record));
  }
  std::string html;
  for (const auto& [model, rows] : models) {
    html += fmt::format("<h2>{}: {}</h2>\n{}", HtmlText(title), HtmlText(model), Table(header, rows));
  }
  return html;
}

}  // namespace

std::string HtmlText(std::string_view text) {
  std::string html;
  for (const char c : text) {
    switch (c) {
      case '&':
        html += "&amp;";
        break;
      case '<':
        html += "&lt;";
        break;
      case '>':
        html += "&gt;";
        break;
      case '"':
        html += "&quot;";
        break;
      default:
        html += c;
    }
  }
  return html;
}

bool IsReportable(const Record& record) { return IsGate(record) || IsDecode(record) || IsPrefill(record); }

std::string ReportPage(std::span<const Record> records, std::span<const Figure> figures) {
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<link rel=\"icon\" href=\"data:,\">\n"
      "<title>SCSA report</title>\n<style>{}</style>\n</head>\n<body>\n<h1>SCSA report</h1>\n{}",
      kStyle, WhereLines(records));
  html += Tables(records, "Free-running gates", IsGate, GateRow,
                 {"gate", "context", "operator", "verdict", "trials", "dense", "scsa", "figure", "95 %", "limit"});
  html += Tables(records, "Decoding", IsDecode, DecodeRow,
                 {"arm", "context", "tok/s", "median ms", "p99 ms", "vs llama", "rows read", "agreement", "KL",
                  "attn error", "audit median", "plan build ms", "plan MB"});
  html += Tables(records, "Prompts", IsPrefill, PrefillRow,
                 {"arm", "tokens", "first token s", "tok/s", "vs llama", "attention s", "first step ms", "rows read",
                  "error", "perplexity", "KL after", "NLL after", "facts found"});
  if (!figures.empty()) html += "<h2>Figures</h2>\n<div class=\"figures\">\n";
  for (const Figure& figure : figures) {
    html += fmt::format("<figure><h3>{}</h3>{}<figcaption>{}</figcaption></figure>\n", HtmlText(figure.title),
                        figure.svg, HtmlText(figure.caption));
  }
  if (!figures.empty()) html += "</div>\n";
  return html + "</body>\n</html>\n";
}

}  // namespace scsa::tool
