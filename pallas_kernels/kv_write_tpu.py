"""The KV write as a Pallas kernel for TPUs: read, merge and write back tiles of eight rows.

A TPU's DMA moves packed rows (bfloat16, int8, float8) only in whole tiles of eight, so a token
cannot be stored alone: its tile [2 * Hkv, 8, width] is read, the token's row is put in, and the
tile goes back. Rows of the batch that are neighbours there and in the pool share one such group;
a group that covers its tile, as most of a prefill's do, is written without a read.

Static cost a token, from the compiler's own model (bfloat16, head_dim 128, blocks of 16), less an
empty call (3,600 cycles on v5e, 2,100 on v6e). `HBM` is the bytes moved over 546 a cycle, what v5e
can do; of a token's bytes 8 / 9 are its tile, read and written.

    | case                | v5e issued | v5e cycles | v6e issued | v6e cycles | HBM |
    | 8 KV heads, 8 rows  | 128        | 299        | 127        | 220        | 135 |
    | .. 64 decodes       | 119        | 134        | 117        | 133        | 135 |
    | .. 256 decodes      | 105        | 122        | 108        | 123        | 135 |
    | .. prefill of 512   | 14.5       | 29         | 14.9       | 19         | 23  |
    | 1 KV head, 8 rows   | 118        | 283        | 118        | 209        | 17  |
    | .. 64 decodes       | 107        | 121        | 107        | 119        | 17  |
    | .. 256 decodes      | 97         | 111        | 96         | 110        | 17  |
    | .. prefill of 512   | 13.4       | 16         | 13.3       | 17         | 3   |

64 decodes, 8 KV heads on v5e in other pools, issued: int8 126, float32 115, head_dim 64 151. With
one KV head a decode is bound by its scalar work. 8 real rows in a bucket of 256 issue what 8 alone
do, and fetch a chunk of 128 tokens instead of 8: 1,800 cycles.

XLA's scatter on v5e takes loops of 2,333 bundles (1,410 with 1 KV head) for 16 tokens, so 146 (88)
a token for prefills too, waits for memory in each, and has 8,500 cycles of operations around it for
64 tokens of 8 KV heads. Around this kernel there are 6,100: the groups, the same for all layers of
a step, and K and V as float32, which XLA fuses into what makes them. (A projection and rotary
embedding for 64 tokens, with what comes before the write: 19,500 cycles for this kernel, 26,000 for
the scatter, 23,500 where K and V are only returned.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_runtime
from pallas_kernels.kv_write_tpu_kernel import HASH_SLOTS, LANES, Geometry, kernel
from pallas_kernels.pool_storage import PoolLayout, pool_layout

_POOL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
_TILE_ROWS = 8
_MAX_TILES = 64  # of which half are being read and half written: what hides a DMA's latency
_TILES_BYTES = 2 << 20
_CHUNK_BYTES = 1 << 20
_VMEM_BYTES = 12 << 20  # of the 16 MiB that the smallest TPU has
_MAX_BATCH_ROWS = 100_000  # two int32 a row in 1 MiB of scalar memory


def _geometry(layout: PoolLayout, itemsize: int, num_batch_rows: int) -> Geometry:
    """The tile and chunk sizes for a shape: as many as hide latency, within a few MiB."""
    tile_rows = _TILE_ROWS if layout.rows % _TILE_ROWS == 0 else layout.rows
    row_lanes = 2 * layout.num_kv_heads * layout.width
    tile_bytes, num_tiles = tile_rows * row_lanes * itemsize, 4
    while num_tiles < _MAX_TILES and 2 * num_tiles * tile_bytes <= _TILES_BYTES:
        num_tiles *= 2
    chunk_tokens = tile_rows * layout.tokens_per_row
    while 2 * chunk_tokens * row_lanes * 4 <= _CHUNK_BYTES:
        chunk_tokens *= 2
    return Geometry(
        layout=layout,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
        chunk_tokens=min(chunk_tokens, num_batch_rows),
    )


def unsupported_reason(pool_layer: jax.Array, head_dim: int, num_batch_rows: int) -> str | None:
    """Why this kernel cannot write `num_batch_rows` tokens to `pool_layer`, or None if it can.

    Args:
      pool_layer: anything with the pool's shape [num_blocks, 2 * Hkv, rows, width] and dtype.
      head_dim: numbers a token and head.
      num_batch_rows: T.
    """
    layout = pool_layout(pool_layer, head_dim)
    if pool_layer.dtype not in _POOL_DTYPES:
        return (
            f"the kernel does not store {pool_layer.dtype}; make the pool of bfloat16, float32, "
            "int8 or float8"
        )
    if layout.width % LANES:
        return (
            f"the pool's rows have {layout.width} lanes, no multiple of {LANES}; make it with "
            "pool_storage.tpu_pool_shape"
        )
    if layout.tokens_per_row > 1 and layout.width != LANES:
        return (
            f"the pool's rows of {layout.width} lanes hold {layout.tokens_per_row} tokens of "
            f"{head_dim}; make it with pool_storage.tpu_pool_shape"
        )
    # XLA keeps blocks of other heights in a form of its own, and would copy the pool to ours.
    if layout.rows % _TILE_ROWS and layout.rows != 4:
        return (
            f"a block of {layout.block_size} tokens has {layout.rows} rows of {layout.width} "
            f"lanes, neither 4 nor a multiple of {_TILE_ROWS}; use a block_size that is a "
            f"multiple of {_TILE_ROWS * layout.tokens_per_row}"
        )
    if num_batch_rows > _MAX_BATCH_ROWS:
        return (
            f"{num_batch_rows} rows exceed scalar memory; write at most {_MAX_BATCH_ROWS} in a call"
        )
    size = _geometry(layout, pool_layer.dtype.itemsize, num_batch_rows)
    row_lanes = 2 * layout.num_kv_heads * layout.width
    vmem_bytes = size.num_tiles * size.tile_rows * row_lanes * pool_layer.dtype.itemsize
    vmem_bytes += 2 * (size.chunk_tokens + 2 * size.tile_tokens) * row_lanes * 4
    if vmem_bytes > _VMEM_BYTES:
        return (
            f"{layout.num_kv_heads} KV heads of {layout.width} lanes need {vmem_bytes} bytes of "
            f"vector memory and there are {_VMEM_BYTES}; split the heads over devices"
        )
    return None


def write_kv(
    pool_layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> jax.Array:
    """Writes rows to their slots, in place. Arguments as in `pallas_kernels.write_kv`, checked.

    pool_layer [num_blocks, 2 * Hkv, rows, width]; k and v [T, Hkv, D] in the pool's dtype;
    slot_mapping int32[T].
    """
    layout = pool_layout(pool_layer, k.shape[2])
    size = _geometry(layout, pool_layer.dtype.itemsize, k.shape[0])
    slots = slot_mapping.astype(jnp.int32)
    group_sizes = _group_sizes(slots, layout, size.tile_tokens)
    rows = jnp.arange(1, k.shape[0] + 1, dtype=jnp.int32)
    num_rows = jnp.max(jnp.where(group_sizes > 0, rows, 0), keepdims=True)
    k, v = _kernel_tokens(k, size), _kernel_tokens(v, size)
    return _write_groups(slots, group_sizes, num_rows, k, v, pool_layer, size=size)


def _write_groups(
    slots: jax.Array,
    group_sizes: jax.Array,
    num_rows: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool_layer: jax.Array,
    *,
    size: Geometry,
) -> jax.Array:
    """Calls the kernel; its inputs are described there."""
    num_columns = k.shape[0]
    two_kv_heads, width = 2 * size.layout.num_kv_heads, size.layout.width
    buffered_rows = (size.chunk_tokens + 2 * size.tile_tokens) * size.layout.num_kv_heads
    return pl.pallas_call(
        functools.partial(kernel, size=size),
        name="write_kv",
        out_shape=jax.ShapeDtypeStruct(pool_layer.shape, pool_layer.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((2, num_columns, 2, buffered_rows, LANES), k.dtype),
                pltpu.VMEM((size.num_tiles, two_kv_heads, size.tile_rows, width), pool_layer.dtype),
                pltpu.SMEM((2, size.num_tiles), jnp.int32),
                pltpu.SMEM((HASH_SLOTS,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((size.num_tiles,)),
                pltpu.SemaphoreType.DMA((size.num_tiles,)),
            ],
        ),
        input_output_aliases={5: 0},
        # Slots outside the pool are dropped before; the checks are a fifth of the kernel's time.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=tpu_runtime.interpret_mode(),
    )(slots, group_sizes, num_rows, k, v, pool_layer)


def _kernel_tokens(tokens: jax.Array, size: Geometry) -> jax.Array:
    """K or V [T, Hkv, D] as [width / 128, T * Hkv, 128] in 32 bits, whose rows load from any on.

    Eight-bit elements come as their bits in int32, others as float32. Where a pool's row holds
    several tokens, a row here repeats its one token across the lanes. For a head_dim of 128 this
    is the same order as before, and the conversion a part of whatever made the tokens.
    """
    if tokens.dtype.itemsize == 1:
        tokens = lax.bitcast_convert_type(tokens, jnp.int8).astype(jnp.int32)
    else:
        tokens = tokens.astype(jnp.float32)
    layout = size.layout
    if layout.tokens_per_row > 1:
        tokens = jnp.tile(tokens, (1, 1, layout.tokens_per_row))
    num_fill_lanes = layout.width - tokens.shape[2]
    num_fill_tokens = -tokens.shape[0] % size.chunk_tokens
    tokens = jnp.pad(tokens, ((0, num_fill_tokens), (0, 0), (0, num_fill_lanes)))
    return tokens.reshape(-1, layout.width // LANES, LANES).swapaxes(0, 1)


def _group_sizes(slots: jax.Array, layout: PoolLayout, tile_tokens: int) -> jax.Array:
    """For each row, how many rows from it on go to consecutive slots of one tile: int32[T].

    0 for rows that are dropped: padding (slot 0), and slots outside the pool.
    """
    going = (slots > 0) & (slots < layout.num_blocks * layout.block_size)
    sizes = going.astype(jnp.int32)
    following = jnp.pad(slots, (0, tile_tokens), constant_values=-1)
    for ahead in range(1, tile_tokens):
        follows = following[ahead : ahead + slots.shape[0]] == slots + ahead
        going &= follows & ((slots + ahead) % tile_tokens != 0)
        sizes += going
    return sizes
