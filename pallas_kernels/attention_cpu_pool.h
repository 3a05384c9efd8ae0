// The paged KV pool as the CPU's attention reads it: rows of float32, in place or converted.

#ifndef PALLAS_KERNELS_ATTENTION_CPU_POOL_H_
#define PALLAS_KERNELS_ATTENTION_CPU_POOL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention_cpu_math.h"

namespace paged_attention {

constexpr int kMaxHeadDim = 1024;

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void convert_bfloat16(const uint16_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = bits_to_float(uint32_t{from[i]} << 16);
}

// Rounds to the nearest, to even between two; a NaN stays one.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void write_bfloat16(const float* from, int count, uint16_t* to) {
  for (int i = 0; i < count; ++i) to[i] = to_bfloat16(from[i]);
}

inline void convert_int8(const int8_t* from, int count, float* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// In normal numbers only: XLA's threads may take subnormal ones for 0.
inline float float16_value(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, magnitude = half & 0x7fffu;
  const float normal = bits_to_float((magnitude << 13) + (112u << 23));
  const float subnormal = bits_to_float((magnitude << 13) + (113u << 23)) - 6.103515625e-05f;
  const float special = bits_to_float(magnitude << 13 | 0x7f800000u);
  const float value = magnitude < 0x400 ? subnormal : magnitude >= 0x7c00 ? special : normal;
  return sign ? -value : value;
}

inline void convert_float16(const uint16_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = float16_value(from[i]);
}

struct Float8Table {
  float values[256];
};

inline Float8Table make_e5m2_table() {
  Float8Table table;
  for (int byte = 0; byte < 256; ++byte) table.values[byte] = float16_value(byte << 8);
  return table;
}

inline Float8Table make_e4m3fn_table() {
  Float8Table table;
  for (int byte = 0; byte < 256; ++byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : mantissa / 512.0f;
    if ((byte & 127) == 127) value = std::numeric_limits<float>::quiet_NaN();
    table.values[byte] = byte & 128 ? -value : value;
  }
  return table;
}

inline void convert_float8(const Float8Table& table, const uint8_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = table.values[from[i]];
}

// The numbers are those of POOL_KINDS in attention_cpu.py.
enum class PoolKind { kFloat32, kBfloat16, kFloat16, kInt8, kFloat8E4m3fn, kFloat8E5m2 };

// [num_blocks, 2 * num_kv_heads, rows, row_width]: a token every token_stride numbers of a page.
struct Pool {
  const char* data;
  PoolKind kind;
  int64_t num_blocks;
  int num_kv_heads, head_dim, token_stride, block_size;
  int64_t page_numbers;

  Pool() = default;
  Pool(const void* data, PoolKind kind, int64_t num_blocks, int64_t num_kv_heads, int64_t rows,
       int64_t row_width, int64_t head_dim)
      : data(static_cast<const char*>(data)),
        kind(kind),
        num_blocks(num_blocks),
        num_kv_heads(num_kv_heads),
        head_dim(head_dim),
        token_stride(row_width % head_dim ? row_width : head_dim),
        block_size(rows * row_width / token_stride),
        page_numbers(rows * row_width) {}

  // Whether rows can be read where they are, as whole vectors.
  bool is_direct() const { return kind == PoolKind::kFloat32 && head_dim % kLanes == 0; }

  int element_bytes() const {
    switch (kind) {
      case PoolKind::kFloat32: return 4;
      case PoolKind::kBfloat16:
      case PoolKind::kFloat16: return 2;
      default: return 1;
    }
  }

  void convert(const char* from, float* to) const {
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
    const auto* bytes = reinterpret_cast<const uint8_t*>(from);
    switch (kind) {
      case PoolKind::kFloat32: std::memcpy(to, from, head_dim * sizeof(float)); return;
      case PoolKind::kBfloat16: return convert_bfloat16(halves, head_dim, to);
      case PoolKind::kFloat16: return convert_float16(halves, head_dim, to);
      case PoolKind::kInt8:
        return convert_int8(reinterpret_cast<const int8_t*>(from), head_dim, to);
      case PoolKind::kFloat8E4m3fn: {
        static const Float8Table e4m3fn = make_e4m3fn_table();
        return convert_float8(e4m3fn, bytes, head_dim, to);
      }
      case PoolKind::kFloat8E5m2: {
        static const Float8Table e5m2 = make_e5m2_table();
        return convert_float8(e5m2, bytes, head_dim, to);
      }
    }
  }

  // A wrong block must not become an address outside the pool.
  int64_t block_of(const int32_t* table, int index) const {
    return std::clamp<int64_t>(table[index], 0, num_blocks - 1);
  }

  const char* page(int64_t block, int head) const {
    return data + (block * 2 * num_kv_heads + head) * page_numbers * element_bytes();
  }

  // Asks for tokens of `head` (keys first, then values), into the second level of cache: the first
  // is too small for them. Inlined, or GCC drops the call of a function without effects.
  __attribute__((always_inline)) void prefetch(const int32_t* table, int head, int begin,
                                               int num_tokens) const {
    constexpr int64_t kLineBytes = 64;
    const int64_t token_bytes = int64_t{token_stride} * element_bytes();
    for (int i = 0; i < num_tokens;) {
      const int position = begin + i, offset = position % block_size;
      const int count = std::min(block_size - offset, num_tokens - i);
      const char* first = page(block_of(table, position / block_size), head) + offset * token_bytes;
      for (int64_t byte = 0; byte < count * token_bytes; byte += kLineBytes) {
        __builtin_prefetch(first + byte, 0, 2);
      }
      i += count;
    }
  }

  // Sets rows[i] to where the numbers of token begin + i in `head` lie (keys first, then values),
  // for num_tokens tokens; up to num_rows the last one stands again.
  template <class Number>
  void find_tokens(const int32_t* table, int head, int begin, int num_tokens, int num_rows,
                   const Number** rows) const {
    for (int i = 0; i < num_tokens;) {
      const int position = begin + i, offset = position % block_size;
      const int end = i + std::min(block_size - offset, num_tokens - i);
      const char* first = page(block_of(table, position / block_size), head);
      const Number* from = reinterpret_cast<const Number*>(first) + int64_t{offset} * token_stride;
      for (; i < end; ++i, from += token_stride) rows[i] = from;
    }
    for (int i = num_tokens; i < num_rows; ++i) rows[i] = rows[num_tokens - 1];
  }

  // As find_tokens, of float32: in place, or converted to `converted`, [num_tokens, head_dim
  // rounded up], with zeros up to a whole vector.
  void tokens_of(const int32_t* table, int head, int begin, int num_tokens, int num_rows,
                 float* converted, const float** rows) const {
    if (is_direct()) return find_tokens(table, head, begin, num_tokens, num_rows, rows);
    const int width = round_up(head_dim, kLanes);
    const int64_t token_bytes = int64_t{token_stride} * element_bytes();
    for (int i = 0; i < num_tokens;) {
      const int position = begin + i, offset = position % block_size;
      const int count = std::min(block_size - offset, num_tokens - i);
      const int64_t block = block_of(table, position / block_size);
      const char* from = page(block, head) + offset * token_bytes;
      for (int end = i + count; i < end; ++i, from += token_bytes) {
        float* to = converted + i * width;
        convert(from, to);
        std::fill(to + head_dim, to + width, 0.0f);
        rows[i] = to;
      }
    }
    for (int i = num_tokens; i < num_rows; ++i) rows[i] = rows[num_tokens - 1];
  }
};

}  // namespace paged_attention

#endif  // PALLAS_KERNELS_ATTENTION_CPU_POOL_H_
