"""The public block ops: copies inside a pool (copy-on-write), gather and scatter (swap).

All three move whole blocks as they are, whatever they hold, for all layers in one call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import block_copy_reference, block_copy_xla, tpu_runtime
from pallas_kernels.pool_storage import check_pool

# But "tpu", which is imported where it is used.
_IMPLEMENTATIONS = {"reference": block_copy_reference, "xla": block_copy_xla}
_FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
# One layer's array, or a pytree (a tuple, say) of them.
Layers = TypeVar("Layers")


def copy_blocks(
    layers: Layers,
    src_block_ids: jax.Array,
    dst_block_ids: jax.Array,
    num_copies: jax.Array | int,
    *,
    implementation: str | None = None,
) -> Layers:
    """Copies block src_block_ids[i] to block dst_block_ids[i] in every layer, for i < num_copies.

    In place where the caller donates the layers and reads only the result afterwards. All copies
    read what stood there before the call: a block may be the source of many copies, but a
    destination must not be a source too, nor stand there twice; what such a block then holds is
    not defined. A copy from or to a block outside the pool is dropped.

    Args:
      layers: a pool's layers, [num_blocks, 2 * Hkv, rows, width] each, of any pool dtype: a pytree
        or one array.
      src_block_ids: int32[N], padded with anything.
      dst_block_ids: int32[N].
      num_copies: int32[], how many of the N are real.
      implementation: "xla", "reference", "tpu" (interpreted where there is none), or None for the
        best on this backend.

    Returns:
      The layers, same structure, shapes and dtypes.

    Raises:
      ValueError: a shape does not fit, or the implementation is unknown or does not take it.
      TypeError: a dtype does not fit.
    """
    pools, structure = _checked_layers(layers)
    src_block_ids = _checked_ids("src_block_ids", src_block_ids)
    dst_block_ids = _checked_ids("dst_block_ids", dst_block_ids)
    if dst_block_ids.shape != src_block_ids.shape:
        raise ValueError(
            f"dst_block_ids has shape {tuple(dst_block_ids.shape)}; it must be that of "
            f"src_block_ids, {tuple(src_block_ids.shape)}"
        )
    num_copies = _checked_count("num_copies", num_copies)
    ops = _pick(implementation, pools, src_block_ids)
    copied = ops.copy_blocks(_movable(pools, ops), src_block_ids, dst_block_ids, num_copies)
    return structure.unflatten(_restored(copied, pools))


def gather_blocks(
    layers: Layers, block_ids: jax.Array, *, implementation: str | None = None
) -> Layers:
    """Copies of the blocks `block_ids` of every layer, to be swapped out.

    Args:
      layers: as in `copy_blocks`; they stay as they are.
      block_ids: int32[N]. Ids outside the pool give its nearest block; pad with 0.
      implementation: as in `copy_blocks`.

    Returns:
      As `layers`, with N blocks a layer: [N, 2 * Hkv, rows, width].

    Raises:
      ValueError, TypeError: as `copy_blocks`.
    """
    pools, structure = _checked_layers(layers)
    block_ids = _checked_ids("block_ids", block_ids)
    ops = _pick(implementation, pools, block_ids)
    return structure.unflatten(_restored(ops.gather_blocks(_movable(pools, ops), block_ids), pools))


def scatter_blocks(
    layers: Layers,
    block_ids: jax.Array,
    num_blocks_real: jax.Array | int,
    blocks: Layers,
    *,
    implementation: str | None = None,
) -> Layers:
    """Puts blocks[i] into block block_ids[i] of every layer, for i < num_blocks_real: swap in.

    In place where the caller donates the layers and reads only the result afterwards. An id must
    not stand there twice; ids outside the pool are dropped.

    Args:
      layers: as in `copy_blocks`.
      block_ids: int32[N], padded with anything.
      num_blocks_real: int32[], how many of the N are real.
      blocks: as `gather_blocks` returns them: the structure and dtypes of `layers`, N blocks each.
      implementation: as in `copy_blocks`.

    Returns:
      The layers, same structure, shapes and dtypes.

    Raises:
      ValueError, TypeError: as `copy_blocks`.
    """
    pools, structure = _checked_layers(layers)
    block_ids = _checked_ids("block_ids", block_ids)
    num_blocks_real = _checked_count("num_blocks_real", num_blocks_real)
    parts, parts_structure = jax.tree.flatten(blocks)
    if parts_structure != structure:
        raise ValueError(f"blocks is {parts_structure}; it must be as layers, {structure}")
    parts = [jnp.asarray(part) for part in parts]
    for pool, part in zip(pools, parts, strict=True):
        expected = (block_ids.shape[0], *pool.shape[1:])
        if part.shape != expected or part.dtype != pool.dtype:
            raise ValueError(
                f"blocks has an array {part.dtype}{list(part.shape)}; its layer and block_ids "
                f"need {pool.dtype}{list(expected)}"
            )
    ops = _pick(implementation, pools, block_ids)
    movable, parts = _movable(pools, ops), _movable(parts, ops)
    written = ops.scatter_blocks(movable, block_ids, num_blocks_real, parts)
    return structure.unflatten(_restored(written, pools))


def _checked_layers(layers: Any) -> tuple[list[jax.Array], Any]:
    """The layers' pools, and the structure to put them back into."""
    leaves, structure = jax.tree.flatten(layers)
    if not leaves:
        raise ValueError("layers is empty; give at least one layer's pool")
    pools = [jnp.asarray(leaf) for leaf in leaves]
    for pool in pools:
        check_pool(pool)
        if pool.shape[0] != pools[0].shape[0]:
            raise ValueError(
                f"layers have {pools[0].shape[0]} and {pool.shape[0]} blocks; a block id means "
                "the same in all of them, so give layers with one number of blocks"
            )
    return pools, structure


def _checked_ids(name: str, ids: jax.Array) -> jax.Array:
    ids = jnp.asarray(ids)
    if ids.ndim != 1 or ids.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; it must be [N], N >= 1")
    if ids.dtype != jnp.int32:
        raise TypeError(f"{name} has dtype {ids.dtype}; use int32")
    return ids


def _checked_count(name: str, count: jax.Array | int) -> jax.Array:
    count = jnp.int32(count) if isinstance(count, int) else jnp.asarray(count)
    if count.shape != ():
        raise ValueError(f"{name} has shape {tuple(count.shape)}; it must be a scalar")
    if count.dtype != jnp.int32:
        raise TypeError(f"{name} has dtype {count.dtype}; use int32")
    return count


def _pick(implementation: str | None, pools: list[jax.Array], ids: jax.Array) -> ModuleType:
    kernel = tpu_runtime.chosen_module(
        "block_copy_tpu", implementation, _IMPLEMENTATIONS, pools, ids.shape[0]
    )
    return kernel or _IMPLEMENTATIONS[implementation or "xla"]


def _movable(arrays: list[jax.Array], ops: ModuleType) -> list[jax.Array]:
    """Arrays that XLA moves as they are: float8 as its bits.

    XLA's CPU backend would turn a float8 pool into float16 and back for every block, which alters
    NaNs and takes 250 ms for 10 MB; as bits the pool is copied once a call.
    """
    if ops not in _IMPLEMENTATIONS.values():
        return arrays
    return [
        lax.bitcast_convert_type(array, jnp.uint8) if array.dtype in _FLOAT8 else array
        for array in arrays
    ]


def _restored(arrays: list[jax.Array], originals: list[jax.Array]) -> list[jax.Array]:
    return [
        array if array.dtype == original.dtype else lax.bitcast_convert_type(array, original.dtype)
        for array, original in zip(arrays, originals, strict=True)
    ]
