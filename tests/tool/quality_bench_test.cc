// SPDX-License-Identifier: Apache-2.0
#include "quality_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "quality_report.h"
#include "synthetic_capture.h"
#include "tool_error.h"

namespace scsa::tool {
namespace {

constexpr Shape kShape = {.q_heads = 6, .kv_heads = 2, .head_dim = 16};
constexpr double kRowBytes = 64.0;  // f16 key and value of 16 channels

const QualityResult& Find(const std::vector<QualityResult>& results, const std::string& method,
                          const std::string& budget) {
  const auto result = std::find_if(results.begin(), results.end(),
                                   [&](const QualityResult& r) { return r.method == method && r.budget == budget; });
  EXPECT_NE(result, results.end()) << method << " " << budget;
  return *result;
}

// Attention of one query head over some rows, in double precision.
std::vector<double> Attend(const Capture& capture, const CapturedLayer& layer, int step, int head,
                           const std::vector<int>& rows) {
  const int dim = capture.shape.head_dim;
  const float* q = layer.q.data() + (step * capture.shape.q_heads + head) * dim;
  const std::size_t base = head / capture.shape.group() * capture.rows() * dim;
  std::vector<double> out(dim, 0.0);
  double sum = 0.0;
  for (const int row : rows) {
    double logit = 0.0;
    for (int d = 0; d < dim; ++d) logit += q[d] * ggml_fp16_to_fp32(layer.k[base + row * dim + d]);
    const double weight = std::exp(capture.scale * logit);
    sum += weight;
    for (int d = 0; d < dim; ++d) out[d] += weight * ggml_fp16_to_fp32(layer.v[base + row * dim + d]);
  }
  for (double& value : out) value /= sum;
  return out;
}

TEST(MeasureQuality, StreamingIsWhatItsDefinitionSays) {
  const Capture capture = SyntheticCapture(kShape, 200, 40, {3, 9});
  Progress progress;
  const std::vector<QualityResult> results =
      MeasureQuality(capture, {.tolerance = std::nullopt, .threads = 2}, progress);
  std::vector<double> errors;
  double rows_read = 0.0;
  double visible_rows = 0.0;
  for (const CapturedLayer& layer : capture.layers) {
    double left_over = 0.0;
    for (int step = 32; step < 40; ++step) {
      const int n = 200 + step;
      const double budget = 0.2 * n + left_over;  // in rows
      const int count = static_cast<int>(std::floor(budget + 1e-9));
      left_over = budget - count;
      std::vector<int> all(n);
      std::vector<int> some;
      for (int r = 0; r < n; ++r) {
        all[r] = r;
        if (r < 4 || r >= n - (count - 4)) some.push_back(r);
      }
      rows_read += 2 * count;
      visible_rows += 2 * n;
      for (int head = 0; head < 6; ++head) {
        const std::vector<double> exact = Attend(capture, layer, step, head, all);
        const std::vector<double> streaming = Attend(capture, layer, step, head, some);
        double difference = 0.0;
        double norm = 0.0;
        for (int d = 0; d < 16; ++d) {
          difference += (streaming[d] - exact[d]) * (streaming[d] - exact[d]);
          norm += exact[d] * exact[d];
        }
        errors.push_back(std::sqrt(difference / norm));
      }
    }
  }
  std::sort(errors.begin(), errors.end());
  double mean = 0.0;
  for (const double error : errors) mean += error / static_cast<double>(errors.size());
  const QualityResult& streaming = Find(results, "streaming", "20 %");
  EXPECT_NEAR(streaming.rows_read, rows_read / visible_rows, 1e-9);
  EXPECT_NEAR(streaming.bytes_share, rows_read / visible_rows, 1e-9);
  EXPECT_NEAR(streaming.bytes_read, rows_read * kRowBytes / 8, 1e-6);
  EXPECT_NEAR(streaming.err_mean, mean, 1e-4 * mean);
  // 96 errors: the median lies between the two in the middle.
  ASSERT_EQ(errors.size(), 96u);
  EXPECT_NEAR(streaming.err_median, 0.5 * (errors[47] + errors[48]), 1e-4 * mean);
  EXPECT_GE(streaming.err_p99, streaming.err_p90);
  EXPECT_LE(streaming.err_p99, errors.back() * 1.0001);
}

TEST(MeasureQuality, ShortCachesAreReadWhole) {
  const Capture capture = SyntheticCapture(kShape, 60, 34, {0});  // less than a block of `fast`
  Progress progress;
  const std::vector<QualityResult> results = MeasureQuality(capture, {.tolerance = 0.1, .threads = 1}, progress);
  const QualityResult& fast = Find(results, "fast", "tolerance 0.1");
  EXPECT_EQ(fast.tolerance, 0.1);
  EXPECT_EQ(fast.rows_read, 1.0);
  EXPECT_EQ(fast.bytes_share, 1.0);
  EXPECT_DOUBLE_EQ(fast.bytes_read, 92.5 * 2 * kRowBytes);  // the two measured steps see 92 and 93 rows
  EXPECT_LT(fast.err_p99, 1e-5);
  for (const char* method : {"streaming", "top-k"}) {
    const QualityResult& result = Find(results, method, "as fast");
    EXPECT_FALSE(result.tolerance.has_value());
    EXPECT_EQ(result.rows_read, 1.0);
    EXPECT_LT(result.err_p99, 1e-5);
  }
  // Quest spends a part of the bytes on minima and maxima: of the four pages in between, 4 rows' worth, one is left
  // out.
  EXPECT_LT(Find(results, "quest", "as fast").rows_read, 1.0);
}

TEST(MeasureQuality, OthersGetTheBytesOfFast) {
  const Capture capture = SyntheticCapture(kShape, 1500, 40, {5});
  Progress progress;
  const std::vector<QualityResult> results =
      MeasureQuality(capture, {.tolerance = std::nullopt, .threads = 2}, progress);
  const QualityResult& fast = Find(results, "fast", "tolerance 0.015");
  EXPECT_EQ(fast.tolerance, 0.015);
  EXPECT_LT(fast.rows_read, 1.0);
  EXPECT_GT(fast.bytes_share, fast.rows_read);  // summaries
  EXPECT_GT(fast.err_mean, 0.0);
  EXPECT_LT(fast.err_mean, 0.1);
  // Another choice of clusters at the same tolerance.
  const QualityResult& hierarchical = Find(results, "hierarchical", "tolerance 0.015");
  EXPECT_NE(hierarchical.err_mean, fast.err_mean);
  EXPECT_GT(hierarchical.err_mean, 0.0);
  EXPECT_LT(hierarchical.err_mean, 0.1);
  EXPECT_LT(hierarchical.rows_read, 1.0);
  const QualityResult& seed = Find(results, "seed", "tolerance 0.025");
  EXPECT_EQ(seed.tolerance, 0.025);
  const QualityResult& seed_hierarchical = Find(results, "seed-hierarchical", "tolerance 0.025");
  EXPECT_NE(seed_hierarchical.err_mean, seed.err_mean);
  EXPECT_GT(seed_hierarchical.err_mean, 0.0);
  EXPECT_LT(seed_hierarchical.err_mean, 0.1);
  const double page = 16.0 / 1500.0;
  for (const char* method : {"streaming", "quest", "top-k"}) {
    const QualityResult& equal = Find(results, method, "as fast");
    EXPECT_NEAR(equal.bytes_share, fast.bytes_share, page / 8) << method;  // less than a page in 8 steps
    EXPECT_NEAR(Find(results, method, "10 %").bytes_share, 0.1, page / 8) << method;
    EXPECT_NEAR(Find(results, method, "20 %").bytes_share, 0.2, page / 8) << method;
    EXPECT_LT(Find(results, method, "20 %").err_mean, Find(results, method, "10 %").err_mean) << method;
  }
  EXPECT_LT(Find(results, "quest", "20 %").rows_read, Find(results, "top-k", "20 %").rows_read);
  EXPECT_LT(Find(results, "top-k", "20 %").err_mean, Find(results, "quest", "20 %").err_mean);
  EXPECT_LT(Find(results, "top-k", "20 %").err_mean, Find(results, "streaming", "20 %").err_mean);
}

TEST(MeasureQuality, NumbersOfThreadsGiveTheSameResult) {
  const Capture capture = SyntheticCapture(kShape, 600, 34, {5});
  Progress progress;
  const auto one = MeasureQuality(capture, {.tolerance = std::nullopt, .threads = 1}, progress);
  const auto two = MeasureQuality(capture, {.tolerance = std::nullopt, .threads = 2}, progress);
  ASSERT_EQ(one.size(), two.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].err_mean, two[i].err_mean) << one[i].method << " " << one[i].budget;
    EXPECT_EQ(one[i].bytes_read, two[i].bytes_read) << one[i].method << " " << one[i].budget;
  }
}

