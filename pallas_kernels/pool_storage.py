"""What a KV pool may store, how its tokens lie in it, and how its elements become float32.

Every attention implementation and the KV write read this one table, so that they accept the same
pools and refuse the others with the same words.

**Rows.** A layer's pool is [num_blocks, 2 * num_kv_heads, rows, width]. Where width is head_dim, a
row is a token. A TPU's memory is tiled in 128 lanes and would waste, or copy, what is not as wide:
there a row of 128 lanes holds two tokens of head_dim 64 (the same bytes, seen as another shape),
and a token of head_dim 96 is filled up with zeros. `pool_layout` tells which, from the shape.

`uint16` stands for bfloat16 kept as raw bits. XLA's CPU backend of jax 0.10 turns each bfloat16
data movement into float32 arithmetic on the whole operand, so that writing one row to a bfloat16
pool converts the pool twice (17 ms for 24 MB measured, against 5 microseconds for the same
write on 16-bit integers). A pool of `uint16` has the numbers and the size of a bfloat16 pool and
is written in place on every version.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

FLOAT_POOL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint16)
SCALED_POOL_DTYPES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
_ALL_POOL_DTYPES = FLOAT_POOL_DTYPES + SCALED_POOL_DTYPES


def check_pool(pool_layer: jax.Array) -> None:
    """Raises ValueError or TypeError unless `pool_layer` is [num_blocks, 2 * Hkv, bs, D]."""
    if pool_layer.ndim != 4 or pool_layer.shape[1] % 2 or 0 in pool_layer.shape:
        raise ValueError(
            f"pool_layer has shape {tuple(pool_layer.shape)}; it must be [num_blocks, "
            "2 * num_kv_heads, block_size, head_dim], K heads first, then V heads"
        )
    if pool_layer.dtype not in _ALL_POOL_DTYPES:
        raise TypeError(
            f"pool_layer has dtype {pool_layer.dtype}; use one of "
            f"{', '.join(jnp.dtype(d).name for d in _ALL_POOL_DTYPES)} (uint16 = bfloat16 bits)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """How a layer's pool [num_blocks, 2 * num_kv_heads, rows, width] holds its tokens.

    Token t of a block stands in row t // tokens_per_row, from lane
    t % tokens_per_row * head_dim on. Lanes that no token uses hold zeros.
    """

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    width: int
    tokens_per_row: int

    @property
    def rows(self) -> int:
        """Rows of a block and head."""
        return self.block_size // self.tokens_per_row


def pool_layout(pool_layer: jax.Array | jax.ShapeDtypeStruct, head_dim: int) -> PoolLayout:
    """The layout of a checked pool whose tokens have `head_dim` numbers a head.

    Raises:
      ValueError: head_dim does not fit into the pool's rows.
    """
    num_blocks, two_kv_heads, rows, width = pool_layer.shape
    if head_dim > width:
        raise ValueError(
            f"q has head_dim {head_dim}, but pool_layer has rows of {width}; match them"
        )
    tokens_per_row = width // head_dim if width % head_dim == 0 else 1
    return PoolLayout(
        num_blocks=num_blocks,
        num_kv_heads=two_kv_heads // 2,
        block_size=rows * tokens_per_row,
        head_dim=head_dim,
        width=width,
        tokens_per_row=tokens_per_row,
    )


def tpu_pool_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int]:
    """The pool's shape for a TPU: rows of whole 128-lane tiles.

    Raises:
      ValueError: block_size is not a multiple of the tokens that share a row.
    """
    width = -(-head_dim // 128) * 128
    tokens_per_row = width // head_dim if width % head_dim == 0 else 1
    if block_size % tokens_per_row:
        raise ValueError(
            f"block_size is {block_size}; head_dim {head_dim} puts {tokens_per_row} tokens in a "
            f"row of {width} lanes: use a multiple of {tokens_per_row}"
        )
    return num_blocks, 2 * num_kv_heads, block_size // tokens_per_row, width


def token_rows(pages: jax.Array, layout: PoolLayout) -> jax.Array:
    """Blocks [..., rows, width] as one row a token, [..., block_size, head_dim]."""
    leading = pages.shape[:-2]
    if layout.width % layout.head_dim == 0:
        return pages.reshape(*leading, layout.block_size, layout.head_dim)
    return pages[..., : layout.head_dim]


def to_float32(stored: jax.Array) -> jax.Array:
    """Elements read from a pool as float32, without the per-head scales: same shape."""
    if stored.dtype == jnp.uint16:
        stored = lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored.astype(jnp.float32)


def to_storage(values: jax.Array, pool_dtype: jnp.dtype) -> jax.Array:
    """Float values as elements of a pool of `pool_dtype`: same shape, rounded to nearest even."""
    if pool_dtype == jnp.uint16:
        return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(pool_dtype)
