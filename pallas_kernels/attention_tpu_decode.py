"""Decodes: one query token a sequence, or a few that see the same, against its KV blocks.

    item     seq 0, block 0   seq 0, block 1   seq 1, block 0   ...
    fetch    page page page   page page page   page
    compute                   S = q K^T        S = q K^T        S = q K^T
                              softmax, + P V   softmax, + P V   softmax, + P V
    output                                     row of seq 0     row of seq 1

Where an item and the one that is `decode_buffers` - 1 ahead are both full, the pages of the latter
are started one at a time between the products of the former: their scalar work runs in slots that
the products leave empty, and costs one to four bundles a page where a loop of its own takes seven.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_tpu_append import TokenWriter
from pallas_kernels.attention_tpu_decode_item import clean_block, compute_item, decode_parts
from pallas_kernels.attention_tpu_math import LOWEST, Softmax, finished
from pallas_kernels.attention_tpu_pipeline import (
    Buffers,
    KvPipeline,
    State,
    WorkList,
    modulo,
    token_rows,
)
from pallas_kernels.attention_tpu_spec import LANES, LOG2_E, SUBLANES, AttentionSpec


class DecodeScratch(NamedTuple):
    """Scratch of the decode phase."""

    state: Softmax
    out: Any  # VMEM float32[2, tile tokens, lane tiles * num_out_rows, 128]
    lse: Any  # VMEM float32[2, tile tokens, num_out_rows, 128], or None
    num_written: Any  # SMEM int32[2]: tokens of each output in flight
    out_written: Any  # DMA semaphores [2]


def decode_phase(
    spec: AttentionSpec,
    work: WorkList,
    token_arrays,
    pool_hbm,
    tables_hbm,
    sinks,
    out_hbm,
    lse_hbm,
    written_pool_hbm,
) -> None:
    """Attends every tile of `work`, each of one row, and writes it to `out_hbm` and `lse_hbm`.

    Args:
      written_pool_hbm: the pool as an output, where decodes append their token; else None.
    """
    sizes = spec.sizes
    block_tokens = sizes.decode_block_tokens
    out_shape = (2, spec.tile_tokens, spec.lane_tiles * spec.heads.num_out_rows, LANES)
    lse_shape = (2, spec.tile_tokens, spec.heads.num_out_rows, LANES)

    def run(buffers, state, out, lse, num_written, out_written, *append):
        pipeline = KvPipeline(spec, work, token_arrays, pool_hbm, tables_hbm, Buffers(*buffers))
        lse = lse if spec.return_lse else None
        scratch = DecodeScratch(Softmax(*state), out, lse, num_written, out_written)
        outputs = _Outputs(spec, scratch, sinks, out_hbm, lse_hbm)
        writer = None
        if spec.appends:
            staging, written = append
            writer = TokenWriter(spec, pipeline.buffers, staging, written, written_pool_hbm)

        def one_item(state: State) -> State:
            item = pipeline.wait(state)
            fetched, pages = pipeline.fetch(state)
            compute = functools.partial(
                compute_item, spec, scratch.state, pipeline.buffers, item, pipeline.slot(state)
            )

            @pl.when(item.is_first)
            def _():
                _begin(spec, scratch.state, pipeline.buffers.q.at[pipeline.q_slot(item), 0])

            if writer is not None:
                put = functools.partial(writer.put, item, pipeline.slot(state), item.tile_number)
                pl.when(item.is_last)(put)

            is_full = (item.first_page == 0) & (item.visible_end >= block_tokens)
            is_streaming = is_full & (pages.first == 0) & (pages.end == pipeline.block_pages)

            @pl.when(is_streaming)
            def _():
                start_page = functools.partial(pipeline.start_page, pages)
                compute(
                    tokens=block_tokens,
                    is_all_visible=spec.sliding_window is None,
                    num_pages=pipeline.block_pages,
                    start_page=start_page,
                )

            @pl.when(jnp.logical_not(is_streaming))
            def _():
                pl.when(pages.end > pages.first)(lambda: pipeline.start_pages(pages))
                end = jnp.minimum(item.visible_end, block_tokens)
                pl.when(jnp.logical_not(is_full))(
                    lambda: clean_block(spec, pipeline.buffers, item, pipeline.slot(state), end)
                )
                smaller = 0
                for tokens in decode_parts(spec):
                    fits = (end > smaller) & (end <= tokens)
                    pl.when(fits)(functools.partial(compute, tokens=tokens))
                    smaller = tokens

            @pl.when(item.is_last)
            def _():
                outputs.write(*work.rows(item.seq, item.tile), item.tile_number)

            return fetched._replace(computed_items=state.computed_items + 1)

        state = lax.while_loop(
            lambda state: state.computed_items < state.fetched_items, one_item, pipeline.start()
        )
        outputs.finish(state.fetched_tiles)
        if writer is not None:
            writer.finish(state.fetched_tiles)

    run_scoped = functools.partial(
        pl.run_scoped,
        run,
        Buffers.scratch(
            spec, block_tokens=block_tokens, num_buffers=sizes.decode_buffers, tile_tokens=None
        ),
        Softmax.scratch(spec, spec.heads.num_units * spec.rows_per_unit),
        pltpu.VMEM(out_shape, jnp.float32),
        pltpu.VMEM(lse_shape if spec.return_lse else (1, SUBLANES, LANES), jnp.float32),
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        *(TokenWriter.scratch(spec) if spec.appends else ()),
    )
    pl.when(work.count > 0)(run_scoped)


def _begin(spec: AttentionSpec, state: Softmax, rows) -> None:
    """Empties the running softmax, or sets it to what the token in `rows` continues from."""
    state.largest[...] = jnp.full_like(state.largest, LOWEST)
    state.total[...] = jnp.zeros_like(state.total)
    state.weighted[...] = jnp.zeros_like(state.weighted)
    if not spec.continues:
        return
    heads = spec.heads
    start = spec.lane_tiles * heads.num_rows
    for unit in range(heads.num_units):
        # The first parity's rows will do: the parities are added up in the end.
        place = pl.ds(unit * heads.rows_per_unit, heads.out_rows_per_unit)
        first = start + unit * heads.out_rows_per_unit
        tiles = [
            rows[pl.ds(first + tile * heads.num_out_rows, heads.out_rows_per_unit)]
            for tile in range(spec.lane_tiles + 1)
        ]
        lse = tiles.pop() * LOG2_E
        state.largest[place] = jnp.maximum(lse, LOWEST)
        state.total[place] = jnp.where(lse > LOWEST, 1.0, 0.0)
        state.weighted[place] = jnp.concatenate(tiles, axis=1)


class _Outputs:
    """Writes finished rows to HBM, two tiles in flight."""

    def __init__(self, spec: AttentionSpec, scratch: DecodeScratch, sinks, out_hbm, lse_hbm):
        self.spec, self.scratch, self.sinks = spec, scratch, sinks
        self.out_hbm, self.lse_hbm = out_hbm, lse_hbm

    def _copies(self, row, num_tokens, slot) -> list[Any]:
        written = self.scratch.out_written.at[slot]
        pairs = [(self.scratch.out, self.out_hbm)]
        if self.scratch.lse is not None:
            pairs.append((self.scratch.lse, self.lse_hbm))
        if self.spec.tile_tokens > 1:
            return [
                pltpu.make_async_copy(
                    source.at[slot, pl.ds(0, num_tokens)],
                    target.at[pl.ds(row, num_tokens)],
                    written,
                )
                for source, target in pairs
            ]
        return [
            pltpu.make_async_copy(source.at[slot, 0], token_rows(self.spec, target, row), written)
            for source, target in pairs
        ]

    def write(self, row, num_tokens, number) -> None:
        """Writes the running softmax's result as output `number` of this phase."""
        slot = modulo(number, 2)
        self._wait(number >= 2, slot)
        self.scratch.num_written[slot] = num_tokens
        heads = self.spec.heads

        def put_token(token, carry=0):
            if heads.num_units <= 2:
                for unit in range(heads.num_units):
                    self._put(slot, token, unit)
                return carry
            # One after the other, or the compiler would hold all of them in registers.
            return lax.fori_loop(0, heads.num_units, functools.partial(put_unit, token), carry)

        def put_unit(token, unit, carry):
            self._put(slot, token, unit)
            return carry

        if self.spec.tile_tokens == 1:
            put_token(0)
        else:
            lax.fori_loop(0, num_tokens, put_token, 0)
        for copy in self._copies(row, num_tokens, slot):
            copy.start()

    def _put(self, slot, token, unit) -> None:
        """Puts a unit's outputs of one token into scratch."""
        heads = self.spec.heads
        start = unit * self.spec.rows_per_unit + token * heads.rows_per_unit
        rows = pl.ds(pl.multiple_of(start, SUBLANES), heads.rows_per_unit)
        first_out = pl.multiple_of(unit * heads.out_rows_per_unit, SUBLANES)
        out_rows = pl.ds(first_out, heads.out_rows_per_unit)
        sinks = None if self.sinks is None else self.sinks[out_rows]
        state = Softmax(*(field[rows] for field in self.scratch.state))
        out, lse = finished(self.spec, state, sinks)
        for tile in range(self.spec.lane_tiles):
            tile_rows = pl.ds(tile * heads.num_out_rows + first_out, heads.out_rows_per_unit)
            lanes = slice(tile * LANES, (tile + 1) * LANES)
            self.scratch.out[slot, token, tile_rows] = out[:, lanes]
        if self.scratch.lse is not None:
            self.scratch.lse[slot, token, out_rows] = lse

    def _wait(self, is_pending, slot) -> None:
        @pl.when(is_pending)
        def _():
            # A wait needs the size only, not the rows.
            for copy in self._copies(0, self.scratch.num_written[slot], slot):
                copy.wait()

    def finish(self, count) -> None:
        """Waits until all `count` outputs are written."""
        for last in (1, 2):
            self._wait(count >= last, modulo(count + 2 - last, 2))
