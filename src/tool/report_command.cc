// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cctype>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "commands.h"
#include "gnuplot.h"
#include "output_file.h"
#include "report_page.h"
#include "report_plots.h"
#include "text.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

struct CommandOptions {
  std::vector<std::string> files;
  std::string out;
  std::string figures;  // folder; empty: none
};

// A title as a file name: lower-case letters and digits, everything else as single dashes.
std::string FileNameOf(std::string_view title) {
  std::string name;
  for (const char c : title) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0) {
      name += static_cast<char>(std::tolower(byte));
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name;
}

void WriteFigures(const std::string& folder, std::span<const Figure> figures) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw ToolError(fmt::format("--figures: cannot make the folder {}: {}", folder, error.message()));
  for (const Figure& figure : figures) {
    WriteFileAtomically((std::filesystem::path(folder) / (FileNameOf(figure.title) + ".svg")).string(), figure.svg);
  }
}

// The records of a file that the page shows.
std::vector<Record> ReadRecords(const std::string& path) {
  const Record content = Record::parse(ReadFile(path, "result"), nullptr, false);
  if (content.is_discarded()) {
    throw ToolError(fmt::format("{} is no JSON: give what --json of bench decode or eval freerun wrote", path));
  }
  std::vector<Record> records;
  if (content.is_array()) {
    for (const Record& record : content) {
      if (IsReportable(record)) records.push_back(record);
    }
  }
  if (records.empty()) {
    throw ToolError(fmt::format("{} holds no results: give what --json of bench decode or eval freerun wrote", path));
  }
  return records;
}

void Run(const CommandOptions& options) {
  std::vector<Record> records;
  for (const std::string& file : options.files) {
    for (Record& record : ReadRecords(file)) records.push_back(std::move(record));
  }
  CheckWritable(options.out, "-o");
  std::vector<Figure> figures;
  for (const Plot& plot : PlotsOf(records)) {
    const std::string name = fmt::format("plot{}", figures.size() + 1);
    figures.push_back({plot.title, plot.caption, DrawSvg(name, plot.script)});
  }
  if (!options.figures.empty()) WriteFigures(options.figures, figures);
  WriteFileAtomically(options.out, ReportPage(records, figures));
}

}  // namespace

void AddReportCommand(CLI::App& parent) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* app = parent.add_subcommand("report", "Make one HTML page with tables and plots of measured results");
  app->add_option("files", options->files, "JSON files of 'scsa bench decode' and 'scsa eval freerun'")
      ->type_name("FILE")
      ->required();
  app->add_option("-o,--out", options->out, "HTML file to write")->type_name("FILE")->required();
  app->add_option("--figures", options->figures, "Also write each figure as an SVG file into this folder")
      ->type_name("DIR");
  app->footer(
      "Examples:\n"
      "  scsa report decode.json -o report.html\n"
      "  scsa report decode.json freerun.json -o report.html");
  app->get_formatter()->column_width(34);
  app->callback([options] { Run(*options); });
}

}  // namespace scsa::tool
