"""The KV write as one row after another: the definition that other implementations must meet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_storage import pool_layout


def write_kv(
    pool_layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> jax.Array:
    """Writes row after row. Arguments as in `pallas_kernels.write_kv`, already checked.

    pool_layer [num_blocks, 2 * Hkv, rows, width]; k and v [T, Hkv, D] in the pool's dtype;
    slot_mapping int32[T].
    """
    layout = pool_layout(pool_layer, k.shape[2])
    is_filled_up = layout.tokens_per_row == 1
    num_fill_lanes = layout.width - layout.head_dim if is_filled_up else 0
    tokens = jnp.pad(jnp.concatenate([k, v], axis=1), ((0, 0), (0, 0), (0, num_fill_lanes)))

    def write_row(index: jax.Array, pool: jax.Array) -> jax.Array:
        slot = slot_mapping[index]
        block, offset = slot // layout.block_size, slot % layout.block_size
        row, place = offset // layout.tokens_per_row, offset % layout.tokens_per_row
        start = (block, 0, row, place * layout.head_dim)
        written = lax.dynamic_update_slice(pool, tokens[index][None, :, None], start)
        return lax.select((slot >= 0) & (block < layout.num_blocks), written, pool)

    return lax.fori_loop(0, k.shape[0], write_row, pool_layer)
