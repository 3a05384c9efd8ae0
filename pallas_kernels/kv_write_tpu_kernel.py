"""The kernel of the KV write: see `kv_write_tpu` for what it is for and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pool_storage import PoolLayout

LANES = 128
HASH_SLOTS = 1024
_HASH_MASK = HASH_SLOTS - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Everything static about a call. A tile holds tile_tokens tokens of a block, all heads."""

    layout: PoolLayout
    tile_rows: int
    num_tiles: int  # tiles in VMEM, a power of two
    chunk_tokens: int  # rows of the batch that are in VMEM at a time, twice

    @property
    def tile_tokens(self) -> int:
        return self.tile_rows * self.layout.tokens_per_row


def kernel(
    slots_ref,  # prefetch, int32[T]
    group_sizes_ref,  # prefetch, int32[T]: rows from this one on that share its tile, or 0
    num_rows_ref,  # prefetch, int32[1]: rows up to the last real one
    k_hbm,  # input, float32 or int32 [width / 128, T * Hkv, 128], T padded to whole chunks
    v_hbm,  # input, as k_hbm
    _,  # input, the pool: the output's buffer
    pool_hbm,  # output, [num_blocks, 2 * Hkv, rows, width]
    chunks_ref,  # scratch, as k_hbm [2, width / 128, 2, (tile + chunk + tile tokens) * Hkv, 128]
    tiles_ref,  # scratch, as pool_hbm [num_tiles, 2 * Hkv, 8, width]
    ring_ref,  # scratch, int32[2, num_tiles]: the group's first row, and its tile in the pool
    last_group_ref,  # scratch, int32[HASH_SLOTS]: last group of the tiles of each hash
    chunk_sems,  # scratch, DMA semaphores [2]
    read_sems,  # scratch, DMA semaphores [num_tiles]
    write_sems,  # scratch, DMA semaphores [num_tiles]
    *,
    size: Geometry,
):
    """Merges each group of rows into its tile of the pool.

    From HBM it reads the real rows' tokens once, in chunks, and the tiles that a group does not
    cover; it writes each group's tile. Chunks past the last real row are not read.

        group        g        g+1      g+2      ...          (ring of num_tiles tiles)
        read         ####     ####     ####                  half the ring ahead of the merge
        merge            #        #        #                 tokens -> rows of the tile
        write             ####     ####     ####             waited for when its place is needed

    A group whose tile is still in flight (rows that share a tile but are no neighbours in the
    batch) waits until all writes have arrived. A table of last groups by hash of the tile finds
    them: entries of groups that are not in flight, or that were never set, are told by the ring.
    """
    writer = _Writer(
        slots=slots_ref,
        group_sizes=group_sizes_ref,
        num_rows=num_rows_ref[0],
        tokens_hbm=(k_hbm, v_hbm),
        pool_hbm=pool_hbm,
        chunks=chunks_ref,
        tiles=tiles_ref,
        ring=ring_ref,
        last_group=last_group_ref,
        chunk_sems=chunk_sems,
        read_sems=read_sems,
        write_sems=write_sems,
        size=size,
    )
    zero = jnp.int32(0)
    pl.when(writer.num_rows > 0)(lambda: writer.for_chunk(zero, lambda copy: copy.start()))
    start = _Progress(zero, zero, zero, zero, chunk=jnp.int32(-1))
    lax.while_loop(lambda now: now.row < writer.num_rows, writer.run_until_stuck, start)


