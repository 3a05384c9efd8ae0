// How a batch is cut into items of work. See attention_cpu.cc.

#ifndef PALLAS_KERNELS_ATTENTION_CPU_PLAN_H_
#define PALLAS_KERNELS_ATTENTION_CPU_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_cpu_math.h"
#include "attention_cpu_pool.h"

namespace paged_attention {

constexpr int kFewRows = 8;           // up to so many rows, dot products beat a transposition
constexpr int kSplitTokens = 256;     // a part of a sequence with few rows
constexpr int kTilePrefillRows = 96;  // query rows times heads, about, of a prefill's item

struct Batch {
  const void* q;
  bool q_is_bfloat16;
  Pool pool;
  const int32_t *kv_lens, *block_tables, *query_starts;
  int num_rows, num_seqs, num_q_heads, max_blocks;
  const float *sinks, *k_scale, *v_scale;       // null where there are none
  const float *channel_scale, *channel_offset;  // [2 * num_kv_heads, head_dim], or null
  float scale, soft_cap;                        // soft_cap 0: none
  int64_t sliding_window;                       // 0: none
  bool causal;
  void* out;
  float* lse;  // null where it is not asked for
  float* parts;

  int group() const { return num_q_heads / pool.num_kv_heads; }
  int width() const { return round_up(pool.head_dim, kLanes); }
  const int32_t* table_of(int seq) const { return block_tables + int64_t{seq} * max_blocks; }
  // Of a head's channels; null where there are none.
  const float* key_scales(int kv_head) const {
    return channel_scale ? channel_scale + int64_t{kv_head} * pool.head_dim : nullptr;
  }
  const float* value_scales(int kv_head) const { return key_scales(pool.num_kv_heads + kv_head); }
  const float* value_offsets(int kv_head) const {
    const int64_t head = pool.num_kv_heads + kv_head;
    return channel_offset ? channel_offset + head * pool.head_dim : nullptr;
  }
  // The tokens that a query at `position` sees: from first_seen to before end_seen.
  int end_seen(int position, int seq) const {
    const int end = causal ? std::min(position + 1, kv_lens[seq]) : kv_lens[seq];
    return std::min(end, max_blocks * pool.block_size);
  }
  int first_seen(int position) const {
    return sliding_window ? std::max<int64_t>(0, position - sliding_window + 1) : 0;
  }
};

// Query rows first_row to first_row + num_rows of q, which stand at `position` and after.
struct Item {
  int seq, kv_head, first_row, num_rows, position, first_token, end_token;
  int part;  // where the state goes in Batch::parts, or -1 if this item is all of it
  int64_t cost(int group) const {
    return int64_t{end_token - first_token} * (4 + num_rows * group);
  }
};

// Items of consecutive parts that make up the same rows.
struct Merge {
  Item first;
  int num_parts;
};

// Floats of a running softmax: sums [rows, width], and for each row a maximum and a total.
inline int64_t state_floats(int rows, int width) { return int64_t{rows} * (width + 2); }

// Rows that nobody owns, or that see nothing: zeros, and -inf.
inline void write_zeros(const Batch& batch, int first_row, int end_row) {
  if (end_row <= first_row) return;
  const int64_t first = int64_t{first_row} * batch.num_q_heads;
  const int64_t end = int64_t{end_row} * batch.num_q_heads;
  const int64_t bytes = int64_t{batch.pool.head_dim} * (batch.q_is_bfloat16 ? 2 : 4);
  std::memset(static_cast<char*>(batch.out) + first * bytes, 0, (end - first) * bytes);
  if (batch.lse) {
    std::fill(batch.lse + first, batch.lse + end, -std::numeric_limits<float>::infinity());
  }
}

struct Plan {
  std::vector<Item> items;
  std::vector<Merge> merges;
  int64_t part_floats = 0;
};

// Adds the items of one tile; `item` says which, but for its head and tokens.
inline void plan_tile(const Batch& batch, Item item, Plan* plan) {
  const int last = item.position + item.num_rows - 1;
  const int first_token = batch.first_seen(item.position);
  const int end_token = batch.end_seen(last, item.seq);
  if (end_token <= first_token) {
    return write_zeros(batch, item.first_row, item.first_row + item.num_rows);
  }
  const int rows = item.num_rows * batch.group();
  const bool splits = item.num_rows <= kFewRows &&
                      first_token / kSplitTokens != (end_token - 1) / kSplitTokens;
  const int64_t floats = state_floats(rows, batch.width());
  for (item.kv_head = 0; item.kv_head < batch.pool.num_kv_heads; ++item.kv_head) {
    item.first_token = first_token;
    item.end_token = end_token;
    item.part = -1;
    if (!splits) {
      plan->items.push_back(item);
      continue;
    }
    // Parts of one shape lie together: the next multiple of their size.
    item.part = (plan->part_floats + floats - 1) / floats;
    Merge merged{item, 0};
    for (; item.first_token < end_token; ++item.part, ++merged.num_parts) {
      item.end_token = std::min(end_token, (item.first_token / kSplitTokens + 1) * kSplitTokens);
      plan->items.push_back(item);
      item.first_token = item.end_token;
    }
    plan->part_floats = item.part * floats;
    plan->merges.push_back(merged);
  }
}

// The items of a batch. Zeros are written at once for rows that see nothing.
inline Plan make_plan(const Batch& batch) {
  Plan plan;
  const int group = batch.group();
  int written_rows = 0;
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int begin = std::clamp(batch.query_starts[seq], written_rows, batch.num_rows);
    const int end = std::clamp(batch.query_starts[seq + 1], begin, batch.num_rows);
    write_zeros(batch, written_rows, begin);
    const int count = end - begin;
    const int tile = count * group <= kFewRows ? kFewRows : std::max(1, kTilePrefillRows / group);
    for (int row = 0; row < count; row += tile) {
      Item item{};
      item.seq = seq;
      item.first_row = begin + row;
      item.num_rows = std::min(tile, count - row);
      item.position = batch.kv_lens[seq] - count + row;
      plan_tile(batch, item, &plan);
    }
    written_rows = end;
  }
  write_zeros(batch, written_rows, batch.num_rows);
  const auto is_dearer = [group](const Item& a, const Item& b) {
    return a.cost(group) > b.cost(group);
  };
  if (!std::is_sorted(plan.items.begin(), plan.items.end(), is_dearer)) {
    std::stable_sort(plan.items.begin(), plan.items.end(), is_dearer);
  }
  return plan;
}

}  // namespace paged_attention

#endif  // PALLAS_KERNELS_ATTENTION_CPU_PLAN_H_
