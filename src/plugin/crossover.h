// SPDX-License-Identifier: Apache-2.0
//
// From which length of the context on the sparse operator answers decode steps: found by timing it against the exact
// kernel where both would do. Pure logic; whoever feeds it takes the times.
//
// A trial answers steps of one length exactly and sparsely in turn and compares the medians of their times, so that
// whatever else the machine does meets both alike. Below the length of a trial that exact won, exact answers; from the
// length of one that sparse won on, sparse does. How clearly it was won says how far the result carries: exact
// attention costs in proportion to the length and sparse attention grows more slowly, so that the ratio of the two at
// another length is known to be no worse than in proportion. Between the two bounds the next trial is held, but lengths
// of trials lie at least a factor kStep apart: their number grows with the logarithm of the length.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace scsa::plugin {

// Of the layers of one stream of a cache. Not thread-safe: used by the thread that evaluates the context's graphs.
class Crossover {
 public:
  // Visible cells below which there is nothing to gain: no trial is held, prompts make nothing ready.
  static constexpr std::uint64_t kFirst = 1536;
  // From where on a calibration window is opened for lack of a prompt that calibrates. A window and the blocks that
  // come with it cost more than some hundred steps gain below.
  static constexpr std::uint64_t kFirstWindow = 2560;
  static constexpr std::size_t kTimed = 8;  // steps of each kind in a trial
  static constexpr double kStep = 1.25;

  enum class Answer : std::uint8_t { kExact, kSparse, kOther };  // kOther: calibration, or a plan that does not serve

  // The first layer begins a step, and the one before is over. ready: the layer has thresholds, or its calibration
  // window has begun.
  void BeginStep(std::uint64_t visible, bool ready);
  // How the present step is to be answered, in every layer.
  bool sparse() const { return sparse_; }
  // What one layer of the step answered, and how long it took.
  void Add(Answer answer, double seconds);

  // Visible cells from which steps are sparse, or are tried again where exact has won so far. Nothing before the first
  // trial is over.
  std::optional<std::uint64_t> bound() const;
  int trials() const { return trials_; }  // that are over

 private:
  class Seconds {
   public:
    void Add(double seconds) { steps_[n_++] = seconds; }
    std::size_t n() const { return n_; }
    double Least() const;
    double Median() const;

   private:
    std::array<double, kTimed> steps_{};
    std::size_t n_ = 0;
  };
  struct Trial {
    std::uint64_t visible = 0;  // when it began
    bool caught_up = false;     // the first sparse step builds what is due and is not timed
    Seconds exact, sparse;
  };

  void EndStep();
  bool InTrial(std::uint64_t visible);
  void Judge();
  void Decide(double ratio);

  std::uint64_t exact_below_ = kFirst;        // no trial below
  std::optional<std::uint64_t> sparse_from_;  // a trial that sparse won carries to here
  std::optional<Trial> trial_;
  int trials_ = 0;
  // The present step.
  bool begun_ = false;
  bool sparse_ = false;
  bool timed_ = false;  // as part of the trial
  bool as_planned_ = false;
  double seconds_ = 0.0;
};

}  // namespace scsa::plugin
