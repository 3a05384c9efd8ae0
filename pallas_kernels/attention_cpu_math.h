// Vectors of floats, and the few functions of them that attention needs.
//
// Written with the vector extensions of GCC and clang, so that one source serves AVX-512, AVX2 and
// NEON. Must be compiled without -ffast-math: a NaN among the keys has to arrive in the output.

#ifndef PALLAS_KERNELS_ATTENTION_CPU_MATH_H_
#define PALLAS_KERNELS_ATTENTION_CPU_MATH_H_

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace paged_attention {

// The widest register, and a tile of kTileRows x kTileVecs sums that leaves room for operands.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 6, kTileVecs = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileRows = 6, kTileVecs = 2;
#else
constexpr int kLanes = 4, kTileRows = 6, kTileVecs = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// a * b + c, rounded once where the machine does so in one instruction, as XLA's programs do.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline Vec load(const float* from) {
  Vec vec;
  std::memcpy(&vec, from, sizeof vec);
  return vec;
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  Vec vec;
  for (int lane = 0; lane < kLanes; ++lane) vec[lane] = from[lane];
  return vec;
#endif
}

inline void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof vec); }

// A vector of words, in whatever type of vector they are meant.
template <class V>
inline V load_words(const int32_t* from) {
  V vec;
  std::memcpy(&vec, from, sizeof vec);
  return vec;
}

template <class V>
inline void store_words(int32_t* to, V vec) {
  std::memcpy(to, &vec, sizeof vec);
}

inline Vec splat(float value) { return value - Vec{}; }

inline IntVec iota() {
  IntVec lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  return lanes;
}

// Lanes of the pair (a, b), which count through: lane kLanes is the first of b.
template <int... lanes>
inline Vec pick(Vec a, Vec b, std::integer_sequence<int, lanes...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lanes...);
#else
  return __builtin_shuffle(a, b, IntVec{lanes...});
#endif
}

using Lanes = std::make_integer_sequence<int, kLanes>;

template <int... i>
inline Vec every_second(Vec a, Vec b, int first, std::integer_sequence<int, i...>) {
  return first == 0 ? pick(a, b, std::integer_sequence<int, 2 * i...>())
                    : pick(a, b, std::integer_sequence<int, 2 * i + 1 ...>());
}

template <int... i>
inline Vec zip(Vec a, Vec b, bool second_half, std::integer_sequence<int, i...>) {
  return second_half
             ? pick(a, b, std::integer_sequence<int, kLanes / 2 + i / 2 + i % 2 * kLanes...>())
             : pick(a, b, std::integer_sequence<int, i / 2 + i % 2 * kLanes...>());
}

// One vector of the sums over the lanes of each of kLanes vectors, which it overwrites.
inline Vec sums_of(Vec (&vecs)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const Vec a = vecs[2 * i], b = vecs[2 * i + 1];
      vecs[i] = every_second(a, b, 0, Lanes()) + every_second(a, b, 1, Lanes());
    }
  }
  return vecs[0];
}

// Transposes a square of kLanes vectors.
#if defined(__AVX512F__)
// Single numbers, pairs, then quarters of a register: these shuffles take half the time of any.
inline void transpose(Vec (&rows)[kLanes]) {
  __m512i a[kLanes], b[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    const __m512i even = (__m512i)rows[i], odd = (__m512i)rows[i + 1];
    a[i] = _mm512_unpacklo_epi32(even, odd);
    a[i + 1] = _mm512_unpackhi_epi32(even, odd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      b[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + 2 + half]);
      b[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + 2 + half]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int half = 0; half < 16; half += 8) {
      a[half + i] = _mm512_shuffle_i32x4(b[half + i], b[half + 4 + i], 0x88);
      a[half + 4 + i] = _mm512_shuffle_i32x4(b[half + i], b[half + 4 + i], 0xdd);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = (Vec)_mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    rows[8 + i] = (Vec)_mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
  }
}
#else
// As many perfect shuffles as a lane's number has bits.
inline void transpose(Vec (&rows)[kLanes]) {
  Vec shuffled[kLanes];
#pragma GCC unroll 4
  for (int bit = 1; bit < kLanes; bit *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      shuffled[2 * i] = zip(rows[i], rows[i + kLanes / 2], false, Lanes());
      shuffled[2 * i + 1] = zip(rows[i], rows[i + kLanes / 2], true, Lanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = shuffled[i];
  }
}
#endif

inline float sum_of(Vec vec) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += vec[lane];
  return sum;
}

// The larger in each lane; b where one of them is NaN.
inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

template <int step, int... i>
inline Vec swap_lanes(Vec vec, std::integer_sequence<int, i...>) {
  return pick(vec, vec, std::integer_sequence<int, (i ^ step)...>());
}

