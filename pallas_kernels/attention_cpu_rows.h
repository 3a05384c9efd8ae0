// What happens to rows of queries on their way: loaded, weighed by a running softmax, written.

#ifndef PALLAS_KERNELS_ATTENTION_CPU_ROWS_H_
#define PALLAS_KERNELS_ATTENTION_CPU_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention_cpu_math.h"
#include "attention_cpu_plan.h"
#include "attention_cpu_pool.h"

namespace paged_attention {

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

// Where a row of an item stands in q and in the output, counted in rows of head_dim.
inline int64_t place_of(const Batch& batch, const Item& item, int row) {
  const int group = batch.group();
  return int64_t{item.first_row + row / group} * batch.num_q_heads + item.kv_head * group +
         row % group;
}

// One row of an item's queries, with all that multiplies it: [width], zeros after head_dim.
inline void load_query(const Batch& batch, const Item& item, int row, float* __restrict q) {
  const int dim = batch.pool.head_dim;
  const int64_t at = place_of(batch, item, row) * dim;
  const float factor = batch.k_scale ? batch.scale * batch.k_scale[item.kv_head] : batch.scale;
  if (batch.q_is_bfloat16) {
    convert_bfloat16(static_cast<const uint16_t*>(batch.q) + at, dim, q);
  } else {
    std::memcpy(q, static_cast<const float*>(batch.q) + at, dim * sizeof(float));
  }
  if (const float* __restrict channels = batch.key_scales(item.kv_head)) {
    for (int d = 0; d < dim; ++d) q[d] *= channels[d] * factor;
  } else {
    for (int d = 0; d < dim; ++d) q[d] *= factor;
  }
  std::fill(q + dim, q + batch.width(), 0.0f);
}

inline void load_queries(const Batch& batch, const Item& item, float* q) {
  const int rows = item.num_rows * batch.group(), width = batch.width();
  for (int row = 0; row < rows; ++row) load_query(batch, item, row, q + row * width);
}

// Turns one row's scores into weights exp(score - largest), 0 outside [first, end), and brings the
// row's state up to them. Tokens are counted from the chunk's first; scores end at `num_scores`.
inline void add_row(float* scores, int num_scores, int first, int end, float soft_cap,
                    const State& state, int row, int width) {
  if (end <= first) return std::fill(scores, scores + num_scores, 0.0f);
  Vec peaks = splat(state.largest[row]);
  for (int token = 0; token < num_scores; token += kLanes) {
    Vec score = load(scores + token);
    if (soft_cap > 0) score = soft_cap * tanh_of(score / soft_cap);
    if (token < first || token + kLanes > end) {
      const IntVec at = iota() + token;
      score = (at >= first) & (at < end) ? score : splat(-std::numeric_limits<float>::infinity());
    }
    peaks = larger(score, peaks);
    store(scores + token, score);
  }
  const Vec largest = fold(peaks, larger);
  Vec total{};
  for (int token = 0; token < num_scores; token += kLanes) {
    const Vec weight = exp_of(load(scores + token) - largest);
    total += weight;
    store(scores + token, weight);
  }
  total = fold(total, [](Vec a, Vec b) { return a + b; });
  const Vec correction = exp_of(state.largest[row] - largest);
  state.largest[row] = largest[0];
  state.total[row] = state.total[row] * correction[0] + total[0];
  float* weighted = state.weighted + int64_t{row} * width;
  for (int d = 0; d < width; d += kLanes) store(weighted + d, load(weighted + d) * correction);
}

inline void write_rows(const Batch& batch, const Item& item, const State& state) {
  const int group = batch.group(), dim = batch.pool.head_dim, width = batch.width();
  const float v_scale = batch.v_scale ? batch.v_scale[item.kv_head] : 1.0f;
  const float* __restrict scales = batch.value_scales(item.kv_head);
  const float* __restrict offsets = batch.value_offsets(item.kv_head);
  for (int i = 0; i < item.num_rows * group; ++i) {
    const int head = item.kv_head * group + i % group;
    const int64_t row = place_of(batch, item, i);
    float total = state.total[i], factor = v_scale;
    if (batch.sinks) {
      const float largest = std::max(state.largest[i], batch.sinks[head]);
      const float correction = std::exp(state.largest[i] - largest);
      total = total * correction + std::exp(batch.sinks[head] - largest);
      factor *= correction;
    }
    factor /= std::max(total, std::numeric_limits<float>::min());
    float* __restrict values = state.weighted + int64_t{i} * width;
    if (scales) {  // The weights add up to 1, so that the offset counts once.
      for (int d = 0; d < dim; ++d) {
        values[d] = multiply_add(values[d] * factor, scales[d], offsets[d]);
      }
    } else {
      for (int d = 0; d < dim; ++d) values[d] *= factor;
    }
    if (batch.q_is_bfloat16) {
      write_bfloat16(values, dim, static_cast<uint16_t*>(batch.out) + row * dim);
    } else {
      std::memcpy(static_cast<float*>(batch.out) + row * dim, values, dim * sizeof(float));
    }
    if (batch.lse) batch.lse[row] = state.largest[i] + std::log(state.total[i]);
  }
}

}  // namespace paged_attention

#endif  // PALLAS_KERNELS_ATTENTION_CPU_ROWS_H_
