// Products with weights of 4 bits, which have a scale and a minimum for each 32 columns of a row.
//
// The weight is stored as it is read: 16 rows together, and of these a block for each 32 columns,
// one behind the other, so that a thread reads one stream. A block has kInt4BlockBytes bytes:
//
//    byte   64 v + 4 r + b      low half: column 4 v + b of row r; high half: column 16 + 4 v + b
//    bytes  256 .. 287          the rows' scales, float16
//    bytes  288 .. 319          the rows' minima, float16
//
// A number stands for scale * (0 .. 15) + minimum. Rows of x become int8, each 32 numbers by their
// largest absolute value. So a block adds to a sum, with everything in brackets an exact integer,
//
//    scale * scale of x * [sum of weight * x]  +  minimum * scale of x * [sum of x]

#ifndef PALLAS_KERNELS_MATMUL_CPU_INT4_H_
#define PALLAS_KERNELS_MATMUL_CPU_INT4_H_

#include <cmath>
#include <limits>

#include "matmul_cpu_output.h"
#include "matmul_cpu_panel.h"
#include "matmul_cpu_sink.h"

namespace matmul {

constexpr int kInt4Columns = 32;  // of a block
constexpr int kInt4Rows = 16;
constexpr int kInt4Words = kInt4Columns / kWordBytes;  // of four int8, in a row of x
constexpr int kInt4BlockBytes = kInt4Rows * (kInt4Columns / 2 + 2 + 2);
// Vectors of rows in a block; more than one is taken one after the other.
constexpr int kInt4Vecs = kInt4Rows / kLanes;
#if defined(__AVX512F__)
constexpr int kInt4TileRows = 12;
#else
constexpr int kInt4TileRows = 4;
#endif

// Sum + the dot product of four unsigned numbers below 16, of the weight, and four int8 of x.
inline IntVec multiply_add_int4(IntVec sum, IntVec weight, IntVec x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return multiply_add_int8(sum, weight, x);
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)weight, (__m512i)x);
  return sum + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weight, (__m256i)x);
  return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  return multiply_add_int8(sum, weight, x);
#endif
}

// kLanes float16 as float32; all of them exact, whether subnormal numbers count as 0 or not.
inline Vec widen_float16(const char* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  IntVec halves;
  for (int i = 0; i < kLanes; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    halves[i] = half;
  }
  const IntVec magnitude = halves & splat(0x7FFF), sign = (halves & splat(0x8000)) << 16;
  const IntVec normal = (magnitude << 13) + splat(112 << 23);
  const Vec below = bits_of<Vec>((magnitude << 13) + splat(113 << 23)) - 6.103515625e-05f;
  return bits_of<Vec>(sign | (magnitude < 0x400 ? bits_of<IntVec>(below) : normal));
#endif
}

// Rows of x as int8, and for each 32 columns their scale and that times the integers' sum.
struct Int4Input {
  int8_t* values;  // [num_rows, num_blocks, 32]
  float* scale;    // [num_rows, num_blocks]
  float* sum;      // [num_rows, num_blocks]
};

