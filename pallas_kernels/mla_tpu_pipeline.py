"""The scalar side of the latent attention kernel: what is computed next, and all its copies.

`Plan` cuts the batch into items, `Fetch` brings their table rows, queries and pages, `Write` takes
the finished tiles away. Each walks the same list; counts in scalar memory tell how far it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# An HBM -> SMEM copy must start at a multiple of as many entries of a block table.
TABLE_ROW_ENTRIES = 128
# Rings: sizes are powers of 2, so that a count's low bits are its place.
TABLE_RING_ROWS = 16
ITEM_RING = 32  # more than there are items between the plan and the write
ITEM_WORDS = 3
OUT_RING_TILES = 2
_PAGE_GROUP = 8
_ROWS_AT_ONCE = 16

# Where the kernel is, in scalar memory so that conditional code can move it.
STATE = range(11)
(
    PLAN_SEQ,  # sequence, its first query token, and KV block that the plan is at
    PLAN_TOKEN,
    PLAN_BLOCK,
    PLAN_ITEM,  # counts of items and table rows planned so far
    PLAN_ROW,
    FETCH_ITEM,  # item, its KV block, and table row that the fetch is at
    FETCH_BLOCK,
    FETCH_ROW,
    FETCH_STEP,  # count of blocks fetched
    COMPUTE_ITEM,
    COMPUTE_BLOCK,
) = STATE
STATE_WORDS = len(STATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of the kernel's work, all static."""

    block_tokens: int  # tokens of a KV block: a power of 2 of pages, at most 128
    part_scores: int  # scores, about, that are computed at once in a block seen in part
    num_buffers: int  # a power of 2: KV blocks in VMEM, and items whose queries are
    tile_tokens: int  # query tokens that one matrix product takes in a prefill
    item_tokens: int  # query tokens of a work item, a multiple of tile_tokens
    # What one step of the arithmetic takes, and how many steps are straight-line code.
    step_tokens: int = 128
    step_lanes: int = 128
    step_rows: int | None = None  # rows whose weights are made at once; None: all of a tile
    product_rows: int | None = None  # rows of a product whose parts are not joined; None: all
    steps_at_once: int = 1
    joins_parts: bool = False  # the products of a float32 operand's parts are one


class Item(NamedTuple):
    """Query tokens of one sequence: rows [row, row + num_tokens) of q, seeing below kv_end."""

    row: Any
    num_tokens: Any
    kv_end: Any


def ring_place(count: Any, size: int) -> Any:
    """count % size for a power of 2; jnp's % would also treat negative numbers, at a cost."""
    return count & (size - 1)


def ceil_div(number: Any, divisor: int) -> Any:
    """ceil(number / divisor) of a number >= 0."""
    return lax.div(number + (divisor - 1), jnp.int32(divisor))


class Plan:
    """Cuts the sequences into items, in order, and writes them down in a ring."""

    def __init__(
        self, kv_lens: Any, query_starts: Any, num_seqs: Any, state: Any, items: Any, tiling: Tiling
    ):
        self._kv_lens, self._query_starts, self._num_seqs = kv_lens, query_starts, num_seqs
        self.state, self._items, self.tiling = state, items, tiling

    def begin(self) -> None:
        self.state[PLAN_SEQ] = self._next_seq(jnp.int32(0))

    def _next_seq(self, seq: Any) -> Any:
        """The first sequence from `seq` on that has query rows, or num_seqs."""
        starts = self._query_starts
        last = starts.shape[0] - 2
        return lax.while_loop(
            lambda s: (s < self._num_seqs) & (starts[jnp.minimum(s, last) + 1] == starts[s]),
            lambda s: s + 1,
            seq,
        )

    def is_done(self) -> Any:
        return self.state[PLAN_SEQ] >= self._num_seqs

    def add_table_row(self, blocks_per_row: int) -> tuple[Any, Any, Any]:
        """Plans the next `blocks_per_row` blocks, with their item if they are its first.

        Returns (sequence, first block, count of table rows planned before).
        """
        state, starts = self.state, self._query_starts
        seq, token, block = state[PLAN_SEQ], state[PLAN_TOKEN], state[PLAN_BLOCK]
        item, row = state[PLAN_ITEM], state[PLAN_ROW]
        query_len = starts[seq + 1] - starts[seq]
        num_tokens = jnp.minimum(query_len - token, self.tiling.item_tokens)
        kv_end = self._kv_lens[seq] - query_len + token + num_tokens
        for at, word in enumerate(Item(starts[seq] + token, num_tokens, kv_end)):
            self._items[ring_place(item, ITEM_RING) * ITEM_WORDS + at] = word

        has_row = (block + blocks_per_row) * self.tiling.block_tokens < kv_end
        has_item = token + self.tiling.item_tokens < query_len
        state[PLAN_ROW] = row + 1
        state[PLAN_BLOCK] = jnp.where(has_row, block + blocks_per_row, 0)
        state[PLAN_ITEM] = jnp.where(has_row, item, item + 1)
        following = jnp.where(has_item, token + self.tiling.item_tokens, 0)
        state[PLAN_TOKEN] = jnp.where(has_row, token, following)

        @pl.when(~(has_row | has_item))
        def _():
            state[PLAN_SEQ] = self._next_seq(seq + 1)

        return seq, block, row

    def item(self, index: Any) -> Item:
        base = ring_place(index, ITEM_RING) * ITEM_WORDS
        return Item(*(self._items[base + at] for at in range(ITEM_WORDS)))


