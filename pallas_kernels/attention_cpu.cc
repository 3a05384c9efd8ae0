// Ragged paged attention on a CPU, called by XLA through its foreign function interface.
//
// Work is cut into items: a tile of query rows of one sequence, one KV head with all query heads
// that share it, and a range of tokens. Threads take items until none is left, the most costly
// first. How a sequence is cut depends on nothing but itself, so that neighbours in the
// batch change no bit of its result.
//
//   few rows (decodes): 256 tokens an item, cut at multiples of 256; the parts of a longer sequence
//       are merged by log-sum-exp at the end. One dot product a token, row and vector, 16 tokens
//       side by side. Keys and values of float32 and int8 are read in place, where a head is
//       whole vectors.
//   many rows (prefills): all tokens that the tile sees, 64 at a time. Keys are transposed once a
//       chunk, and both products are tiles of sums held in registers.
//
// Slots past a sequence's end are never read. Elements that are not read in place become float32 a
// chunk at a time, in the cache.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention_cpu_math.h"
#include "attention_cpu_plan.h"
#include "attention_cpu_pool.h"
#include "matmul_cpu_threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace paged_attention {
namespace {

constexpr int kChunkTokens = 64;   // of keys that are transposed or converted
constexpr float kLowest = -1e30f;  // the maximum over nothing; finite, so differences are numbers

// The running softmax of some rows, each a query row and head: row * group + head of the group.
struct State {
  float *largest, *total, *weighted;  // [rows], [rows], [rows, width]
  State(float* at, int rows, int width)
      : largest(at + int64_t{rows} * width), total(largest + rows), weighted(at) {
    std::fill(largest, largest + rows, kLowest);
    std::fill(total, total + rows, 0.0f);
    std::fill(weighted, weighted + int64_t{rows} * width, 0.0f);
  }
};

// A thread's own memory, kept between calls.
float* scratch(int64_t num_floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < num_floats + 16) memory.resize(num_floats + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

void load_queries(const Batch& batch, const Item& item, float* q) {
  const int group = batch.group(), dim = batch.pool.head_dim, width = batch.width();
  const float* channels = batch.key_scales(item.kv_head);
  float factor = batch.scale;
  if (batch.k_scale) factor *= batch.k_scale[item.kv_head];
  for (int row = 0; row < item.num_rows; ++row) {
    for (int head = 0; head < group; ++head, q += width) {
      const int64_t at = (int64_t{item.first_row + row} * batch.num_q_heads +
                          item.kv_head * group + head) * dim;
      if (batch.q_is_bfloat16) {
        convert_bfloat16(static_cast<const uint16_t*>(batch.q) + at, dim, q);
      } else {
        std::memcpy(q, static_cast<const float*>(batch.q) + at, dim * sizeof(float));
      }
      if (channels) {
        for (int d = 0; d < dim; ++d) q[d] *= channels[d];
      }
      for (int d = 0; d < dim; ++d) q[d] *= factor;
      std::fill(q + dim, q + width, 0.0f);
    }
  }
}

// Asks for the next kLanes rows, into the second level of cache: the first is too small for them.
// Inlined always, or GCC drops the call of a function without effects.
template <class Number>
__attribute__((always_inline)) inline void prefetch_rows(const Number* const* rows, int width) {
  constexpr int kLineNumbers = 64 / sizeof(Number);
  for (int i = 0; i < kLanes; ++i) {
    for (int d = 0; d < width; d += kLineNumbers) __builtin_prefetch(rows[i] + d, 0, 2);
  }
}

// scores[row][token] = q[row] . keys[token], for a multiple of kLanes tokens.
//
// Blocks lie scattered, which no hardware foresees: the keys to come, of which num_known are there,
// and the values that are read next (null if they are not in place), are asked for here. It takes
// a third off the time.
template <class Number>
void dot_products(const float* q, int rows, int width, const Number* const* keys,
                  const Number* const* values, int num_tokens, int num_known, float* scores,
                  int stride) {
  constexpr int kKeysAhead = 2 * kLanes;
  for (int token = 0; token < num_tokens; token += kLanes) {
    if (values != nullptr) prefetch_rows(values + token, width);
    if (token + kKeysAhead < num_known) prefetch_rows(keys + token + kKeysAhead, width);
    for (int row = 0; row < rows; ++row) {
      Vec products[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) products[i] = Vec{};
      for (int d = 0; d < width; d += kLanes) {
        const Vec part = load(q + row * width + d);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) products[i] += part * load(keys[token + i] + d);
      }
      store(scores + row * stride + token, sums_of(products));
    }
  }
}

// packed[d][token] = keys[token][d], for a multiple of kLanes tokens.
void transpose_keys(const float* const* keys, int num_tokens, int width, float* packed) {
  for (int token = 0; token < num_tokens; token += kLanes) {
    for (int d = 0; d < width; d += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load(keys[token + i] + d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(packed + (d + i) * kChunkTokens + token, square[i]);
    }
  }
}

// Turns one row's scores into weights exp(score - largest), 0 outside [first, end), and brings the
// row's state up to them. Tokens are counted from the chunk's first; scores end at `num_scores`.
void add_row(float* scores, int num_scores, int first, int end, float soft_cap, State state,
             int row, int width) {
  if (end <= first) return std::fill(scores, scores + num_scores, 0.0f);
  Vec peaks = splat(kLowest);
  for (int token = 0; token < num_scores; token += kLanes) {
    Vec score = load(scores + token);
    if (soft_cap > 0) score = soft_cap * tanh_of(score / soft_cap);
    if (token < first || token + kLanes > end) {
      const IntVec at = iota() + token;
      score = (at >= first) & (at < end) ? score : splat(-std::numeric_limits<float>::infinity());
    }
    peaks = score > peaks ? score : peaks;
    store(scores + token, score);
  }
  const float largest = std::max(state.largest[row], largest_of(peaks));
  Vec total{};
  for (int token = 0; token < num_scores; token += kLanes) {
    const Vec weight = exp_of(load(scores + token) - largest);
    total += weight;
    store(scores + token, weight);
  }
  const float correction = std::exp(state.largest[row] - largest);
  state.largest[row] = largest;
  state.total[row] = state.total[row] * correction + sum_of(total);
  float* weighted = state.weighted + int64_t{row} * width;
  for (int d = 0; d < width; d += kLanes) store(weighted + d, load(weighted + d) * correction);
}

void write_rows(const Batch& batch, const Item& item, const State& state) {
  const int group = batch.group(), dim = batch.pool.head_dim, width = batch.width();
  const float v_scale = batch.v_scale ? batch.v_scale[item.kv_head] : 1.0f;
  const float* scales = batch.value_scales(item.kv_head);
  const float* offsets = batch.value_offsets(item.kv_head);
  for (int i = 0; i < item.num_rows * group; ++i) {
    const int head = item.kv_head * group + i % group;
    const int64_t row = int64_t{item.first_row + i / group} * batch.num_q_heads + head;
    float total = state.total[i], factor = v_scale;
    if (batch.sinks) {
      const float largest = std::max(state.largest[i], batch.sinks[head]);
      const float correction = std::exp(state.largest[i] - largest);
      total = total * correction + std::exp(batch.sinks[head] - largest);
      factor *= correction;
    }
    factor /= std::max(total, std::numeric_limits<float>::min());
    float* values = state.weighted + int64_t{i} * width;
    for (int d = 0; d < dim; ++d) values[d] *= factor;
    if (scales) {  // The weights add up to 1, so that the offset counts once.
      for (int d = 0; d < dim; ++d) values[d] = multiply_add(values[d], scales[d], offsets[d]);
    }
    if (batch.q_is_bfloat16) {
      write_bfloat16(values, dim, static_cast<uint16_t*>(batch.out) + row * dim);
    } else {
      std::memcpy(static_cast<float*>(batch.out) + row * dim, values, dim * sizeof(float));
    }
    if (batch.lse) batch.lse[row] = state.largest[i] + std::log(state.total[i]);
  }
}

// Tokens begin to begin + num_tokens of an item's sequence, whose scores stand in [rows, stride].
struct Chunk {
  const Batch& batch;
  const Item& item;
  int begin, num_tokens, stride;
  float* scores;

  int rows() const { return item.num_rows * batch.group(); }
  // How many of the chunk's tokens come before what a row does not see.
  int visible(int row) const {
    const int end = batch.end_seen(item.position + row / batch.group(), item.seq);
    return std::clamp(end - begin, 0, num_tokens);
  }
  // Vectors of scores that any of the rows up to `end` needs: later rows see more.
  int num_vecs(int end) const { return round_up(visible(end - 1), kLanes) / kLanes; }
};

// add_row of rows [first_row, end_row).
void add_rows(const Chunk& chunk, int first_row, int end_row, State state, int width) {
  const Batch& batch = chunk.batch;
  for (int row = first_row; row < end_row; ++row) {
    const int position = chunk.item.position + row / batch.group();
    const int first = std::max(batch.first_seen(position) - chunk.begin, 0);
    add_row(chunk.scores + row * chunk.stride, chunk.num_vecs(end_row) * kLanes, first,
            chunk.visible(row), batch.soft_cap, state, row, width);
  }
}

// Adds a chunk's values, weighted by its scores. What none of a tile sees is not multiplied.
template <class Number>
void add_values(const Chunk& chunk, const Number* const* values, State state, int width) {
  for (int i = 0; i < chunk.rows(); i += kTileRows) {
    const int tile = std::min(kTileRows, chunk.rows() - i);
    multiply<true>(tile, chunk.scores + i * chunk.stride, chunk.stride, values,
                   chunk.visible(i + tile - 1), state.weighted + int64_t{i} * width, width,
                   width / kLanes);
  }
}

// Few rows, whose item is a part of a sequence; keys and values are read where they lie.
template <class Number>
void attend_in_place(const Batch& batch, const Item& item) {
  // Other than float32 as where they are converted, bit for bit.
  constexpr int kChunk = std::is_same<Number, float>::value ? kSplitTokens : kChunkTokens;
  const int rows = item.num_rows * batch.group(), width = batch.width();
  const int64_t own_floats = state_floats(rows, width);
  float* q = scratch(own_floats + rows * (width + kChunk));
  float* scores = q + rows * width;
  float* own = scores + rows * kChunk;
  State state(item.part < 0 ? own : batch.parts + item.part * own_floats, rows, width);
  load_queries(batch, item, q);

  const Number *keys[kSplitTokens + kLanes], *values[kSplitTokens + kLanes];
  const int num_tokens = item.end_token - item.first_token;
  const int num_known = round_up(num_tokens, kLanes);
  const int value_head = batch.pool.num_kv_heads + item.kv_head;
  const int32_t* table = batch.block_tables + int64_t{item.seq} * batch.max_blocks;
  const auto find = [&](int head, const Number** found) {
    batch.pool.find_tokens(table, head, item.first_token, num_tokens, num_known, found);
  };
  find(item.kv_head, keys);
  find(value_head, values);
  for (int at = 0; at < num_tokens; at += kChunk) {
    const int here = std::min(kChunk, num_tokens - at);
    const Chunk chunk{batch, item, item.first_token + at, here, kChunk, scores};
    dot_products(q, rows, width, keys + at, values + at, round_up(here, kLanes), num_known - at,
                 scores, kChunk);
    for (int i = 0; i < rows; i += kTileRows) {
      add_rows(chunk, i, std::min(i + kTileRows, rows), state, width);
    }
    add_values(chunk, values + at, state, width);
  }
  if (item.part < 0) write_rows(batch, item, state);
}

// Any rows and pool, a chunk at a time.
void attend_by_chunks(const Batch& batch, const Item& item) {
  const int rows = item.num_rows * batch.group(), width = batch.width();
  const bool packs = rows > kFewRows;
  constexpr int kStride = kChunkTokens;
  const int64_t own_floats = state_floats(rows, width);
  float* q = scratch(own_floats + rows * (width + kStride) + 2 * kChunkTokens * width);
  float* scores = q + rows * width;
  float* packed = scores + rows * kStride;
  float* converted = packed + kChunkTokens * width;
  float* own = converted + kChunkTokens * width;
  State state(item.part < 0 ? own : batch.parts + item.part * own_floats, rows, width);
  load_queries(batch, item, q);

  const float* packed_rows[kMaxHeadDim];
  const float *keys[kChunkTokens + kLanes], *values[kChunkTokens + kLanes];
  const int value_head = batch.pool.num_kv_heads + item.kv_head;
  for (int d = 0; d < width; ++d) packed_rows[d] = packed + d * kChunkTokens;
  const int32_t* table = batch.block_tables + int64_t{item.seq} * batch.max_blocks;
  for (int begin = item.first_token; begin < item.end_token; begin += kChunkTokens) {
    const int num_tokens = std::min(kChunkTokens, item.end_token - begin);
    const int num_scores = round_up(num_tokens, kLanes);
    const Chunk chunk{batch, item, begin, num_tokens, kStride, scores};
    const auto read_tokens = [&](int head, const float** found) {
      batch.pool.tokens_of(table, head, begin, num_tokens, num_scores, converted, found);
    };
    read_tokens(item.kv_head, keys);
    if (packs) {
      transpose_keys(keys, num_scores, width, packed);
    } else {
      const float* const* not_in_place = nullptr;
      dot_products(q, rows, width, keys, not_in_place, num_scores, num_scores, scores, kStride);
    }
    for (int i = 0; i < rows; i += kTileRows) {
      const int tile = std::min(kTileRows, rows - i);
      if (packs) {
        multiply<false>(tile, q + i * width, width, packed_rows, width, scores + i * kStride,
                        kStride, chunk.num_vecs(i + tile));
      }
      add_rows(chunk, i, i + tile, state, width);
    }
    read_tokens(value_head, values);  // Converted values take the place of the keys.
    add_values(chunk, values, state, width);
  }
  if (item.part < 0) write_rows(batch, item, state);
}

void attend(const Batch& batch, const Item& item) {
  const bool is_few = item.num_rows * batch.group() <= kFewRows;
  if (is_few && batch.pool.head_dim % kLanes == 0) {
    if (batch.pool.kind == PoolKind::kFloat32) return attend_in_place<float>(batch, item);
    if (batch.pool.kind == PoolKind::kInt8) return attend_in_place<int8_t>(batch, item);
  }
  attend_by_chunks(batch, item);
}

void merge(const Batch& batch, const Merge& merged) {
  const int rows = merged.first.num_rows * batch.group(), width = batch.width();
  const int64_t floats = state_floats(rows, width);
  State sum(scratch(floats), rows, width);
  float* parts = batch.parts + merged.first.part * floats;
  const float *largest = parts + int64_t{rows} * width, *total = largest + rows;
  for (int row = 0; row < rows; ++row) {
    for (int p = 0; p < merged.num_parts; ++p) {
      sum.largest[row] = std::max(sum.largest[row], largest[p * floats + row]);
    }
    for (int p = 0; p < merged.num_parts; ++p) {
      const float weight = std::exp(largest[p * floats + row] - sum.largest[row]);
      sum.total[row] += weight * total[p * floats + row];
      const float* part = parts + p * floats + int64_t{row} * width;
      float* into = sum.weighted + int64_t{row} * width;
      for (int d = 0; d < width; d += kLanes) {
        store(into + d, load(into + d) + load(part + d) * weight);
      }
    }
  }
  write_rows(batch, merged.first, sum);
}

void run(const Batch& batch, const std::vector<Item>& items, ffi::ThreadPool& threads) {
  constexpr int64_t kWorthAThread = 1 << 13;  // of cost: some microseconds
  int64_t cost = 0;
  for (const Item& item : items) cost += item.cost(batch.group());
  matmul::for_each_item(items.size(), 1 + cost / kWorthAThread, threads,
                        [&](int64_t i) { attend(batch, items[i]); });
}

ffi::Error attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer pool,
                     ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> block_tables,
                     ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> num_seqs,
                     ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> k_scale,
                     ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::F32> channel_scale,
                     ffi::Buffer<ffi::F32> channel_offset, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::Buffer<ffi::F32>> lse, float scale, float soft_cap,
                     int64_t sliding_window, bool causal, int64_t pool_kind) {
  const auto q_dims = q.dimensions(), pool_dims = pool.dimensions();
  const auto optional = [](ffi::Buffer<ffi::F32>& buffer) {
    return buffer.element_count() ? buffer.typed_data() : nullptr;
  };
  Batch batch{};
  batch.q = q.untyped_data();
  batch.q_is_bfloat16 = q.element_type() == ffi::BF16;
  batch.pool = Pool(pool.untyped_data(), static_cast<PoolKind>(pool_kind), pool_dims[0],
                    pool_dims[1] / 2, pool_dims[2], pool_dims[3], q_dims[2]);
  batch.kv_lens = kv_lens.typed_data();
  batch.block_tables = block_tables.typed_data();
  batch.query_starts = query_starts.typed_data();
  batch.num_rows = q_dims[0];
  batch.num_seqs = std::clamp<int64_t>(num_seqs.typed_data()[0], 0, kv_lens.element_count());
  batch.num_q_heads = q_dims[1];
  batch.max_blocks = block_tables.dimensions()[1];
  batch.sinks = optional(sinks);
  batch.k_scale = optional(k_scale);
  batch.v_scale = optional(v_scale);
  batch.channel_scale = optional(channel_scale);
  batch.channel_offset = optional(channel_offset);
  batch.scale = scale;
  batch.soft_cap = soft_cap;
  batch.sliding_window = sliding_window;
  batch.causal = causal;
  batch.out = out->untyped_data();
  batch.lse = lse->element_count() ? lse->typed_data() : nullptr;
  const Plan plan = make_plan(batch);
  std::unique_ptr<float[]> parts(new float[plan.part_floats]);
  batch.parts = parts.get();
  run(batch, plan.items, threads);
  for (const Merge& merged : plan.merges) merge(batch, merged);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace paged_attention

// The only symbol that is visible outside.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* PagedAttention(
    XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttention, paged_attention::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("sliding_window")
                                  .Attr<bool>("causal")
                                  .Attr<int64_t>("pool_kind"));
