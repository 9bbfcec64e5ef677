// SPDX-License-Identifier: Apache-2.0
#include "report_page.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "command.h"
#include "gnuplot.h"
#include "report_plots.h"
#include "text.h"

namespace scsa::tool {
namespace {

namespace fs = std::filesystem;

Record Sparse(double context, double tolerance) {
  return {{"model", "some<model>"},
          {"context", context},
          {"arm", "scsa"},
          {"steps", 64},
          {"preset", "fast"},
          {"tolerance", tolerance},
          {"tok_s", 80.0 + 100.0 * tolerance},
          {"ms_median", 12.0},
          {"agreement", 0.95 - tolerance},
          {"kl_mean", tolerance / 10},
          {"attn_err_mean", tolerance},
          {"plan_build_ms", 400.0},
          {"plan_bytes", 2e7},
          {"head_rows_read", {{0.5, 0.25}, {0.125, nullptr}, Record::array()}},
          {"head_bytes_read", {{5e4, 25e3}, {12e3, 0.0}, Record::array()}},
          {"audit_windows",
           {{{"begin", 0},
             {"end", 32},
             {"median", 0.01},
             {"median_low", 0.008},
             {"median_high", 0.02},
             {"p90", 0.03},
             {"p99", 0.06}},
            {{"begin", 32},
             {"end", 64},
             {"median", 0.012},
             {"median_low", nullptr},
             {"median_high", nullptr},
             {"p90", 0.04},
             {"p99", 0.05}}}}};
}

std::vector<Record> Records() {
  return {Sparse(8000, 0.01),
          Sparse(8000, 0.1),
          {{"model", "some<model>"},
           {"context", 8000},
           {"arm", "llama"},
           {"tok_s", 18.0},
           {"ms_median", 54.0},
           {"kl_mean", 0.009},
           {"head_rows_read", nullptr}},
          {{"model", "some<model>"},
           {"context", 2000},
           {"gate", "nll"},
           {"trials", 8},
           {"dense", 1.0},
           {"scsa", 1.02},
           {"figure", 0.02},
           {"limit", 0.15},
           {"limit_kind", "at most"},
           {"verdict", "pass"}},
          {{"model", "some<model>"}, {"context", 2000}, {"gate", "variables"}, {"verdict", "none"}},
          {{"model", "some<model>"},
           {"context", 7900},
           {"arm", "sparse"},
           {"prompt_tolerance", 0.025},
           {"ttft_s", 30.2},
           {"tok_s", 262.0},
           {"attention_s", 4.98},
           {"rows_read", 0.212},
           {"nll_delta", 0.0056},
           {"found", 6},
           {"hidden", 7}}};
}

std::vector<Figure> Draw(const std::vector<Record>& records) {
  std::vector<Figure> figures;
  for (const Plot& plot : PlotsOf(records)) {
    figures.push_back({plot.title, plot.caption, DrawSvg("plot" + std::to_string(figures.size()), plot.script)});
  }
  return figures;
}

bool HasGnuplot() { return RunCommand({"/bin/sh", "-c", "command -v gnuplot"}).status == 0; }

std::string Chromium() {
  const CommandResult result = RunCommand({"/bin/sh", "-c", "command -v chromium || command -v chromium-browser"});
  return result.status == 0 ? OneLine(result.out) : "";
}

TEST(ReportPage, HoldsTablesAndFiguresAndNothingFromOutside) {
  const std::string page = ReportPage(Records(), std::vector<Figure>{{"A & B", "of <C>", "<svg></svg>"}});
  EXPECT_EQ(page.rfind("<!DOCTYPE html>", 0), 0u);
  EXPECT_NE(page.find("some&lt;model&gt;"), std::string::npos);
  EXPECT_EQ(page.find("some<model>"), std::string::npos);
  EXPECT_NE(page.find("<h3>A &amp; B</h3><svg></svg><figcaption>of &lt;C&gt;"), std::string::npos);
  EXPECT_NE(page.find("<td class=\"pass\">PASS</td>"), std::string::npos);
  EXPECT_NE(page.find("dense fails: no verdict"), std::string::npos);
  EXPECT_NE(page.find("<td>scsa fast 0.01</td>"), std::string::npos);
  EXPECT_NE(page.find("<td>+0.020</td>"), std::string::npos);
  // A prompt is no decoding.
  EXPECT_NE(page.find("<h2>Prompts: some&lt;model&gt;</h2>"), std::string::npos);
  const std::size_t prompt = page.find(
      "<td>sparse 0.025</td><td>7900</td><td>30.20</td><td>262</td><td>-</td><td>4.98</td>"
      "<td>-</td><td>21.2 %</td><td>-</td><td>-</td><td>-</td><td>+0.0056</td><td>6/7</td>");
  EXPECT_NE(prompt, std::string::npos) << page;
  EXPECT_EQ(page.find("<td>sparse 0.025</td>", prompt + 1), std::string::npos);
  for (const char* outside : {"http://", "https://", "<script", "src=", "@import"}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
}

TEST(IsReportable, TakesResultsOfThreeCommands) {
  for (const Record& record : Records()) EXPECT_TRUE(IsReportable(record)) << record.dump();
  for (const char* other : {"3", "null", "[]", "{}", R"({"arm": "exact"})", R"({"arm": 1, "tok_s": 2})"}) {
    EXPECT_FALSE(IsReportable(Record::parse(other))) << other;
  }
}

TEST(PlotsOf, DrawsWhatTheRecordsHold) {
  std::vector<std::string> titles;
  for (const Plot& plot : PlotsOf(Records())) titles.push_back(plot.title);
  EXPECT_EQ(titles, (std::vector<std::string>{
                        "Speed: some<model>",
                        "Step time: some<model>",
                        "Time to the first token: some<model>",
                        "Attention in prompts: some<model>",
                        "Speed and agreement over tolerance: some<model>, fast, 8000 tokens",
                        "Error over tolerance: some<model>, fast, 8000 tokens",
                        "Rows read: some<model>, scsa fast 0.01, 8000 tokens",
                        "Bytes read: some<model>, scsa fast 0.01, 8000 tokens",
                        "Audited error over time: some<model>, scsa fast 0.01, 8000 tokens",
                    }));
  // A single tolerance is no curve.
  EXPECT_EQ(PlotsOf(std::vector<Record>{Sparse(8000, 0.01)}).size(), 5u);
  // Values of other types leave their plot out.
  Record broken = Sparse(8000, 0.01);
  broken["head_rows_read"] = "x";
  broken["head_bytes_read"] = {1, "x", {"y"}};
  broken["audit_windows"] = {1, nullptr};
  EXPECT_EQ(PlotsOf(std::vector<Record>{broken}).size(), 2u);
}

TEST(GnuplotText, KeepsNothingThatGnuplotReads) {
  EXPECT_EQ(GnuplotText("a 0.5 %"), "'a 0.5 %'");
  EXPECT_EQ(GnuplotText("a'; system('x') `y` \"z\"\n<&>"), "'a ; system( x )  y   z     '");
}

TEST(DrawSvg, DrawsEveryPlot) {
  if (!HasGnuplot()) GTEST_SKIP() << "no gnuplot (Debian package gnuplot-nox)";
  for (const Figure& figure : Draw(Records())) {
    EXPECT_EQ(figure.svg.rfind("<svg", 0), 0u) << figure.title;
    EXPECT_NE(figure.svg.find("</svg>"), std::string::npos) << figure.title;
    EXPECT_NE(figure.svg.find("viewBox"), std::string::npos) << figure.title;
    EXPECT_EQ(figure.svg.find("href='http"), std::string::npos) << figure.title;
  }
}

// In a real browser: the page is taken without a message on the console, and nothing but tables is wider than it.
TEST(ReportPage, FitsWideAndNarrowWindowsOfABrowser) {
  const std::string chromium = Chromium();
  if (!HasGnuplot() || chromium.empty()) GTEST_SKIP() << "no gnuplot or no chromium (Debian package chromium)";
  const fs::path folder = fs::path(testing::TempDir()) / "scsa_report_page_test";
  fs::remove_all(folder);
  fs::create_directories(folder);
  // The page has no script of its own; this one measures it, in a frame of the given width.
  std::ofstream(folder / "report.html")
      << ReportPage(Records(), Draw(Records()))
      << "<script>parent.postMessage([document.documentElement.scrollWidth <= innerWidth,"
         "document.querySelectorAll('figure svg').length,"
         "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))], '*')"
         "</script>";
  for (const int width : {1280, 400}) {
    std::ofstream(folder / "frame.html")
        << "<body><pre id='found'></pre><iframe src='report.html' style='width:" << width
        << "px;height:800px;border:0'></iframe>"
           "<script>onmessage = e => document.getElementById('found').textContent = 'found ' + e.data</script>";
    const CommandResult result =
        RunCommand({chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                    "--user-data-dir=" + (folder / "user").string(), "--virtual-time-budget=5000", "--dump-dom",
                    "file://" + (folder / "frame.html").string()});
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.err.find("CONSOLE"), std::string::npos) << result.err;
    const std::size_t found = result.out.find("found true,9,");
    ASSERT_NE(found, std::string::npos) << width << " px: " << result.out.substr(0, 300);
    // Labels of the plots stay legible.
    EXPECT_GE(std::atof(result.out.c_str() + found + 13), 8.0) << width;
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace scsa::tool