// In every lane what `join` makes of all of them, two and two.
template <int step = kLanes / 2, class Join>
inline Vec fold(Vec vec, const Join& join) {
  vec = join(vec, swap_lanes<step>(vec, Lanes()));
  if constexpr (step > 1) return fold<step / 2>(vec, join);
  return vec;
}

// exp(x) = power * (1 + excess), power a power of two. For x from -87 to 88, or NaN.
//
// x = n log 2 + r with |r| <= log(2) / 2, and the Taylor series of exp(r) - 1, whose eighth term is
// below 1e-8. The product n log 2 is taken in two parts, the first of which is exact.
struct Exponential {
  Vec power, excess;
};

inline Exponential split_exp(Vec x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const Vec shifted = x * 1.44269504088896341f + 12582912.0f;
  const Vec n = shifted - 12582912.0f;
  const Vec r = (x - n * 0.693145751953125f) - n * 1.42860677e-6f;
  Vec series = splat(1.0f / 5040);
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  IntVec bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127 << 23);
  Exponential result;
  std::memcpy(&result.power, &bits, sizeof bits);
  result.excess = series * r;
  return result;
}

// exp of numbers up to 0, of -inf and of NaN; 0 where it would be smaller than any normal number.
inline Vec exp_of(Vec x) {
  const Exponential e = split_exp(x);
  const Vec result = e.power + e.power * e.excess;
  return x < -87.0f ? Vec{} : result;
}

// tanh from exp(2 |x|) - 1, which keeps its digits where x is small.
inline Vec tanh_of(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec bounded = size > 10.0f ? splat(10.0f) : size;
  const Exponential e = split_exp(2.0f * bounded);
  const Vec above_one = e.power * e.excess + (e.power - 1.0f);
  const Vec result = above_one / (above_one + 2.0f);
  return x < 0.0f ? -result : result;
}

// c[i][j] = (adds ? c[i][j] : 0) + sum over k of a[i][k] * b[k][j], for kRows rows and kVecs
// vectors of columns. The rows of b are pointers: they may lie anywhere. Its numbers become float32
// as they are read.
template <int kRows, int kVecs, bool adds, class Number>
void multiply_tile(const float* a, int a_stride, const Number* const* b, int b_column, int depth,
                   float* c, int c_stride) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j)
      sums[i][j] = adds ? load(c + i * c_stride + j * kLanes) : Vec{};
  for (int k = 0; k < depth; ++k) {
    const Number* row = b[k] + b_column;
    Vec columns[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) columns[j] = load(row + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec factor = splat(a[i * a_stride + k]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[i][j] += factor * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) store(c + i * c_stride + j * kLanes, sums[i][j]);
}

template <int kRows, bool adds, class Number>
void multiply_rows(const float* a, int a_stride, const Number* const* b, int depth, float* c,
                   int c_stride, int num_vecs) {
  for (int vec = 0; vec < num_vecs; vec += kTileVecs) {
    const int column = vec * kLanes;
    const auto tile = [&](auto vecs) {
      multiply_tile<kRows, decltype(vecs)::value, adds>(a, a_stride, b, column, depth, c + column,
                                                        c_stride);
    };
    switch (num_vecs - vec) {
      case 1: tile(std::integral_constant<int, 1>()); break;
      case 2: tile(std::integral_constant<int, 2>()); break;
      case 3: tile(std::integral_constant<int, kTileVecs < 3 ? kTileVecs : 3>()); break;
      default: tile(std::integral_constant<int, kTileVecs>());
    }
  }
}

// As `multiply_tile`, for 1 to kTileRows rows and any number of vectors.
template <bool adds, class Number>
void multiply(int rows, const float* a, int a_stride, const Number* const* b, int depth, float* c,
              int c_stride, int num_vecs) {
  switch (rows) {
    case 1: return multiply_rows<1, adds>(a, a_stride, b, depth, c, c_stride, num_vecs);
    case 2: return multiply_rows<2, adds>(a, a_stride, b, depth, c, c_stride, num_vecs);
    case 3: return multiply_rows<3, adds>(a, a_stride, b, depth, c, c_stride, num_vecs);
    case 4: return multiply_rows<4, adds>(a, a_stride, b, depth, c, c_stride, num_vecs);
    case 5: return multiply_rows<5, adds>(a, a_stride, b, depth, c, c_stride, num_vecs);
    default: return multiply_rows<6, adds>(a, a_stride, b, depth, c, c_stride, num_vecs);
  }
}

}  // namespace paged_attention

#endif  // PALLAS_KERNELS_ATTENTION_CPU_MATH_H_
