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
// For one row of x the turning costs more than the product, and less than the memory. For many rows
// x is turned instead, see matmul_cpu_wide.h.
//
// On the way in, a row of x may be normalised (matmul_cpu_input.h). On the way out, a residual may
// be added, or the first half of the weight's rows gate what the second half gives, number by number
// (matmul_cpu_output.h); or of each row only the largest result is kept (matmul_cpu_sink.h).
//
// A row's sums are taken in one order whatever its neighbours and the threads, so that a row's
// result has the same bits in every batch.
//
//   float32, bfloat16: products and sums in float32.
//   int8, widened: the integers as float32, the weight's scales applied at the end.
//   int8, quantised: each row of x is rounded to int8 by its own largest absolute value first,
//       after a Hadamard transform of its blocks if asked for; the sums are int32 and exact.
//   int4: see matmul_cpu_int4.h.

#include "matmul_cpu_hadamard.h"
#include "matmul_cpu_input.h"
#include "matmul_cpu_int4.h"
#include "matmul_cpu_output.h"
#include "matmul_cpu_panel.h"
#include "matmul_cpu_sink.h"
#include "matmul_cpu_threads.h"
#include "matmul_cpu_wide.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace matmul {
namespace {

constexpr int64_t kMaxRows = 256;  // of x in one item: its sums stay in the second level of cache
constexpr int64_t kFewRows = 64;   // of x

struct Product {
  const int32_t* x;  // [num_rows, words_per_row], as the panel's Format is multiplied with
  const float* x_scale;     // [num_rows], or null
  const int32_t* x_sum;     // [num_rows], of its integers; with x_scale
  const char* weight;         // of num_out rows; is_swiglu: of so many that gate, and as many more
  const float* weight_scale;  // of each row, or null
  Sink sink;                  // of [num_rows, num_out]
  int64_t num_rows, num_out, words_per_row, weight_row_bytes;
  bool is_swiglu;

  int num_halves() const { return is_swiglu ? 2 : 1; }
  int64_t weight_bytes() const { return num_halves() * num_out * weight_row_bytes; }

  // Rows of the weight for up to max_rows outputs from first_out on.
  Rows rows(int half, int64_t first_out, int64_t max_rows) const {
    return {weight + (half * num_out + first_out) * weight_row_bytes, weight_row_bytes,
            static_cast<int>(std::min(max_rows, num_out - first_out))};
  }

