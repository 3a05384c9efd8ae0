"""Carries out `BlockMoves` on the KV pool, and keeps the blocks that are swapped out.

    swap out   gather to new arrays -> host, under way while the step runs -> settle: host store
    copies     one call for all layers, in the pool's buffers
    swap in    host store -> staged, contiguous -> device -> scatter into the pool's buffers

Blocks travel in chunks of a fixed size, of all layers each, so that few programs do for every
number of blocks and one transfer moves many. A list shorter than its chunk is filled up with the
null block. On a mesh every row moves blocks of its own pool, all rows in one call.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from paged_jax.block_moves import BlockMoves, BlockPairs
from paged_jax.kv_pool import KVPool
from pallas_kernels import copy_blocks, gather_blocks, scatter_blocks

Layers = tuple[jax.Array, ...]

_COPIES_A_CALL = 64  # Those that are not real cost nothing.
# A swap's chunk is copied whole, so that a few blocks go in small ones. Large ones amortise the
# call, and are bounded because they take device memory beside the pool.
_SMALL_CHUNK_BLOCKS = 8
_LARGE_CHUNK_BLOCKS = 64
_MAX_CHUNK_BYTES = 64 * 2**20
_ALIGNMENT_BYTES = 64
_ROWS = "data"  # The axis of a mesh whose rows have pools of their own.
_MAX_CHUNKS_UNDER_WAY = 2  # Large ones, in each direction: one arrives while the next one starts.


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Blocks that travel together, as swaps number them on both sides."""

    device_ids: np.ndarray  # int32[mesh rows, chunk size], filled up with the null block
    host_ids: list[np.ndarray]  # of each mesh row int32[its blocks], the real ones, in the store

    @property
    def size(self) -> int:
        return self.device_ids.shape[1]

    @property
    def counts(self) -> np.ndarray:
        """int32[mesh rows], blocks of each."""
        return np.array([len(ids) for ids in self.host_ids], np.int32)

    @property
    def num_blocks(self) -> int:
        return int(self.counts.sum())

    def places(self) -> Iterator[tuple[np.ndarray, slice]]:
        """Of each mesh row its host blocks, and where they stand in a chunk's arrays."""
        for row, ids in enumerate(self.host_ids):
            yield ids, slice(row * self.size, row * self.size + len(ids))


