// Ragged paged attention on a CPU, called by XLA through its foreign function interface.
//
// Work is cut into items: a tile of query rows of one sequence, one KV head with all query heads
// that share it, and a range of tokens. Threads take items until none is left, the most costly
// first. How a sequence is cut depends on nothing but itself, so that neighbours in the
// batch change no bit of its result.
//
//   few rows (decodes): 256 tokens an item, cut at multiples of 256; the parts of a longer sequence
//       are merged by log-sum-exp at the end.
//   many rows (prefills): all tokens that the tile sees.
//
// An item goes through its tokens in chunks:
//
//   keys --> scores [rows, chunk] --> weights, a running softmax --> + weights * values
//   (attention_cpu_keys.h)            (attention_cpu_rows.h)         [rows, head_dim]
//
// Tokens are read some at a time, and asked for before. Slots past a sequence's end are never read.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention_cpu_keys.h"
#include "attention_cpu_math.h"
#include "attention_cpu_plan.h"
#include "attention_cpu_pool.h"
#include "attention_cpu_rows.h"
#include "matmul_cpu_threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace paged_attention {
namespace {

// Tokens whose scores are held at once; the items of few rows have no more.
constexpr int kChunkTokens = kSplitTokens;

// How many of them are read at a time. With few rows memory takes most of the time, and is asked
// for little by little.
int step_tokens(const Batch& batch, const Item& item) {
  constexpr int kStepBytes = 4096;
  if (item.num_rows * batch.group() > kFewRows) return kMaxStepTokens;
  const int tokens = kStepBytes / (batch.pool.token_stride * batch.pool.element_bytes());
  return std::clamp(tokens / kLanes * kLanes, kLanes, kMaxStepTokens);
}

// Asks for keys and values some time before they are read. Blocks lie scattered, which no hardware
// foresees; this way memory is at work all the time, from one item into the next:
//
//   read    k0 k1 k2 k3 v0 v1 v2 v3 | k0 k1 k2 ...
//   asked         k2 k3 v0 v1 v2 v3 | k0 k1 k2 k3 ...
class Lookahead {
 public:
  // Over items [item, end), whose keys and values are then read in this order.
  Lookahead(const Batch& batch, const Item* item, const Item* end)
      : batch_(batch), item_(item), end_(end) {
    constexpr int kTokensAhead = 64;
    advance(kTokensAhead);
  }

  // To be called before the next num_tokens keys or values are read.
  __attribute__((always_inline)) void advance(int num_tokens) {
    const Pool& pool = batch_.pool;
    while (num_tokens > 0 && item_ != end_) {
      // A chunk's keys come before its values.
      const int first = at_ / (2 * kChunkTokens) * kChunkTokens, within = at_ - 2 * first;
      const int size = item_->end_token - item_->first_token;
      const int chunk_tokens = std::min(kChunkTokens, size - first);
      const bool is_value = within >= chunk_tokens;
      const int token = is_value ? within - chunk_tokens : within;
      const int count = std::min(num_tokens, chunk_tokens - token);
      pool.prefetch(batch_.table_of(item_->seq),
                    item_->kv_head + (is_value ? pool.num_kv_heads : 0),
                    item_->first_token + first + token, count);
      num_tokens -= count;
      at_ += count;
      if (at_ == 2 * size) {
        ++item_;
        at_ = 0;
      }
    }
  }

