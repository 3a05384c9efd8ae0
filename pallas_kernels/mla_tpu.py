"""Latent attention on a TPU: block sizes, and the call of the kernel.

**Static cost.** Cycles that one more sequence costs, by the TPU compiler's own profile of the
kernel: bfloat16, 512 + 64 -> 640 lanes, one query token a sequence (issued bundles / estimated
cycles; nothing here was measured on a device). The HBM floor is the bytes of pool, queries and
outputs at 546 a cycle on v5e (819 GB/s, 1.5 GHz); on v6e at 937, taking 1,640 GB/s and 1.75 GHz.
v5e's matrix unit alone needs 2,304 cycles for 128 heads x 1,024 tokens.

    heads, tokens, page     v5e issued / est.   floor    v6e issued / est.   floor
    16     1,024   16         1,348 /  1,873     2,470     1,323 /  1,911     1,440
    16     1,024   128        1,099 /  1,566     2,470     1,107 /  1,694     1,440
    128    1,024   16         3,128 /  3,441     2,940     2,014 /  2,134     1,710
    128    1,024   128        2,879 /  3,134     2,940     1,798 /  1,917     1,710

So with 16 heads v5e waits for HBM; with 128 heads its estimate is 17 % above the floor at page 16,
and 7 % at page 128, whose 56 copies fewer save 249 bundles. On v6e with 16 heads a third of the
estimated cycles issue nothing. With float32 queries and pool, page 16, a sequence costs 23,963 /
22,299 estimated cycles (16 / 128 heads) on v5e and 14,455 / 11,943 on v6e. The profile knows
neither v4 nor v5p nor tpu7x. On v4 and v5p the kernel uses one of the two cores.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_runtime
from pallas_kernels.mla_tpu_kernel import mla_kernel
from pallas_kernels.mla_tpu_pipeline import (
    ITEM_RING,
    ITEM_WORDS,
    OUT_RING_TILES,
    STATE_WORDS,
    TABLE_RING_ROWS,
    TABLE_ROW_ENTRIES,
    Tiling,
)
from pallas_kernels.mla_tpu_softmax import LANES, num_parts

# The smallest generation, v4, has 16 MiB; a fifth of it stays free for the compiler.
_VMEM_LIMIT_BYTES = 15 * 2**20 + 2**19
_REFS_LIMIT_BYTES = int(12.5 * 2**20)
# Tokens of a KV block: enough to fetch well and to amortise a step's scalar work and latencies.
_BLOCK_TOKENS = {2: 1024, 4: 512}  # by the bytes of a product's element
# A step, and steps of straight-line code, such that few registers are spilled (see `Tiling`): for
# 512 + 64 -> 640 lanes at most 56 KiB on v4 and 36 KiB on the others, but on v4 88 KiB with
# float32 queries, a bfloat16 pool and 16 heads. Matrix units of v6e and tpu7x are 256 wide. v4's
# float32 steps, profiled on v5e, cost 39,007 cycles with 128 heads instead of the 22,299 above.
_STEPS = {
    "v4": dict(step_tokens=128, step_lanes=128, step_rows=32, product_rows=64, steps_at_once=1),
    "v5e": dict(step_tokens=128, step_lanes=128, steps_at_once=8),
    "v5p": dict(step_tokens=128, step_lanes=128, steps_at_once=8),
    "v6e": dict(step_tokens=256, step_lanes=256, steps_at_once=4),
    "tpu7x": dict(step_tokens=128, step_lanes=256, steps_at_once=8),
}
_FLOAT32_STEPS = dict(step_tokens=128, step_lanes=128, steps_at_once=1)
_PART_SCORES = {2: 32 * 1024, 4: 16 * 1024}
_TILE_ROWS = 128  # what the matrix unit takes at once on most generations
_ITEM_ROWS = 512  # so many rows share a fetched block: then prefills are bound by the matrix unit


def unsupported_reason(q_latent: Any, pool_layer: Any) -> str | None:
    """Why the kernel does not take checked arguments of these shapes and dtypes, or None.

    Anything with a shape and a dtype does for the arguments.
    """
    latent_dim, (_, block_size, width) = q_latent.shape[2], pool_layer.shape
    if pool_layer.dtype not in (jnp.float32, jnp.bfloat16):
        return f"pool_layer has dtype {pool_layer.dtype}; use float32 or bfloat16"
    if latent_dim % LANES:
        return f"q_latent has latent_dim {latent_dim}; the kernel needs a multiple of {LANES}"
    if width % LANES:
        return (
            f"pool_layer has width {width}; the kernel needs a multiple of {LANES}: fill the rows "
            "up with zeros, see latent_pool_width"
        )
    tile_tokens = 32 // pool_layer.dtype.itemsize  # a page is whole tiles, so copies are aligned
    if block_size % tile_tokens:
        return (
            f"pool_layer has block_size {block_size}; for {pool_layer.dtype} the kernel needs a "
            f"multiple of {tile_tokens}"
        )
    if choose_tiling(q_latent, pool_layer, max_blocks=TABLE_ROW_ENTRIES) is None:
        return (
            f"{q_latent.shape[1]} heads x {width} lanes with blocks of {block_size} tokens do not "
            "fit into VMEM; split the heads over devices or use smaller blocks"
        )
    return None


def choose_tiling(q_latent: Any, pool_layer: Any, *, max_blocks: int) -> Tiling | None:
    """The largest work sizes that fit into the VMEM of every generation; None if none does.

    q_latent and pool_layer: the op's arguments, or anything with their shapes and dtypes.
    max_blocks: columns of the block tables, so that short tables get short blocks.
    """
    block_size = pool_layer.shape[1]
    num_heads = _padded_heads(q_latent)
    product_bytes = max(q_latent.dtype.itemsize, pool_layer.dtype.itemsize)
    pages = min(_BLOCK_TOKENS[product_bytes] // block_size, max_blocks, TABLE_ROW_ENTRIES)
    pages = 2 ** math.ceil(math.log2(max(pages, 1)))
    fewest_pages = LANES // math.gcd(LANES, block_size)  # scores fill whole lanes
    pages = max(pages, fewest_pages)
    tile_tokens = max(1, _TILE_ROWS // num_heads)
    max_item_tiles = max(1, _ITEM_ROWS // (tile_tokens * num_heads))
    generation = tpu_runtime.tpu_generation() or "v4"
    steps = _STEPS[generation] | (_FLOAT32_STEPS if product_bytes == 4 else {})
    while pages >= fewest_pages:
        for item_tiles in (max_item_tiles, max(1, max_item_tiles // 2), 1):
            tiling = Tiling(
                block_tokens=pages * block_size,
                part_scores=_PART_SCORES[product_bytes],
                num_buffers=4,
                tile_tokens=tile_tokens,
                item_tokens=item_tiles * tile_tokens,
                **steps,
                joins_parts=generation in ("v6e", "tpu7x"),
            )
            if _refs_bytes(q_latent, pool_layer, tiling) <= _REFS_LIMIT_BYTES:
                return tiling
        pages //= 2
    return None


def _padded_heads(q_latent: jax.Array) -> int:
    """Heads filled up to whole tiles, so that tokens x heads are rows without a copy."""
    sublanes = 8 if q_latent.dtype == jnp.float32 else 16
    return -(-q_latent.shape[1] // sublanes) * sublanes


def _refs_bytes(q_latent: jax.Array, pool_layer: jax.Array, tiling: Tiling) -> int:
    """VMEM of the kernel's scratch, with the log-sum-exps'."""
    latent_dim, width, num_heads = q_latent.shape[2], pool_layer.shape[2], _padded_heads(q_latent)
    q_bytes, pool_bytes = q_latent.dtype.itemsize, pool_layer.dtype.itemsize
    item_rows, tile_rows = tiling.item_tokens * num_heads, tiling.tile_tokens * num_heads
    kv_parts = num_parts(pool_layer.dtype)
    weight_parts = max(num_parts(q_latent.dtype), kv_parts)
    return (
        tiling.num_buffers * tiling.block_tokens * width * pool_bytes
        + tiling.num_buffers * item_rows * width * q_bytes
        + item_rows * (2 * LANES + latent_dim) * 4
        + tile_rows * (tiling.block_tokens * (4 + 2 * weight_parts) + 2 * LANES * 4)
        + num_parts(q_latent.dtype) * item_rows * width * 2
        + (weight_parts > 1) * tile_rows * latent_dim * 4
        + (kv_parts > 1) * kv_parts * tiling.block_tokens * width * 2
        + OUT_RING_TILES * tile_rows * (latent_dim * q_bytes + LANES * 4)
    )


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    return_lse: bool,
    tiling: Tiling | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments, shapes and results as in `pallas_kernels.mla_attention`, checked.

    Without return_lse the second result is None. The queries are joined into rows of the pool's
    width, and heads and tables filled up, before the kernel; the pool is read where it lies.
    """
    num_rows, num_heads, latent_dim = q_latent.shape
    width, padded_heads = pool_layer.shape[2], _padded_heads(q_latent)
    tiling = tiling or choose_tiling(q_latent, pool_layer, max_blocks=block_tables.shape[1])
    assert tiling is not None, "unsupported_reason would have told"
    q = jnp.concatenate([q_latent, q_rope], axis=2)
    q = jnp.pad(q, ((0, 0), (0, padded_heads - num_heads), (0, width - q.shape[2])))
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % TABLE_ROW_ENTRIES)))
    out_shape = [jax.ShapeDtypeStruct((num_rows, padded_heads, latent_dim), q.dtype)]
    if return_lse:
        out_shape.append(jax.ShapeDtypeStruct((num_rows, padded_heads, LANES), jnp.float32))
    item_rows = tiling.item_tokens * padded_heads
    tile_rows = tiling.tile_tokens * padded_heads
    kv_parts = num_parts(pool_layer.dtype)
    weight_parts = max(num_parts(q.dtype), kv_parts)
    out_tile = (OUT_RING_TILES, tiling.tile_tokens, padded_heads)
    scratch: list[Any] = [
        pltpu.SMEM((STATE_WORDS,), jnp.int32),
        pltpu.SMEM((ITEM_RING * ITEM_WORDS,), jnp.int32),
        pltpu.SMEM((OUT_RING_TILES + 1,), jnp.int32),
        pltpu.SMEM((TABLE_RING_ROWS * TABLE_ROW_ENTRIES,), jnp.int32),
        pltpu.VMEM((tiling.num_buffers, tiling.item_tokens, padded_heads, width), q.dtype),
        pltpu.VMEM((tiling.num_buffers, tiling.block_tokens, width), pool_layer.dtype),
        pltpu.VMEM((item_rows, LANES), jnp.float32),
        pltpu.VMEM((item_rows, LANES), jnp.float32),
        pltpu.VMEM((item_rows, latent_dim), jnp.float32),
        pltpu.VMEM((tile_rows, tiling.block_tokens), jnp.float32),
        pltpu.VMEM((weight_parts, tile_rows, tiling.block_tokens), jnp.bfloat16),
        pltpu.VMEM((tile_rows, LANES), jnp.float32),
        pltpu.VMEM((tile_rows, LANES), jnp.float32),
        pltpu.VMEM((tile_rows, latent_dim), jnp.float32) if weight_parts > 1 else None,
        pltpu.VMEM((num_parts(q.dtype), item_rows, width), jnp.bfloat16),
        pltpu.VMEM((kv_parts, tiling.block_tokens, width), jnp.bfloat16) if kv_parts > 1 else None,
        pltpu.VMEM((*out_tile, latent_dim), q.dtype),
        pltpu.VMEM((*out_tile, LANES), jnp.float32) if return_lse else None,
        pltpu.SemaphoreType.DMA((TABLE_RING_ROWS,)),
        pltpu.SemaphoreType.DMA((tiling.num_buffers,)),
        pltpu.SemaphoreType.DMA((tiling.num_buffers,)),
        pltpu.SemaphoreType.DMA((OUT_RING_TILES,)),
    ]
    num_scalars_and_inputs = 6
    present = [True] * num_scalars_and_inputs + [True, return_lse]
    present += [shape is not None for shape in scratch]
    outputs = pl.pallas_call(
        functools.partial(_kernel, present=present, tiling=tiling, scale=scale),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(out_shape),
            scratch_shapes=[shape for shape in scratch if shape is not None],
        ),
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, vmem_limit_bytes=_VMEM_LIMIT_BYTES
        ),
        interpret=tpu_runtime.interpret_mode(),
        name="mla_attention",
    )(kv_lens, query_starts, num_seqs.reshape(1), q, pool_layer, tables)
    out = outputs[0][:, :num_heads]
    if not return_lse:
        return out, None
    return out, outputs[1][:, :num_heads, 0]


def _kernel(*refs: Any, present: list[bool], tiling: Tiling, scale: float) -> None:
    """Puts None in the place of the outputs and scratch that are not present."""
    given = iter(refs)
    listed = [next(given) if is_present else None for is_present in present]
    mla_kernel(*listed, tiling=tiling, scale=scale)
