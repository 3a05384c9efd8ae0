// Panels of a weight: some rows of it, turned so that a vector holds one number of each row.
//
// Everything here counts in words of 32 bits: a float32, two bfloat16 or four int8 that lie side by
// side in a row. A panel is [words][kPanelRows] words; what a word holds is its Format's affair.

#ifndef PALLAS_KERNELS_MATMUL_CPU_PANEL_H_
#define PALLAS_KERNELS_MATMUL_CPU_PANEL_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "attention_cpu_math.h"

namespace matmul {

using paged_attention::IntVec;
using paged_attention::kLanes;
using paged_attention::load;
using paged_attention::load_words;
using paged_attention::round_up;
using paged_attention::store;
using paged_attention::store_words;
using paged_attention::transpose;
using paged_attention::Vec;

constexpr int kWordBytes = 4;
// A tile of sums, [rows of x][vectors of weight rows], that leaves registers for the operands.
constexpr int kPanelVecs = 2;
constexpr int kPanelRows = kPanelVecs * kLanes;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
// A panel of so many words and a tile's rows of x stay in the first level of cache, 32 KiB.
constexpr int kMaxBlockWords = 160;

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class V>
inline V splat_word(const int32_t* from) {
  typename std::remove_reference<decltype(V{}[0])>::type number;
  std::memcpy(&number, from, sizeof number);
  return number - V{};
}

inline IntVec splat(int32_t word) { return word - IntVec{}; }

// Sum + the dot product of four int8 of the weight, prepared by prepare_int8, and four of x. Exact;
// x is never -128. Intel's instructions multiply unsigned with signed bytes: where the sums are
// wide enough 128 is added to the weight, so that each row's sum comes out kWeightOffset times the
// sum of x too large; elsewhere the weight's sign moves to x.
#if defined(__AVX512VNNI__)
constexpr int kWeightOffset = 128;
constexpr const char* kInt8Product = "avx512-vnni";
inline IntVec multiply_add_int8(IntVec sum, IntVec weight, IntVec x) {
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x);
}
#elif defined(__AVXVNNI__)
constexpr int kWeightOffset = 128;
constexpr const char* kInt8Product = "avx-vnni";
inline IntVec multiply_add_int8(IntVec sum, IntVec weight, IntVec x) {
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight, (__m256i)x);
}
#elif defined(__AVX512BW__)
constexpr int kWeightOffset = 0;
constexpr const char* kInt8Product = "avx512";
inline IntVec multiply_add_int8(IntVec sum, IntVec weight, IntVec x) {
  const __m512i w = (__m512i)weight, v = (__m512i)x;
  const __m512i turned =
      _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(w), _mm512_setzero_si512(), v);
  // Two products of at most 128 * 127 fit 16 bits.
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
  return sum + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__)
constexpr int kWeightOffset = 0;
constexpr const char* kInt8Product = "avx2";
inline IntVec multiply_add_int8(IntVec sum, IntVec weight, IntVec x) {
  const __m256i w = (__m256i)weight;
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8((__m256i)x, w));
  return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr int kWeightOffset = 0;
constexpr const char* kInt8Product = "portable";
inline IntVec multiply_add_int8(IntVec sum, IntVec weight, IntVec x) {
  // Shifts to the top and back down widen the sign.
  for (int shift = 0; shift < 32; shift += 8) {
    sum += ((weight << (24 - shift)) >> 24) * ((x << (24 - shift)) >> 24);
  }
  return sum;
}
#endif

// What a word of the panel and one of x add to a sum.
struct FloatProduct {
  using Sum = Vec;
  static Vec prepare(Vec weight) { return weight; }
  static Vec add(Vec sum, Vec weight, Vec x) { return sum + weight * x; }
};

struct Int8Product {
  using Sum = IntVec;
  static IntVec prepare(IntVec weight) {
    return kWeightOffset ? weight ^ splat(0x80808080) : weight;
  }
  static IntVec add(IntVec sum, IntVec weight, IntVec x) {
    return multiply_add_int8(sum, weight, x);
  }
};

// How the weight's words stand in a panel.
struct WholeWords {  // as they are
  static constexpr int kNumbers = 1;
  static void put(IntVec word, int32_t* panel) { store_words(panel, word); }
};

struct Bfloat16Words {  // each becomes two words, float32
  static constexpr int kNumbers = 2;
  static void put(IntVec word, int32_t* panel) {
    store_words(panel, word << 16);
    store_words(panel + kPanelRows, word & splat(0xFFFF0000));
  }
};

struct WidenedInt8Words {  // each becomes four words, float32
  static constexpr int kNumbers = 4;
  static void put(IntVec word, int32_t* panel) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const IntVec number = (word << (24 - 8 * i)) >> 24;
      store_words(panel + i * kPanelRows, __builtin_convertvector(number, Vec));
    }
  }
};

