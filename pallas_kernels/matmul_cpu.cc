// x[N, in] @ weight[out, in].T on a CPU, called by XLA through its foreign function interface.
//
// The weight is read in place, once for every kMaxRows rows of x. Panels of it, some rows at a
// time, are turned in the first level of cache so that neighbouring lanes of a vector belong to
// neighbouring rows; then each number of x meets a panel's column in a tile of sums held in
// registers:
//
//      weight, in memory          panel, in the cache             sums, in registers
//    row 0  a0 a1 a2 ...             a0 b0 c0 ...
//    row 1  b0 b1 b2 ...    ==>      a1 b1 c1 ...    * x[n] ==>   [x rows][panel rows]
//    row 2  c0 c1 c2 ...             a2 b2 c2 ...
//
// For one row of x the turning costs more than the product, and less than the memory.
//
// A row's sums are taken in one order whatever its neighbours and the threads, so that a row's
// result has the same bits in every batch.
//
//   float32, bfloat16: products and sums in float32.
//   int8, widened: the integers as float32, the weight's scales applied at the end.
//   int8, quantised: each row of x is rounded to int8 by its own largest absolute value first,
//       after a Hadamard transform of its blocks if asked for; the sums are int32 and exact.

#include <cmath>
#include <limits>
#include <vector>