class BlockMover:
    """Moves blocks within a KV pool, and between it and a store in host memory.

    Not safe for several threads. If `apply` or `settle` raises anything but a ValueError for its
    moves, call `reset` before the next step, and make a new pool if `KVPool.is_deleted`.

    Args:
      pool: gives shapes, dtypes and devices; it is not kept.
      num_host_blocks: blocks of the host store, block 0, which is never used, included. Its memory
        is taken from the system page by page, as blocks arrive.
      implementation: of the block ops, see `pallas_kernels.copy_blocks`.
      mesh: what the pool is spread over, see `sharding`; each of its rows then has
        `num_host_blocks` in the store.

    Attributes:
      transfer_bytes: of all blocks swapped so far, out and in, without what fills up chunks.
      transfer_seconds: what the host has spent on them: staging, dispatching, waiting for what has
        not arrived, and storing. Work that a device did meanwhile is not in it.

    Raises:
      ValueError: num_host_blocks is negative, or the implementation does not take the pool (when
        it is compiled).
      MemoryError: the host's address space has no room for the store.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_host_blocks: int = 0,
        implementation: str | None = None,
        mesh: Mesh | None = None,
    ):
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks={num_host_blocks}: it must be 0 (no swap) or more")
        self._mesh = mesh
        self._num_rows = 1 if mesh is None else mesh.shape[_ROWS]
        self.num_blocks = pool.num_blocks // self._num_rows
        self.num_host_blocks = num_host_blocks
        self.bytes_a_block = pool.num_bytes // pool.num_blocks
        self.transfer_bytes = 0
        self.transfer_seconds = 0.0
        self._implementation = implementation
        self._layers = tuple(
            jax.ShapeDtypeStruct(layer.shape, layer.dtype, sharding=layer.sharding)
            for layer in pool.layers
        )
        self._shardings = tuple(layer.sharding for layer in pool.layers)
        self._pinned_shardings = tuple(map(pinned_sharding, self._shardings))
        self._store = _empty_blocks(self._layers, self._num_rows * num_host_blocks)
        large = _large_chunk_blocks(self.bytes_a_block)
        self._chunk_sizes = (min(_SMALL_CHUNK_BLOCKS, large), large)
        self._programs: dict[tuple[str, int], jax.stages.Compiled] = {}
        # Gathered, on their way to the host, oldest first.
        self._outgoing: collections.deque[tuple[_Chunk, Layers]] = collections.deque()

    @property
    def num_host_bytes(self) -> int:
        """Size of the host store in bytes, whether its pages are in use or not."""
        return self._num_rows * self.num_host_blocks * self.bytes_a_block

    @property
    def temporary_bytes(self) -> int:
        """Device memory that swaps hold at most beside the pool, both directions together."""
        return swap_temporary_bytes(self.bytes_a_block) if self.num_host_blocks else 0

    def warm_up(self) -> None:
        """Compiles every program that `apply` may need; those of swaps only with a host store."""
        keys = [("copy", _COPIES_A_CALL)]
        if self.num_host_blocks:
            keys += [(name, n) for n in set(self._chunk_sizes) for name in ("gather", "scatter")]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            list(threads.map(self._program, keys))

    def apply(self, pool: KVPool, moves: BlockMoves | Sequence[BlockMoves]) -> KVPool:
        """Dispatches a step's moves, which then come before whatever is dispatched later.

        The pool is donated and written in its own buffers. Blocks swapped out are on their way when
        this returns, and `settle` stores them. It waits for blocks on their way if a swap in reads
        one of them, and for the oldest when they would take more than `temporary_bytes`.

        Args:
          pool: of the shapes that the mover was made for.
          moves: see `BlockMoves`; blocks are numbered from 1. A host block that nothing was
            swapped out to holds anything. With a mesh, those of each of its rows.

        Raises:
          ValueError: a block is out of range, written twice, or copied from and to. Nothing has
            moved, and the pool is as it was.
        """
        rows = [moves] if isinstance(moves, BlockMoves) else list(moves)
        for own in rows:
            self._check(own)
        staged = self._stage([own.swap_in for own in rows])  # The store before the step.
        self._send_out(pool.layers, [own.swap_out for own in rows])
        layers, copies = pool.layers, [own.copies for own in rows]
        for start in range(0, max(map(len, copies)), _COPIES_A_CALL):
            ids = np.zeros((2, self._num_rows, _COPIES_A_CALL), np.int32)
            counts = np.zeros(self._num_rows, np.int32)
            for row, pairs in enumerate(copies):
                part = np.array(pairs[start : start + _COPIES_A_CALL], np.int32).reshape(-1, 2)
                ids[:, row, : len(part)], counts[row] = part.T, len(part)
            layers = self._program(("copy", _COPIES_A_CALL))(layers, ids[0], ids[1], counts)
        return dataclasses.replace(pool, layers=self._send_in(layers, staged))

    def settle(self) -> None:
        """Stores what is on its way to the host; best called when a step's results were read."""
        while self._outgoing:
            self._store_oldest()

    def reset(self) -> None:
        """Forgets what is on its way to the host; the host blocks it was for hold anything.

        Blocks stored before, and the counters, stay.
        """
        self._outgoing.clear()

    def measure_bandwidth(self, pool: KVPool) -> tuple[KVPool, float]:
        """Takes a large chunk of blocks to the host and back, waiting for each way, three times.

        Args:
          pool: donated; its blocks hold the same afterwards.

        Returns:
          The pool, and the median of bytes a second: the blocks' bytes out and in, by the seconds
          of both ways. The counters are left alone.

        Raises:
          ValueError: there is no host store.
        """
        if not self.num_host_blocks:
            raise ValueError("num_host_blocks=0: there is no swap to measure; give it 2 or more")
        num_blocks = min(self._chunk_sizes[-1], self.num_blocks - 1)
        blocks = _empty_blocks(self._layers, num_blocks)
        pairs = tuple((block, block - 1) for block in range(1, num_blocks + 1))
        idle = [()] * (self._num_rows - 1)
        (chunk,) = list(self._chunks([pairs, *idle], sizes=self._chunk_sizes[-1:]))
        layers, seconds = jax.block_until_ready(pool.layers), []
        for _ in range(3):
            start = time.perf_counter()
            _write_rows(blocks, chunk, self._start_gather(layers, chunk))
            layers = self._scatter_chunk(layers, chunk, _read_rows(blocks, chunk))
            jax.block_until_ready(layers)
            seconds.append(time.perf_counter() - start)
        num_bytes = 2 * num_blocks * self.bytes_a_block
        return dataclasses.replace(pool, layers=layers), num_bytes / statistics.median(seconds)

    def _check(self, moves: BlockMoves) -> None:
        for name in ("swap_out", "copies", "swap_in"):
            pairs = getattr(moves, name)
            is_host = (name == "swap_in", name == "swap_out")
            if pairs and any(is_host) and not self.num_host_blocks:
                raise ValueError(
                    f"{name} holds {pairs[0]}, and num_host_blocks=0; give the mover a host store"
                )
            limits = [self.num_host_blocks if host else self.num_blocks for host in is_host]
            for i, pair in enumerate(pairs):
                for block, limit, host in zip(pair, limits, is_host, strict=True):
                    if not 0 < block < limit:
                        raise ValueError(
                            f"{name}[{i}]={pair}: {'host' if host else 'device'} block {block} is "
                            f"out of range; use 1 to {limit - 1}, since block 0 is the null block"
                        )
        _check_once("swap_out", "host", [host for _, host in moves.swap_out])
        written = [dst for _, dst in moves.copies] + [dst for _, dst in moves.swap_in]
        _check_once("copies and swap_in", "device", written)
        both = {src for src, _ in moves.copies}.intersection(dst for _, dst in moves.copies)
        if both:
            raise ValueError(
                f"copies has device block {min(both)} as a source and as a destination; copy from "
                "where its content came from, or in the next step"
            )

    def _chunks(self, rows: Sequence[BlockPairs], sizes: tuple[int, ...]) -> Iterator[_Chunk]:
        """(device, host) pairs of each row in chunks of the smallest and largest of `sizes`."""
        small, large = sizes[0], sizes[-1]
        ids = [np.array(pairs, np.int32).reshape(-1, 2) for pairs in rows]
        start, end = 0, max(map(len, ids))
        while start < end:
            # Several small chunks cost less than a large one that is half empty.
            size = large if 2 * (end - start) > large else small
            device_ids = np.zeros((self._num_rows, size), np.int32)
            host_ids = []
            for row, own in enumerate(ids):
                part = own[start : start + size]
                device_ids[row, : len(part)] = part[:, 0]
                host_ids.append(part[:, 1] + row * self.num_host_blocks)
            start += size
            yield _Chunk(device_ids, host_ids)

    def _stage(self, swap_in: Sequence[BlockPairs]) -> list[tuple[_Chunk, list[np.ndarray]]]:
        """The wanted host blocks, in arrays that nothing else ever writes to."""
        start = time.perf_counter()
        rows = [tuple((device, host) for host, device in pairs) for pairs in swap_in]
        chunks = list(self._chunks(rows, self._chunk_sizes))
        waited = 0.0
        if chunks and self._outgoing:
            under_way = {block for chunk, _ in self._outgoing for block in _host_blocks(chunk)}
            if any(not under_way.isdisjoint(_host_blocks(chunk)) for chunk in chunks):
                before = self.transfer_seconds
                self.settle()
                waited = self.transfer_seconds - before  # Counted there.
        staged = [(chunk, _read_rows(self._store, chunk)) for chunk in chunks]
        self.transfer_seconds += time.perf_counter() - start - waited
        return staged

    def _send_out(self, layers: Layers, swap_out: Sequence[BlockPairs]) -> None:
        room = _MAX_CHUNKS_UNDER_WAY * self._chunk_sizes[-1]
        for chunk in self._chunks(swap_out, self._chunk_sizes):
            # Oldest first, so that a host block swapped out to twice ends with the later content.
            while sum(c.size for c, _ in self._outgoing) + chunk.size > room:
                self._store_oldest()
            start = time.perf_counter()
            self._outgoing.append((chunk, self._start_gather(layers, chunk)))
            self.transfer_seconds += time.perf_counter() - start

    def _start_gather(self, layers: Layers, chunk: _Chunk) -> Layers:
        """Copies of a chunk's blocks, on their way to the host."""
        blocks = self._program(("gather", chunk.size))(layers, chunk.device_ids)
        if None not in self._pinned_shardings:
            return jax.device_put(blocks, self._pinned_shardings)
        for part in blocks:
            part.copy_to_host_async()
        return blocks

    def _store_oldest(self) -> None:
        start = time.perf_counter()
        chunk, blocks = self._outgoing.popleft()
        _write_rows(self._store, chunk, blocks)
        self.transfer_bytes += chunk.num_blocks * self.bytes_a_block
        self.transfer_seconds += time.perf_counter() - start

    def _send_in(self, layers: Layers, staged: list[tuple[_Chunk, list[np.ndarray]]]) -> Layers:
        start = time.perf_counter()
        room, num_under_way = _MAX_CHUNKS_UNDER_WAY * self._chunk_sizes[-1], 0
        for chunk, blocks in staged:
            num_under_way += chunk.size
            if num_under_way > room:  # What the device still holds of earlier chunks is freed.
                jax.block_until_ready(layers)
                num_under_way = chunk.size
            layers = self._scatter_chunk(layers, chunk, blocks)
            self.transfer_bytes += chunk.num_blocks * self.bytes_a_block
        self.transfer_seconds += time.perf_counter() - start
        return layers

    def _scatter_chunk(self, layers: Layers, chunk: _Chunk, blocks: list[np.ndarray]) -> Layers:
        on_device = jax.device_put(tuple(blocks), self._shardings)
        program = self._program(("scatter", chunk.size))
        return program(layers, chunk.device_ids, chunk.counts, on_device)

    def _program(self, key: tuple[str, int]) -> jax.stages.Compiled:
        """The program of an op ("copy", "gather", "scatter") and a number of block ids."""
        if key not in self._programs:
            self._programs[key] = self._lower(*key).compile()
        return self._programs[key]

    def _lower(self, name: str, num_ids: int) -> jax.stages.Lowered:
        layers, ops = self._layers, block_ops(self._mesh, self._implementation)
        ids = jax.ShapeDtypeStruct((self._num_rows, num_ids), np.int32)
        counts = jax.ShapeDtypeStruct((self._num_rows,), np.int32)
        if name == "copy":
            return ops["copy"].lower(layers, ids, ids, counts)
        if name == "gather":
            return ops["gather"].lower(layers, ids)
        blocks = tuple(
            jax.ShapeDtypeStruct(
                (self._num_rows * num_ids, *layer.shape[1:]), layer.dtype, sharding=layer.sharding
            )
            for layer in layers
        )
        return ops["scatter"].lower(layers, ids, counts, blocks)


