"""The KV write as one scatter.

Writes T * 2 * Hkv rows of D elements and reads nothing but them; the pool stays in its buffer
when it is donated. Measured on CPU with 2,000 and 20,000 blocks of 16 tokens, 3 KV heads of 64, a
layer: 5 microseconds for 32 rows and 70-95 for 512, float32, on jax 0.10.2 and 0.12, whatever
the number of blocks; a loop of dynamic_update_slice takes 8 and 120-175. bfloat16 does as well on
0.12. On 0.10.2 every bfloat16 write copies the pool (a scatter, a loop of dynamic_update_slice,
and a scatter between two bitcasts alike): keep the bits in a uint16 pool there
(see `pallas_kernels.pool_storage`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.pool_storage import pool_layout


def write_kv(
    pool_layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> jax.Array:
    """One scatter of K and V together. Arguments as in `pallas_kernels.write_kv`, checked.

    pool_layer [num_blocks, 2 * Hkv, rows, width]; k and v [T, Hkv, D] in the pool's dtype;
    slot_mapping int32[T].
    """
    layout = pool_layout(pool_layer, k.shape[2])
    token_width = layout.width // layout.tokens_per_row
    tokens = jnp.concatenate([k, v], axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, token_width - layout.head_dim)))
    # A row a token: the same bytes.
    pool = pool_layer.reshape(*pool_layer.shape[:2], layout.block_size, token_width)
    # A negative index would wrap to the pool's end; past the end is dropped.
    block_ids = jnp.where(slot_mapping < 0, layout.num_blocks, slot_mapping // layout.block_size)
    offsets = slot_mapping % layout.block_size
    return pool.at[block_ids, :, offsets].set(tokens, mode="drop").reshape(pool_layer.shape)
