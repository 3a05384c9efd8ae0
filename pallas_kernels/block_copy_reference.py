"""The block ops by indexing: the definition that other implementations must meet.

Each reads all its sources before it writes; pools are copied on the way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def copy_blocks(
    pools: list[jax.Array],
    src_block_ids: jax.Array,
    dst_block_ids: jax.Array,
    num_copies: jax.Array,
) -> list[jax.Array]:
    """Arguments as in `pallas_kernels.copy_blocks`, checked; `pools` is the list of layers."""
    is_inside = (src_block_ids >= 0) & (src_block_ids < pools[0].shape[0])
    dst_block_ids = jnp.where(is_inside, dst_block_ids, -1)
    return scatter_blocks(pools, dst_block_ids, num_copies, gather_blocks(pools, src_block_ids))


def gather_blocks(pools: list[jax.Array], block_ids: jax.Array) -> list[jax.Array]:
    """Arguments as in `pallas_kernels.gather_blocks`, checked."""
    nearest = jnp.clip(block_ids, 0, pools[0].shape[0] - 1)
    return [pool[nearest] for pool in pools]


def scatter_blocks(
    pools: list[jax.Array],
    block_ids: jax.Array,
    num_blocks_real: jax.Array,
    blocks: list[jax.Array],
) -> list[jax.Array]:
    """Arguments as in `pallas_kernels.scatter_blocks`, checked."""
    num_blocks = pools[0].shape[0]
    is_real = (jnp.arange(block_ids.shape[0]) < num_blocks_real) & (block_ids >= 0)
    targets = jnp.where(is_real, block_ids, num_blocks)  # past the end: dropped
    return [
        pool.at[targets].set(part, mode="drop") for pool, part in zip(pools, blocks, strict=True)
    ]
