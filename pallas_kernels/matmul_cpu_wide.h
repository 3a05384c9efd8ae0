// Products with many rows of x: here x is turned, once, and the weight is read as it lies.
//
// Turning a weight costs as much as multiplying it with eight rows. From there on it is the other
// way round: panels of x have kPanelRows of its rows in their lanes, and each number of the weight
// meets a panel's column:
//
//      panel of x, turned         weight, in memory         sums, in registers
//    x[0..31][0]  a0 b0 c0 ..       w00 w01 w02 ...
//    x[0..31][1]  a1 b1 c1 ..   *   w10 w11 w12 ...   ==>   [weight rows][x rows]
//    x[0..31][2]  a2 b2 c2 ..       w20 w21 w22 ...
//
// kGroupRows of the weight are multiplied with one panel after the other while they are in the
// cache, and their sums turned back to the output's rows. Each sum is taken in the order of the
// columns, as with the weight turned: to the same bits.

#ifndef PALLAS_KERNELS_MATMUL_CPU_WIDE_H_
#define PALLAS_KERNELS_MATMUL_CPU_WIDE_H_

#include "matmul_cpu_panel.h"

namespace matmul {

// A whole number of tiles and of squares, whatever the vectors' size.
constexpr int kGroupRows = 48;
static_assert(kGroupRows % kTileRows == 0 && kGroupRows % kLanes == 0);

// sums[i][x row] of kRows rows of the weight and kVecs vectors of rows of a panel.
template <class Product, int kRows, int kVecs>
void multiply_wide_tile(const char* weight, int64_t row_bytes, const int32_t* panel,
                        int64_t num_words, int32_t* sums) {
  using Sum = typename Product::Sum;
  constexpr int64_t kLineWords = 16;
  Sum tile[kRows][kVecs];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) tile[i][j] = Sum{};
  for (int64_t first = 0; first < num_words; first += kLineWords) {
    // The rows that come next are too many streams for the hardware.
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      __builtin_prefetch(weight + (i + kRows) * row_bytes + first * kWordBytes, 0, 2);
    }
    const int64_t end = std::min(first + kLineWords, num_words);
    for (int64_t word = first; word < end; ++word) {
      Sum x[kVecs];
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) {
        x[j] = load_words<Sum>(panel + word * kPanelRows + j * kLanes);
      }
#pragma GCC unroll 12
      for (int i = 0; i < kRows; ++i) {
        int32_t factor;
        std::memcpy(&factor, weight + i * row_bytes + word * kWordBytes, sizeof factor);
        const Sum factors = Product::prepare(splat_word<Sum>(&factor));
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j) tile[i][j] = Product::add(tile[i][j], factors, x[j]);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) store_words(sums + i * kPanelRows + j * kLanes, tile[i][j]);
}

template <class Product, int kVecs, int kRows = kTileRows>
void multiply_wide_rows(int rows, const char* weight, int64_t row_bytes, const int32_t* panel,
                        int64_t num_words, int32_t* sums) {
  if (rows >= kRows) {
    multiply_wide_tile<Product, kRows, kVecs>(weight, row_bytes, panel, num_words, sums);
  } else if constexpr (kRows > 1) {
    multiply_wide_rows<Product, kVecs, kRows - 1>(rows, weight, row_bytes, panel, num_words, sums);
  }
}

// sums[weight row][x row] of up to kGroupRows rows of the weight and the first num_x_rows of a
// panel.
template <class Product>
void multiply_group(const Rows& weight, const int32_t* panel, int num_x_rows, int64_t num_words,
                    int32_t* sums) {
  for (int row = 0; row < weight.count; row += kTileRows, sums += kTileRows * kPanelRows) {
    const char* first = weight.first + row * weight.row_bytes;
    const int rows = weight.count - row;
    if (num_x_rows > kLanes) {
      multiply_wide_rows<Product, 2>(rows, first, weight.row_bytes, panel, num_words, sums);
    } else {
      multiply_wide_rows<Product, 1>(rows, first, weight.row_bytes, panel, num_words, sums);
    }
  }
}

// A square of the sums above as floats that stand in the output's order: of kLanes rows of x, from
// x_row of the panel on, each with kLanes of the weight's, from out_row of the group on. An int8
// sum is too large by its row's `offsets`, [kLanes].
template <bool is_int8>
void turn_sums(const int32_t* sums, int out_row, int x_row, const IntVec& offsets,
               Vec (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const int32_t* from = sums + (out_row + i) * kPanelRows + x_row;
    if constexpr (is_int8) {
      square[i] = __builtin_convertvector(load_words<IntVec>(from) - offsets, Vec);
    } else {
      square[i] = load_words<Vec>(from);
    }
  }
  transpose(square);
}

}  // namespace matmul

#endif  // PALLAS_KERNELS_MATMUL_CPU_WIDE_H_
