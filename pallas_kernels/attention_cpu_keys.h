// Scores, q . key: three ways to take them, for some keys and the rows of one item.
//
//   DottedKeys: one dot product a row and key, kLanes keys side by side; for few rows.
//   TurnedKeys: keys are transposed, and tiles of sums held in registers; for many rows.
//   Int8Keys:   the same in integers, for int8 keys and any rows, where the machine has the
//               instruction.
//
// Each has its memory from outside (`num_floats`) and takes an item's queries when it is made.
// `read` takes up to kMaxStepTokens keys, a multiple of kLanes; `score` writes the scores of some
// rows with the first num_vecs vectors of them, to [num_rows, stride].

#ifndef PALLAS_KERNELS_ATTENTION_CPU_KEYS_H_
#define PALLAS_KERNELS_ATTENTION_CPU_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention_cpu_math.h"
#include "attention_cpu_plan.h"
#include "attention_cpu_pool.h"
#include "attention_cpu_rows.h"

namespace paged_attention {

constexpr int kMaxStepTokens = 64;  // of keys that are read at a time

template <class KeyNumber>
class DottedKeys {
 public:
  using Number = KeyNumber;
  static int64_t num_floats(int rows, int width) { return int64_t{rows} * width; }

  DottedKeys(const Batch& batch, const Item& item, float* memory)
      : width_(batch.width()), q_(memory) {
    load_queries(batch, item, q_);
  }

  // Keys are read where they lie.
  void read(const Number* const* keys, int) { keys_ = keys; }

  void score(int row, int num_rows, int num_vecs, float* scores, int stride) const {
    for (int vec = 0; vec < num_vecs; ++vec) {
      const Number* const* keys = keys_ + vec * kLanes;
      for (int i = 0; i < num_rows; ++i) {
        const float* q = q_ + (row + i) * width_;
        Vec products[kLanes];
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) products[lane] = Vec{};
        for (int d = 0; d < width_; d += kLanes) {
          const Vec part = load(q + d);
#pragma GCC unroll 16
          for (int lane = 0; lane < kLanes; ++lane) products[lane] += part * load(keys[lane] + d);
        }
        store(scores + i * stride + vec * kLanes, sums_of(products));
      }
    }
  }

 private:
  int width_;
  float* q_;
  const Number* const* keys_ = nullptr;
};

class TurnedKeys {
 public:
  using Number = float;
  static int64_t num_floats(int rows, int width) { return int64_t{rows + kMaxStepTokens} * width; }

  TurnedKeys(const Batch& batch, const Item& item, float* memory)
      : width_(batch.width()), q_(memory) {
    load_queries(batch, item, q_);
    float* turned = q_ + item.num_rows * batch.group() * width_;
    for (int d = 0; d < width_; ++d) turned_[d] = turned + d * kMaxStepTokens;
  }

  void read(const float* const* keys, int num_tokens) {
    for (int token = 0; token < num_tokens; token += kLanes) {
      for (int d = 0; d < width_; d += kLanes) {
        Vec square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = load(keys[token + i] + d);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(turned_[d + i] + token, square[i]);
      }
    }
  }

  void score(int row, int num_rows, int num_vecs, float* scores, int stride) const {
    multiply<false>(num_rows, q_ + row * width_, width_, turned_, width_, scores, stride, num_vecs);
  }

 private:
  int width_;
  float* q_;
  float* turned_[kMaxHeadDim];  // [channel][token]
};

#if defined(__AVX512VNNI__)

// A row of q becomes integers of 23 bits, counted in units of a power of two that the row's largest
// number fits in, and those become three bytes each:
//
//   q[d] = unit * (2^16 high[d] + 2^8 middle[d] + low[d] - 2^22)
//
// about as near as float32 is at the row's largest. Products of bytes with keys are summed up
// exactly; what 2^22 adds depends on the key alone, so that the sums start at minus that. Keys are
// transposed in words of four channels: a quarter of the work that float32 would be. The scores of
// a row with a NaN or an infinity are NaN.
class Int8Keys {
 public:
  using Number = int8_t;

  // Whether a head is whole squares of words.
  static bool takes(int head_dim) { return head_dim % (4 * kLanes) == 0; }

  static int64_t num_floats(int rows, int width) {
    const int64_t num_words = width / 4;
    return width + (num_words + 1) * kMaxStepTokens + rows * (kLimbs * num_words + 1);
  }

  Int8Keys(const Batch& batch, const Item& item, float* memory) : num_words_(batch.width() / 4) {
    const int rows = item.num_rows * batch.group();
    turned_ = reinterpret_cast<int32_t*>(memory + batch.width());
    starts_ = turned_ + num_words_ * kMaxStepTokens;
    limbs_ = starts_ + kMaxStepTokens;
    units_ = reinterpret_cast<float*>(limbs_ + rows * kLimbs * num_words_);
    for (int row = 0; row < rows; ++row) {
      load_query(batch, item, row, memory);
      cut_row(memory, row);
    }
  }