@functools.cache  # A second mover of the same shapes compiles nothing.
def block_ops(mesh: Mesh | None, implementation: str | None) -> dict[str, Any]:
    """The block ops, jitted: each row of a mesh moves its own blocks. Their ids are [rows, N]."""

    def own(array: jax.Array) -> jax.Array:
        row = 0 if mesh is None or mesh.shape[_ROWS] == 1 else lax.axis_index(_ROWS)
        return array[row]

    def copy(layers, src, dst, counts):
        of = (own(src), own(dst), own(counts))
        return copy_blocks(layers, *of, implementation=implementation)

    def gather(layers, ids):
        return gather_blocks(layers, own(ids), implementation=implementation)

    def scatter(layers, ids, counts, blocks):
        of = (own(ids), own(counts), blocks)
        return scatter_blocks(layers, *of, implementation=implementation)

    if mesh is not None:
        spread, whole = P(*mesh.axis_names), P()
        on_rows = functools.partial(jax.shard_map, mesh=mesh, out_specs=spread, check_vma=False)
        copy = on_rows(copy, in_specs=(spread, whole, whole, whole))
        gather = on_rows(gather, in_specs=(spread, whole))
        scatter = on_rows(scatter, in_specs=(spread, whole, whole, spread))
    return {
        "copy": jax.jit(copy, donate_argnums=0),
        "gather": jax.jit(gather),
        "scatter": jax.jit(scatter, donate_argnums=0),
    }


