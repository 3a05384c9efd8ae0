// A step's rotary embedding and KV write on a CPU, called by XLA through its foreign function
// interface.
//
//   rows [T, Hkv, G + 2, D]                 (float32 or bfloat16, as the product wrote them)
//     |-- G queries -- rotated ----------------------------------> q [T, Hkv * G, D]
//     |-- a key ------ rotated --.-- as the pool stores them ----> the pool's page of the slot,
//     `-- a value ---------------'                                 heads h and Hkv + h
//
// Each number is read and written once. Threads take ranges of tokens; a token's bits depend on
// nothing but its own row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention_cpu_math.h"
#include "attention_cpu_pool.h"
#include "matmul_cpu_threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace paged_attention {
namespace {

struct Step {
  const void* rows;
  bool is_bfloat16;
  int64_t num_rows, num_kv_heads, group;
  int dim;
  const float *cos, *sin;       // [num_rows, dim / 2]
  const float *scale, *offset;  // [2 * num_kv_heads, dim] of an int8 pool
  const int32_t* slots;
  Pool pool;
  void* q;

  int64_t row_numbers() const { return num_kv_heads * (group + 2) * dim; }
  bool has(int64_t slot) const { return slot >= 0 && slot < pool.num_blocks * pool.block_size; }
  char* place(int64_t slot, int64_t pool_head) const {
    const int64_t at = slot % pool.block_size * pool.token_stride * pool.element_bytes();
    return const_cast<char*>(pool.page(slot / pool.block_size, pool_head)) + at;
  }
};

inline float widen(float number) { return number; }
inline float widen(uint16_t bits) { return bits_to_float(uint32_t{bits} << 16); }

inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, uint16_t* to) { *to = to_bfloat16(value); }

// Turns the pairs (i, i + half) of a head. The sums are contracted as XLA's are.
template <class Number>
void rotate(const Number* __restrict from, const float* __restrict cos,
            const float* __restrict sin, int half, Number* __restrict to) {
  for (int i = 0; i < half; ++i) {
    const float first = widen(from[i]), second = widen(from[half + i]);
    narrow(multiply_add(first, cos[i], -(second * sin[i])), to + i);
    narrow(multiply_add(second, cos[i], first * sin[i]), to + half + i);
  }
}

// Rounded to the nearest, to even between two; 0 for a NaN, as XLA converts it.
template <class Number>
void write_int8(const Number* __restrict values, const float* __restrict scale,
                const float* __restrict offset, int count, int8_t* __restrict to) {
  for (int i = 0; i < count; ++i) {
    const float stored = std::nearbyint((widen(values[i]) - offset[i]) / scale[i]);
    const float clipped = std::min(std::max(stored, -127.0f), 127.0f);
    to[i] = static_cast<int32_t>(stored == stored ? clipped : 0.0f);
  }
}

template <class Number, class Stored>
void write_floats(const Number* __restrict values, int count, Stored* __restrict to) {
  for (int i = 0; i < count; ++i) narrow(widen(values[i]), to + i);
}

// Puts one head of one token into its slot. Numbers that fill its place up become zeros.
template <class Number>
void write_slot(const Step& step, int64_t slot, int64_t pool_head, const Number* values) {
  const int dim = step.dim, bytes = step.pool.element_bytes();
  const int64_t channels = pool_head * dim;
  char* const to = step.place(slot, pool_head);
  switch (step.pool.kind) {
    case PoolKind::kFloat32: write_floats(values, dim, reinterpret_cast<float*>(to)); break;
    case PoolKind::kBfloat16: write_floats(values, dim, reinterpret_cast<uint16_t*>(to)); break;
    default:
      write_int8(values, step.scale + channels, step.offset + channels, dim,
                 reinterpret_cast<int8_t*>(to));
  }
  std::memset(to + dim * bytes, 0, (step.pool.token_stride - dim) * bytes);
}