  // Sums of a row of x and of up to kLanes rows of the weight, scaled.
  template <bool is_int8>
  Vec scaled(Vec sums, int64_t row, int half, int64_t out, int count) const {
    const Vec real = is_int8 ? sums * x_scale[row] : sums;
    return weight_scale ? real * load_part(weight_scale + half * num_out + out, count) : real;
  }
};

// The sums of one panel and up to kMaxRows rows of x, [row][kPanelRows].
template <class Format, class Multiply>
const int32_t* sum_panel(const Product& p, const Rows& rows, int half, int64_t first_row,
                         int64_t num_rows) {
  struct Panel;
  const int64_t num_sums = num_rows * kPanelRows;
  int32_t* const turned = scratch<Panel>(kMaxBlockWords * kPanelRows + p.num_halves() * num_sums);
  int32_t* const sums = turned + kMaxBlockWords * kPanelRows + half * num_sums;
  std::fill(sums, sums + num_sums, 0);
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

// Writes the sums of a panel, and those that they gate.
template <bool is_int8>
void write_panel(const Product& p, const Place& place, int64_t first_out, int64_t first_row, int64_t num_rows,
                 const int32_t* sums, const int32_t* gated_sums) {
  const int num_out = std::min<int64_t>(kPanelRows, p.num_out - first_out);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = first_row + i;
    const auto scaled = [&](const int32_t* from, int half, int out, int count) {
      if constexpr (is_int8) {
        const IntVec exact = load_words<IntVec>(from) - splat(kWeightOffset * p.x_sum[row]);
        const Vec sums = __builtin_convertvector(exact, Vec);
        return p.scaled<is_int8>(sums, row, half, first_out + out, count);
      } else {
        return p.scaled<is_int8>(load_words<Vec>(from), row, half, first_out + out, count);
      }
    };
    for (int out = 0; out < num_out; out += kLanes) {
      const int count = std::min(kLanes, num_out - out);
      const int64_t at = i * kPanelRows + out;
      Vec result = scaled(sums + at, 0, out, count);
      if (p.is_swiglu) result = swiglu(result, scaled(gated_sums + at, 1, out, count));
      store_part(place.at(row, first_out + out), count, result);
    }
  }
}

// Calls work(panel, first row, number of rows) for all panels of a weight of so many bytes and all
// rows of x, up to kMaxRows at a time.
template <class Work>
void share_panels(int64_t num_panels, int64_t weight_bytes, int64_t num_rows,
                  ffi::ThreadPool& threads, const Work& work) {
  const int64_t rows_each =
      round_up(ceil_div(num_rows, ceil_div(num_rows, kMaxRows)), kPanelRows);
  const int64_t row_blocks = ceil_div(num_rows, rows_each);
  // Neighbouring panels together, which memory serves best, and most where reading the weight is
  // what takes the time; and enough pieces to share them out.
  const int64_t pieces_each = num_rows <= kFewRows ? 2 : 4;
  const int64_t pieces = std::max<int64_t>(1, threads.num_threads()) * pieces_each;
  const int64_t groups = std::min(num_panels, ceil_div(pieces, row_blocks));
  const int64_t bytes = weight_bytes * (1 + num_rows / 8);
  for_each_item(row_blocks * groups, threads_for(bytes), threads, [&](int64_t item) {
    const int64_t first_row = item / groups * rows_each;
    const int64_t group = item % groups, end = (group + 1) * num_panels / groups;
    for (int64_t panel = group * num_panels / groups; panel < end; ++panel) {
      work(panel, first_row, std::min(rows_each, num_rows - first_row));
    }
  });
}

// Writes the sums of a group of the weight's rows and a panel of x, and the group's that they gate.
template <bool is_int8>
void write_group(const Product& p, const Place& place, int64_t first_out, int64_t first_row, int num_rows,
                 const int32_t* sums, const int32_t* gated_sums) {
  const int num_out = std::min<int64_t>(kGroupRows, p.num_out - first_out);
  IntVec offsets[kPanelVecs] = {};
  if constexpr (is_int8 && kWeightOffset) {
    std::memcpy(offsets, p.x_sum + first_row, num_rows * sizeof(int32_t));
    for (IntVec& offset : offsets) offset *= kWeightOffset;
  }
  for (int out = 0; out < num_out; out += kLanes) {
    const int count = std::min(kLanes, num_out - out);
    for (int lane = 0; lane < num_rows; lane += kLanes) {
      Vec square[kLanes], gated[kLanes];
      turn_sums<is_int8>(sums, out, lane, offsets[lane / kLanes], square);
      if (p.is_swiglu) turn_sums<is_int8>(gated_sums, out, lane, offsets[lane / kLanes], gated);
      for (int i = 0; i < std::min(kLanes, num_rows - lane); ++i) {
        const int64_t row = first_row + lane + i;
        Vec result = p.scaled<is_int8>(square[i], row, 0, first_out + out, count);
        if (p.is_swiglu) {
          result = swiglu(result, p.scaled<is_int8>(gated[i], row, 1, first_out + out, count));
        }
        store_part(place.at(row, first_out + out), count, result);
      }
    }
  }
}

// Whether turning x is cheaper than turning the weight, which costs as much as eight rows, and a
// thirtieth more on top. With x turned lanes without a row cost as much as others, and what a group
// costs besides as much as so many `extra_rows`.
bool is_better_wide(int64_t num_rows, int64_t extra_rows) {
  return round_up(num_rows, kLanes) + extra_rows <= num_rows + 8 + num_rows / 30;
}

// As multiply, but x is turned; of a weight whose rows are whole words, multiplied as they are.
template <class Multiply, bool is_int8>
void multiply_wide(const Product& p, ffi::ThreadPool& threads) {
  if (p.num_out == 0) return;
  struct WideX;
  const int64_t panel_size = p.words_per_row * kPanelRows;
  int32_t* const panels = scratch<WideX>(ceil_div(p.num_rows, kPanelRows) * panel_size);
  const int64_t x_row_bytes = p.words_per_row * kWordBytes;
  const auto turn_x = [&](int64_t panel) {
    const int64_t row = panel * kPanelRows;
    const Rows rows{reinterpret_cast<const char*>(p.x + row * p.words_per_row), x_row_bytes,
                    static_cast<int>(std::min<int64_t>(kPanelRows, p.num_rows - row))};
    fill_panel<WholeWords>(rows, 0, p.words_per_row, panels + panel * panel_size);
  };
  for_each_item(ceil_div(p.num_rows, kPanelRows), threads_for(p.num_rows * x_row_bytes), threads,
                turn_x);
  const auto multiply_rows = [&](int64_t index, int64_t first_row, int64_t num_rows) {
    const int64_t first_out = index * kGroupRows;
    struct GroupSums;
    constexpr int kNumSums = kGroupRows * kPanelRows;
    int32_t* const sums = scratch<GroupSums>(2 * kNumSums);
    for (int64_t row = first_row; row < first_row + num_rows; row += kPanelRows) {
      const int rows = std::min<int64_t>(kPanelRows, first_row + num_rows - row);
      for (int half = 0; half < p.num_halves(); ++half) {
        multiply_group<Multiply>(p.rows(half, first_out, kGroupRows),
                                 panels + row * p.words_per_row, rows, p.words_per_row,
                                 sums + half * kNumSums);
      }
      p.sink.take(row, rows, first_out, kGroupRows, [&](const Place& place) {
        write_group<is_int8>(p, place, first_out, row, rows, sums, sums + kNumSums);
      });
    }
  };
  share_panels(ceil_div(p.num_out, kGroupRows), p.weight_bytes(), p.num_rows, threads,
               multiply_rows);
}

template <class Format, class Multiply, bool is_int8>
void multiply(const Product& p, ffi::ThreadPool& threads) {
  if (p.num_rows == 0 || p.num_out == 0) return;
  share_panels(ceil_div(p.num_out, kPanelRows), p.weight_bytes(), p.num_rows, threads,
               [&](int64_t panel, int64_t first_row, int64_t num_rows) {
                 const int64_t first_out = panel * kPanelRows;
                 const int32_t* sums[2];
                 for (int half = 0; half < p.num_halves(); ++half) {
                   const Rows rows = p.rows(half, first_out, kPanelRows);
                   sums[half] =
                       sum_panel<Format, Multiply>(p, rows, half, first_row, num_rows);
                 }
                 p.sink.take(first_row, num_rows, first_out, kPanelRows, [&](const Place& place) {
                   write_panel<is_int8>(p, place, first_out, first_row, num_rows, sums[0], sums[1]);
                 });
               });
}

void multiply_quantized(Product p, const Input& input, int64_t hadamard_size,
                        ffi::ThreadPool& threads) {
  p.words_per_row = ceil_div(input.size, kWordBytes);
  struct QuantizedX;
  int32_t* const words = scratch<QuantizedX>(p.num_rows * (p.words_per_row + 2));
  int32_t* const sums = words + p.num_rows * p.words_per_row;
  float* const scales = reinterpret_cast<float*>(sums + p.num_rows);
  for_each_row(input, threads, [&](int64_t row, const float* from, float* memory) {
    if (hadamard_size > 1) {
      if (from != memory) std::memcpy(memory, from, input.size * sizeof(float));
      transform_blocks(memory, input.size, hadamard_size);
      from = memory;
    }
    int32_t* const to = words + row * p.words_per_row;
    to[p.words_per_row - 1] = 0;
    quantize_row(from, input.size, reinterpret_cast<int8_t*>(to), scales + row, sums + row);
  });
  p.x = words;
  p.x_scale = scales;
  p.x_sum = sums;
  if (input.size % kWordBytes == 0 && is_better_wide(p.num_rows, 4)) {
    multiply_wide<Int8Product, true>(p, threads);
  } else {
    multiply<Int8Words, Int8Product, true>(p, threads);
  }
}

void multiply_floats(Product p, const Input& input, ffi::DataType weight_type,
                     ffi::ThreadPool& threads) {
  p.words_per_row = input.size;
  p.x = static_cast<const int32_t*>(input.x);
  if (!input.is_in_place()) {
    struct FloatX;
    int32_t* const words = scratch<FloatX>(p.num_rows * input.size);
    for_each_row(input, threads, [&](int64_t row, const float* from, float*) {
      std::memcpy(words + row * input.size, from, input.size * sizeof(float));
    });
    p.x = words;
  }
  if (weight_type == ffi::F32 && is_better_wide(p.num_rows, 0)) {
    multiply_wide<FloatProduct, false>(p, threads);
  } else if (weight_type == ffi::F32) {
    multiply<WholeWords, FloatProduct, false>(p, threads);
  } else if (weight_type == ffi::BF16) {
    multiply<Bfloat16Words, FloatProduct, false>(p, threads);
  } else {
    multiply<WidenedInt8Words, FloatProduct, false>(p, threads);
  }
}

const float* optional(ffi::Buffer<ffi::F32>& buffer) {
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

Input make_input(ffi::AnyBuffer& x, ffi::Buffer<ffi::F32>& norm_weight, float norm_eps) {
  const auto dims = x.dimensions();
  return {x.untyped_data(), x.element_type() == ffi::BF16, dims[0], dims[1],
          optional(norm_weight), norm_eps};
}

void run(const Input& input, const Sink& sink, ffi::AnyBuffer& weight,
         ffi::Buffer<ffi::F32>& weight_scale, bool quantizes_x, int64_t hadamard_size,
         bool is_swiglu, ffi::ThreadPool& threads) {
  Product p{};
  p.num_rows = input.num_rows;
  p.num_out = sink.num_out;
  p.is_swiglu = is_swiglu;
  p.weight = static_cast<const char*>(weight.untyped_data());
  p.weight_row_bytes = weight.dimensions()[1] * ffi::ByteWidth(weight.element_type());
  p.weight_scale = optional(weight_scale);
  p.sink = sink;
  if (quantizes_x) {
    multiply_quantized(p, input, hadamard_size, threads);
  } else {
    multiply_floats(p, input, weight.element_type(), threads);
  }
}

ffi::Error matmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                  ffi::Buffer<ffi::F32> weight_scale, ffi::Buffer<ffi::F32> norm_weight,
                  ffi::Buffer<ffi::F32> residual, ffi::Result<ffi::Buffer<ffi::F32>> out,
                  bool quantizes_x, int64_t hadamard_size, float norm_eps, bool is_swiglu) {
  const Sink sink{out->typed_data(), optional(residual), nullptr, out->dimensions()[1]};
  run(make_input(x, norm_weight, norm_eps), sink, weight, weight_scale, quantizes_x, hadamard_size,
      is_swiglu, threads);
  return ffi::Error::Success();
}

ffi::Error largest(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                   ffi::Buffer<ffi::F32> weight_scale, ffi::Result<ffi::Buffer<ffi::S32>> columns,
                   ffi::Result<ffi::Buffer<ffi::F32>> numbers, bool quantizes_x,
                   int64_t hadamard_size) {
  const auto dims = x.dimensions();
  const Input input{x.untyped_data(), x.element_type() == ffi::BF16, dims[0], dims[1], nullptr, 0};
  Largest found(input.num_rows);
  const Sink sink{nullptr, nullptr, &found, weight.dimensions()[0]};
  run(input, sink, weight, weight_scale, quantizes_x, hadamard_size, false, threads);
  for (int64_t row = 0; row < input.num_rows; ++row) {
    found.write(row, columns->typed_data() + row, numbers->typed_data() + row);
  }
  return ffi::Error::Success();
}

// The rows of x as int8, in memory of this thread.
Int4Input quantize_for_int4(const Input& input, ffi::ThreadPool& threads) {
  const int64_t num_blocks = input.size / kInt4Columns, blocks = input.num_rows * num_blocks;
  struct Int4X;
  int32_t* const memory = scratch<Int4X>(blocks * (kInt4Words + 2));
  float* const scale = reinterpret_cast<float*>(memory + blocks * kInt4Words);
  const Int4Input result{reinterpret_cast<int8_t*>(memory), scale, scale + blocks};
  for_each_row(input, threads, [&](int64_t row, const float* from, float*) {
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int64_t block = row * num_blocks + i;
      quantize_columns(from + i * kInt4Columns, result.values + block * kInt4Columns,
                       result.scale + block, result.sum + block);
    }
  });
  return result;
}

