// SPDX-License-Identifier: Apache-2.0
#include "core/parallel.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace scsa {
namespace {

// What each thread was told, in the order of its calls: (task, next).
using Log = std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>;

Log RunAhead(int n_threads, std::int64_t n_tasks, bool uneven = false) {
  Log log(std::max(n_threads, 1));
  ParallelForAhead(n_threads, n_tasks, [&](std::int64_t task, std::int64_t next, int thread) {
    log.at(thread).emplace_back(task, next);
    // Threads get out of step, so that they take tasks from each other.
    if (uneven && task % 3 == 0) std::this_thread::yield();
  });
  return log;
}

void ExpectEachTaskOnce(const Log& log, std::int64_t n_tasks) {
  std::vector<int> runs(n_tasks, 0);
  for (const auto& calls : log) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      ++runs.at(calls[i].first);
      // What follows on this thread is what it was told; nothing follows the last one.
      EXPECT_EQ(calls[i].second, i + 1 < calls.size() ? calls[i + 1].first : n_tasks);
      EXPECT_GT(calls[i].second, calls[i].first);  // ascending, so that a task may wait for an earlier one
    }
  }
  EXPECT_EQ(runs, std::vector<int>(n_tasks, 1));
}

TEST(ParallelForAheadTest, RunsEachTaskOnceAndNamesTheNextOne) {
  for (const int n_threads : {1, 2, 3, 7}) {
    for (const std::int64_t n_tasks : {1, 2, 3, 6, 7, 8, 9, 100, 1000}) {
      SCOPED_TRACE(std::to_string(n_threads) + " threads, " + std::to_string(n_tasks) + " tasks");
      ExpectEachTaskOnce(RunAhead(n_threads, n_tasks, /*uneven=*/true), n_tasks);
    }
  }
}

TEST(ParallelForAheadTest, SmallLoopsHoldOftenRepeated) {
  for (int i = 0; i < 500; ++i) {
    ExpectEachTaskOnce(RunAhead(2, 5, i % 2 == 0), 5);
    ExpectEachTaskOnce(RunAhead(3, 4, i % 2 == 0), 4);
  }
}

TEST(ParallelForAheadTest, NoTasksNoCalls) {
  for (const int n_threads : {0, 1, 4}) ExpectEachTaskOnce(RunAhead(n_threads, 0), 0);
}

TEST(ParallelForAheadTest, MoreThreadsThanTasks) {
  const Log log = RunAhead(7, 3);
  ExpectEachTaskOnce(log, 3);
  for (std::size_t thread = 3; thread < log.size(); ++thread) EXPECT_TRUE(log[thread].empty());
}

TEST(ParallelForAheadTest, OneThreadIsTheCaller) {
  const std::thread::id caller = std::this_thread::get_id();
  for (const int n_threads : {-1, 0, 1}) {
    std::int64_t calls = 0;
    ParallelForAhead(n_threads, 5, [&](std::int64_t task, std::int64_t next, int thread) {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      EXPECT_EQ(task, calls++);
      EXPECT_EQ(next, calls);
      EXPECT_EQ(thread, 0);
    });
    EXPECT_EQ(calls, 5);
  }
}

// Threads in step with each other: each starts on the task of its own number.
TEST(ParallelForAheadTest, ThreadsRunAtTheSameTime) {
  std::atomic<int> arrived{0};
  ParallelForAhead(3, 3, [&](std::int64_t task, std::int64_t, int thread) {
    EXPECT_EQ(task, thread);
    // Ends only if three threads are here together.
    for (arrived.fetch_add(1); arrived.load() < 3;) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 3);
}

TEST(ParallelForAheadTest, StaysOnItsThreadInsideAParallelRegion) {
  Log log;
#pragma omp parallel num_threads(2)
  {
    // One caller is enough, and keeps the log to one thread.
    if (omp_get_thread_num() == 0) {
      EXPECT_EQ(omp_get_num_threads(), 2);
      log = RunAhead(4, 20);
    }
  }
  ExpectEachTaskOnce(log, 20);
  ASSERT_EQ(log.size(), 4u);
  EXPECT_EQ(log[0].size(), 20u);
}

#if !defined(__SANITIZE_THREAD__)
// The runtime may start fewer threads than it is asked for: a limit, here, in a program the load of the machine.
TEST(ParallelForAheadTest, ASmallerTeamThanAskedForDoesAllTasks) {
  for (const std::int64_t n_tasks : {3, 7, 50}) {
    Log log(7);
    std::atomic<int> team{0};
#pragma omp teams num_teams(1) thread_limit(2)
    ParallelForAhead(7, n_tasks, [&](std::int64_t task, std::int64_t next, int thread) {
      team = omp_get_num_threads();
      log.at(thread).emplace_back(task, next);
    });
    ASSERT_EQ(team.load(), 2);
    ExpectEachTaskOnce(log, n_tasks);
    for (std::size_t thread = 2; thread < log.size(); ++thread) EXPECT_TRUE(log[thread].empty());
  }
}
#endif

}  // namespace
}  // namespace scsa