template <class Number>
void do_token(const Step& step, int64_t token) {
  const int64_t slot = step.slots[token], half = step.dim / 2;
  const float *cos = step.cos + token * half, *sin = step.sin + token * half;
  const Number* from = static_cast<const Number*>(step.rows) + token * step.row_numbers();
  Number* to = static_cast<Number*>(step.q) + token * step.num_kv_heads * step.group * step.dim;
  Number key[kMaxHeadDim];
  for (int64_t kv_head = 0; kv_head < step.num_kv_heads; ++kv_head) {
    for (int64_t query = 0; query < step.group; ++query, from += step.dim, to += step.dim) {
      rotate(from, cos, sin, half, to);
    }
    if (step.has(slot)) {
      rotate(from, cos, sin, half, key);
      write_slot(step, slot, kv_head, key);
      write_slot(step, slot, step.num_kv_heads + kv_head, from + step.dim);
    }
    from += 2 * step.dim;
  }
}

// Asks for the places that a token is written to, to own them. They lie scattered, which no
// hardware foresees. Inlined, or GCC drops the call of a function without effects.
__attribute__((always_inline)) inline void prefetch(const Step& step, int64_t token) {
  constexpr int kLineBytes = 64;
  const int64_t slot = step.slots[token], bytes = step.dim * step.pool.element_bytes();
  if (!step.has(slot)) return;
  for (int64_t head = 0; head < 2 * step.num_kv_heads; ++head) {
    const char* to = step.place(slot, head);
    for (int64_t byte = 0; byte < bytes; byte += kLineBytes) __builtin_prefetch(to + byte, 1, 2);
  }
}

void run(const Step& step, ffi::ThreadPool& threads) {
  constexpr int64_t kItemNumbers = 1 << 14;  // some microseconds
  constexpr int64_t kTokensAhead = 4;
  const int64_t tokens = std::max<int64_t>(1, kItemNumbers / step.row_numbers());
  const int64_t num_items = (step.num_rows + tokens - 1) / tokens;
  matmul::for_each_item(num_items, num_items, threads, [&](int64_t item) {
    const int64_t end = std::min((item + 1) * tokens, step.num_rows);
    for (int64_t token = item * tokens; token < end; ++token) {
      if (token + kTokensAhead < step.num_rows) prefetch(step, token + kTokensAhead);
      step.is_bfloat16 ? do_token<uint16_t>(step, token) : do_token<float>(step, token);
    }
  });
}

ffi::Error rope_write(ffi::ThreadPool threads, ffi::AnyBuffer rows, ffi::Buffer<ffi::F32> cos,
                      ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer pool,
                      ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::F32> scale,
                      ffi::Buffer<ffi::F32> offset, ffi::Result<ffi::AnyBuffer> q,
                      ffi::Result<ffi::AnyBuffer> new_pool, int64_t pool_kind) {
  if (pool.untyped_data() != new_pool->untyped_data()) {
    return ffi::Error::Internal("the pool that is written is not the pool that was given");
  }
  const auto dims = rows.dimensions(), pool_dims = pool.dimensions();
  Step step{};
  step.rows = rows.untyped_data();
  step.is_bfloat16 = rows.element_type() == ffi::BF16;
  step.num_rows = dims[0];
  step.num_kv_heads = dims[1];
  step.group = dims[2] - 2;
  step.dim = dims[3];
  step.cos = cos.typed_data();
  step.sin = sin.typed_data();
  step.scale = scale.typed_data();
  step.offset = offset.typed_data();
  step.slots = slots.typed_data();
  step.pool = Pool(new_pool->untyped_data(), static_cast<PoolKind>(pool_kind), pool_dims[0],
                   pool_dims[1] / 2, pool_dims[2], pool_dims[3], step.dim);
  step.q = q->untyped_data();
  run(step, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace paged_attention

// The only symbol that is visible outside, but for the team of threads.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* PagedRopeWrite(
    XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedRopeWrite, paged_attention::rope_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("pool_kind"));