class Fetch:
    """Copies from HBM: table rows, query rows, pages. Each copy is awaited in the same order."""

    def __init__(
        self, plan: Plan, q_hbm, pool_hbm, tables_hbm, table, q, kv, table_sems, q_sems, kv_sems
    ):
        self._plan, self._state, self._tiling = plan, plan.state, plan.tiling
        self._q_hbm, self._pool_hbm, self._tables_hbm = q_hbm, pool_hbm, tables_hbm
        self._table, self._q, self._kv = table, q, kv
        self._table_sems, self._q_sems, self._kv_sems = table_sems, q_sems, kv_sems
        self._block_size = pool_hbm.shape[1]
        self._pages_per_block = self._tiling.block_tokens // self._block_size
        self._blocks_per_row = TABLE_ROW_ENTRIES // self._pages_per_block

    def start_table_row(self) -> None:
        """Plans the next table row and starts its copy, if there is one."""

        @pl.when(~self._plan.is_done())
        def _():
            seq, block, row = self._plan.add_table_row(self._blocks_per_row)
            entry = pl.multiple_of(block * self._pages_per_block, TABLE_ROW_ENTRIES)
            pltpu.make_async_copy(
                self._tables_hbm.at[seq, pl.ds(entry, TABLE_ROW_ENTRIES)],
                self._table_row(row),
                self._table_sems.at[ring_place(row, TABLE_RING_ROWS)],
            ).start()

    def _table_row(self, row: Any) -> Any:
        entry = pl.multiple_of(
            ring_place(row, TABLE_RING_ROWS) * TABLE_ROW_ENTRIES, TABLE_ROW_ENTRIES
        )
        return self._table.at[pl.ds(entry, TABLE_ROW_ENTRIES)]

    def start_block(self) -> None:
        """Starts the copies of the next block, and of its item's queries if it is their first."""
        state = self._state

        @pl.when(state[FETCH_ROW] < state[PLAN_ROW])
        def _():
            index, block, row = state[FETCH_ITEM], state[FETCH_BLOCK], state[FETCH_ROW]
            step, item = state[FETCH_STEP], self._plan.item(index)
            block_in_row = ring_place(block, self._blocks_per_row)
            num_left = item.kv_end - block * self._tiling.block_tokens

            @pl.when(block_in_row == 0)
            def _():
                entries = self._table_row(row)
                semaphore = self._table_sems.at[ring_place(row, TABLE_RING_ROWS)]
                pltpu.make_async_copy(entries, entries, semaphore).wait()
                self.start_table_row()

            @pl.when(block == 0)
            def _():
                self.query_copy(index, item).start()

            entry = ring_place(row, TABLE_RING_ROWS) * TABLE_ROW_ENTRIES
            self._start_pages(
                ring_place(step, self._tiling.num_buffers),
                num_left,
                entry + block_in_row * self._pages_per_block,
            )
            is_last = num_left <= self._tiling.block_tokens
            is_row_end = is_last | (block_in_row == self._blocks_per_row - 1)
            state[FETCH_STEP] = step + 1
            state[FETCH_BLOCK] = jnp.where(is_last, 0, block + 1)
            state[FETCH_ITEM] = index + is_last.astype(jnp.int32)
            state[FETCH_ROW] = row + is_row_end.astype(jnp.int32)

    def query_copy(self, index: Any, item: Item) -> Any:
        slot = ring_place(index, self._tiling.num_buffers)
        return pltpu.make_async_copy(
            self._q_hbm.at[pl.ds(item.row, item.num_tokens)],
            self._q.at[slot, pl.ds(0, item.num_tokens)],
            self._q_sems.at[slot],
        )

    def _num_pages(self, num_left: Any) -> Any:
        """Pages of a block that exist, where the item has num_left tokens from its start on."""
        num_pages = ceil_div(jnp.maximum(num_left, 0), self._block_size)
        return jnp.minimum(num_pages, self._pages_per_block)

    def _start_pages(self, slot: Any, num_left: Any, first_entry: Any) -> None:
        def start_page(page: Any) -> None:
            first_token = pl.multiple_of(page * self._block_size, self._block_size)
            pltpu.make_async_copy(
                self._pool_hbm.at[self._table[first_entry + page]],
                self._kv.at[slot, pl.ds(first_token, self._block_size)],
                self._kv_sems.at[slot],
            ).start()

        def start_pages(first: Any, count: int) -> None:
            for page in range(count):
                start_page(first + page)

        is_whole = num_left > self._tiling.block_tokens - self._block_size

        @pl.when(is_whole)
        def _():
            start_pages(0, self._pages_per_block)

        # Page after page in a loop would take twice the time: go by groups as far as they reach.
        @pl.when(~is_whole)
        def _():
            num_pages, group = self._num_pages(num_left), min(_PAGE_GROUP, self._pages_per_block)
            num_groups = lax.div(num_pages, jnp.int32(group))
            rest = num_groups * group
            lax.fori_loop(0, num_groups, lambda i, _: start_pages(i * group, group), None)
            lax.fori_loop(rest, num_pages, lambda page, _: start_page(page), None)

    def wait_pages(self, slot: Any, num_left: Any) -> None:
        """Waits for the pages of the block in `slot`."""
        num_tokens = self._num_pages(num_left) * self._block_size

        @pl.when(num_tokens > 0)
        def _():
            pages = self._kv.at[slot, pl.ds(0, pl.multiple_of(num_tokens, self._block_size))]
            pltpu.make_async_copy(pages, pages, self._kv_sems.at[slot]).wait()


