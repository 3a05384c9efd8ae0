// The fast Hadamard transform of blocks of a row, with additions alone.
//
// A block of 2^n numbers takes n steps; step s replaces each pair of numbers that are 2^s apart,
// (a, b), by (a + b, a - b). Pairs within one vector are brought together by a shuffle:
//
//    x          a b c d ...        step 1:  shuffled  b a d c ...    + x * (1 -1 1 -1 ...)

#ifndef PALLAS_KERNELS_MATMUL_CPU_HADAMARD_H_
#define PALLAS_KERNELS_MATMUL_CPU_HADAMARD_H_

#include <cstdint>
#include <utility>

#include "attention_cpu_math.h"

namespace matmul {

// A step within vectors, of the numbers kStep lanes apart.
template <int kStep, int... kLane>
inline paged_attention::Vec add_pairs(paged_attention::Vec x,
                                      std::integer_sequence<int, kLane...>) {
  constexpr paged_attention::Vec signs = {((kLane & kStep) ? -1.0f : 1.0f)...};
  return paged_attention::pick(x, x, std::integer_sequence<int, (kLane ^ kStep)...>()) + x * signs;
}

template <int kStep = 1>
inline paged_attention::Vec transform_lanes(paged_attention::Vec x) {
  if constexpr (kStep < paged_attention::kLanes) {
    x = add_pairs<kStep>(x, std::make_integer_sequence<int, paged_attention::kLanes>());
    return transform_lanes<2 * kStep>(x);
  }
  return x;
}

// A block of kVecs vectors, which stay in registers where there are so many.
template <int kVecs>
inline void transform_vectors(float* block) {
  using paged_attention::kLanes;
  paged_attention::Vec vecs[kVecs];
#pragma GCC unroll 32
  for (int i = 0; i < kVecs; ++i) {
    vecs[i] = transform_lanes(paged_attention::load(block + i * kLanes));
  }
#pragma GCC unroll 8
  for (int step = 1; step < kVecs; step *= 2) {
#pragma GCC unroll 32
    for (int i = 0; i < kVecs; ++i) {
      if (i & step) continue;
      const paged_attention::Vec a = vecs[i], b = vecs[i + step];
      vecs[i] = a + b;
      vecs[i + step] = a - b;
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kVecs; ++i) paged_attention::store(block + i * kLanes, vecs[i]);
}

// A block of any power of two, number by number.
inline void transform_numbers(float* block, int64_t size) {
  for (int64_t step = 1; step < size; step *= 2) {
    for (int64_t i = 0; i < size; ++i) {
      if (i & step) continue;
      const float a = block[i], b = block[i + step];
      block[i] = a + b;
      block[i + step] = a - b;
    }
  }
}

// Transforms each block of a row in place; `block` is a power of two that divides `size`.
inline void transform_blocks(float* x, int64_t size, int64_t block) {
  for (float* first = x; first < x + size; first += block) {
    switch (block % paged_attention::kLanes ? 0 : block / paged_attention::kLanes) {
      case 1: transform_vectors<1>(first); break;
      case 2: transform_vectors<2>(first); break;
      case 4: transform_vectors<4>(first); break;
      case 8: transform_vectors<8>(first); break;
      case 16: transform_vectors<16>(first); break;
      case 32: transform_vectors<32>(first); break;
      default: transform_numbers(first, block);
    }
  }
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_HADAMARD_H_