ffi::Error matmul_int4(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Buffer<ffi::U8> blocks,
                       ffi::Buffer<ffi::F32> norm_weight, ffi::Buffer<ffi::F32> residual,
                       ffi::Result<ffi::Buffer<ffi::F32>> out, float norm_eps,
                       bool is_swiglu) {
  Int4Product p{};
  p.num_blocks = blocks.dimensions()[1];
  const Input input = make_input(x, norm_weight, norm_eps);
  p.num_rows = input.num_rows;
  p.num_out = out->dimensions()[1];
  p.blocks = reinterpret_cast<const char*>(blocks.typed_data());
  p.sink = {out->typed_data(), optional(residual), nullptr, p.num_out};
  p.is_swiglu = is_swiglu;
  if (p.num_rows == 0 || p.num_out == 0) return ffi::Error::Success();
  p.x = quantize_for_int4(input, threads);
  const int64_t num_panels = ceil_div(p.num_out, kInt4Rows);
  const auto multiply_rows = [&](int64_t panel, int64_t first_row, int64_t num_rows) {
    p.sink.take(first_row, num_rows, panel * kInt4Rows, kInt4Rows, [&](const Place& place) {
      multiply_int4_panel(p, place, panel, first_row, first_row + num_rows);
    });
  };
  const int64_t num_bytes = p.num_halves() * num_panels * p.num_blocks * kInt4BlockBytes;
  share_panels(num_panels, num_bytes, p.num_rows, threads, multiply_rows);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace matmul

// The only symbols that are visible outside, but for the team of threads.
extern "C" {
__attribute__((visibility("default"))) XLA_FFI_Error* PagedMatmul(XLA_FFI_CallFrame* call_frame);
__attribute__((visibility("default"))) XLA_FFI_Error* PagedMatmulLargest(
    XLA_FFI_CallFrame* call_frame);
__attribute__((visibility("default"))) XLA_FFI_Error* PagedMatmulInt4(
    XLA_FFI_CallFrame* call_frame);
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
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("quantizes_x")
                                  .Attr<int64_t>("hadamard_size")
                                  .Attr<float>("norm_eps")
                                  .Attr<bool>("is_swiglu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedMatmulLargest, matmul::largest,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("quantizes_x")
                                  .Attr<int64_t>("hadamard_size"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedMatmulInt4, matmul::matmul_int4,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("norm_eps")
                                  .Attr<bool>("is_swiglu"));
