// SPDX-License-Identifier: Apache-2.0
//
// The one place that starts threads. Callers give the thread count; results must not depend on it, so a task writes
// only what belongs to its own index.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__SANITIZE_THREAD__)
#include <pthread.h>

#include <array>
#include <cstdlib>
#include <type_traits>
#endif

namespace scsa {

// For loops that wait for another thread.
inline void PauseThread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls work(thread, threads) on each thread of a team, this one among them, and waits for all. The team may be smaller
// than asked for.
template <class F>
void RunTeam(int team, F&& work) {
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer does not see libgomp's synchronisation (the library is not instrumented) and would report races
  // that do not exist. As with libgomp, a team takes no memory that operator new could refuse.
  struct Member {
    void* work;
    int thread;
    int team;
    pthread_t id;
  };
  std::array<Member, 64> members;
  team = std::clamp(team, 1, static_cast<int>(members.size()));
  const auto run = [](void* p) -> void* {
    const Member& member = *static_cast<Member*>(p);
    (*static_cast<std::remove_reference_t<F>*>(member.work))(member.thread, member.team);
    return nullptr;
  };
  for (int thread = 1; thread < team; ++thread) {
    members[thread] = {&work, thread, team, {}};
    if (pthread_create(&members[thread].id, nullptr, run, &members[thread]) != 0) std::abort();
  }
  work(0, team);
  for (int thread = 1; thread < team; ++thread) pthread_join(members[thread].id, nullptr);
#else
#pragma omp parallel num_threads(team)
  work(omp_get_thread_num(), omp_get_num_threads());
#endif
}

// Calls fn(task, thread) once for every task in [0, n_tasks), thread in [0, n_threads), and waits for all of them.
// Tasks are handed out in ascending order as threads become free. Runs on the calling thread alone when n_threads <= 1,
// when there is only one task, or inside a parallel region. fn must not throw.
template <class F>
void ParallelFor(int n_threads, std::int64_t n_tasks, F&& fn) {
  const int team = static_cast<int>(std::min<std::int64_t>(n_threads, n_tasks));
  if (team <= 1 || omp_in_parallel() != 0) {
    for (std::int64_t task = 0; task < n_tasks; ++task) fn(task, 0);
    return;
  }
  std::atomic<std::int64_t> next{0};
  RunTeam(team, [&](int thread, int /*threads*/) {
    for (std::int64_t task = next.fetch_add(1); task < n_tasks; task = next.fetch_add(1)) fn(task, thread);
  });
}

// The same, for tasks that fetch the memory of the one that follows on their thread: fn(task, next, thread) learns that
// task, n_tasks when none follows. A thread has claimed `next` already, so tasks are handed out one ahead of need.
template <class F>
void ParallelForAhead(int n_threads, std::int64_t n_tasks, F&& fn) {
  const int team = static_cast<int>(std::min<std::int64_t>(n_threads, n_tasks));
  if (team <= 1 || omp_in_parallel() != 0) {
    for (std::int64_t task = 0; task < n_tasks; ++task) fn(task, task + 1, 0);
    return;
  }
  // Each thread starts on a task of its own, so that a thread that wakes early takes none from the others.
  std::atomic<std::int64_t> unclaimed{team};
  RunTeam(team, [&](int thread, int threads) {
    for (std::int64_t task = thread; task < n_tasks;) {
      const bool own = task + threads < team;  // the team is smaller than asked for
      const std::int64_t next = own ? task + threads : std::min(n_tasks, unclaimed.fetch_add(1));
      fn(task, next, thread);
      task = next;
    }
  });
}

}  // namespace scsa