#include "matmul_cpu_hadamard.h"
#include "matmul_cpu_panel.h"
#include "matmul_cpu_threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace matmul {
namespace {

constexpr int64_t kMaxRows = 256;  // of x in one item: its sums stay in the second level of cache
constexpr float kMaxInt8 = 127.0f;

// A thread's own memory, kept between calls; `Use` tells apart what is alive at the same time.
template <class Use>
int32_t* scratch(int64_t num_words) {
  thread_local std::vector<int32_t> memory;
  if (static_cast<int64_t>(memory.size()) < num_words + 16) memory.resize(num_words + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / kWordBytes;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Product {
  const int32_t* x;  // [num_rows, words_per_row], as the panel's Format is multiplied with
  const float* x_scale;     // [num_rows], or null
  const int32_t* x_sum;     // [num_rows], of its integers; with x_scale
  const char* weight;
  const float* weight_scale;  // [num_out], or null
  float* out;                 // [num_rows, num_out]
  int64_t num_rows, num_out, words_per_row, weight_row_bytes;

  int64_t num_panels() const { return ceil_div(num_out, kPanelRows); }
};

float bfloat16_at(const uint16_t* from, int64_t i) {
  return bits_of<float>(static_cast<uint32_t>(from[i]) << 16);
}

float element(const float* from, int64_t i) { return from[i]; }
float element(const uint16_t* from, int64_t i) { return bfloat16_at(from, i); }

// Rounds a row to int8, half to even, by its largest absolute value. A row that holds a NaN or an
// infinity gets the scale NaN.
template <class Element>
void quantize_row(const Element* x, int64_t size, int8_t* values, float* scale, int32_t* sum) {
  uint32_t largest_bits = 0;  // Ordered as the numbers are, and above all of them for NaN.
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t size_bits = bits_of<uint32_t>(element(x, i)) & 0x7FFFFFFF;
    largest_bits = std::max(largest_bits, size_bits);
  }
  const float largest = bits_of<float>(largest_bits);
  *scale = std::isfinite(largest) ? largest / kMaxInt8 : std::numeric_limits<float>::quiet_NaN();
  const float inverse = largest > 0 && std::isfinite(largest) ? kMaxInt8 / largest : 0.0f;
  int32_t total = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t value = std::rint(inverse > 0 ? element(x, i) * inverse : 0.0f);
    values[i] = static_cast<int8_t>(value);
    total += value;
  }
  *sum = total;
}

// The sums of one panel and up to kMaxRows rows, [row][kPanelRows].
template <class Format, class Multiply>
const int32_t* sum_panel(const Product& p, int64_t panel, int64_t first_row, int64_t num_rows) {
  struct Panel;
  int32_t* const turned = scratch<Panel>(kMaxBlockWords * kPanelRows + num_rows * kPanelRows);
  int32_t* const sums = turned + kMaxBlockWords * kPanelRows;
  std::fill(sums, sums + num_rows * kPanelRows, 0);
  const int64_t first_out = panel * kPanelRows;
  const Rows rows{p.weight + first_out * p.weight_row_bytes, p.weight_row_bytes,
                  static_cast<int>(std::min<int64_t>(kPanelRows, p.num_out - first_out))};
  constexpr int kSquareWords = kLanes * Format::kNumbers;
  const int64_t num_blocks = ceil_div(p.words_per_row, kMaxBlockWords);
  const int64_t block =
      std::min<int64_t>(kMaxBlockWords / kSquareWords * kSquareWords,
                        round_up(ceil_div(p.words_per_row, num_blocks), kSquareWords));
  for (int64_t word = 0; word < p.words_per_row; word += block) {
    const int num_words = std::min(block, p.words_per_row - word);
    fill_panel<Format>(rows, word / Format::kNumbers * kWordBytes,
                       round_up(num_words, Format::kNumbers), turned);
    multiply_panel<Multiply>(num_rows, p.x + first_row * p.words_per_row + word, p.words_per_row,
                             turned, num_words, sums);
  }
  return sums;
}

// Writes a panel's sums to the output, scaled.
template <bool is_int8>
void write_panel(const Product& p, int64_t panel, int64_t first_row, int64_t num_rows,
                 const int32_t* sums) {
  const int64_t first_out = panel * kPanelRows;
  const int count = std::min<int64_t>(kPanelRows, p.num_out - first_out);
  for (int64_t i = 0; i < num_rows; ++i, sums += kPanelRows) {
    const int64_t row = first_row + i;
    const int32_t offset = is_int8 ? kWeightOffset * p.x_sum[row] : 0;
    float* out = p.out + row * p.num_out + first_out;
    for (int j = 0; j < count; ++j) {
      float sum;
      if constexpr (is_int8) {
        sum = static_cast<float>(sums[j] - offset) * p.x_scale[row];
      } else {
        std::memcpy(&sum, sums + j, sizeof sum);
      }
      out[j] = p.weight_scale ? sum * p.weight_scale[first_out + j] : sum;
    }
  }
}

// Threads that the work is worth: some microseconds each.
int64_t threads_for(int64_t bytes) { return 1 + bytes / (32 << 10); }

template <class Format, class Multiply, bool is_int8>
void multiply(const Product& p, ffi::ThreadPool& threads) {
  if (p.num_rows == 0 || p.num_out == 0) return;
  const int64_t row_blocks = ceil_div(p.num_rows, kMaxRows);
  const int64_t rows_each = ceil_div(p.num_rows, row_blocks);
  // Neighbouring panels together, which memory serves best, and enough pieces to share them out.
  constexpr int64_t kPiecesPerThread = 4;
  const int64_t pieces = std::max<int64_t>(1, threads.num_threads()) * kPiecesPerThread;
  const int64_t panels_each = std::max<int64_t>(1, p.num_panels() * row_blocks / pieces);
  const int64_t groups = ceil_div(p.num_panels(), panels_each);
  const int64_t bytes = p.num_out * p.weight_row_bytes * (1 + p.num_rows / 8);
  for_each_item(row_blocks * groups, threads_for(bytes), threads, [&](int64_t item) {
    const int64_t first_row = item / groups * rows_each;
    const int64_t num_rows = std::min(rows_each, p.num_rows - first_row);
    const int64_t first = item % groups * panels_each;
    const int64_t end = std::min(first + panels_each, p.num_panels());
    for (int64_t panel = first; panel < end; ++panel) {
      const int32_t* sums = sum_panel<Format, Multiply>(p, panel, first_row, num_rows);
      write_panel<is_int8>(p, panel, first_row, num_rows, sums);
    }
  });
}

// Calls work(first, end) for ranges of the rows of x, each of `row_bytes`.
template <class Work>
void for_row_ranges(int64_t num_rows, int64_t row_bytes, ffi::ThreadPool& threads,
                    const Work& work) {
  constexpr int64_t kRangeRows = 16;
  for_each_item(ceil_div(num_rows, kRangeRows), threads_for(num_rows * row_bytes / 4), threads,
                [&](int64_t range) {
                  const int64_t first = range * kRangeRows;
                  work(first, std::min(first + kRangeRows, num_rows));
                });
}

template <class Element>
void transform_and_quantize_row(const Element* x, int64_t size, int64_t hadamard_size,
                                int8_t* values, float* scale, int32_t* sum) {
  if (hadamard_size == 1) return quantize_row(x, size, values, scale, sum);
  struct TransformedX;
  float* const transformed = reinterpret_cast<float*>(scratch<TransformedX>(size));
  for (int64_t i = 0; i < size; ++i) transformed[i] = element(x, i);
  transform_blocks(transformed, size, hadamard_size);
  quantize_row(transformed, size, values, scale, sum);
}

void multiply_quantized(Product p, const ffi::AnyBuffer& x, int64_t size, int64_t hadamard_size,
                        ffi::ThreadPool& threads) {
  p.words_per_row = ceil_div(size, kWordBytes);
  struct QuantizedX;
  int32_t* const words = scratch<QuantizedX>(p.num_rows * (p.words_per_row + 2));
  int32_t* const sums = words + p.num_rows * p.words_per_row;
  float* const scales = reinterpret_cast<float*>(sums + p.num_rows);
  for_row_ranges(p.num_rows, size * 4, threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      int32_t* const to = words + row * p.words_per_row;
      to[p.words_per_row - 1] = 0;
      int8_t* const values = reinterpret_cast<int8_t*>(to);
      if (x.element_type() == ffi::BF16) {
        const auto* from = static_cast<const uint16_t*>(x.untyped_data()) + row * size;
        transform_and_quantize_row(from, size, hadamard_size, values, scales + row, sums + row);
      } else {
        const auto* from = static_cast<const float*>(x.untyped_data()) + row * size;
        transform_and_quantize_row(from, size, hadamard_size, values, scales + row, sums + row);
      }
    }
  });
  p.x = words;
  p.x_scale = scales;
  p.x_sum = sums;
  multiply<Int8Words, Int8Product, true>(p, threads);
}