class Write:
    """Copies finished tiles to HBM, two in flight."""

    def __init__(self, out_hbm, lse_hbm, out, lse, out_tokens, out_sems):
        self._pairs = [(out, out_hbm)] + ([] if lse_hbm is None else [(lse, lse_hbm)])
        self._out_tokens, self._sems = out_tokens, out_sems

    def begin(self) -> None:
        for slot in range(OUT_RING_TILES + 1):
            self._out_tokens[slot] = 0

    def _copies(self, slot: Any, row: Any, num_tokens: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(
                vmem.at[slot, pl.ds(0, num_tokens)],
                hbm.at[pl.ds(row, num_tokens)],
                self._sems.at[slot],
            )
            for vmem, hbm in self._pairs
        ]

    def _wait(self, slot: Any) -> None:
        num_tokens = self._out_tokens[slot]

        @pl.when(num_tokens > 0)
        def _():
            for copy in self._copies(slot, 0, num_tokens):
                copy.wait()

    def start(self, row: Any, num_tokens: Any, tile_tokens: int, finished: Any) -> None:
        """Puts the first num_tokens of a tile's tokens on their way to rows from `row` on.

        finished(first, count) gives the values [count, latent_dim] and logs [count, 128] of some
        of the tile's tokens x heads; they are taken a few at a time, to fit into registers.
        """
        done = self._out_tokens[OUT_RING_TILES]
        self._out_tokens[OUT_RING_TILES] = done + 1
        slot = ring_place(done, OUT_RING_TILES)
        self._wait(slot)
        num_heads = self._pairs[0][0].shape[2]
        count = math.gcd(num_heads, _ROWS_AT_ONCE)
        for token, head in itertools.product(range(tile_tokens), range(0, num_heads, count)):
            parts = finished(token * num_heads + head, count)
            for (vmem, _), part in zip(self._pairs, parts, strict=False):
                vmem[slot, token, pl.ds(head, count)] = part.astype(vmem.dtype)
        self._out_tokens[slot] = num_tokens
        for copy in self._copies(slot, row, num_tokens):
            copy.start()

    def finish(self, first_row: Any) -> None:
        """Waits for what is on its way, then fills the rows of padding from first_row on."""
        for slot in range(OUT_RING_TILES):
            self._wait(slot)
        num_rows = self._pairs[0][1].shape[0]

        @pl.when(first_row < num_rows)
        def _():
            for (vmem, _), fill in zip(self._pairs, (0, -jnp.inf), strict=False):
                vmem[0, 0] = jnp.full(vmem.shape[2:], fill, vmem.dtype)

            def start(row: Any, _: None) -> None:
                for copy in self._copies(0, row, 1):
                    copy.start()

            def wait(row: Any, _: None) -> None:
                for copy in self._copies(0, row, 1):
                    copy.wait()

            lax.fori_loop(first_row, num_rows, start, None)
            lax.fori_loop(first_row, num_rows, wait, None)
