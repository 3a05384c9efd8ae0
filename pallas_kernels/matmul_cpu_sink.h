// Where the results of a product go: to the output, with a residual added; or nowhere, where all that
// is wanted of each row is its largest number and that number's column, as of the logits of a greedy
// step. Those are hundreds of kilobytes a row, which then are neither written nor read again.
//
// Either way they come a tile at a time, of some rows and some columns:
//
//                          tile                     output [num_rows, num_out]
//    panel's sums  ==>  in place          ==>    (+ residual)
//                       in the cache      ==>    largest of each row so far
//
// What is kept of a row's numbers so far is one integer of 64 bits, which grows with the number, and
// among equal ones falls with the column, so that the order in which tiles come changes nothing.

#ifndef PALLAS_KERNELS_MATMUL_CPU_SINK_H_
#define PALLAS_KERNELS_MATMUL_CPU_SINK_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "matmul_cpu_output.h"
#include "matmul_cpu_panel.h"
#include "matmul_cpu_threads.h"

namespace matmul {

// Memory of a tile: numbers of a row stand side by side.
struct Place {
  float* first;  // of first_row and first_column
  int64_t stride, first_row, first_column;

  float* at(int64_t row, int64_t column) const {
    return first + (row - first_row) * stride + column - first_column;
  }
};

class Largest {
 public:
  explicit Largest(int64_t num_rows) : best_(new std::atomic<uint64_t>[num_rows]()) {}

  // Looks at `count` columns of a row.
  void take(const float* numbers, int64_t count, int64_t row, int64_t first_column) {
    IntVec top = splat(kNone);
    for (int64_t at = 0; at < count; at += kLanes) {
      const IntVec orders = orders_of(numbers + at, count - at);
      top = orders > top ? orders : top;
    }
    int32_t order = top[0];
    for (int lane = 1; lane < kLanes; ++lane) order = std::max(order, top[lane]);
    uint64_t best = best_[row].load(std::memory_order_relaxed);
    if (rank(order, first_column) <= best) return;  // As nearly always.
    int64_t column = 0;
    while (orders_of(numbers + column, 1)[0] != order) ++column;
    const uint64_t found = rank(order, first_column + column);
    while (found > best && !best_[row].compare_exchange_weak(best, found)) {
    }
  }

  // The column, the first of equal ones, and the number. NaN is larger than all numbers.
  void write(int64_t row, int32_t* column, float* number) const {
    const uint64_t best = best_[row].load();
    const int32_t order = static_cast<int32_t>(best >> 32) ^ kSign;
    *column = static_cast<int32_t>(~static_cast<uint32_t>(best));
    *number = bits_of<float>(order < 0 ? order ^ ~kSign : order);
  }

 private:
  static constexpr int32_t kSign = std::numeric_limits<int32_t>::min(), kNone = kSign;
  static constexpr int32_t kInfinity = 0x7F800000, kNaN = 0x7FFFFFFF;

  // Integers in the order of the numbers, both zeros alike, then NaN; kNone past the last number.
  static IntVec orders_of(const float* numbers, int64_t count) {
    const IntVec bits = bits_of<IntVec>(load_part(numbers, count) + 0.0f);
    const IntVec size = bits & splat(kNaN);
    IntVec orders = bits < 0 ? bits ^ splat(kNaN) : bits;
    orders = size > kInfinity ? splat(kNaN) : orders;
    return paged_attention::iota() < static_cast<int32_t>(std::min<int64_t>(count, kLanes))
               ? orders
               : splat(kNone);
  }

  static uint64_t rank(int32_t order, int64_t column) {
    return static_cast<uint64_t>(static_cast<uint32_t>(order ^ kSign)) << 32 |
           static_cast<uint32_t>(~static_cast<uint32_t>(column));
  }

  std::unique_ptr<std::atomic<uint64_t>[]> best_;
};

struct Sink {
  float* out;             // [num_rows, num_out], or null: only `largest` is wanted
  const float* residual;  // as `out`, or null
  Largest* largest;
  int64_t num_out;

  // Takes what write(place) writes: `num_rows` rows and up to `max_columns` columns.
  template <class Write>
  void take(int64_t first_row, int64_t num_rows, int64_t first_column, int64_t max_columns,
            const Write& write) const {
    const int64_t count = std::min(max_columns, num_out - first_column);
    if (out != nullptr) {
      const Place place{out, num_out, 0, 0};
      write(place);
      if (residual != nullptr) add_residual(place, first_row, num_rows, first_column, count);
      return;
    }
    struct SinkTile;
    float* const memory = reinterpret_cast<float*>(scratch<SinkTile>(num_rows * max_columns));
    const Place place{memory, max_columns, first_row, first_column};
    write(place);
    for (int64_t row = first_row; row < first_row + num_rows; ++row) {
      largest->take(place.at(row, first_column), count, row, first_column);
    }
  }

 private:
  // Apart from the writing, which some forms of the product would round together with the sum.
  void add_residual(const Place& place, int64_t first_row, int64_t num_rows, int64_t first_column,
                    int64_t count) const {
    asm volatile("" ::: "memory");
    for (int64_t row = first_row; row < first_row + num_rows; ++row) {
      float* const to = place.at(row, first_column);
      const float* const from = residual + (to - out);
      for (int64_t i = 0; i < count; ++i) to[i] += from[i];
    }
  }
};

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_SINK_H_
