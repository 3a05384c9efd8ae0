"""Brings the KV blocks of a list of work items from HBM, ahead of the computation.

A *tile* is some query rows of one sequence (a decode: its one row); an *item* is a tile and one
block of its KV tokens. Two cursors walk the list ahead of the computation:

    tables   HBM -> SMEM   128 block ids of a sequence, `TABLE_BUFFERS` - 1 chunks ahead
    fetch    HBM -> VMEM   the pages of an item (one DMA brings K and V of all heads of a page),
                           and the query rows of a tile with its first item
             notes         what the computation must know of the item, in SMEM
    compute                waits for its item, and is all that the vector units see

The rings wrap around, across items, tiles and sequences, so that no sequence starts with an empty
pipeline but the first. Pages that do not exist, or that no query sees, are not fetched. Block
tables never lie whole in scalar memory, whose 1 MiB they would soon fill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_tpu_spec import LANES, AttentionSpec

TABLE_BUFFERS = 8
# What a loop starts in one turn: its own overhead is seven bundles.
_PAGES_AT_ONCE = 8


class TokenRange(NamedTuple):
    """Tokens from `first` to before `end`: int32 scalars."""

    first: Any
    end: Any


@dataclasses.dataclass(frozen=True)
class WorkList:
    """The tiles to compute: those of sequences seq_at(0) to seq_at(count - 1)."""

    count: Any
    seq_at: Callable[[Any], Any]
    # (sequence) -> tiles; None: each sequence has one
    num_tiles: Callable[[Any], Any] | None
    # (sequence, tile) -> KV tokens that any of its rows sees
    tokens: Callable[[Any, Any], TokenRange]
    # (sequence, tile) -> its first row of q, and how many
    rows: Callable[[Any, Any], tuple[Any, Any]]


class Cursor(NamedTuple):
    """A place in the work list: int32 scalars."""

    index: Any  # of the sequence in the list
    tile: Any  # of the sequence
    part: Any  # of the tile's KV tokens: a block, or a chunk of the table


class State(NamedTuple):
    """What the loop over items carries: int32 scalars."""

    fetch: Cursor
    tables: Cursor
    computed_items: Any
    fetched_items: Any
    fetched_tiles: Any
    entered_chunks: Any


class Buffers(NamedTuple):
    """Scratch of a pipeline."""

    kv: Any  # VMEM pool dtype[buffers, 2 * Hkv, block rows, width]
    # VMEM float32[buffers, tile tokens, rows a token, 128] of a decode's tile, or
    # [buffers, rows a token, tile tokens, 128] of a prefill tile's
    q: Any
    tables: Any  # SMEM int32[TABLE_BUFFERS, table chunk]
    notes: Any  # SMEM int32[buffers, len(Item fields)]
    kv_arrived: Any  # DMA semaphores [buffers]
    q_arrived: Any  # DMA semaphores [buffers]
    tables_arrived: Any  # DMA semaphores [TABLE_BUFFERS]

    @staticmethod
    def scratch(
        spec: AttentionSpec, *, block_tokens: int, num_buffers: int, tile_tokens: int | None
    ) -> tuple[Any, ...]:
        """The scratch shapes, in the order of the fields. num_buffers is a power of two;
        tile_tokens is None for decodes."""
        rows = block_tokens // spec.pool.tokens_per_row
        kv_shape = (num_buffers, 2 * spec.pool.num_kv_heads, rows, spec.pool.width)
        q_shape = (num_buffers, spec.tile_tokens, spec.rows_a_token, LANES)
        if tile_tokens is not None:
            q_shape = (num_buffers, spec.rows_a_token, tile_tokens, LANES)
        return (
            pltpu.VMEM(kv_shape, spec.pool_dtype),
            pltpu.VMEM(q_shape, jnp.float32),
            pltpu.SMEM((TABLE_BUFFERS, spec.table_chunk), jnp.int32),
            pltpu.SMEM((num_buffers, len(Item._fields)), jnp.int32),
            pltpu.SemaphoreType.DMA((num_buffers,)),
            pltpu.SemaphoreType.DMA((num_buffers,)),
            pltpu.SemaphoreType.DMA((TABLE_BUFFERS,)),
        )


class Item(NamedTuple):
    """A tile and one block of its KV tokens: int32 scalars."""

    seq: Any
    tile: Any
    tile_number: Any  # of all tiles of the work list
    first_token: Any  # of the block
    # What any row of the tile sees, counted from first_token, not clipped to the block
    visible_first: Any
    visible_end: Any
    # What came from HBM: pages of the block
    first_page: Any
    end_page: Any
    last_block: Any  # id of the block in the last of these pages
    is_first: Any  # of the tile's items
    is_last: Any


class Pages(NamedTuple):
    """Pages of one item to fetch: int32 scalars."""

    table_slot: Any
    table_offset: Any
    slot: Any
    first: Any
    end: Any


class KvPipeline:
    """The cursors over one work list."""

    def __init__(
        self, spec: AttentionSpec, work: WorkList, token_arrays, pool, tables, buffers: Buffers
    ):
        """token_arrays (see `attention_kernel`), pool and tables are refs in HBM."""
        self.spec, self.work, self.buffers = spec, work, buffers
        self.token_arrays, self.pool, self.tables = token_arrays, pool, tables
        self.num_buffers = buffers.kv.shape[0]
        self.block_tokens = buffers.kv.shape[2] * spec.pool.tokens_per_row
        self.block_pages = self.block_tokens // spec.pool.block_size
        self.blocks_per_chunk = -(-spec.table_chunk // self.block_pages)

    # --- walking the list ---------------------------------------------------------------------

    def _seq(self, index):
        """The sequence at `index`; of an index past the end, some sequence."""
        return self.work.seq_at(jnp.maximum(jnp.minimum(index, self.work.count - 1), 0))

    def _first_part(self, index, tile, tokens: int):
        """The first part of `tokens` tokens of a tile."""
        if self.spec.sliding_window is None:
            return jnp.int32(0)
        return divide(self.work.tokens(self._seq(index), tile).first, tokens)

    def _first_cursor(self, tokens: int) -> Cursor:
        zero = jnp.int32(0)
        return Cursor(zero, zero, self._first_part(zero, zero, tokens))

    def _next(self, cursor: Cursor, seq, is_last, tokens: int) -> Cursor:
        """The next part of the same tile, or the first of the next tile."""
        tile, ends_seq = cursor.tile, is_last
        if self.work.num_tiles is not None:
            ends_seq = is_last & (tile + 1 == self.work.num_tiles(seq))
            tile = jnp.where(ends_seq, 0, tile + is_last.astype(jnp.int32))
        index = cursor.index + ends_seq.astype(jnp.int32)
        first = self._first_part(index, tile, tokens)
        return Cursor(index, tile, jnp.where(is_last, first, cursor.part + 1))

    # --- tables -------------------------------------------------------------------------------

    @property
    def _chunk_tokens(self) -> int:
        return self.blocks_per_chunk * self.block_tokens

    def _table_copy(self, seq, part, slot):
        chunk = self.spec.table_chunk
        row = self.tables.at[seq]
        if self.spec.table_width != chunk:
            row = row.at[pl.ds(pl.multiple_of(part * chunk, chunk), chunk)]
        return pltpu.make_async_copy(
            row, self.buffers.tables.at[slot], self.buffers.tables_arrived.at[slot]
        )

    def _fetch_table(self, cursor: Cursor, slot) -> Cursor:
        seq = self._seq(cursor.index)

        @pl.when(cursor.index < self.work.count)
        def _():
            self._table_copy(seq, cursor.part, slot).start()

        end = self.work.tokens(seq, cursor.tile).end
        is_last = (cursor.part + 1) * self._chunk_tokens >= end
        return self._next(cursor, seq, is_last, self._chunk_tokens)

    # --- fetch --------------------------------------------------------------------------------

    def start(self) -> State:
        """Fills the rings."""
        tables = self._first_cursor(self._chunk_tokens)
        tables = lax.fori_loop(
            0, TABLE_BUFFERS - 1, lambda slot, cursor: self._fetch_table(cursor, slot), tables
        )
        zero = jnp.int32(0)
        state = State(self._first_cursor(self.block_tokens), tables, zero, zero, zero, zero)

        def fetch_one(_, state: State) -> State:
            state, pages = self.fetch(state)
            self.start_pages(pages)
            return state

        return lax.fori_loop(0, self.num_buffers - 1, fetch_one, state)

    def fetch(self, state: State) -> tuple[State, Pages]:
        """Takes the fetch cursor's item, if there is one, into the ring and moves the cursor on.

        Its query rows are on their way then; its pages are the caller's to start.
        """
        zero = jnp.int32(0)
        nothing = Pages(zero, zero, zero, zero, zero)
        return lax.cond(
            state.fetch.index < self.work.count,
            lambda: self._fetch(state),
            lambda: (state, nothing),
        )

    def _fetch(self, state: State) -> tuple[State, Pages]:
        cursor = state.fetch
        seq = self._seq(cursor.index)
        reads = self.work.tokens(seq, cursor.tile)
        first_token = cursor.part * self.block_tokens
        is_last = first_token + self.block_tokens >= reads.end
        is_first = cursor.part == 0
        if self.spec.sliding_window is not None:
            is_first = first_token <= reads.first
        first_page, end_page = self._pages_of(reads, first_token)
        tables, entered = self._enter_table(state, seq, is_first)
        pages = Pages(
            table_slot=modulo(entered + TABLE_BUFFERS - 1, TABLE_BUFFERS),
            table_offset=modulo(cursor.part, self.blocks_per_chunk) * self.block_pages,
            slot=modulo(state.fetched_items, self.num_buffers),
            first=first_page,
            end=end_page,
        )
        item = Item(
            seq=seq,
            tile=cursor.tile,
            tile_number=state.fetched_tiles,
            first_token=first_token,
            visible_first=reads.first - first_token,
            visible_end=reads.end - first_token,
            first_page=first_page,
            end_page=end_page,
            last_block=self._last_block(pages),
            is_first=is_first.astype(jnp.int32),
            is_last=is_last.astype(jnp.int32),
        )
        for place, value in enumerate(item):
            self.buffers.notes[pages.slot, place] = jnp.int32(value)

        @pl.when(is_first)
        def _():
            for copy in self._q_copies(item):
                copy.start()

        state = State(
            fetch=self._next(cursor, seq, is_last, self.block_tokens),
            tables=tables,
            computed_items=state.computed_items,
            fetched_items=state.fetched_items + 1,
            fetched_tiles=state.fetched_tiles + is_last.astype(jnp.int32),
            entered_chunks=entered,
        )
        return state, pages

    def _pages_of(self, reads: TokenRange, first_token) -> tuple[Any, Any]:
        """First and end page of the block that starts at `first_token`."""
        block_size = self.spec.pool.block_size
        end = divide(reads.end - first_token + block_size - 1, block_size)
        end = jnp.minimum(end, self.block_pages)
        if self.spec.sliding_window is None:
            return jnp.int32(0), end
        return divide(jnp.maximum(reads.first - first_token, 0), block_size), end

    def _enter_table(self, state: State, seq, is_first) -> tuple[Cursor, Any]:
        """Waits for the table's chunk if the fetch cursor enters one; the chunk that it left
        makes room for one more."""
        cursor = state.fetch
        enters = is_first
        if self.spec.table_width != self.spec.table_chunk:
            enters |= modulo(cursor.part, self.blocks_per_chunk) == 0

        def enter() -> Cursor:
            slot = modulo(state.entered_chunks, TABLE_BUFFERS)
            self._table_copy(seq, 0, slot).wait()
            return self._fetch_table(
                state.tables, modulo(state.entered_chunks + TABLE_BUFFERS - 1, TABLE_BUFFERS)
            )

        tables = lax.cond(enters, enter, lambda: state.tables)
        return tables, state.entered_chunks + enters.astype(jnp.int32)

    def _last_block(self, pages: Pages):
        if not self.spec.appends:
            return jnp.int32(0)
        return self.buffers.tables[
            pages.table_slot, pages.table_offset + jnp.maximum(pages.end - 1, 0)
        ]

    def start_page(self, pages: Pages, page) -> None:
        block_id = self.buffers.tables[pages.table_slot, pages.table_offset + page]
        rows = self.spec.pool.rows
        start = page * rows if isinstance(page, int) else pl.multiple_of(page * rows, rows)
        pltpu.make_async_copy(
            self.pool.at[block_id],
            self.buffers.kv.at[pages.slot, :, pl.ds(start, rows), :],
            self.buffers.kv_arrived.at[pages.slot],
        ).start()

    def start_pages(self, pages: Pages) -> None:
        """Starts all pages in a loop, eight at a time as long as there are so many."""

        def group(number, carry):
            for place in range(_PAGES_AT_ONCE):
                self.start_page(pages, pages.first + number * _PAGES_AT_ONCE + place)
            return carry

        def one(page, carry):
            self.start_page(pages, page)
            return carry

        groups = jnp.int32(0)
        if self.block_pages >= _PAGES_AT_ONCE:
            groups = divide(jnp.maximum(pages.end - pages.first, 0), _PAGES_AT_ONCE)
            lax.fori_loop(0, groups, group, 0)
        lax.fori_loop(pages.first + groups * _PAGES_AT_ONCE, pages.end, one, 0)

    def _q_copies(self, item: Item) -> list[Any]:
        """All that the tile's tokens bring, array after array."""
        row, num_tokens = self.work.rows(item.seq, item.tile)
        slot = self.q_slot(item)
        copies, first = [], 0
        for array in self.token_arrays:
            rows = pl.ds(first, array.shape[1 if self.spec.decode_only else 0])
            target = self.buffers.q.at[slot]
            if self.spec.tile_tokens > 1:
                source = array.at[pl.ds(row, num_tokens)]
                target = target.at[pl.ds(0, num_tokens), rows]
            elif self.work.num_tiles is not None:
                source = array.at[:, pl.ds(row, num_tokens), :]
                target = target.at[rows, pl.ds(0, num_tokens), :]
            else:
                source, target = token_rows(self.spec, array, row), target.at[0, rows]
            arrived = self.buffers.q_arrived.at[slot]
            copies.append(pltpu.make_async_copy(source, target, arrived))
            first += rows.size
        return copies

    # --- compute ------------------------------------------------------------------------------

    def q_slot(self, item: Item):
        return modulo(item.tile_number, self.num_buffers)

    def slot(self, state: State):
        """The ring's slot of the item to compute."""
        return modulo(state.computed_items, self.num_buffers)

    def wait(self, state: State) -> Item:
        """Waits for the next item to compute."""
        slot = self.slot(state)
        notes = self.buffers.notes
        item = Item(*(notes[slot, place] for place in range(len(Item._fields))))
        item = item._replace(is_first=item.is_first == 1, is_last=item.is_last == 1)
        rows = self.spec.pool.rows
        num_rows = pl.multiple_of((item.end_page - item.first_page) * rows, rows)
        # Waits count bytes: which rows these are does not matter.
        arrived = self.buffers.kv.at[slot, :, pl.ds(0, num_rows), :]
        pltpu.make_async_copy(arrived, arrived, self.buffers.kv_arrived.at[slot]).wait()

        @pl.when(item.is_first)
        def _():
            for copy in self._q_copies(item):
                copy.wait()

        return item


def token_rows(spec: AttentionSpec, array, token):
    """The rows of one token of q or of an output in HBM; see `attention_kernel` for its shape."""
    return array.at[token] if spec.decode_only else array.at[:, token, :]


def divide(value, divisor: int):
    """value // divisor for value >= 0; a shift where the divisor is a power of two."""
    if divisor & (divisor - 1) == 0:
        return lax.shift_right_logical(value, jnp.int32(divisor.bit_length() - 1))
    return lax.div(value, jnp.int32(divisor))


def modulo(value, divisor: int):
    """value % divisor for value >= 0; a mask where the divisor is a power of two."""
    if divisor & (divisor - 1) == 0:
        return value & (divisor - 1)
    return lax.rem(value, jnp.int32(divisor))