void multiply_floats(Product p, const ffi::AnyBuffer& x, int64_t size, ffi::DataType weight_type,
                     ffi::ThreadPool& threads) {
  p.words_per_row = size;
  p.x = static_cast<const int32_t*>(x.untyped_data());
  if (x.element_type() == ffi::BF16) {
    struct WideX;
    int32_t* const words = scratch<WideX>(p.num_rows * size);
    const auto* from = static_cast<const uint16_t*>(x.untyped_data());
    for_row_ranges(p.num_rows, size * 4, threads, [&](int64_t first, int64_t end) {
      for (int64_t i = first * size; i < end * size; ++i) {
        words[i] = static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16);
      }
    });
    p.x = words;
  }
  if (weight_type == ffi::F32) {
    multiply<FloatWords, FloatProduct, false>(p, threads);
  } else if (weight_type == ffi::BF16) {
    multiply<Bfloat16Words, FloatProduct, false>(p, threads);
  } else {
    multiply<WidenedInt8Words, FloatProduct, false>(p, threads);
  }
}

ffi::Error matmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                  ffi::Buffer<ffi::F32> weight_scale, ffi::Result<ffi::Buffer<ffi::F32>> out,
                  bool quantizes_x, int64_t hadamard_size) {
  const auto x_dims = x.dimensions(), weight_dims = weight.dimensions();
  Product p{};
  p.num_rows = x_dims[0];
  p.num_out = weight_dims[0];
  p.weight = static_cast<const char*>(weight.untyped_data());
  p.weight_row_bytes = weight_dims[1] * ffi::ByteWidth(weight.element_type());
  p.weight_scale = weight_scale.element_count() ? weight_scale.typed_data() : nullptr;
  p.out = out->typed_data();
  if (quantizes_x) {
    multiply_quantized(p, x, x_dims[1], hadamard_size, threads);
  } else {
    multiply_floats(p, x, x_dims[1], weight.element_type(), threads);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace matmul

// The only symbols that are visible outside.
extern "C" {
__attribute__((visibility("default"))) XLA_FFI_Error* PagedMatmul(XLA_FFI_CallFrame* call_frame);
__attribute__((visibility("default"))) const char* PagedMatmulInt8Product() {
  return matmul::kInt8Product;
}
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedMatmul, matmul::matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("quantizes_x")
                                  .Attr<int64_t>("hadamard_size"));