def swap_temporary_bytes(bytes_a_block: int) -> int:
    """Device memory that the swaps of a mover hold at most beside the pool."""
    return 2 * _MAX_CHUNKS_UNDER_WAY * _large_chunk_blocks(bytes_a_block) * bytes_a_block


def _large_chunk_blocks(bytes_a_block: int) -> int:
    return max(1, min(_LARGE_CHUNK_BLOCKS, _MAX_CHUNK_BYTES // bytes_a_block))


def pinned_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding | None:
    """The same devices' pinned host memory, which DMA engines reach; None if it gains nothing."""
    device = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:
        return None
    return sharding.with_memory_kind("pinned_host")


def _check_once(fields: str, where: str, blocks: list[int]) -> None:
    if len(set(blocks)) < len(blocks):
        twice = next(block for block, n in collections.Counter(blocks).items() if n > 1)
        raise ValueError(
            f"{fields} write to {where} block {twice} more than once; give it one content a step"
        )


def _empty_blocks(layers: Sequence[Any], num_blocks: int) -> list[np.ndarray]:
    """Room for blocks of each layer, in one piece of memory that holds anything.

    Each array starts where XLA's CPU backend can read it in place: `jax.device_put` of a chunk of
    47 MB takes 1 ms then, and 5 to 15 ms elsewhere.
    """
    shapes = [(num_blocks, *layer.shape[1:]) for layer in layers]
    num_bytes = [
        math.prod(s) * np.dtype(x.dtype).itemsize for s, x in zip(shapes, layers, strict=True)
    ]
    memory = np.empty(sum(num_bytes) + _ALIGNMENT_BYTES * (len(shapes) + 1), np.uint8)
    blocks, start = [], 0
    for layer, shape, size in zip(layers, shapes, num_bytes, strict=True):
        start += -(memory.ctypes.data + start) % _ALIGNMENT_BYTES
        blocks.append(memory[start : start + size].view(layer.dtype).reshape(shape))
        start += size
    return blocks


def _read_rows(store: list[np.ndarray], chunk: _Chunk) -> list[np.ndarray]:
    """A chunk's host blocks in new arrays of the chunk's size.

    New ones each time, because a device may read them in place until its work is done.
    """
    blocks = _empty_blocks(store, chunk.device_ids.size)
    for layer, part in zip(store, blocks, strict=True):
        for host_ids, place in chunk.places():
            # The ids are checked; with "raise", numpy would go through a buffer.
            np.take(layer, host_ids, axis=0, out=part[place], mode="clip")
    return blocks


def _write_rows(store: list[np.ndarray], chunk: _Chunk, blocks: Layers) -> None:
    """Waits for a chunk's blocks and puts them into the store."""
    for layer, part in zip(store, blocks, strict=True):
        part = np.asarray(part)
        for host_ids, place in chunk.places():
            layer[host_ids] = part[place]


def _host_blocks(chunk: _Chunk) -> Iterator[int]:
    return itertools.chain.from_iterable(ids.tolist() for ids in chunk.host_ids)
