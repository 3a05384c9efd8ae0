"""The block ops in plain XLA: loops over the blocks that are real.

A loop and not a scatter, since a scatter would read and write the padding too: no copies cost
nothing. Each pool stays in its buffer when it is donated.

On CPU with jax 0.10.2 a bfloat16 pool is copied for every block (see
`pallas_kernels.pool_storage`): keep the bits in a uint16 pool there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def copy_blocks(
    pools: list[jax.Array],
    src_block_ids: jax.Array,
    dst_block_ids: jax.Array,
    num_copies: jax.Array,
) -> list[jax.Array]:
    """One block after another. Arguments as in `pallas_kernels.copy_blocks`, checked.

    A destination is no source, so that the order does not matter.
    """
    num_blocks = pools[0].shape[0]

    def copy(index: jax.Array, pools: list[jax.Array]) -> list[jax.Array]:
        src, dst = src_block_ids[index], dst_block_ids[index]
        is_inside = (src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks)
        # A copy onto itself is none.
        dst = jnp.where(is_inside, dst, 0)
        src = jnp.where(is_inside, src, 0)
        return [_put(pool, dst, lax.dynamic_index_in_dim(pool, src)) for pool in pools]

    return lax.fori_loop(0, _real_count(num_copies, src_block_ids), copy, pools)


def gather_blocks(pools: list[jax.Array], block_ids: jax.Array) -> list[jax.Array]:
    """One gather a layer. Arguments as in `pallas_kernels.gather_blocks`, checked."""
    nearest = jnp.clip(block_ids, 0, pools[0].shape[0] - 1)
    return [pool.at[nearest].get(mode="promise_in_bounds") for pool in pools]


def scatter_blocks(
    pools: list[jax.Array],
    block_ids: jax.Array,
    num_blocks_real: jax.Array,
    blocks: list[jax.Array],
) -> list[jax.Array]:
    """One block after another. Arguments as in `pallas_kernels.scatter_blocks`, checked."""
    num_blocks = pools[0].shape[0]

    def put(index: jax.Array, pools: list[jax.Array]) -> list[jax.Array]:
        block_id = block_ids[index]
        is_inside = (block_id >= 0) & (block_id < num_blocks)
        target = jnp.where(is_inside, block_id, 0)
        return [
            _put(
                pool,
                target,
                jnp.where(
                    is_inside,
                    lax.dynamic_index_in_dim(part, index),
                    lax.dynamic_index_in_dim(pool, target),
                ),
            )
            for pool, part in zip(pools, blocks, strict=True)
        ]

    return lax.fori_loop(0, _real_count(num_blocks_real, block_ids), put, pools)


def _put(pool: jax.Array, block_id: jax.Array, block: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(pool, block, block_id, 0)


def _real_count(count: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.clip(count, 0, ids.shape[0])
