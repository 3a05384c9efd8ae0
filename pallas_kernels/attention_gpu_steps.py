"""What a program of the GPU attention kernel does with a segment and with a chunk of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_gpu_plan import Share, Tile
from pallas_kernels.attention_gpu_spec import (
    CHUNK_TOKENS,
    LOG2_E,
    QUERY_BUFFERS,
    TILE_COLUMNS,
    GpuSpec,
)
from pallas_kernels.gpu_runtime import interpret_mode, plgpu

# Below every score, and no infinity, of which a difference would be NaN.
_LOWEST = -1e30


class Place(NamedTuple):
    """A segment: which unit, and which chunks of the line of all chunks."""

    unit: jax.Array
    tile: jax.Array
    head: jax.Array
    begin: jax.Array
    end: jax.Array
    seq: jax.Array
    # position of the tile's first query token; the rows see none below low and none from high on
    position: jax.Array
    low: jax.Array
    high: jax.Array
    # of the line's chunk 0, were it this unit's
    origin: jax.Array

    def position_of(self, chunk: jax.Array) -> jax.Array:
        """Of a chunk's first token in its sequence."""
        return self.origin + chunk * CHUNK_TOKENS


class ShareOf:
    """A program's share of the line, read from the plan in global memory."""

    def __init__(self, spec: GpuSpec, tiles_hbm: Any, shares_hbm: Any, program: jax.Array):
        self._spec, self._tiles = spec, tiles_hbm
        self.begin = shares_hbm[program, Share.BEGIN]
        self.end = shares_hbm[program, Share.END]
        self.first_unit = shares_hbm[program, Share.FIRST_UNIT]
        self.num_units = shares_hbm[program, Share.NUM_UNITS]

    def segment(self, index: jax.Array) -> Place:
        heads = self._spec.num_kv_heads
        unit = self.first_unit + index
        tile, head = lax.div(unit, jnp.int32(heads)), lax.rem(unit, jnp.int32(heads))
        num_chunks = self._tiles[tile, Tile.NUM_CHUNKS]
        start = heads * self._tiles[tile, Tile.START] + head * num_chunks
        low = self._tiles[tile, Tile.LOW]
        return Place(
            unit=unit,
            tile=tile,
            head=head,
            begin=jnp.maximum(start, self.begin),
            end=jnp.minimum(start + num_chunks, self.end),
            seq=self._tiles[tile, Tile.SEQ],
            position=self._tiles[tile, Tile.POSITION],
            low=low,
            high=self._tiles[tile, Tile.HIGH],
            origin=(lax.div(low, jnp.int32(CHUNK_TOKENS)) - start) * CHUNK_TOKENS,
        )


def copy_share(
    spec: GpuSpec,
    share: ShareOf,
    consumed: Any,
    queries_consumed: Any,
    copy_queries: Callable[[Place, jax.Array], None],
    copy_chunk: Callable[[Place, jax.Array, jax.Array], None],
) -> None:
    """Starts all copies of a share in their order, each as soon as its buffer is free."""

    def segment(index, _):
        place = share.segment(index)
        buffer = lax.rem(index, jnp.int32(QUERY_BUFFERS))

        @pl.when(index >= QUERY_BUFFERS)
        def _wait():
            plgpu.barrier_wait(queries_consumed.at[buffer])

        copy_queries(place, buffer)

        def chunk(number, _):
            since = number - share.begin
            stage = lax.rem(since, jnp.int32(spec.num_stages))

            @pl.when(since >= spec.num_stages)
            def _wait():
                plgpu.barrier_wait(consumed.at[stage])

            copy_chunk(place, number, stage)
            return 0

        lax.fori_loop(place.begin, place.end, chunk, 0)
        return 0

    lax.fori_loop(0, share.num_units, segment, 0)


