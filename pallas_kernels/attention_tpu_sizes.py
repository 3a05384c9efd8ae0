"""Block sizes of the TPU attention kernel: a heuristic that fits every shape, and tuned entries.

The heuristic's reasons, from static profiles on v5e (issued bundles a sequence of 1,024 tokens,
32 query and 8 KV heads of 128, bfloat16, page 16): items of 256 / 512 / 1,024 tokens take 2,518 /
1,898 / 1,674, since each item costs some 130 bundles of its own. Items of 1,024 tokens and more
gain nothing further. The ring must hold what arrives during the latency of a DMA, about 900 KB on
v5e; four buffers of 512 KB do, and larger ones do anyway.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention_tpu_spec import LANES, SUBLANES, AttentionSizes, HeadLayout
from pallas_kernels.pool_storage import PoolLayout

TUNED_FILE = pathlib.Path(__file__).with_name("tpu_tuned.json")

_MIB = 1 << 20
# What one kernel may use of a core's VMEM; the rest is the compiler's and the next operation's.
_VMEM_BUDGET_BYTES = {
    "v4": 12 * _MIB,
    "v5e": 48 * _MIB,
    "v5p": 32 * _MIB,
    "v6e": 48 * _MIB,
    "tpu7x": 32 * _MIB,
}
_SMALLEST_BUDGET_BYTES = 12 * _MIB
_VMEM_MARGIN_BYTES = 3 * _MIB

# Where copies between the products make the compiler hold, and spill, what it loads around them.
_HOLDING_GENERATIONS = ("v6e", "tpu7x")
# Where int8 becomes bfloat16 in many steps, as float8 does everywhere.
_CONVERTING_GENERATIONS = ("v5e", "v5p")

_DECODE_BUFFERS = 4
_DECODE_PART_TOKENS = 128
# Scores of one unit: more would not stay in registers.
_MAX_UNIT_SCORES = 16 * 1024
_PREFILL_BUFFERS = 2
_PREFILL_COLUMNS = 128
_MAX_PREFILL_TILE_TOKENS = 128
_PREFILL_ROWS = 256
_MAX_HEADS_AT_ONCE = 8
_PREFILL_STEP_ROWS = 32


def choose_sizes(
    *,
    heads: HeadLayout,
    pool: PoolLayout,
    pool_dtype: DTypeLike,
    compute_dtype: DTypeLike,
    table_width: int,
    sliding_window: int | None,
    return_lse: bool,
    tile_tokens: int,
    generation: str | None,
) -> AttentionSizes:
    """Sizes that fit the shape and the VMEM of the generation, tuned ones if there are any.

    Args:
      tile_tokens: query tokens of a decode item.
      generation: "v4", "v5e", "v5p", "v6e", "tpu7x"; None for sizes that fit all.

    Raises:
      ValueError: nothing fits; the message names what would.
    """
    key = tuned_key(heads=heads, pool=pool, pool_dtype=pool_dtype, generation=generation)
    budget = _VMEM_BUDGET_BYTES.get(generation or "", _SMALLEST_BUDGET_BYTES)
    token_bytes = 2 * pool.num_kv_heads * pool.width * jnp.dtype(pool_dtype).itemsize
    token_bytes //= pool.tokens_per_row
    longest = 1 << (table_width * pool.block_size - 1).bit_length()
    if sliding_window is not None:
        longest = min(longest, 1 << (sliding_window - 1).bit_length())

    code = _decode_code(pool, pool_dtype, compute_dtype, tile_tokens, generation)
    decode_tokens = code.max_tokens
    unit_scores = tile_tokens * heads.rows_per_unit // pool.tokens_per_row
    ring_budget = budget // 2
    least = max(pool.block_size, _DECODE_PART_TOKENS, SUBLANES * pool.tokens_per_row)
    while decode_tokens > least and (
        decode_tokens >= 2 * longest
        or decode_tokens * unit_scores > _MAX_UNIT_SCORES * min(tile_tokens, 2)
        or decode_tokens * token_bytes * _DECODE_BUFFERS > ring_budget
        or decode_tokens // pool.block_size > LANES
    ):
        decode_tokens //= 2
    units_are_alike = heads.num_kv_heads % heads.heads_per_unit == 0
    buffers = _DECODE_BUFFERS
    decode_tokens = max(decode_tokens, least)
    if decode_tokens * token_bytes * buffers > ring_budget:
        buffers = 2
    if decode_tokens * token_bytes * buffers > budget:
        raise ValueError(
            f"{least} tokens of {pool.num_kv_heads} KV heads take {least * token_bytes} bytes, and "
            f"{buffers} times that does not fit in {budget} bytes of fast memory: use a smaller "
            "block_size, or split the heads over more devices"
        )
    sizes: dict[str, Any] = dict(
        decode_block_tokens=decode_tokens,
        decode_part_tokens=min(_DECODE_PART_TOKENS, decode_tokens),
        decode_units_at_once=1 if code.is_looped and units_are_alike else heads.num_units,
        decode_piece_rows=code.piece_rows,
        decode_interleaves=generation not in _HOLDING_GENERATIONS,
        decode_buffers=buffers,
        **_prefill_sizes(
            heads, pool, token_bytes, pool_dtype, compute_dtype, budget, return_lse, generation
        ),
    )
    sizes |= tuned_sizes().get(key, {})
    return AttentionSizes(**sizes, vmem_limit_bytes=budget + _VMEM_MARGIN_BYTES)


def most_tile_tokens(heads: HeadLayout, compute_dtype: DTypeLike, generation: str | None) -> int:
    """Query tokens that a decode item may have: 8 at most, 0 where not even one fits.

    Rows of a product cost next to nothing beside the loads of keys and values, but more of them
    than this make the compiler spill more than 64 KiB of registers.
    """
    is_float32 = compute_dtype == jnp.float32
    if is_float32 and generation == "v4":
        return 1
    most_tokens, most_rows = (2, 32) if is_float32 or generation == "v4" else (8, 64)
    return min(most_tokens, most_rows // heads.rows_per_unit)


class _DecodeCode(NamedTuple):
    """How much of a decode item stands in one piece of straight-line code. What is above makes
    the compiler spill more than 64 KiB of registers on some shape; below, items cost more.
    """

    max_tokens: int
    is_looped: bool  # over units; else they are unrolled
    piece_rows: int


def _decode_code(
    pool: PoolLayout,
    pool_dtype: DTypeLike,
    compute_dtype: DTypeLike,
    tile_tokens: int,
    generation: str | None,
) -> _DecodeCode:
    is_wide = pool.width > LANES
    if compute_dtype == jnp.float32:
        is_small = is_wide or tile_tokens > 1 or generation == "v4"
        return _DecodeCode(128 if is_small else 256, True, 64)
    is_converted = pool_dtype != compute_dtype
    if tile_tokens > 1 and generation == "v4":
        return _DecodeCode(128, True, 64)
    if tile_tokens > 1:
        return _DecodeCode(256 if is_converted or is_wide else 512, True, 128)
    if generation in ("v4", None):
        return _DecodeCode(128 if is_converted else 256, True, 64 if is_wide else 128)
    is_float8 = jnp.issubdtype(pool_dtype, jnp.floating)
    if is_converted and (is_float8 or generation in _CONVERTING_GENERATIONS):
        return _DecodeCode(256 if is_wide else 512, False, 128)
    return _DecodeCode(256 if is_wide else 1024, False, 1024)


def _prefill_sizes(
    heads: HeadLayout,
    pool: PoolLayout,
    token_bytes: int,
    pool_dtype: DTypeLike,
    compute_dtype: DTypeLike,
    budget: int,
    return_lse: bool,
    generation: str | None,
) -> dict[str, int]:
    columns_a_token = heads.tokens_per_row * heads.padded_group
    # Where straight-line code would make the compiler spill more than 64 KiB of registers.
    is_stepped = compute_dtype == jnp.float32 or generation in ("v4", None)
    # Float32 products take three times the registers, and v4 has fewer for wide rows.
    is_narrow = compute_dtype == jnp.float32 or (is_stepped and pool.width > LANES)
    columns = _PREFILL_COLUMNS // (2 if is_narrow else 1)
    chunk = max(SUBLANES, 1 << int(math.log2(max(1, columns // columns_a_token))))
    block = max(_PREFILL_ROWS * pool.tokens_per_row, pool.block_size)
    tile = max(chunk, _MAX_PREFILL_TILE_TOKENS)
    scratch = lambda tile: _prefill_bytes(
        heads, pool, token_bytes, compute_dtype, tile, block, return_lse
    )
    while tile > SUBLANES and scratch(tile) > budget:
        tile //= 2
    if scratch(tile) > budget:
        raise ValueError(
            f"{heads.group * heads.num_kv_heads} query and {heads.num_kv_heads} KV heads of "
            f"{pool.head_dim} take {scratch(tile)} bytes of fast memory, and there are {budget}: "
            "split the heads over more devices"
        )
    chunk = min(chunk, tile)
    # More heads spill as much; so do converted ones where copies between products do.
    is_float8 = pool_dtype != compute_dtype and jnp.issubdtype(pool_dtype, jnp.floating)
    is_single = heads.tokens_per_row > 1 or is_stepped
    is_single |= is_float8 and generation in _HOLDING_GENERATIONS
    limit = 1 if is_single else _MAX_HEADS_AT_ONCE
    at_once = max(n for n in range(1, limit + 1) if pool.num_kv_heads % n == 0)
    return dict(
        prefill_tile_tokens=tile,
        prefill_chunk_tokens=chunk,
        prefill_heads_at_once=at_once,
        prefill_step_rows=_PREFILL_STEP_ROWS if is_stepped else 0,
        prefill_block_tokens=block,
        prefill_buffers=_PREFILL_BUFFERS,
    )


def _prefill_bytes(
    heads: HeadLayout,
    pool: PoolLayout,
    token_bytes: int,
    compute_dtype: DTypeLike,
    tile: int,
    block: int,
    return_lse: bool,
) -> int:
    """Scratch of the prefill phase."""
    ring = _PREFILL_BUFFERS * (block * token_bytes + tile * heads.num_rows * pool.width * 4)
    values = block // pool.tokens_per_row * pool.num_kv_heads * pool.width
    values *= jnp.dtype(compute_dtype).itemsize
    columns = tile * heads.tokens_per_row * heads.padded_group * pool.num_kv_heads
    softmax = columns * (pool.width + 2 * SUBLANES) * 4
    outputs = tile * heads.num_out_rows * (pool.width + LANES * return_lse) * 4
    return ring + values + softmax + outputs


def tuned_key(
    *, heads: HeadLayout, pool: PoolLayout, pool_dtype: DTypeLike, generation: str | None
) -> str:
    """The name of a shape in the file of tuned sizes."""
    return (
        f"{generation} q{heads.group * heads.num_kv_heads} kv{heads.num_kv_heads} "
        f"d{pool.head_dim} page{pool.block_size} {jnp.dtype(pool_dtype).name}"
    )


@functools.cache
def tuned_sizes() -> dict[str, dict[str, Any]]:
    """The tuned entries: by shape, some fields of `AttentionSizes` each."""
    return json.loads(TUNED_FILE.read_text()) if TUNED_FILE.exists() else {}
