// The rows of x as they are multiplied: widened and normalised on the way, then in int8.

#ifndef PALLAS_KERNELS_MATMUL_CPU_INPUT_H_
#define PALLAS_KERNELS_MATMUL_CPU_INPUT_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "matmul_cpu_hadamard.h"
#include "matmul_cpu_output.h"
#include "matmul_cpu_panel.h"
#include "matmul_cpu_threads.h"

namespace matmul {

constexpr float kMaxInt8 = 127.0f;

// x / sqrt(mean of squares + eps) * weight. `to` may be x.
inline void normalize(const float* x, const float* weight, float eps, int64_t size, float* to) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec part = load_part(x + i, size - i);
    squares += part * part;
  }
  const float inverse = 1.0f / std::sqrt(paged_attention::sum_of(squares) / size + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec scaled = load_part(x + i, size - i) * inverse;
    store_part(to + i, size - i, scaled * load_part(weight + i, size - i));
  }
}

struct Input {
  const void* x;  // [num_rows, size], float32 or bfloat16
  bool is_bfloat16;
  int64_t num_rows, size;
  const float* norm_weight;  // [size], or null: not normalised
  float norm_eps;

  bool is_in_place() const { return !is_bfloat16 && norm_weight == nullptr; }

  // Row `index` as float32 [size], in place or in `memory`, [size].
  const float* row(int64_t index, float* memory) const {
    const int64_t first = index * size;
    const float* from = static_cast<const float*>(x) + first;
    if (is_in_place()) return from;
    if (is_bfloat16) {
      const uint16_t* narrow = static_cast<const uint16_t*>(x) + first;
      for (int64_t i = 0; i < size; ++i) {
        memory[i] = bits_of<float>(static_cast<uint32_t>(narrow[i]) << 16);
      }
      from = memory;
    }
    if (norm_weight) normalize(from, norm_weight, norm_eps, size, memory);
    return memory;
  }
};

// Calls work(row, numbers, memory) for all rows of x, where `memory` is the thread's own, of as
// many numbers as a row has, and may be where they are.
template <class Work>
void for_each_row(const Input& input, xla::ffi::ThreadPool& threads, const Work& work) {
  constexpr int64_t kRangeRows = 16;
  const int64_t num_threads = threads_for(input.num_rows * input.size);
  const auto take_range = [&](int64_t range) {
    struct RowX;
    float* const memory = reinterpret_cast<float*>(scratch<RowX>(input.size));
    const int64_t end = std::min(range * kRangeRows + kRangeRows, input.num_rows);
    for (int64_t row = range * kRangeRows; row < end; ++row) {
      work(row, input.row(row, memory), memory);
    }
  };
  for_each_item(ceil_div(input.num_rows, kRangeRows), num_threads, threads, take_range);
}

// Rounds a row to int8, half to even, by its largest absolute value. A row that holds a NaN or an
// infinity gets the scale NaN.
inline void quantize_row(const float* x, int64_t size, int8_t* values, float* scale,
                         int32_t* sum) {
  uint32_t largest_bits = 0;  // Ordered as the numbers are, and above all of them for NaN.
  for (int64_t i = 0; i < size; ++i) {
    largest_bits = std::max(largest_bits, bits_of<uint32_t>(x[i]) & 0x7FFFFFFF);
  }
  const float largest = bits_of<float>(largest_bits);
  *scale = std::isfinite(largest) ? largest / kMaxInt8 : std::numeric_limits<float>::quiet_NaN();
  const float inverse = largest > 0 && std::isfinite(largest) ? kMaxInt8 / largest : 0.0f;
  int32_t total = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t value = std::rint(inverse > 0 ? x[i] * inverse : 0.0f);
    values[i] = static_cast<int8_t>(value);
    total += value;
  }
  *sum = total;
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_INPUT_H_