def empty_result(spec: GpuSpec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sums, maximum, total) before the first chunk."""
    layout, rows = plgpu.Layout.WGMMA, (spec.warpgroup_rows,)
    sums = jnp.zeros(spec.scores_shape(spec.width), jnp.float32)
    maximum = jnp.full(rows, _LOWEST, jnp.float32)
    row_layout = layout.reduce(spec.keys_axis)
    return (
        plgpu.layout_cast(sums, layout),
        plgpu.layout_cast(maximum, row_layout),
        plgpu.layout_cast(jnp.zeros(rows, jnp.float32), row_layout),
    )


def attend_chunk(
    spec: GpuSpec,
    carry: tuple[jax.Array, jax.Array, jax.Array],
    place: Place,
    *,
    queries: Any,
    keys: Any,
    values: Any,
    weights: Any,
    factor: jax.Array,
    position: jax.Array,
    first_row: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sums, maximum, total) with one more chunk of a warpgroup's rows.

    The softmax is the online one (arXiv 1805.02867), in base 2. The weights go through shared
    memory, from which the second product reads them.

    Args:
      queries: [warpgroup_rows, width], keys, values: [64, width], weights: [warpgroup_rows, 64] in
        shared memory.
      factor: of q . k, see `key_factor`.
      position: of the chunk's first token.
      first_row: of the warpgroup's rows in the tile.
    """
    sums, maximum, total = carry
    shape = spec.scores_shape(CHUNK_TOKENS)
    scores = _product(spec, shape, queries, keys.transpose((1, 0)))
    scores = _in_base_2(spec, scores * factor)
    scores = _mask(spec, scores, place, position, first_row)

    along_rows = [1 - spec.keys_axis]

    def spread(rows: jax.Array, to: tuple[int, ...]) -> jax.Array:
        return lax.broadcast_in_dim(rows, to, along_rows)

    higher = jnp.maximum(maximum, scores.max(axis=spec.keys_axis))
    decay = jnp.exp2(maximum - higher)
    exponentials = jnp.exp2(scores - spread(higher, shape))
    total = total * decay + exponentials.sum(axis=spec.keys_axis)
    as_stored = weights.transpose((1, 0)) if spec.is_turned else weights
    as_stored[...] = exponentials.astype(spec.compute_dtype)
    plgpu.commit_smem()

    sums = sums * spread(decay, sums.shape)
    return _add_product(spec, sums, weights, values), higher, total


def _product(spec: GpuSpec, shape: tuple[int, ...], rows: Any, others: Any) -> jax.Array:
    """rows @ others, of shared memory, in float32; in the turned form its transpose."""
    rows, others = _factors(spec, rows, others)

    def multiply(accumulator):
        plgpu.wgmma(accumulator, rows, others)
        return accumulator[...]

    accumulator: Any = plgpu.WGMMAAccumulatorRef
    return pl.run_scoped(multiply, accumulator(shape, jnp.float32))


def _add_product(spec: GpuSpec, sums: jax.Array, rows: Any, others: Any) -> jax.Array:
    """sums + rows @ others, in the registers that hold the sums."""
    if interpret_mode():  # The interpreter has no accumulators that begin with a value.
        return sums + _product(spec, sums.shape, rows, others)
    rows, others = _factors(spec, rows, others)

    def multiply(accumulator):
        plgpu.wgmma(accumulator, rows, others)

    accumulator: Any = plgpu.WGMMAAccumulatorRef.init(sums)
    return pl.run_state(multiply)(accumulator)


def _factors(spec: GpuSpec, rows: Any, others: Any) -> tuple[Any, Any]:
    if spec.is_turned:
        return others.transpose((1, 0)), rows.transpose((1, 0))
    return rows, others


def _in_base_2(spec: GpuSpec, scores: jax.Array) -> jax.Array:
    """Capped scores times log2(e), from q . k times its `key_factor`."""
    if spec.soft_cap is None:
        return scores
    # The hardware's tanh has 11 bits, too few for an exponent.
    cap = spec.soft_cap * LOG2_E
    return cap - (2 * cap) / (jnp.exp2(scores) + 1)