// 32 numbers, rounded half to even. The scale is NaN where one of them is none, or infinite.
inline void quantize_columns(const float* x, int8_t* values, float* scale, float* sum) {
  constexpr int kVecs = kInt4Columns / kLanes;
  IntVec largest_bits{};
  for (int i = 0; i < kVecs; ++i) {
    const IntVec bits = bits_of<IntVec>(load(x + i * kLanes)) & splat(0x7FFFFFFF);
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  int32_t bits = 0;  // Ordered as the numbers are, and above all of them for NaN.
  for (int lane = 0; lane < kLanes; ++lane) bits = std::max(bits, largest_bits[lane]);
  const float largest = bits_of<float>(bits);
  const bool is_finite = std::isfinite(largest);
  const float inverse = largest > 0 && is_finite ? 127.0f / largest : 0.0f;
  int32_t total = 0;
  for (int i = 0; i < kInt4Columns; ++i) {
    const int32_t value = std::rint(inverse > 0 ? x[i] * inverse : 0.0f);
    values[i] = static_cast<int8_t>(value);
    total += value;
  }
  *scale = is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
  *sum = *scale * static_cast<float>(total);
}

struct Int4Product {
  Int4Input x;
  // [ceil(num_out / 16), num_blocks, kInt4BlockBytes]; is_swiglu: as many again, which the first
  // ones gate.
  const char* blocks;
  Sink sink;  // of [num_rows, num_out]
  int64_t num_rows, num_out, num_blocks;
  bool is_swiglu;

  int num_halves() const { return is_swiglu ? 2 : 1; }
};

// The results of kRows rows of x and of kLanes rows of the weight, those from `lane` on.
// Inlined, or the call for both halves of SwiGLU would take twice the time.
template <int kRows>
__attribute__((always_inline)) inline void multiply_int4_tile(const Int4Product& p, const char* block, int lane, int64_t row,
                        Vec (&sums)[kRows]) {
  const int64_t num_blocks = p.num_blocks;
  const int8_t* x = p.x.values + row * num_blocks * kInt4Columns;
  const float* scale = p.x.scale + row * num_blocks;
  const float* sum = p.x.sum + row * num_blocks;
  Vec tile[kRows];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) tile[i] = Vec{};
  for (int64_t b = 0; b < num_blocks; ++b, block += kInt4BlockBytes, x += kInt4Columns) {
    IntVec weight[kInt4Words];
#pragma GCC unroll 4
    for (int v = 0; v < kInt4Words / 2; ++v) {
      IntVec both;
      std::memcpy(&both, block + (v * kInt4Rows + lane) * kWordBytes, sizeof both);
      weight[v] = both & splat(0x0F0F0F0F);
      weight[v + kInt4Words / 2] = (both >> 4) & splat(0x0F0F0F0F);
    }
    const char* factors = block + kInt4Rows * kInt4Columns / 2 + 2 * lane;
    const Vec weight_scale = widen_float16(factors);
    const Vec minimum = widen_float16(factors + 2 * kInt4Rows);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const int8_t* words = x + i * num_blocks * kInt4Columns;
      IntVec dots{};
#pragma GCC unroll 8
      for (int word = 0; word < kInt4Words; ++word) {
        int32_t factor;
        std::memcpy(&factor, words + word * kWordBytes, sizeof factor);
        dots = multiply_add_int4(dots, weight[word], splat(factor));
      }
      const Vec scaled = __builtin_convertvector(dots, Vec) * weight_scale;
      tile[i] += scaled * scale[i * num_blocks + b];
      tile[i] += minimum * sum[i * num_blocks + b];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) sums[i] = tile[i];
}

// As above, for 16 rows of the weight, written out.
template <int kRows>
void multiply_int4_rows(int rows, const Int4Product& p, const Place& place, int64_t panel,
                        int64_t row) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_int4_rows<kRows - 1>(rows, p, place, panel, row);
  }
  const int64_t panel_bytes = p.num_blocks * kInt4BlockBytes;
  const char* block = p.blocks + panel * panel_bytes;
  const int64_t half_bytes = (p.num_out + kInt4Rows - 1) / kInt4Rows * panel_bytes;
  for (int lane = 0; lane < kInt4Rows; lane += kLanes) {
    const int64_t first_out = panel * kInt4Rows + lane;
    const int64_t count = std::min<int64_t>(kLanes, p.num_out - first_out);
    if (count <= 0) return;
    Vec sums[kRows];
    multiply_int4_tile<kRows>(p, block, lane, row, sums);
    if (p.is_swiglu) {
      Vec gated[kRows];
      multiply_int4_tile<kRows>(p, block + half_bytes, lane, row, gated);
      for (int i = 0; i < kRows; ++i) sums[i] = swiglu(sums[i], gated[i]);
    }
    for (int i = 0; i < kRows; ++i) {
      store_part(place.at(row + i, first_out), count, sums[i]);
    }
  }
}

// Rows [row, end) of x with one panel, in tiles of about one size.
inline void multiply_int4_panel(const Int4Product& p, const Place& place, int64_t panel,
                                int64_t row, int64_t end) {
  int64_t tiles = (end - row + kInt4TileRows - 1) / kInt4TileRows;
  for (; row < end; --tiles) {
    const int64_t rows = (end - row + tiles - 1) / tiles;
    multiply_int4_rows<kInt4TileRows>(rows, p, place, panel, row);
    row += rows;
  }
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_INT4_H_