 private:
  const Batch& batch_;
  const Item *item_, *end_;
  int at_ = 0;  // among the item's keys and values
};

// A thread's own memory, kept between calls.
float* scratch(int64_t num_floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < num_floats + 16) memory.resize(num_floats + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

// Tokens begin to begin + num_tokens of an item's sequence, with their scores.
struct Chunk {
  const Batch& batch;
  const Item& item;
  int begin, num_tokens;
  float* scores;  // [rows, kChunkTokens]

  int rows() const { return item.num_rows * batch.group(); }
  float* scores_of(int row, int token) const { return scores + row * kChunkTokens + token; }
  // How many of the chunk's tokens come before what a row does not see.
  int visible(int row) const {
    const int end = batch.end_seen(item.position + row / batch.group(), item.seq);
    return std::clamp(end - begin, 0, num_tokens);
  }
  // Vectors of scores that any of the rows up to `end` needs: later rows see more.
  int num_vecs(int end) const { return round_up(visible(end - 1), kLanes) / kLanes; }
};

// Calls work(first row, number of rows) for each tile.
template <class Work>
void for_each_tile(int rows, const Work& work) {
  for (int row = 0; row < rows; row += kTileRows) work(row, std::min(kTileRows, rows - row));
}

// Where a step's numbers of a head lie: in the pool, or in `converted` where those are no Number.
template <class Number>
void find_step(const Chunk& chunk, int head, int first, int num_tokens, float* converted,
               const Number** found) {
  const Batch& batch = chunk.batch;
  const int32_t* table = batch.table_of(chunk.item.seq);
  const int begin = chunk.begin + first, num_found = round_up(num_tokens, kLanes);
  if constexpr (std::is_same<Number, float>::value) {
    batch.pool.tokens_of(table, head, begin, num_tokens, num_found, converted, found);
  } else {
    batch.pool.find_tokens(table, head, begin, num_tokens, num_found, found);
  }
}

// Scores of num_tokens keys that are read, which begin with the chunk's token `first`.
template <class Keys>
void score_step(const Chunk& chunk, const Keys& keys, int first, int num_tokens) {
  const int all_vecs = round_up(num_tokens, kLanes) / kLanes;
  for_each_tile(chunk.rows(), [&](int row, int tile) {
    const int num_vecs = std::min(chunk.num_vecs(row + tile) - first / kLanes, all_vecs);
    keys.score(row, tile, num_vecs, chunk.scores_of(row, first), kChunkTokens);
  });
}

void add_rows(const Chunk& chunk, const State& state, int width) {
  const Batch& batch = chunk.batch;
  for_each_tile(chunk.rows(), [&](int first_row, int tile) {
    const int num_scores = chunk.num_vecs(first_row + tile) * kLanes;
    for (int row = first_row; row < first_row + tile; ++row) {
      const int position = chunk.item.position + row / batch.group();
      const int first = std::max(batch.first_seen(position) - chunk.begin, 0);
      add_row(chunk.scores_of(row, 0), num_scores, first, chunk.visible(row), batch.soft_cap,
              state, row, width);
    }
  });
}

// Adds a step's values, weighted. What none of a tile sees is not multiplied.
template <class Value>
void add_values(const Chunk& chunk, const Value* const* values, int first, int num_tokens,
                const State& state, int width) {
  for_each_tile(chunk.rows(), [&](int row, int tile) {
    const int depth = std::min(chunk.visible(row + tile - 1) - first, num_tokens);
    if (depth <= 0) return;
    multiply<true>(tile, chunk.scores_of(row, first), kChunkTokens, values, depth,
                   state.weighted + int64_t{row} * width, width, width / kLanes);
  });
}

// One item, its scores by a class of attention_cpu_keys.h. Value is float, for any pool, or what
// the pool consists of.
template <class Keys, class Value>
void attend_by(const Batch& batch, const Item& item, Lookahead& ahead) {
  const int rows = item.num_rows * batch.group(), width = batch.width();
  const int step = step_tokens(batch, item);
  const int value_step = std::min(2 * step, kMaxStepTokens);  // each loads and stores all sums
  const int64_t own_floats = state_floats(rows, width), scores_at = round_up(own_floats, kLanes);
  float* own = scratch(scores_at + rows * kChunkTokens + kMaxStepTokens * width +
                       Keys::num_floats(rows, width));
  float* scores = own + scores_at;
  float* converted = scores + rows * kChunkTokens;
  Keys keys(batch, item, converted + kMaxStepTokens * width);
  State state(item.part < 0 ? own : batch.parts + item.part * own_floats, rows, width);

  const typename Keys::Number* key_rows[kMaxStepTokens];
  const Value* value_rows[kMaxStepTokens];
  for (int begin = item.first_token; begin < item.end_token; begin += kChunkTokens) {
    const int num_tokens = std::min(kChunkTokens, item.end_token - begin);
    const Chunk chunk{batch, item, begin, num_tokens, scores};
    for (int first = 0; first < num_tokens; first += step) {
      const int count = std::min(step, num_tokens - first);
      ahead.advance(count);
      find_step(chunk, item.kv_head, first, count, converted, key_rows);
      keys.read(key_rows, round_up(count, kLanes));
      score_step(chunk, keys, first, count);
    }
    add_rows(chunk, state, width);
    for (int first = 0; first < num_tokens; first += value_step) {
      const int count = std::min(value_step, num_tokens - first);
      ahead.advance(count);
      find_step(chunk, batch.pool.num_kv_heads + item.kv_head, first, count, converted,
                value_rows);
      add_values(chunk, value_rows, first, count, state, width);
    }
  }
  if (item.part < 0) write_rows(batch, item, state);
}

void attend(const Batch& batch, const Item& item, Lookahead& ahead) {
  const bool is_few = item.num_rows * batch.group() <= kFewRows;
  if (batch.pool.kind == PoolKind::kInt8) {
#if defined(__AVX512VNNI__)
    if (Int8Keys::takes(batch.pool.head_dim)) {
      // With many rows a value is worth converting once for all of them.
      return is_few ? attend_by<Int8Keys, int8_t>(batch, item, ahead)
                    : attend_by<Int8Keys, float>(batch, item, ahead);
    }
#endif
    if (is_few && batch.pool.head_dim % kLanes == 0) {
      return attend_by<DottedKeys<int8_t>, int8_t>(batch, item, ahead);
    }
  }
  is_few ? attend_by<DottedKeys<float>, float>(batch, item, ahead)
         : attend_by<TurnedKeys, float>(batch, item, ahead);
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

// Where the units begin that threads take: items that follow each other, so that a thread knows
// what it reads next. Ends with the items' end.
std::vector<const Item*> cut_into_units(const std::vector<Item>& items, int group, int64_t cost) {
  std::vector<const Item*> units;
  int64_t taken = cost;
  for (const Item& item : items) {
    if (taken >= cost) {
      units.push_back(&item);
      taken = 0;
    }
    taken += item.cost(group);
  }
  units.push_back(items.data() + items.size());
  return units;
}

void run(const Batch& batch, const std::vector<Item>& items, ffi::ThreadPool& threads) {
  constexpr int64_t kWorthAThread = 1 << 13;  // of cost: some microseconds
  constexpr int64_t kUnitsPerThread = 16;     // so many that nobody waits long for the last one
  int64_t cost = 0;
  for (const Item& item : items) cost += item.cost(batch.group());
  const int64_t num_threads = std::min<int64_t>(threads.num_threads(), 1 + cost / kWorthAThread);
  const int64_t unit_cost = std::min(cost / (num_threads * kUnitsPerThread), kWorthAThread);
  const auto units = cut_into_units(items, batch.group(), unit_cost);
  matmul::for_each_item(units.size() - 1, num_threads, threads, [&](int64_t i) {
    Lookahead ahead(batch, units[i], units[i + 1]);
    for (const Item* item = units[i]; item != units[i + 1]; ++item) attend(batch, *item, ahead);
  });
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