def _mask(
    spec: GpuSpec, scores: jax.Array, place: Place, position: jax.Array, first_row: jax.Array
) -> jax.Array:
    """The scores of a chunk, -inf where a row does not see the key."""
    layout, shape = plgpu.Layout.WGMMA, scores.shape
    if spec.tile_tokens == 1 or not spec.causal:
        keys = plgpu.broadcasted_iota(jnp.int32, shape, spec.keys_axis, layout=layout)
        low, high = place.low - position, place.high - position
        return jnp.where((keys >= low) & (keys < high), scores, -jnp.inf)
    # The first row's own token, and the last row's, counted from the chunk's first.
    first_own = place.position - position + lax.div(first_row, jnp.int32(spec.group))
    is_masked = first_own < CHUNK_TOKENS - 1
    if spec.sliding_window is not None:
        is_masked |= first_own + -(-spec.warpgroup_rows // spec.group) >= spec.sliding_window

    def masked(scores: jax.Array) -> jax.Array:
        keys = plgpu.broadcasted_iota(jnp.int32, shape, spec.keys_axis, layout=layout)
        rows = plgpu.broadcasted_iota(
            jnp.int32, (spec.warpgroup_rows,), 0, layout=layout.reduce(spec.keys_axis)
        )
        own = lax.div(rows + first_row, jnp.int32(spec.group))
        if spec.sliding_window is None:
            # Positions in the sequence: counted from the chunk's first token, the keys' would be
            # the same in all chunks, and the compiler would keep all of them in registers. With a
            # window it finds fewer the other way.
            keys, own = keys + position, own + place.position
        else:
            own = own + (place.position - position)

        def spread(of_rows: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(of_rows, shape, [1 - spec.keys_axis])

        is_seen = keys <= spread(own)
        if spec.sliding_window is not None:
            is_seen &= keys > spread(own - spec.sliding_window)
        return jnp.where(is_seen, scores, -jnp.inf)

    return lax.cond(is_masked, masked, lambda scores: scores, scores)


def clean_values(values: Any, place: Place, position: jax.Array) -> None:
    """Zeroes the values of a chunk that no row sees: a weight of 0 does not silence a NaN.

    values: [64, width] in shared memory; position: of its first token.
    """
    layout = plgpu.Layout.WGMMA
    # In pieces, beside which the sums fit into registers.
    for first_column in range(0, values.shape[1], TILE_COLUMNS):
        piece = values.at[:, pl.ds(first_column, TILE_COLUMNS)]
        held = plgpu.layout_cast(piece[...], layout)
        tokens = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=layout) + position
        is_seen = (tokens >= place.low) & (tokens < place.high)
        piece[...] = jnp.where(is_seen, held, jnp.zeros_like(held))


def widen(spec: GpuSpec, narrow: Any, wide: Any, place: Place) -> None:
    """Copies a chunk [64, width] of 8 bits in shared memory to one of 16, where it is exact."""
    layouts = plgpu.Layout
    # Eight numbers side by side a thread are the fewest loads; four take fewer registers.
    layout = layouts.WGMMA_UPCAST_4X if spec.is_turned else layouts.WGMMA_UPCAST_2X

    def widen_piece(first_column) -> None:
        columns = pl.ds(first_column, TILE_COLUMNS)
        held = plgpu.layout_cast(narrow.at[:, columns][...], layout)
        wide.at[:, columns][...] = held.astype(spec.compute_dtype)

    num_pieces = spec.width // TILE_COLUMNS
    if spec.is_turned and num_pieces <= 2 and jnp.dtype(spec.pool_dtype) != jnp.int8:
        for index in range(num_pieces):
            widen_piece(index * TILE_COLUMNS)
        return
    # A loop, lest the addresses of all pieces are kept in registers, and for int8 a copy of a
    # constant for each number. No tile ends before token 0: the compiler does not know, and so
    # does not unroll what would then take more registers than there are.
    end = num_pieces + jnp.minimum(place.high, 0)

    @pl.loop(0, end)
    def _piece(index):
        widen_piece(pl.multiple_of(index * TILE_COLUMNS, TILE_COLUMNS))
