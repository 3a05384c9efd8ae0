// Results of a product on their way out, in vectors of a row.

#ifndef PALLAS_KERNELS_MATMUL_CPU_OUTPUT_H_
#define PALLAS_KERNELS_MATMUL_CPU_OUTPUT_H_

#include <cstdint>
#include <cstring>

#include "attention_cpu_math.h"

namespace matmul {

using paged_attention::kLanes;
using paged_attention::load;
using paged_attention::store;
using paged_attention::Vec;

// A vector, of the numbers that are left where they are fewer than its lanes; zeros fill it up.
inline Vec load_part(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Vec vec{};
  std::memcpy(&vec, from, count * sizeof(float));
  return vec;
}

inline void store_part(float* to, int64_t count, Vec vec) {
  if (count >= kLanes) return store(to, vec);
  std::memcpy(to, &vec, count * sizeof(float));
}

// silu(gate) * up.
inline Vec swiglu(Vec gate, Vec up) {
  // Of numbers up to 0 the exponential cannot overflow.
  const Vec decay = paged_attention::exp_of(gate < 0.0f ? gate : -gate);
  const Vec sigmoid = (gate < 0.0f ? decay : Vec{} + 1.0f) / (decay + 1.0f);
  return gate * sigmoid * up;
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_OUTPUT_H_