TEST(MeasureQuality, ChecksTheAuditsIntervalAgainstEveryOutput) {
  const Capture capture = SyntheticCapture(kShape, 1000, 32 + 128, {5});
  Progress progress;
  const auto results = MeasureQuality(capture, {.tolerance = std::nullopt, .threads = 1, .audit = 0.25}, progress);
  const QualityResult& fast = Find(results, "fast", "tolerance 0.015");
  ASSERT_TRUE(fast.audit);
  EXPECT_EQ(fast.audit->windows, 6);  // two of 64 steps, three audits
  EXPECT_GE(fast.audit->held, 4);
  EXPECT_FALSE(Find(results, "quest", "10 %").audit);
  // An audit of everything is the truth.
  const auto all = MeasureQuality(capture, {.tolerance = std::nullopt, .threads = 1, .audit = 1.0}, progress);
  EXPECT_EQ(Find(all, "fast", "tolerance 0.015").audit->held, 6);
  // Measured or not, the presets give the same outputs.
  EXPECT_EQ(Find(all, "fast", "tolerance 0.015").err_mean, fast.err_mean);
}

TEST(MeasureQuality, NeedsMoreStepsThanCalibrationTakes) {
  Progress progress;
  EXPECT_THROW(MeasureQuality(SyntheticCapture(kShape, 60, 32, {0}), {}, progress), ToolError);
  EXPECT_NO_THROW(MeasureQuality(SyntheticCapture(kShape, 60, 33, {0}), {}, progress));
}