  void read(const int8_t* const* keys, int num_tokens) {
    const IntVec zeros = splat_word((kZero >> 16) * 0x01010101);
    for (int token = 0; token < num_tokens; token += kLanes) {
      IntVec starts[4] = {};  // as many as hide an addition's latency
      for (int word = 0; word < num_words_; word += kLanes) {
        Vec square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          std::memcpy(&square[i], keys[token + i] + 4 * word, sizeof square[i]);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          starts[i % 4] = add_products(starts[i % 4], zeros, (IntVec)square[i]);
          store_words(turned_ + (word + i) * kMaxStepTokens + token, (IntVec)square[i]);
        }
      }
      store_words(starts_ + token, -(starts[0] + starts[1] + starts[2] + starts[3]));
    }
  }

  void score(int row, int num_rows, int num_vecs, float* scores, int stride) const {
    for (int i = 0; i < num_rows; i += 2) {
      float* to = scores + i * stride;
      if (i + 1 < num_rows) {
        score_rows<2>(row + i, num_vecs, to, stride);
      } else {
        score_rows<1>(row + i, num_vecs, to, stride);
      }
    }
  }

 private:
  static constexpr int kLimbs = 3;
  static constexpr int32_t kZero = 1 << 22;

  static IntVec splat_word(int32_t word) { return word - IntVec{}; }

  // Sums of four products, of bytes without sign and keys.
  static IntVec add_products(IntVec sum, IntVec bytes, IntVec keys) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)keys);
  }

  void cut_row(const float* q, int row) {
    constexpr int32_t kExponents = 0x7f800000, kOne = 127 << 23;
    constexpr int32_t kSmallest = 30 << 23;  // so that units are normal numbers
    const int width = 4 * num_words_;
    // Without their signs floats are in the order of their bits, infinities and NaN the last.
    __m512i peaks = _mm512_set1_epi32(kSmallest);
    for (int d = 0; d < width; d += kLanes) {
      const IntVec bits = (IntVec)load(q + d) & 0x7fffffff;
      peaks = _mm512_max_epi32(peaks, (__m512i)bits);
    }
    const int32_t exponent = _mm512_reduce_max_epi32(peaks) & kExponents;
    const bool is_finite = exponent < kExponents;
    // With the largest's power of two at 2^21 units all numbers are below 2^22.
    units_[row] = is_finite ? bits_to_float(exponent - (21 << 23))
                            : std::numeric_limits<float>::quiet_NaN();
    const float inverse = is_finite ? bits_to_float(2 * kOne - exponent + (21 << 23)) : 0.0f;
    char* limbs = reinterpret_cast<char*>(limbs_ + row * kLimbs * num_words_);
    for (int d = 0; d < width; d += kLanes) {
      // Adding 2^23 + kZero leaves the nearest integer, kZero added, in the low bits.
      const float shift = (1 << 23) + kZero;
      __m512i bits = (__m512i)(load(q + d) * inverse + shift);
#pragma GCC unroll 3
      for (int limb = 0; limb < kLimbs; ++limb) {
        const __m128i bytes = _mm512_cvtepi32_epi8(bits);
        std::memcpy(limbs + limb * width + d, &bytes, sizeof bytes);
        bits = _mm512_srli_epi32(bits, 8);
      }
    }
  }

  template <int kRows>
  void score_rows(int row, int num_vecs, float* scores, int stride) const {
    for (int vec = 0; vec < num_vecs; vec += 4) {
      float* to = scores + vec * kLanes;
      switch (num_vecs - vec) {
        case 1: score_tile<kRows, 1>(row, vec, to, stride); break;
        case 2: score_tile<kRows, 2>(row, vec, to, stride); break;
        case 3: score_tile<kRows, 3>(row, vec, to, stride); break;
        default: score_tile<kRows, 4>(row, vec, to, stride);
      }
    }
  }

  template <int kRows, int kVecs>
  void score_tile(int row, int vec, float* scores, int stride) const {
    constexpr int kSums = kRows * kLimbs;
    const int32_t* limbs = limbs_ + row * kLimbs * num_words_;
    const int32_t* keys = turned_ + vec * kLanes;
    IntVec sums[kSums][kVecs];
#pragma GCC unroll 6
    for (int i = 0; i < kSums; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        sums[i][j] = i % kLimbs == 2 ? load_words<IntVec>(starts_ + (vec + j) * kLanes) : IntVec{};
      }
    for (int word = 0; word < num_words_; ++word) {
      IntVec columns[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        columns[j] = load_words<IntVec>(keys + word * kMaxStepTokens + j * kLanes);
      }
#pragma GCC unroll 6
      for (int i = 0; i < kSums; ++i) {
        const IntVec bytes = splat_word(limbs[i * num_words_ + word]);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) sums[i][j] = add_products(sums[i][j], bytes, columns[j]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        const Vec low = __builtin_convertvector(sums[i * kLimbs][j], Vec);
        const Vec middle = __builtin_convertvector(sums[i * kLimbs + 1][j], Vec);
        const Vec high = __builtin_convertvector(sums[i * kLimbs + 2][j], Vec);
        const Vec sum = high * 65536.0f + (middle * 256.0f + low);
        store(scores + i * stride + j * kLanes, sum * units_[row + i]);
      }
  }

  int num_words_;
  int32_t* turned_;  // [word][token]
  int32_t* starts_;  // [token]
  int32_t* limbs_;   // [row][limb][word]
  float* units_;     // [row]
};

#endif

}  // namespace paged_attention

#endif  // PALLAS_KERNELS_ATTENTION_CPU_KEYS_H_
