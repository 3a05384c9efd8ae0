"""Prefills: tiles of query tokens of one sequence against its KV blocks (FlashAttention).

    tile       tokens 0..127 of seq 0                     tokens 128.. of seq 0
    item       block 0        block 1        ...          block 0        ...
    fetch      pages, queries pages                       pages, queries
    compute    turn V         turn V                      turn V
               S = K Q^T      S = K Q^T                   S = K Q^T
               softmax,       softmax,                    softmax,
               O += V^T P     O += V^T P                  O += V^T P
    output                                   tile's rows

A tile's queries of one KV head and one *chunk* of tokens make one matrix, with about 128 rows. It
is the unit of causality: blocks that a chunk does not see are not computed, and a tile with few
tokens has few chunks. Scores are kept turned, tokens down and queries across: then a softmax's
maximum and sum go down the registers, not across their lanes, and the statistics of 128 queries
are one register instead of sixteen.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_tpu_math import LOWEST, scores_of, weigh
from pallas_kernels.attention_tpu_pipeline import (
    Buffers,
    Item,
    KvPipeline,
    State,
    WorkList,
    divide,
    modulo,
)
from pallas_kernels.attention_tpu_prefill_steps import (
    PIECE_ROWS,
    add_in_steps,
    clean_item,
    turn_values,
)
from pallas_kernels.attention_tpu_spec import LANES, SUBLANES, AttentionSpec


class PrefillScratch(NamedTuple):
    """Scratch of the prefill phase; a matrix has the columns (parity, query head, token)."""

    values: Any  # VMEM compute dtype[Hkv, width, block rows]: V of the block, turned
    largest: Any  # VMEM float32[chunks * Hkv, 8, columns], equal in the 8 rows
    total: Any  # the same
    weighted: Any  # VMEM float32[chunks * Hkv, width, columns]
    scores: Any  # VMEM float32[2, block rows, columns]: of one matrix ahead of its softmax
    out: Any  # VMEM float32[lane tiles * num_out_rows, tile tokens, 128]
    lse: Any  # VMEM float32[num_out_rows, tile tokens, 128], or a stub
    out_written: Any  # DMA semaphore


def matrix_columns(spec: AttentionSpec) -> int:
    """Queries of one KV head and chunk, both parities."""
    heads = spec.heads
    return heads.tokens_per_row * heads.padded_group * spec.sizes.prefill_chunk_tokens


def prefill_phase(
    spec: AttentionSpec,
    work: WorkList,
    first_position,
    token_arrays,
    pool_hbm,
    tables_hbm,
    sinks,
    out_hbm,
    lse_hbm,
) -> None:
    """Attends every tile of `work` and writes it to `out_hbm` and `lse_hbm`.

    Args:
      first_position: (sequence, tile) -> position of the tile's first token.
      token_arrays, out_hbm, lse_hbm: head-major, see `attention_kernel`.
      sinks: VMEM float32[Hkv, 8, out columns], in base 2, or None.
    """
    sizes, pool = spec.sizes, spec.pool
    tile_tokens, chunk_tokens = sizes.prefill_tile_tokens, sizes.prefill_chunk_tokens

    def run(buffers, *scratch):
        pipeline = KvPipeline(spec, work, token_arrays, pool_hbm, tables_hbm, Buffers(*buffers))
        tile = _Tile(spec, PrefillScratch(*scratch), pipeline.buffers, sinks)

        def one_item(carry: tuple[State, Any]) -> tuple[State, Any]:
            state, unwritten = carry
            item = pipeline.wait(state)
            fetched, pages = pipeline.fetch(state)
            pipeline.start_pages(pages)
            slot = pipeline.slot(state)
            row, num_tokens = work.rows(item.seq, item.tile)
            num_chunks = divide(num_tokens + chunk_tokens - 1, chunk_tokens)
            pl.when(item.is_first)(lambda: tile.begin(num_chunks))
            clean_item(spec, pipeline.buffers, item, slot)
            turn_values(spec, pipeline.buffers, tile.scratch.values, slot)
            tile.add_block(item, slot, first_position(item.seq, item.tile), num_chunks)

            @pl.when(item.is_last)
            def _():
                wait_for_last_tile(unwritten)
                tile.finish(num_chunks)
                tile.write(row, num_tokens, out_hbm, lse_hbm)

            unwritten = jnp.where(item.is_last, num_tokens, unwritten)
            return fetched._replace(computed_items=state.computed_items + 1), unwritten

        def wait_for_last_tile(num_tokens) -> None:
            @pl.when(num_tokens > 0)
            def _():
                tile.wait_for_write(num_tokens, out_hbm, lse_hbm)

        _, unwritten = lax.while_loop(
            lambda carry: carry[0].computed_items < carry[0].fetched_items,
            one_item,
            (pipeline.start(), jnp.int32(0)),
        )
        wait_for_last_tile(unwritten)

    matrices = tile_tokens // chunk_tokens * pool.num_kv_heads
    block_rows = sizes.prefill_block_tokens // pool.tokens_per_row
    statistic = pltpu.VMEM((matrices, SUBLANES, matrix_columns(spec)), jnp.float32)
    out_shape = (spec.heads.num_out_rows, tile_tokens)
    lse_shape = (*out_shape, LANES) if spec.return_lse else (1, SUBLANES, LANES)
    run_scoped = functools.partial(
        pl.run_scoped,
        run,
        Buffers.scratch(
            spec,
            block_tokens=sizes.prefill_block_tokens,
            num_buffers=sizes.prefill_buffers,
            tile_tokens=tile_tokens,
        ),
        pltpu.VMEM((pool.num_kv_heads, pool.width, block_rows), spec.compute_dtype),
        statistic,
        statistic,
        pltpu.VMEM((matrices, pool.width, matrix_columns(spec)), jnp.float32),
        pltpu.VMEM((2, block_rows, matrix_columns(spec)), jnp.float32),
        pltpu.VMEM((spec.lane_tiles * out_shape[0], tile_tokens, LANES), jnp.float32),
        pltpu.VMEM(lse_shape, jnp.float32),
        pltpu.SemaphoreType.DMA,
    )
    pl.when(work.count > 0)(run_scoped)


class _Tile:
    """The work on one tile of queries. Matrix number chunk * Hkv + head is that KV head's."""

    def __init__(self, spec: AttentionSpec, scratch: PrefillScratch, buffers: Buffers, sinks):
        self.spec, self.scratch, self.buffers, self.sinks = spec, scratch, buffers, sinks
        self.num_kv_heads = spec.pool.num_kv_heads
        self.chunk_tokens = spec.sizes.prefill_chunk_tokens
        self.block_tokens = spec.sizes.prefill_block_tokens
        self.columns = matrix_columns(spec)
        self.piece_tokens = PIECE_ROWS * spec.pool.tokens_per_row

    def _split(self, matrix) -> tuple[Any, Any]:
        chunk = divide(matrix, self.num_kv_heads)
        return chunk, matrix - chunk * self.num_kv_heads

    def begin(self, num_chunks) -> None:
        """Empties the tile's running softmax."""

        def empty(matrix, carry):
            scratch = self.scratch
            scratch.largest[matrix] = jnp.full(scratch.largest.shape[1:], LOWEST, jnp.float32)
            scratch.total[matrix] = jnp.zeros(scratch.total.shape[1:], jnp.float32)
            scratch.weighted[matrix] = jnp.zeros(scratch.weighted.shape[1:], jnp.float32)
            return carry

        lax.fori_loop(0, num_chunks * self.num_kv_heads, empty, 0)

    def add_block(self, item: Item, slot, position, num_chunks) -> None:
        """Adds the item's block to the running softmax of the chunks that see it.

        Args:
          position: of the tile's first token.
        """
        first_chunk, end_chunk = jnp.int32(0), num_chunks
        if self.spec.causal:
            # The first chunk whose last token stands at the block's start or later.
            first_chunk = divide(jnp.maximum(item.first_token - position, 0), self.chunk_tokens)
        if self.spec.sliding_window is not None:
            # Before the first chunk whose first token no longer sees the block's last one.
            last_seeing = item.first_token + self.block_tokens - 2 + self.spec.sliding_window
            ahead = jnp.maximum(last_seeing - position, -1) + self.chunk_tokens
            end_chunk = jnp.minimum(num_chunks, divide(ahead, self.chunk_tokens))

        # Chunks from here on see the whole block.
        whole_chunk = end_chunk
        if not self.spec.causal:
            is_full = (item.first_page == 0) & (item.visible_end >= self.block_tokens)
            whole_chunk = jnp.where(is_full, 0, end_chunk)
        elif self.spec.sliding_window is None:
            behind = jnp.maximum(item.first_token + self.block_tokens - 1 - position, 0)
            whole_chunk = divide(behind + self.chunk_tokens - 1, self.chunk_tokens)
            whole_chunk = jnp.minimum(whole_chunk, end_chunk)
        q_slot = modulo(item.tile_number, self.buffers.q.shape[0])
        heads_at_once = self.spec.sizes.prefill_heads_at_once
        steps = self.num_kv_heads // heads_at_once

        def add_whole(step, carry):
            pieces = self.block_tokens // self.piece_tokens
            self._add(q_slot, slot, step * heads_at_once, 0, pieces, None)
            return carry

        def add_parts(step, carry):
            chunk, _ = self._split(step * heads_at_once)
            first_position = position + chunk * self.chunk_tokens - item.first_token
            first, end = self._seen(item, first_position)

            def add_piece(piece, carry):
                start = piece * self.piece_tokens
                visible = self._visible(
                    item.visible_end - start, first_position - start, PIECE_ROWS
                )
                first_row = pl.multiple_of(piece * PIECE_ROWS, PIECE_ROWS)
                self._add(q_slot, slot, step * heads_at_once, first_row, 1, visible)
                return carry

            last = divide(end + self.piece_tokens - 1, self.piece_tokens)
            return lax.fori_loop(divide(first, self.piece_tokens), last, add_piece, carry)

        def add_stepped(matrix, carry):
            chunk, head = self._split(matrix)
            first_position = position + chunk * self.chunk_tokens - item.first_token

            def visible(row, num_rows):
                start = row * self.spec.pool.tokens_per_row
                return self._visible(item.visible_end - start, first_position - start, num_rows)

            add_in_steps(
                self.spec,
                self.scratch,
                self.buffers.kv.at[slot, head],
                self.scratch.values.at[head],
                matrix,
                *self._seen(item, first_position),
                queries=lambda: self._queries(q_slot, matrix),
                visible=visible,
            )
            return carry

        if self.spec.sizes.prefill_step_rows:
            lax.fori_loop(first_chunk * steps, end_chunk * steps, add_stepped, 0)
            return
        lax.fori_loop(first_chunk * steps, whole_chunk * steps, add_parts, 0)
        lax.fori_loop(whole_chunk * steps, end_chunk * steps, add_whole, 0)

    def _seen(self, item: Item, first_position) -> tuple[Any, Any]:
        """First and end token that a chunk sees; all count from the block's start."""
        first, end = jnp.int32(0), jnp.minimum(item.visible_end, self.block_tokens)
        if self.spec.causal:
            end = jnp.minimum(end, first_position + self.chunk_tokens)
        if self.spec.sliding_window is not None:
            first = jnp.maximum(first_position - self.spec.sliding_window + 1, 0)
        return first, end

    def _visible(self, visible_end, first_position, num_rows: int) -> jax.Array:
        """bool[num_rows, columns]; the arguments count from the first row's first token."""
        tokens_per_row = self.spec.pool.tokens_per_row
        shape = (num_rows, self.columns)
        token = lax.broadcasted_iota(jnp.int32, shape, 0)
        column = lax.broadcasted_iota(jnp.int32, (1, self.columns), 1)
        if tokens_per_row > 1:
            token = token * tokens_per_row + divide(column, self.columns // tokens_per_row)
        if not self.spec.causal:
            return token < visible_end
        position = first_position + modulo(column, self.chunk_tokens)
        visible = token <= position
        if self.spec.sliding_window is not None:
            visible &= token > position - self.spec.sliding_window
        return visible

    def _queries(self, q_slot, matrix) -> jax.Array:
        """float32[columns, width]."""
        heads = self.spec.heads
        chunk, head = self._split(matrix)
        unit, place = divide(head, heads.heads_per_unit), modulo(head, heads.heads_per_unit)
        first = unit * heads.rows_per_unit + place * heads.padded_group
        tokens = pl.ds(pl.multiple_of(chunk * self.chunk_tokens, SUBLANES), self.chunk_tokens)
        queries = []
        for parity in range(heads.tokens_per_row):
            row = first + parity * heads.out_rows_per_unit
            tiles = []
            for tile in range(self.spec.lane_tiles):
                rows = pl.ds(tile * heads.num_rows + row, heads.padded_group)
                tiles.append(self.buffers.q[q_slot, rows, tokens, :].reshape(-1, LANES))
            queries.append(jnp.concatenate(tiles, axis=1))
        return jnp.concatenate(queries)

    def _add(
        self, q_slot, slot, matrix, first_row, num_pieces: int, visible: jax.Array | None
    ) -> None:
        """Adds some of the block to the running softmax of the matrices from `matrix` on.

        The scores of one matrix are computed ahead of the softmax of the one before. They go
        through scratch piece by piece, or the compiler would hold, and spill, all at once.

        Args:
          first_row, num_pieces: of the block's K and V.
          visible: which scores of the only piece count; None for all.
        """
        scratch = self.scratch
        scores_of_piece = [pl.ds(piece * PIECE_ROWS, PIECE_ROWS) for piece in range(num_pieces)]
        rows_of_piece = [pl.ds(first_row + rows.start, PIECE_ROWS) for rows in scores_of_piece]
        if not isinstance(first_row, int):
            rows_of_piece = [pl.ds(first_row, PIECE_ROWS)]

        def put_scores(place: int) -> jax.Array:
            """Puts a matrix's scores into scratch and returns their maxima, [1, columns]."""
            queries = self._queries(q_slot, matrix + place)
            head = self._split(matrix + place)[1]
            peaks = []
            for source, target in zip(rows_of_piece, scores_of_piece, strict=True):
                scores = scores_of(self.spec, self.buffers.kv[slot, head, source], queries)
                if visible is not None:
                    scores = jnp.where(visible, scores, LOWEST)
                scratch.scores[place % 2, target] = scores
                peaks.append(scores.max(axis=0, keepdims=True))
            return functools.reduce(jnp.maximum, peaks)

        def add(place: int, highest: jax.Array) -> None:
            head = self._split(matrix + place)[1]
            old_largest = scratch.largest[matrix + place][:1]
            largest = jnp.maximum(old_largest, highest)
            factor = jnp.exp2(old_largest - largest)
            total = factor * scratch.total[matrix + place][:1]
            weighted = scratch.weighted[matrix + place] * factor
            for rows, target in zip(rows_of_piece, scores_of_piece, strict=True):
                weights = jnp.exp2(scratch.scores[place % 2, target] - largest)
                total += weights.sum(axis=0, keepdims=True)
                weighted += weigh(self.spec, scratch.values[head, :, rows], weights)
            scratch.largest[matrix + place] = jnp.broadcast_to(largest, (SUBLANES, self.columns))
            scratch.total[matrix + place] = jnp.broadcast_to(total, (SUBLANES, self.columns))
            scratch.weighted[matrix + place] = weighted

        ahead = put_scores(0)
        for place in range(self.spec.sizes.prefill_heads_at_once):
            now = ahead
            if place + 1 < self.spec.sizes.prefill_heads_at_once:
                ahead = put_scores(place + 1)
            add(place, now)

    def finish(self, num_chunks) -> None:
        """Puts the tile's outputs into scratch, turned back."""
        heads = self.spec.heads

        def turn_back(matrix, carry):
            chunk, head = self._split(matrix)
            out, lse = self._finished(matrix, head)
            rows = pl.ds(head * heads.padded_group, heads.padded_group)
            tokens = pl.ds(pl.multiple_of(chunk * self.chunk_tokens, SUBLANES), self.chunk_tokens)
            shape = (heads.padded_group, self.chunk_tokens, -1)
            num_columns = heads.padded_group * self.chunk_tokens
            out = out.T[:num_columns]
            for tile in range(self.spec.lane_tiles):
                tile_rows = pl.ds(tile * heads.num_out_rows + rows.start, heads.padded_group)
                lanes = slice(tile * LANES, (tile + 1) * LANES)
                self.scratch.out[tile_rows, tokens, :] = out[:, lanes].reshape(shape)
            if self.spec.return_lse:
                lse = jnp.broadcast_to(lse, (LANES, self.columns)).T
                self.scratch.lse[rows, tokens, :] = lse[:num_columns].reshape(shape)
            return carry

        lax.fori_loop(0, num_chunks * self.num_kv_heads, turn_back, 0)

    def _finished(self, matrix, head) -> tuple[jax.Array, jax.Array]:
        """Outputs [width, columns] and log-sum-exps [1, columns], right in the first parity's."""
        scratch, parities = self.scratch, self.spec.heads.tokens_per_row
        part = self.columns // parities
        head_dim = self.spec.pool.width // parities
        largest, total = scratch.largest[matrix][:1], scratch.total[matrix][:1]
        weighted = scratch.weighted[matrix]
        to_front = lambda x, parity: pltpu.roll(x, self.columns - parity * part, 1) if parity else x
        parts = [
            (
                to_front(jnp.broadcast_to(largest, (SUBLANES, self.columns)), parity)[:1],
                to_front(jnp.broadcast_to(total, (SUBLANES, self.columns)), parity)[:1],
                to_front(weighted[parity * head_dim : (parity + 1) * head_dim], parity),
            )
            for parity in range(parities)
        ]
        peak = parts[0][0]
        for part_largest, _, _ in parts[1:]:
            peak = jnp.maximum(peak, part_largest)
        sum_, out = jnp.zeros_like(peak), jnp.zeros((head_dim, self.columns), jnp.float32)
        if self.sinks is not None:
            sinks = self.sinks[head][:1]
            peak = jnp.maximum(peak, sinks)
            sum_ = jnp.exp2(sinks - peak)
        for part_largest, part_total, part_weighted in parts:
            factor = jnp.exp2(part_largest - peak)
            sum_ += factor * part_total
            out += factor * part_weighted
        lse = jnp.where(sum_ > 0, (peak + jnp.log2(sum_)) * math.log(2), -jnp.inf)
        out /= jnp.maximum(sum_, jnp.finfo(jnp.float32).tiny)
        if parities > 1:
            out = jnp.concatenate([out, jnp.zeros_like(out)])
        return out, lse

    def _copies(self, row, num_tokens, out_hbm, lse_hbm) -> list[Any]:
        pairs = [(self.scratch.out, out_hbm)]
        if self.spec.return_lse:
            pairs.append((self.scratch.lse, lse_hbm))
        return [
            pltpu.make_async_copy(
                source.at[:, pl.ds(0, num_tokens), :],
                target.at[:, pl.ds(row, num_tokens), :],
                self.scratch.out_written,
            )
            for source, target in pairs
        ]

    def write(self, row, num_tokens, out_hbm, lse_hbm) -> None:
        """Starts to write the tile's outputs to HBM."""
        for copy in self._copies(row, num_tokens, out_hbm, lse_hbm):
            copy.start()

    def wait_for_write(self, num_tokens, out_hbm, lse_hbm) -> None:
        """Waits until a tile of num_tokens tokens is written."""
        for copy in self._copies(0, num_tokens, out_hbm, lse_hbm):
            copy.wait()