TEST(QualityReport, TableAndRecords) {
  const CaptureInfo capture = InfoOf(SyntheticCapture(kShape, 60, 40, {2, 8}), "a,b.gguf");
  const QualityRunInfo run = {.cpu = "Some CPU", .simd_target = "AVX2", .date = "2026-01-31", .threads = 2};
  std::vector<QualityResult> results(2);
  results[0] = {.method = "fast",
                .budget = "tolerance 0.015",
                .tolerance = 0.015,
                .rows_read = 0.125,
                .bytes_read = 2.5e6,
                .bytes_share = 0.25,
                .err_mean = 0.0171,
                .err_median = 0.01,
                .err_p90 = 0.03,
                .err_p99 = 0.1};
  results[1] = {.method = "quest",
                .budget = "10 %",
                .tolerance = std::nullopt,
                .rows_read = 0.04,
                .bytes_read = 1e6,
                .bytes_share = 0.1,
                .err_mean = INFINITY,
                .err_median = 0.1,
                .err_p90 = 0.2,
                .err_p99 = 0.3};
  const std::string table = QualityTable(run, capture, results);
  EXPECT_EQ(table,
            "synthetic | 60 cached rows, layers 2,8, 6 query heads, 2 KV heads, head size 16, 8 steps after 32 of "
            "calibration\n"
            "Some CPU, AVX2, 2 threads | 2026-01-31\n"
            "method  budget           rows read  bytes read  MB/step  error mean  median     p90     p99\n"
            "fast    tolerance 0.015     12.5 %      25.0 %     2.50      0.0171  0.0100  0.0300  0.1000\n"
            "quest   10 %                 4.0 %      10.0 %     1.00         inf  0.1000  0.2000  0.3000\n");
  const std::vector<Record> records = QualityRecords(run, capture, results);
  const Record json = Record::parse(RecordsJson(records));
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[0]["method"], "fast");
  EXPECT_EQ(json[0]["tolerance"], 0.015);
  EXPECT_EQ(json[0]["n_kv"], 60);
  EXPECT_EQ(json[0]["steps"], 8);
  EXPECT_EQ(json[0]["bytes_share"], 0.25);
  EXPECT_TRUE(json[1]["tolerance"].is_null());
  EXPECT_TRUE(json[1]["err_mean"].is_null());  // JSON has no infinity
  const std::string csv = RecordsCsv(records);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 3);
  EXPECT_EQ(csv.rfind("capture,model,architecture,n_kv,layers,", 0), 0u) << csv;
  EXPECT_NE(csv.find("\n\"a,b.gguf\",synthetic,none,60,2 8,6,2,16,fast,tolerance 0.015,0.015,0.125,"),
            std::string::npos)
      << csv;
}

}  // namespace
}  // namespace scsa::tool
