"""What a KV pool may store, and how its elements become float32.

Every attention implementation and the KV write read this one table, so that they accept the same
pools and refuse the others with the same words.

`uint16` stands for bfloat16 kept as raw bits. XLA's CPU backend of jax 0.10 turns each bfloat16
data movement into float32 arithmetic on the whole operand, so that writing one row to a bfloat16
pool converts the pool twice (17 ms for 24 MB measured, against 5 microseconds for the same
write on 16-bit integers). A pool of `uint16` has the numbers and the size of a bfloat16 pool and
is written in place on every version.
"""

from __future__ import annotations

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
