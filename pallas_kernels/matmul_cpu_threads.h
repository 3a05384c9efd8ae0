// Work shared with XLA's threads.

#ifndef PALLAS_KERNELS_MATMUL_CPU_THREADS_H_
#define PALLAS_KERNELS_MATMUL_CPU_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace matmul {

// Calls work(item) for items 0 to num_items - 1, on up to max_threads threads, this one included.
//
// The caller works too and waits only for items that a running thread has taken, so that it needs
// no free thread to come to an end. A thread that comes too late touches the counts only.
template <class Work>
void for_each_item(int64_t num_items, int64_t max_threads, xla::ffi::ThreadPool& threads,
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
  const int64_t num_threads = std::min({max_threads, num_items, threads.num_threads()});
  for (int64_t i = 1; i < num_threads; ++i) threads.Schedule([take_items] { take_items(); });
  take_items();
  while (progress->done.load(std::memory_order_acquire) < num_items) std::this_thread::yield();
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_THREADS_H_
