"""The KV write as one row after another: the definition that other implementations must meet."""

from __future__ import annotations

import jax
from jax import lax

from pallas_kernels.pool_storage import to_storage


def write_kv(
    pool_layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> jax.Array:
    """Writes row after row. Arguments as in `pallas_kernels.write_kv`, already checked.

    pool_layer [num_blocks, 2 * Hkv, block_size, D], k and v [T, Hkv, D], slot_mapping int32[T].
    """
    num_blocks, num_kv_heads, block_size = pool_layer.shape[0], k.shape[1], pool_layer.shape[2]

    def write_row(row: jax.Array, pool: jax.Array) -> jax.Array:
        slot = slot_mapping[row]
        block, offset = slot // block_size, slot % block_size
        written = pool.at[block, :num_kv_heads, offset].set(to_storage(k[row], pool.dtype))
        written = written.at[block, num_kv_heads:, offset].set(to_storage(v[row], pool.dtype))
        return lax.select((slot >= 0) & (block < num_blocks), written, pool)

    return lax.fori_loop(0, k.shape[0], write_row, pool_layer)
