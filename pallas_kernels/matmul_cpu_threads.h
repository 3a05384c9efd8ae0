// Work shared among threads, for the products and for attention.
//
// A step on a CPU is some hundred short operations with little between them, and waking a thread
// of XLA's pool costs as much as one of them. So a team of our own waits in a loop for the next
// piece of work, as long as a step may need to get there, before it sleeps:
//
//    caller    post . item item .        post . item item .             ...
//    helper     . . . item item . (polls) . . . item item . (polls, at last sleeps)
//
// One call at a time has the team; another that runs beside it takes threads of XLA's pool.

#ifndef PALLAS_KERNELS_MATMUL_CPU_THREADS_H_
#define PALLAS_KERNELS_MATMUL_CPU_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace matmul {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads that the work is worth: some microseconds each.
inline int64_t threads_for(int64_t bytes) { return 1 + bytes / (32 << 10); }

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

class Team {
 public:
  // The process's, and one for all libraries that are built from this file where the linker knows
  // unique symbols. Never destroyed: its threads do not end.
  __attribute__((visibility("default"))) static Team& shared() {
    static Team* const team = new Team;
    return *team;
  }

  // Calls work(context, item) for items 0 to num_items - 1 on up to num_threads threads, this one
  // included. False, and nothing called, where another call has the team.
  bool run(int64_t num_items, int64_t num_threads, void (*work)(const void*, int64_t),
           const void* context) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock() || num_items >= kMaxItems) return false;
    add_helpers(num_threads - 1);
    std::fegetenv(&environment_);
    work_ = work;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    // From here on helpers take items. Sequentially consistent, as in sleep(): either this thread
    // sees who sleeps, or who falls asleep sees the items.
    state_.store(static_cast<uint64_t>(num_items) << 32);
    wake(num_threads - 1);
    take_items();
    for (int64_t polls = 0; done_.load(std::memory_order_acquire) < num_items; ++polls) {
      polls % kPollsPerYield ? pause_briefly() : std::this_thread::yield();
    }
    return true;
  }

 private:
  static constexpr int64_t kMaxItems = int64_t{1} << 31;
  static constexpr int kPollsPerYield = 32;
  // Longer than what lies between two products of a step.
  static constexpr std::chrono::microseconds kPatience{300};

  // An item is taken by counting up the state's low half; what is not below the high half is none.
  // While an item is taken and not done its call does not end, so that the fields are its own.
  static bool has_items(uint64_t state) { return static_cast<uint32_t>(state) < (state >> 32); }

  void add_helpers(int64_t num_wanted) {
    try {
      for (; num_helpers_ < num_wanted; ++num_helpers_) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads; those that are there will do.
    }
  }

  template <bool is_helper = false>
  void take_items() {
    while (has_items(state_.load(std::memory_order_relaxed))) {
      const uint64_t state = state_.fetch_add(1, std::memory_order_acquire);
      if (!has_items(state)) return;
      // Rounding and subnormal numbers as with the caller, or bits would depend on the thread.
      if (is_helper) std::fesetenv(&environment_);
      work_(context_, static_cast<uint32_t>(state));
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void help() {
    for (;;) {
      wait_for_items();
      take_items<true>();
    }
  }

  void wait_for_items() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    for (int64_t polls = 1; !has_items(state_.load(std::memory_order_relaxed)); ++polls) {
      if (polls % kPollsPerYield) {
        pause_briefly();
        continue;
      }
      std::this_thread::yield();  // To whoever has something to do.
      if (std::chrono::steady_clock::now() > until) sleep();
    }
  }

  void sleep() {
    std::unique_lock<std::mutex> lock(sleep_);
    num_sleeping_.fetch_add(1);
    awake_.wait(lock, [this] { return has_items(state_.load()); });
    num_sleeping_.fetch_sub(1);
  }

  void wake(int64_t num_wanted) {
    if (num_sleeping_.load() == 0) return;
    std::lock_guard<std::mutex> lock(sleep_);
    const int64_t num_woken = std::min<int64_t>(num_wanted, num_sleeping_.load());
    for (int64_t i = 0; i < num_woken; ++i) awake_.notify_one();
  }

  std::mutex turn_, sleep_;
  std::condition_variable awake_;
  int64_t num_helpers_ = 0;
  std::atomic<int64_t> num_sleeping_{0};
  void (*work_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  std::fenv_t environment_;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// Calls work(item) for each item on XLA's threads. The caller works too and waits only for items
// that a running thread has taken, so that it needs no free thread to come to an end. A thread that
// comes too late touches the counts only.
template <class Work>
void for_each_item_in_pool(int64_t num_items, int64_t num_threads, xla::ffi::ThreadPool& threads,
                           const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto progress = std::make_shared<Progress>();
  const auto take_items = [num_items, progress, work = &work] {
    for (int64_t i; (i = progress->next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      (*work)(i);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < num_threads; ++i) threads.Schedule([take_items] { take_items(); });
  take_items();
  while (progress->done.load(std::memory_order_acquire) < num_items) std::this_thread::yield();
}

// Calls work(item) for items 0 to num_items - 1, on up to max_threads threads, this one included,
// and no more than XLA would use.
template <class Work>
void for_each_item(int64_t num_items, int64_t max_threads, xla::ffi::ThreadPool& threads,
                   const Work& work) {
  const int64_t num_threads = std::min({max_threads, num_items, threads.num_threads()});
  if (num_threads <= 1) {
    for (int64_t item = 0; item < num_items; ++item) work(item);
    return;
  }
  const auto call = [](const void* work, int64_t item) { (*static_cast<const Work*>(work))(item); };
  if (!Team::shared().run(num_items, num_threads, call, &work)) {
    for_each_item_in_pool(num_items, num_threads, threads, work);
  }
}

// A thread's own memory, kept between calls; `Use` tells apart what is alive at the same time.
template <class Use>
int32_t* scratch(int64_t num_words) {
  thread_local std::vector<int32_t> memory;
  if (static_cast<int64_t>(memory.size()) < num_words + 16) memory.resize(num_words + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(int32_t);
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_THREADS_H_