struct Int8Words {  // of four int8, to be multiplied so
  static constexpr int kNumbers = 1;
  static void put(IntVec word, int32_t* panel) { store_words(panel, Int8Product::prepare(word)); }
};

// A range of a weight's rows, each of row_bytes, one after another.
struct Rows {
  const char* first;
  int64_t row_bytes;
  int count;  // up to kPanelRows
};

// A square of words, whose rows are lanes of `square` afterwards. What lies past the rows' count
// and ends is zero.
inline void load_square(const Rows& rows, int first_row, int64_t first_byte,
                        Vec (&square)[kLanes]) {
  constexpr int64_t kSquareBytes = kLanes * kWordBytes;
  const char* from = rows.first + first_row * rows.row_bytes + first_byte;
  const int64_t ahead = kPanelRows * rows.row_bytes;
  if (first_row + kLanes <= rows.count && first_byte + kSquareBytes <= rows.row_bytes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      // The next panel, for which the rows are too many streams for the hardware.
      __builtin_prefetch(from + i * rows.row_bytes + ahead, 0, 2);
      std::memcpy(&square[i], from + i * rows.row_bytes, sizeof square[i]);
    }
  } else {
    const int64_t bytes = std::min(kSquareBytes, rows.row_bytes - first_byte);
    for (int i = 0; i < kLanes; ++i) {
      square[i] = Vec{};
      if (first_row + i < rows.count) std::memcpy(&square[i], from + i * rows.row_bytes, bytes);
    }
  }
  transpose(square);
}

// Fills a panel with `num_words` words (in its own count, a multiple of Format::kNumbers) of each
// row, from byte `first_byte` of the row on.
template <class Format>
void fill_panel(const Rows& rows, int64_t first_byte, int num_words, int32_t* panel) {
  constexpr int kSquareWords = kLanes * Format::kNumbers;
  for (int word = 0; word < num_words; word += kSquareWords) {
    const int64_t byte = first_byte + int64_t{word} / Format::kNumbers * kWordBytes;
    const int used = std::min(kLanes, (num_words - word) / Format::kNumbers);
    for (int lane = 0; lane < kPanelRows; lane += kLanes) {
      Vec square[kLanes];
      load_square(rows, lane, byte, square);
      int32_t* to = panel + int64_t{word} * kPanelRows + lane;
      if (used == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          Format::put(bits_of<IntVec>(square[i]), to + i * Format::kNumbers * kPanelRows);
        }
      } else {
        for (int i = 0; i < used; ++i) {
          Format::put(bits_of<IntVec>(square[i]), to + i * Format::kNumbers * kPanelRows);
        }
      }
    }
  }
}

// sums[row][panel row] += over the words of x[row] and of the panel.
template <class Product, int kRows>
void multiply_tile(const int32_t* x, int64_t x_stride, const int32_t* panel, int num_words,
                   int32_t* sums) {
  using Sum = typename Product::Sum;
  Sum tile[kRows][kPanelVecs];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVecs; ++j)
      tile[i][j] = load_words<Sum>(sums + i * kPanelRows + j * kLanes);
  for (int word = 0; word < num_words; ++word) {
    Sum weight[kPanelVecs];
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVecs; ++j)
      weight[j] = load_words<Sum>(panel + word * kPanelRows + j * kLanes);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Sum factor = splat_word<Sum>(x + i * x_stride + word);
#pragma GCC unroll 2
      for (int j = 0; j < kPanelVecs; ++j)
        tile[i][j] = Product::add(tile[i][j], weight[j], factor);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVecs; ++j)
      store_words(sums + i * kPanelRows + j * kLanes, tile[i][j]);
}

template <class Product, int kRows = kTileRows>
void multiply_rows(int rows, const int32_t* x, int64_t x_stride, const int32_t* panel,
                   int num_words, int32_t* sums) {
  if (rows == kRows) {
    multiply_tile<Product, kRows>(x, x_stride, panel, num_words, sums);
  } else if constexpr (kRows > 1) {
    multiply_rows<Product, kRows - 1>(rows, x, x_stride, panel, num_words, sums);
  }
}

// As multiply_tile, for any number of rows, in tiles of about one size.
template <class Product>
void multiply_panel(int num_rows, const int32_t* x, int64_t x_stride, const int32_t* panel,
                    int num_words, int32_t* sums) {
  int tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (int row = 0; row < num_rows; --tiles) {
    const int rows = (num_rows - row + tiles - 1) / tiles;
    multiply_rows<Product>(rows, x + row * x_stride, x_stride, panel, num_words,
                                sums + int64_t{row} * kPanelRows);
    row += rows;
  }
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_PANEL_H_