class _Progress(NamedTuple):
    """Where the kernel stands, int32[] each. Groups are counted from 0 in the batch's order."""

    row: jax.Array  # the next row of the batch to look at
    num_read: jax.Array  # groups whose tile has been asked for
    num_merged: jax.Array  # groups whose tile is on its way back
    num_written: jax.Array  # groups whose tile is known to have arrived
    chunk: jax.Array  # the chunk of tokens in use


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Writer:
    """The kernel's references, as described there, and the stages of its pipeline."""

    slots: Any
    group_sizes: Any
    num_rows: jax.Array
    tokens_hbm: tuple[Any, Any]
    pool_hbm: Any
    chunks: Any
    tiles: Any
    ring: Any
    last_group: Any
    chunk_sems: Any
    read_sems: Any
    write_sems: Any
    size: Geometry

    def run_until_stuck(self, now: _Progress) -> _Progress:
        """Takes groups until one's tile is in flight, or to the end; then all writes arrive."""
        now, _ = lax.while_loop(
            lambda state: state[1], self._read_and_merge, (now, self._is_free(now))
        )
        now = lax.while_loop(lambda now: now.num_merged < now.num_read, self._merge, now)
        lax.fori_loop(now.num_written, now.num_merged, self._wait_for_write, None)
        return now._replace(num_written=now.num_merged)

    def _read_and_merge(self, state: tuple[_Progress, jax.Array]) -> tuple[_Progress, jax.Array]:
        now = self._read(state[0])
        is_due = now.num_read - now.num_merged >= self.size.num_tiles // 2
        now = lax.cond(is_due, self._merge, lambda now: now, now)
        return now, self._is_free(now)

    def _is_free(self, now: _Progress) -> jax.Array:
        """Whether the next row exists and its tile is not in flight."""
        last_row = self.slots.shape[0] - 1
        tile, _ = _divide(self.slots[jnp.minimum(now.row, last_row)], self.size.tile_tokens)
        group = self.last_group[tile & _HASH_MASK]
        is_same_hash = (self.ring[1, self._place(group)] ^ tile) & _HASH_MASK == 0
        is_in_flight = (group >= now.num_written) & (group < now.num_read) & is_same_hash
        return (now.row < self.num_rows) & ~is_in_flight

    def _read(self, now: _Progress) -> _Progress:
        """Asks for the tile of the next row's group, or passes over a row to be dropped."""
        group_size = self.group_sizes[now.row]
        tile, _ = _divide(self.slots[now.row], self.size.tile_tokens)
        place = self._place(now.num_read)
        is_real = group_size > 0
        is_reused = is_real & (now.num_read - now.num_written >= self.size.num_tiles)
        pl.when(is_reused)(lambda: self._wait_for_write(now.num_read))

        @pl.when(is_real)
        def _():
            self.ring[0, place] = now.row
            self.ring[1, place] = tile
            self.last_group[tile & _HASH_MASK] = now.num_read

        is_partial = is_real & (group_size < self.size.tile_tokens)
        pl.when(is_partial)(lambda: self._tile_copy(tile, place, is_read=True).start())
        return now._replace(
            row=now.row + jnp.maximum(group_size, 1),
            num_read=now.num_read + is_real.astype(jnp.int32),
            num_written=now.num_written + is_reused.astype(jnp.int32),
        )

    def _merge(self, now: _Progress) -> _Progress:
        """Puts a group's tokens into its tile and sends it back."""
        tile_tokens, place = self.size.tile_tokens, self._place(now.num_merged)
        row, tile = self.ring[0, place], self.ring[1, place]
        group_size = self.group_sizes[row]
        chunk, index = _divide(row, self.size.chunk_tokens)
        pl.when(chunk != now.chunk)(
            lambda: lax.fori_loop(now.chunk + 1, chunk + 1, self._next_chunk, None)
        )
        is_partial = group_size < tile_tokens
        pl.when(is_partial)(lambda: self._tile_copy(tile, place, is_read=True).wait())
        _, first = _divide(self.slots[row], tile_tokens)
        # The token before the group's first by `first` belongs at the tile's start.
        start = tile_tokens + index - first
        tile_ref, chunk_ref = self.tiles.at[place], self.chunks.at[chunk & 1]
        _merge_tile(tile_ref, chunk_ref, start, first, group_size, self.size)
        self._tile_copy(tile, place, is_read=False).start()
        return now._replace(num_merged=now.num_merged + 1, chunk=chunk)

    def _place(self, group: jax.Array) -> jax.Array:
        return group & (self.size.num_tiles - 1)

    def _wait_for_write(self, group: jax.Array, _: None = None) -> None:
        # The size is all that a wait takes from its copy.
        self._tile_copy(0, self._place(group), is_read=False).wait()

    def _tile_copy(self, tile: jax.Array | int, place: jax.Array, *, is_read: bool) -> Any:
        tile_rows = self.size.tile_rows
        block, index = _divide(tile, self.size.layout.rows // tile_rows)
        rows = pl.ds(pl.multiple_of(index * tile_rows, tile_rows), tile_rows)
        in_pool, in_ring = self.pool_hbm.at[block, :, rows, :], self.tiles.at[place]
        if is_read:
            return pltpu.make_async_copy(in_pool, in_ring, self.read_sems.at[place])
        return pltpu.make_async_copy(in_ring, in_pool, self.write_sems.at[place])

    def _next_chunk(self, chunk: jax.Array, _: None = None) -> None:
        self.for_chunk(chunk, lambda copy: copy.wait())
        is_last = (chunk + 1) * self.size.chunk_tokens >= self.num_rows
        pl.when(~is_last)(lambda: self.for_chunk(chunk + 1, lambda copy: copy.start()))

    def for_chunk(self, chunk: jax.Array, act: Callable[[Any], None]) -> None:
        """Acts on the copies of a chunk of K and V, and of the next chunk's first tile's rows.

        A group may begin in this chunk and end in the next one.
        """
        num_kv_heads = self.size.layout.num_kv_heads
        chunk_rows = self.size.chunk_tokens * num_kv_heads
        tile_rows = self.size.tile_tokens * num_kv_heads
        first = pl.multiple_of(chunk * chunk_rows, chunk_rows)

        def copies(source_start, target_start, num_rows):
            for index, tokens_hbm in enumerate(self.tokens_hbm):
                source = tokens_hbm.at[:, pl.ds(source_start, num_rows), :]
                target = self.chunks.at[chunk & 1, :, index, pl.ds(target_start, num_rows), :]
                act(pltpu.make_async_copy(source, target, self.chunk_sems.at[chunk & 1]))

        copies(first, tile_rows, chunk_rows)
        if self.tokens_hbm[0].shape[1] > chunk_rows:
            pl.when((chunk + 1) * self.size.chunk_tokens < self.num_rows)(
                lambda: copies(first + chunk_rows, tile_rows + chunk_rows, tile_rows)
            )


def _divide(value: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder of an int32 that is not negative, cheaply where they are bits."""
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1), value & (divisor - 1)
    return lax.div(value, divisor), lax.rem(value, divisor)


def _merge_tile(tile_ref, chunk_ref, start, first, num_tokens, size: Geometry) -> None:
    """Puts `num_tokens` tokens into the tile [2 * Hkv, 8, width] from its token `first` on.

    chunk_ref [width / 128, 2, buffered tokens * Hkv, 128] holds the tile's token i, if it is new,
    at start + i, its heads one after another.
    """
    per_row, num_kv_heads = size.layout.tokens_per_row, size.layout.num_kv_heads
    plane = (size.tile_rows, LANES)
    place = lax.div(lax.broadcasted_iota(jnp.int32, plane, 1), size.layout.head_dim)
    place = place if per_row > 1 else jnp.zeros_like(place)
    tile_token = lax.broadcasted_iota(jnp.int32, plane, 0) * per_row + place
    is_new = (tile_token >= first) & (tile_token < first + num_tokens)

    def new_rows(column: int, kv: int, head: int) -> jax.Array:
        """The tile's rows of one head: [8, 128]."""
        stride = per_row * num_kv_heads

        def load(index: int) -> jax.Array:
            first_row = (start + index) * num_kv_heads + head
            if stride == 1:  # A stride of 1 does not compile.
                return chunk_ref[column, kv, pl.ds(first_row, size.tile_rows), :]
            return chunk_ref[column, kv, pl.ds(first_row, size.tile_rows, stride=stride), :]

        rows = load(0)
        for index in range(1, per_row):
            rows = jnp.where(place == index, load(index), rows)
        return rows

    for column in range(size.layout.width // LANES):
        lanes = slice(column * LANES, (column + 1) * LANES)
        heads = [new_rows(column, kv, head) for kv in range(2) for head in range(num_kv_heads)]
        new, old = jnp.stack(heads), tile_ref[:, :, lanes]
        is_float8 = old.dtype.itemsize == 1 and old.dtype != jnp.int8
        bits = pltpu.bitcast(old, jnp.int8) if is_float8 else old
        merged = jnp.where(is_new[None], new, bits.astype(new.dtype)).astype(bits.dtype)
        tile_ref[:, :, lanes] = pltpu.bitcast(merged, old.dtype) if is_float8 else merged
