// SPDX-License-Identifier: Apache-2.0
#include "plugin/crossover.h"

#include <algorithm>

namespace scsa::plugin {
namespace {

// Sparse wins where it takes at most this share of the exact time: less is not worth an error.
constexpr double kWorthIt = 0.98;
// A trial ends early when its first kFew sparse steps all take this much longer than exact ones.
constexpr double kHopeless = 1.3;
constexpr std::size_t kFew = 4;
// A single trial says no more about lengths beyond this factor.
constexpr double kFarthest = 4.0;

std::uint64_t Times(std::uint64_t cells, double factor) {
  return static_cast<std::uint64_t>(static_cast<double>(cells) * factor);
}

}  // namespace

double Crossover::Seconds::Least() const { return *std::min_element(steps_.begin(), steps_.begin() + n_); }

double Crossover::Seconds::Median() const {
  std::array<double, kTimed> steps = steps_;
  std::nth_element(steps.begin(), steps.begin() + n_ / 2, steps.begin() + n_);
  return steps[n_ / 2];
}

void Crossover::BeginStep(std::uint64_t visible, bool ready) {
  if (begun_) EndStep();
  begun_ = true;
  timed_ = false;
  as_planned_ = true;
  seconds_ = 0.0;
  if (visible < kFirst) {
    sparse_ = false;
  } else if (!ready) {
    sparse_ = visible >= kFirstWindow;
  } else if (sparse_from_ && visible >= *sparse_from_) {
    sparse_ = true;
  } else {
    timed_ = InTrial(visible);
    sparse_ = timed_ && (!trial_->caught_up || trial_->sparse.n() < trial_->exact.n());
  }
}

// Whether the trial in progress, or one that begins, covers this length.
bool Crossover::InTrial(std::uint64_t visible) {
  if (trial_ && visible >= trial_->visible && visible < Times(trial_->visible, kStep)) return true;
  trial_.reset();
  if (visible < exact_below_) return false;
  if (sparse_from_ && visible > Times(*sparse_from_, 1.0 / kStep)) return false;
  trial_.emplace().visible = visible;
  return true;
}

void Crossover::Add(Answer answer, double seconds) {
  as_planned_ = as_planned_ && answer == (sparse_ ? Answer::kSparse : Answer::kExact);
  seconds_ += seconds;
}

void Crossover::EndStep() {
  if (!timed_ || !as_planned_) return;
  if (!trial_->caught_up) {
    trial_->caught_up = true;
    return;
  }
  (sparse_ ? trial_->sparse : trial_->exact).Add(seconds_);
  Judge();
}

void Crossover::Judge() {
  const Seconds& exact = trial_->exact;
  const Seconds& sparse = trial_->sparse;
  if (sparse.n() < kFew) return;
  if (sparse.n() == kTimed || sparse.Least() > kHopeless * exact.Median()) Decide(sparse.Median() / exact.Median());
}

// ratio: of sparse to exact time, at the trial's length.
void Crossover::Decide(double ratio) {
  const std::uint64_t visible = trial_->visible;
  if (ratio <= kWorthIt) {
    sparse_from_ = std::max(exact_below_, Times(visible, ratio / kWorthIt));
  } else {
    exact_below_ = Times(visible, std::clamp(ratio / kWorthIt, kStep, kFarthest));
  }
  ++trials_;
  trial_.reset();
}

std::optional<std::uint64_t> Crossover::bound() const {
  if (trials_ == 0) return std::nullopt;
  return sparse_from_.value_or(exact_below_);
}

}  // namespace scsa::plugin
