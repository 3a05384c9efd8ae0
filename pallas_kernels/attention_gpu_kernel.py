"""The GPU attention kernel: each program's share of the chunks, as partial results."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_gpu_spec import (
    CHUNK_TOKENS,
    QUERY_BUFFERS,
    REDUCTION_BYTES,
    TILE_COLUMNS,
    GpuSpec,
)
from pallas_kernels.attention_gpu_steps import (
    Place,
    ShareOf,
    attend_chunk,
    clean_values,
    copy_share,
    empty_result,
    widen,
)
from pallas_kernels.gpu_runtime import interpret_mode, plgpu, store


def attend_shares(
    spec: GpuSpec,
    queries: jax.Array,
    pool_layer: jax.Array,
    block_tables: jax.Array,
    tiles: jax.Array,
    shares: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The partial results of all segments of a plan.

    Args:
      queries: compute_dtype[tiles, Hkv, warpgroups, warpgroup_rows, width].
      pool_layer: [num_blocks, 2 * Hkv, block_size, width].
      block_tables: int32[S, B].
      tiles, shares: see `GpuPlan`.
      factors: float32[Hkv], of each KV head's q . k, with `GpuSpec.key_factor`.

    Returns:
      sums: float32[units + programs, warpgroups, ...], sum of exp2(score - maximum) * v, the last
        two axes (width, warpgroup_rows) in the turned form, (warpgroup_rows, width) else.
      statistics: float32[units + programs, warpgroups, 2, warpgroup_rows], the maximum and the sum
        of exp2(score - maximum). Places that are no segment's are not written.
    """

    def paged_attention(*refs, **scratch):
        _kernel(spec, *refs, **scratch)

    num_places = queries.shape[0] * spec.num_kv_heads + spec.num_programs
    warpgroups, rows = spec.num_warpgroups, spec.warpgroup_rows
    return plgpu.kernel(
        paged_attention,
        out_type=[
            jax.ShapeDtypeStruct(
                (num_places, warpgroups, *spec.scores_shape(spec.width)), jnp.float32
            ),
            jax.ShapeDtypeStruct((num_places, warpgroups, 2, rows), jnp.float32),
        ],
        scratch_types=_scratch(spec),
        grid=(spec.num_programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        interpret=interpret_mode() or None,
    )(queries, pool_layer, block_tables, tiles, shares, factors)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles that TMA writes and the matrix unit reads without conflicts."""
    tile_bytes = TILE_COLUMNS * jnp.dtype(dtype).itemsize
    # Their base class has a method that Mosaic never calls on these, and that pyright misses.
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    transforms = (tiling((8, TILE_COLUMNS)), swizzle(tile_bytes))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(spec: GpuSpec) -> dict[str, Any]:
    chunk, rows = (CHUNK_TOKENS, spec.width), (spec.warpgroup_rows, spec.width)
    warpgroups, stages, dtype = spec.num_warpgroups, spec.num_stages, spec.compute_dtype
    scratch = dict(
        queries=swizzled((QUERY_BUFFERS, warpgroups, *rows), dtype),
        keys=swizzled((stages, *chunk), spec.pool_dtype),
        values=swizzled((stages, *chunk), spec.pool_dtype),
        weights=swizzled((warpgroups, spec.warpgroup_rows, CHUNK_TOKENS), dtype),
        arrived=plgpu.Barrier(num_arrivals=2 * spec.copies_a_chunk, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        queries_arrived=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=QUERY_BUFFERS),
        queries_consumed=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=QUERY_BUFFERS),
        cleaned=plgpu.Barrier(num_arrivals=warpgroups),
    )
    if spec.widens:
        scratch |= dict(wide_keys=swizzled(chunk, dtype), wide_values=swizzled(chunk, dtype))
    return scratch


def _kernel(
    spec: GpuSpec,
    queries_hbm,  # compute_dtype[tiles, Hkv, warpgroups, warpgroup_rows, width]
    pool_hbm,  # pool_dtype[num_blocks, 2 * Hkv, block_size, width]
    tables_hbm,  # int32[S, B]
    tiles_hbm,  # int32[tiles, 8]
    shares_hbm,  # int32[programs, 8]
    factors_hbm,  # float32[Hkv]
    sums_hbm,  # float32[units + programs, warpgroups, ...]
    statistics_hbm,  # float32[units + programs, warpgroups, 2, warpgroup_rows]
    *,
    queries,  # compute_dtype[2, warpgroups, warpgroup_rows, width]
    keys,  # pool_dtype[stages, 64, width]
    values,  # pool_dtype[stages, 64, width]
    weights,  # compute_dtype[warpgroups, warpgroup_rows, 64]
    arrived,
    consumed,
    queries_arrived,
    queries_consumed,
    cleaned,
    wide_keys=None,  # compute_dtype[64, width]
    wide_values=None,  # compute_dtype[64, width]
):
    """One program: the last warpgroup copies, the others compute.

        copies    tables, tiles -> block ids; q, K, V by TMA, HBM -> a ring of chunks
                        |  arrived                                 ^  consumed
        compute   scores = K q | softmax, online | weights -> shared memory | sums += weights V

    The ring goes on across segments: while one sequence's last chunk is computed, the next one's
    first chunks are on their way. Writes to HBM: each segment's sums and statistics.
    """
    program = lax.axis_index("program")
    warpgroup = lax.axis_index("warpgroup")
    share = ShareOf(spec, tiles_hbm, shares_hbm, program)

    def copy_queries(place: Place, buffer: jax.Array) -> None:
        for part in range(spec.num_warpgroups):
            plgpu.copy_gmem_to_smem(
                queries_hbm.at[place.tile, place.head, part],
                queries.at[buffer, part],
                queries_arrived.at[buffer],
            )

    def copy_chunk(place: Place, chunk: jax.Array, stage: jax.Array) -> None:
        position = place.position_of(chunk)
        # All block ids first, so that one wait is for all of them.
        sources = [
            _block_rows(spec, place, tables_hbm, position, copy)
            for copy in range(spec.copies_a_chunk)
        ]
        for copy, (block, of_block) in enumerate(sources):
            rows = pl.ds(copy * spec.copy_tokens, spec.copy_tokens)
            for first_head, target in ((0, keys), (spec.num_kv_heads, values)):
                plgpu.copy_gmem_to_smem(
                    pool_hbm.at[block, first_head + place.head, of_block],
                    target.at[stage, rows],
                    arrived.at[stage],
                )

    @pl.when(warpgroup == spec.num_warpgroups)
    def _copy():
        copy_share(spec, share, consumed, queries_consumed, copy_queries, copy_chunk)

    def attend(place: Place, buffer: jax.Array, number: jax.Array, carry: Any) -> Any:
        stage = lax.rem(number - share.begin, jnp.int32(spec.num_stages))
        position = place.position_of(number)
        plgpu.barrier_wait(arrived.at[stage])
        chunk_keys, chunk_values = keys.at[stage], values.at[stage]
        if spec.widens:
            _share_out(warpgroup, spec, 0, lambda: widen(spec, keys.at[stage], wide_keys, place))
            _share_out(
                warpgroup, spec, 1, lambda: widen(spec, values.at[stage], wide_values, place)
            )
            plgpu.barrier_arrive(consumed.at[stage])
            chunk_keys, chunk_values = wide_keys, wide_values
        is_edge = (position < place.low) | (position + CHUNK_TOKENS > place.high)

        @pl.when(is_edge)
        def _clean():
            _share_out(warpgroup, spec, 1, lambda: clean_values(chunk_values, place, position))
            if not spec.widens:
                _meet(spec, cleaned)

        if spec.widens:
            _meet(spec, cleaned)
        carry = attend_chunk(
            spec,
            carry,
            place,
            queries=queries.at[buffer, warpgroup],
            keys=chunk_keys,
            values=chunk_values,
            weights=weights.at[warpgroup],
            factor=factors_hbm[place.head],
            position=position,
            first_row=warpgroup * spec.warpgroup_rows,
        )
        if spec.widens and spec.num_warpgroups > 1:
            _meet(spec, cleaned)  # Before the next chunk takes the place of this one.
        if not spec.widens:
            plgpu.barrier_arrive(consumed.at[stage])
        return carry

    @pl.when(warpgroup < spec.num_warpgroups)
    def _compute():
        def segment(index, _):
            place = share.segment(index)
            buffer = lax.rem(index, jnp.int32(QUERY_BUFFERS))
            plgpu.barrier_wait(queries_arrived.at[buffer])
            sums, maximum, total = lax.fori_loop(
                place.begin,
                place.end,
                functools.partial(attend, place, buffer),
                empty_result(spec),
            )
            plgpu.barrier_arrive(queries_consumed.at[buffer])
            target = sums_hbm.at[place.unit + program, warpgroup]
            store(target, sums)
            target = statistics_hbm.at[place.unit + program, warpgroup]
            store(target.at[0], maximum)
            store(target.at[1], total)
            return 0

        lax.fori_loop(0, share.num_units, segment, 0)


def _block_rows(spec: GpuSpec, place: Place, tables_hbm: Any, position: jax.Array, copy: int):
    """(block, rows of it) of one of the copies of the chunk that begins at `position`."""
    token = position + copy * spec.copy_tokens
    # A page that nobody sees may not exist. One that is there is copied in its place, because the
    # copies of a chunk are counted.
    seen = jnp.clip(token, place.low, place.high - 1)
    block = tables_hbm[place.seq, lax.div(seen, jnp.int32(spec.block_size))]
    if spec.block_size <= CHUNK_TOKENS:
        return block, pl.ds(0, spec.copy_tokens)
    offset = lax.rem(token, jnp.int32(spec.block_size))
    return block, pl.ds(pl.multiple_of(offset, CHUNK_TOKENS), spec.copy_tokens)


def _share_out(warpgroup: jax.Array, spec: GpuSpec, task: int, work: Any) -> None:
    """Has one of the warpgroups do the work."""
    if spec.num_warpgroups == 1:
        work()
    else:
        pl.when(warpgroup == task % spec.num_warpgroups)(work)


def _meet(spec: GpuSpec, barrier: Any) -> None:
    """Makes what one warpgroup wrote to shared memory ready for the products of all."""
    plgpu.commit_smem()
    if spec.num_warpgroups > 1:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
