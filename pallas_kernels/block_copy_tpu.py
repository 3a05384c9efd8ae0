"""The block ops as Pallas kernels for TPUs: the DMA engines move whole blocks in HBM.

No byte passes through the core; a kernel's work is to hand out DMAs, several at a time, for all
layers. Blocks that are not real cost nothing.

Static cost on v5e, from the compiler's own model: 43 bundles a block of one layer, 165 a block of
32 layers, and nothing beyond the empty call for no copies; the rest is the DMA engines' time.
Whether one DMA from HBM to HBM is as fast as two through VMEM is not known to that model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_runtime

_POOL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
_LANES = 128
_MAX_BLOCKS_IN_FLIGHT = 16
_MAX_COPIES_IN_FLIGHT = 64  # of one block of one layer
_MAX_IDS = 100_000  # two int32 a copy in 1 MiB of scalar memory


def unsupported_reason(pools: list[jax.Array], num_ids: int) -> str | None:
    """Why these kernels cannot move `num_ids` blocks of `pools`, or None if they can.

    Args:
      pools: anything with a pool's shape [num_blocks, 2 * Hkv, rows, width] and dtype.
      num_ids: N, how many block ids a call has, padding included.
    """
    for pool in pools:
        rows, width = pool.shape[2:]
        if pool.dtype not in _POOL_DTYPES:
            return (
                f"the kernel does not move {pool.dtype}; make the pool of bfloat16, float32, int8 "
                "or float8"
            )
        # XLA keeps other blocks in a form of its own, and would copy the pool to ours.
        if width % _LANES or (rows % 8 and rows != 4):
            return (
                f"a block has {rows} rows of {width} lanes, and the rows must be 4 or a multiple "
                f"of 8, the lanes a multiple of {_LANES}; make the pool with "
                "pool_storage.tpu_pool_shape and a larger block_size"
            )
    if num_ids > _MAX_IDS:
        return f"{num_ids} block ids exceed scalar memory; give at most {_MAX_IDS} in a call"
    return None


def copy_blocks(
    pools: list[jax.Array],
    src_block_ids: jax.Array,
    dst_block_ids: jax.Array,
    num_copies: jax.Array,
) -> list[jax.Array]:
    """Arguments as in `pallas_kernels.copy_blocks`, checked; `pools` is the list of layers."""
    return _call(_copy_kernel, [src_block_ids, dst_block_ids, num_copies], [], pools, pools)


def gather_blocks(pools: list[jax.Array], block_ids: jax.Array) -> list[jax.Array]:
    """Arguments as in `pallas_kernels.gather_blocks`, checked."""
    nearest = jnp.clip(block_ids, 0, pools[0].shape[0] - 1)
    gathered = [
        jax.ShapeDtypeStruct((block_ids.shape[0], *pool.shape[1:]), pool.dtype) for pool in pools
    ]
    return _call(_gather_kernel, [nearest], pools, [], gathered)


def scatter_blocks(
    pools: list[jax.Array],
    block_ids: jax.Array,
    num_blocks_real: jax.Array,
    blocks: list[jax.Array],
) -> list[jax.Array]:
    """Arguments as in `pallas_kernels.scatter_blocks`, checked."""
    return _call(_scatter_kernel, [block_ids, num_blocks_real], blocks, pools, pools)


def _call(
    kernel: Callable,
    scalars: list[jax.Array],
    sources: list[jax.Array],
    pools: list[jax.Array],
    outputs: list[jax.Array] | list[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """One call for all layers; `pools` are aliased to the outputs, `sources` are only read."""
    num_layers = len(outputs)
    num_in_flight = max(1, min(_MAX_BLOCKS_IN_FLIGHT, _MAX_COPIES_IN_FLIGHT // num_layers))
    first_pool = len(scalars) + len(sources)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(kernel, num_layers=num_layers),
        name=kernel.__name__.strip("_").removesuffix("_kernel") + "_blocks",
        out_shape=[jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[in_hbm] * (len(sources) + len(pools)),
            out_specs=[in_hbm] * num_layers,
            scratch_shapes=[pltpu.SemaphoreType.DMA((num_in_flight,))],
        ),
        input_output_aliases={first_pool + layer: layer for layer in range(len(pools))},
        # Ids are checked or clipped before they are used.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=tpu_runtime.interpret_mode(),
    )(*(jnp.reshape(scalar, (-1,)) for scalar in scalars), *sources, *pools)


def _copy_kernel(
    src_ids_ref,  # prefetch, int32[N]
    dst_ids_ref,  # prefetch, int32[N]
    count_ref,  # prefetch, int32[1]: how many copies are real
    *refs,  # inputs, the pools; outputs, the same buffers, [num_blocks, 2 * Hkv, rows, width] a
    # layer; scratch, DMA semaphores [num_in_flight]
    num_layers: int,
):
    """Moves block src to block dst of each layer, from HBM to HBM, in the pools' own buffers.

    See `_stream` for the pipeline. Reads and writes the real blocks once.
    """
    pools, sems = refs[num_layers : 2 * num_layers], refs[-1]
    num_blocks = pools[0].shape[0]

    def is_inside(index):
        src, dst = src_ids_ref[index], dst_ids_ref[index]
        return (src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks)

    def moves(index):
        return [(pool.at[src_ids_ref[index]], pool.at[dst_ids_ref[index]]) for pool in pools]

    _stream(jnp.minimum(count_ref[0], src_ids_ref.shape[0]), is_inside, moves, sems)


def _gather_kernel(
    ids_ref,  # prefetch, int32[N], inside the pool
    *refs,  # inputs, the pools, [num_blocks, 2 * Hkv, rows, width] a layer; outputs, the blocks,
    # [N, 2 * Hkv, rows, width] a layer; scratch, DMA semaphores [num_in_flight]
    num_layers: int,
):
    """Moves block ids[i] of each layer to place i of its output, from HBM to HBM.

    See `_stream` for the pipeline. Reads and writes N blocks once.
    """
    pools, outputs, sems = refs[:num_layers], refs[num_layers : 2 * num_layers], refs[-1]

    def moves(index):
        return [
            (pool.at[ids_ref[index]], output.at[index])
            for pool, output in zip(pools, outputs, strict=True)
        ]

    _stream(ids_ref.shape[0], None, moves, sems)


def _scatter_kernel(
    ids_ref,  # prefetch, int32[N]
    count_ref,  # prefetch, int32[1]: how many blocks are real
    *refs,  # inputs, the blocks, [N, 2 * Hkv, rows, width] a layer, and the pools; outputs, the
    # pools' buffers, [num_blocks, 2 * Hkv, rows, width] a layer; scratch, DMA semaphores
    # [num_in_flight]
    num_layers: int,
):
    """Moves place i of each layer's blocks to block ids[i] of its pool, from HBM to HBM.

    See `_stream` for the pipeline. Reads and writes the real blocks once.
    """
    blocks, pools, sems = refs[:num_layers], refs[2 * num_layers : 3 * num_layers], refs[-1]
    num_blocks = pools[0].shape[0]

    def is_inside(index):
        return (ids_ref[index] >= 0) & (ids_ref[index] < num_blocks)

    def moves(index):
        return [
            (part.at[index], pool.at[ids_ref[index]])
            for part, pool in zip(blocks, pools, strict=True)
        ]

    _stream(jnp.minimum(count_ref[0], ids_ref.shape[0]), is_inside, moves, sems)


def _stream(
    count: jax.Array | int,
    is_inside: Callable[[jax.Array], jax.Array] | None,
    moves: Callable[[jax.Array], list[tuple[Any, Any]]],
    sems: Any,
) -> None:
    """Starts `moves` of each index below `count` that is inside, several indices at a time.

        index 0        ########               all its layers on semaphore 0
        index 1          ########             semaphore 1
        ...                ########
        index n                ########       semaphore 0 again: waits for index 0 first

    Args:
      count: int32[], how many indices there are.
      is_inside: whether an index is to be moved; None if all are.
      moves: the (source, destination) references of an index, one pair a layer. Their sizes are
        the same for every index.
      sems: DMA semaphores [num_in_flight].
    """
    num_in_flight = sems.shape[0]

    def copies(index, place):
        return [pltpu.make_async_copy(src, dst, sems.at[place]) for src, dst in moves(index)]

    def wait(place, _=None):
        # The sizes are all that a wait takes from its copies.
        for copy in copies(0, place):
            copy.wait()

    def start(index, num_started):
        place = lax.rem(num_started, num_in_flight)
        pl.when(num_started >= num_in_flight)(lambda: wait(place))
        for copy in copies(index, place):
            copy.start()
        return num_started + 1

    def step(index, num_started):
        if is_inside is None:
            return start(index, num_started)
        return lax.cond(
            is_inside(index),
            lambda: start(index, num_started),
            lambda: num_started,
        )

    num_started = lax.fori_loop(0, count, step, jnp.int32(0))
    lax.fori_loop(0, jnp.minimum(num_started, num_in_flight), wait, None)
