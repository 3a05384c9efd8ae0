"""Snapshots of the prefix cache: full blocks and their hashes on disk, for the next process.

A notebook that is opened again, or a job that was preempted, need not compute its prefixes anew. A
snapshot is a folder of arrays (`array_folder`: orbax checkpoints, refused unless whole). Its blocks
stand there as the pool holds them, the most recently used first, and a prefix's head before its
tail: so a smaller pool takes the first ones that fit, and breaks no prefix.

    pool --gather--> a batch of blocks --> host --> orbax        one batch at a time, both ways
    pool <-scatter-- a batch of blocks <-- host <-- orbax

What a block holds follows from the tokens before it, the weights and the pool's form: a snapshot
says what these were, and another engine refuses it. A hash says which tokens (`prefix_cache`). The
blocks of an int8 pool belong to its scales, which are saved beside them: an engine that has none
of its own blocks yet takes them over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from paged_jax.array_folder import ArrayFolder, ArrayFolderError
from paged_jax.array_folder_writer import ArrayFolderWriter
from paged_jax.block_manager import BlockManager
from paged_jax.block_mover import Layers, block_ops
from paged_jax.compile import StepRunner
from paged_jax.interrupts import uninterrupted
from paged_jax.kv_pool import ChannelScales
from paged_jax.models.config import ModelConfig
from paged_jax.models.partition import TENSOR_AXIS
from paged_jax.request import Request

KIND = "prefix snapshot"

_BATCH_BYTES = 32 << 20
_MAX_BATCH_BLOCKS = 256
# Numbers of a row of weights that stand for them all.
_NUM_SAMPLED = 64
_MENDS = {
    "model": "load the model that it was saved with",
    "block_size": "make the engine with the same block_size",
    "tensor_parallel_size": "make the engine with the same tensor_parallel_size",
    "block_form": "make the engine with the same kv_cache_dtype, on the same kind of device",
    "weights": "load the same weights, in the same dtype and quantization",
}
_SCALES = ("kv_scales.scale", "kv_scales.offset")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What the content of blocks depends on besides tokens; each field as JSON holds it.

    Attributes:
      model: the fields of its `ModelConfig`.
      block_size: tokens a block.
      tensor_parallel_size: devices that share a block's heads.
      block_form: shape and dtype of a layer's block in the pool.
      weights: sha256 of the ends of every parameter, with their dtypes.
    """

    model: dict[str, Any]
    block_size: int
    tensor_parallel_size: int
    block_form: str
    weights: str

    @classmethod
    def of(cls, config: ModelConfig, runner: StepRunner) -> Fingerprint:
        """That of an engine; config is the whole model's."""
        pool = runner.pool
        first = pool.layers[0]
        fields = json.loads(json.dumps(dataclasses.asdict(config)))  # Tuples become lists.
        return cls(
            model=fields,
            block_size=pool.block_size,
            tensor_parallel_size=1 if runner.mesh is None else runner.mesh.shape[TENSOR_AXIS],
            block_form=f"{first.dtype}{list(first.shape[1:])}",
            weights=_digest(_samples(runner.params)),
        )


def save_blocks(
    path: str | os.PathLike[str],
    fingerprint: Fingerprint,
    runner: StepRunner,
    rows: Sequence[tuple[BlockManager, Iterable[Request]]],
) -> int:
    """Writes every block that the prefix cache knows; see `CacheTools.save_prefix_cache`.

    To be called between two steps; what steps in flight write is waited for.

    Args:
      path: the folder to make; another snapshot there is replaced once this one is whole.
      runner: whose pool is read.
      rows: of each row of the mesh, or of the only one: the host's side of its pool, and its live
        requests, whose blocks come first.

    Returns:
      How many blocks were written.
    """
    size = _batch_size(runner)
    gather = block_ops(runner.mesh, None)["gather"]
    all_hashes = []
    with ArrayFolderWriter(path, KIND, overwrite=True) as writer:
        for name, array in zip(_SCALES, jax.tree.leaves(runner.pool.scales), strict=False):
            writer.add(name, np.asarray(array))
        for row, (blocks, requests) in enumerate(rows):
            found = _by_last_use(blocks, requests)
            all_hashes.append([block_hash.hex() for block_hash, _ in found])
            for start in range(0, len(found), size):
                ids = [block_id for _, block_id in found[start : start + size]]
                gathered: Layers = gather(runner.pool.layers, _ids(ids, row, len(rows), size))
                for i, layer in enumerate(gathered):
                    # Not on the device where it need not be: that would be another copy.
                    own = layer if len(rows) == 1 else layer[row * size : (row + 1) * size]
                    values = np.asarray(own)[: len(ids)]
                    writer.add(_array_name(row, start // size, i), values)
        content = {"fingerprint": dataclasses.asdict(fingerprint), "batch_size": size}
        writer.commit({**content, "hashes": all_hashes})
    return sum(map(len, all_hashes))


def load_blocks(
    path: str | os.PathLike[str],
    fingerprint: Fingerprint,
    runner: StepRunner,
    rows: Sequence[BlockManager],
) -> int:
    """Fills blocks of the pool that hold nothing, as far as there are any, from a snapshot.

    To be called between two steps. No block changes that a sequence holds or a hit would find; a
    block whose like is cached already is left out. With as many rows of a mesh as were saved, each
    gets its own back; with fewer, one takes those of several.

    Returns:
      How many blocks were filled.

    Raises:
      FileNotFoundError: there is nothing at path.
      ArrayFolderError: the snapshot is unfinished or damaged, or was made by an engine whose blocks
        hold something else; it says which difference. Of one that is found to be damaged only when
        it is read, what was read before that stays.
    """
    folder = ArrayFolder(path, KIND)
    all_hashes, size = _read_description(folder, fingerprint)
    if runner.pool.scales is not None:
        _match_scales(folder, runner, rows)
    num_filled = 0
    for saved_row, hashes in enumerate(all_hashes):
        row = saved_row % len(rows)
        pool = rows[row].pool
        # Free blocks without a hash stand first in the queue, and are taken before any other.
        room = pool.num_free_blocks - pool.num_cached_blocks
        wanted = [i for i, h in enumerate(hashes) if pool.prefix_cache.find(h) is None][:room]
        taken: list[int] = []
        try:
            for batch, places in itertools.groupby(wanted, key=lambda i: i // size):
                indices = list(places)
                names = [_array_name(saved_row, batch, i) for i in range(len(runner.pool.layers))]
                stored = [folder.read(name)[[i % size for i in indices]] for name in names]
                with uninterrupted():
                    taken += _fill(runner, rows, row, [hashes[i] for i in indices], stored)
        finally:  # Backwards: the snapshot's first block will be the last of them to be evicted.
            pool.release(taken)
        num_filled += len(taken)
    return num_filled


def _fill(
    runner: StepRunner,
    rows: Sequence[BlockManager],
    row: int,
    hashes: Sequence[bytes],
    stored: list[np.ndarray],
) -> list[int]:
    """Puts a batch into free blocks of a row, which are held then and carry their hashes."""
    blocks, size = rows[row], _batch_size(runner)
    scatter = block_ops(runner.mesh, None)["scatter"]
    shardings = tuple(layer.sharding for layer in runner.pool.layers)
    taken = blocks.pool.take(len(hashes))
    try:
        for start in range(0, len(taken), size):  # One round, if the batches are of this size.
            ids = taken[start : start + size]
            counts = np.zeros(len(rows), np.int32)
            counts[row] = len(ids)
            spread = tuple(
                _spread(layer[start : start + size], row, len(rows), size) for layer in stored
            )
            layers = scatter(
                runner.pool.layers,
                _ids(ids, row, len(rows), size),
                counts,
                jax.device_put(spread, shardings),
            )
            runner.pool = dataclasses.replace(runner.pool, layers=layers)
    except BaseException:
        blocks.pool.release(taken)
        raise
    for block_hash, block_id in zip(hashes, taken, strict=True):
        blocks.pool.prefix_cache.insert(block_hash, block_id)
        blocks.pins.note_stored(block_hash, block_id)
        blocks.listeners.restored(block_hash)
    return taken


def _read_description(
    folder: ArrayFolder, fingerprint: Fingerprint
) -> tuple[list[list[bytes]], int]:
    """The hashes of a snapshot's blocks, row by row, and how many blocks are in a batch.

    Raises:
      ArrayFolderError: it is none, or another engine's.
    """
    content = folder.content
    try:
        made_by: dict[str, Any] = content["fingerprint"]
        hashes = [[bytes.fromhex(text) for text in row] for row in content["hashes"]]
        size = int(content["batch_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArrayFolderError(
            f"{folder.path}: its description is no snapshot's ({error}); save it again"
        ) from error
    for name, own in dataclasses.asdict(fingerprint).items():
        theirs = made_by.get(name)
        if theirs != own:
            raise ArrayFolderError(
                f"{folder.path} was saved by another engine: its {_difference(name, theirs, own)}; "
                f"{_MENDS[name]}, or compute the prefixes anew"
            )
    return hashes, size


def _difference(name: str, theirs: Any, own: Any) -> str:
    """Where two values of a field of the fingerprint differ, in words."""
    if isinstance(own, dict) and isinstance(theirs, dict):
        key = next(k for k in [*own, *theirs] if own.get(k) != theirs.get(k))
        return f"{name}.{key} is {theirs.get(key)!r}, and here it is {own.get(key)!r}"
    if name == "weights":
        return "weights are others"
    return f"{name} is {theirs!r}, and here it is {own!r}"


def _match_scales(folder: ArrayFolder, runner: StepRunner, rows: Sequence[BlockManager]) -> None:
    """Sees to it that an int8 pool has the scales of a snapshot.

    Raises:
      ArrayFolderError: it has others, and blocks that belong to them.
    """
    saved = [folder.read(name) for name in _SCALES]
    own = [np.asarray(array) for array in jax.tree.leaves(runner.pool.scales)]
    if all(map(np.array_equal, saved, own)):
        return
    pools = [pool for b in rows for pool in (b.pool, b.host and b.host.pool) if pool is not None]
    if any(pool.num_used_blocks or len(pool.prefix_cache) for pool in pools):
        raise ArrayFolderError(
            f"{folder.path} has other int8 scales than this pool, which holds blocks already: load "
            "it before the first request, or after reset_prefix_cache"
        )
    runner.use_kv_scales(ChannelScales(*saved))


def _by_last_use(blocks: BlockManager, requests: Iterable[Request]) -> list[tuple[bytes, int]]:
    """(hash, block) of the prefix cache, the most recently used first, heads before tails."""
    in_use = [block_id for r in requests for block_id in r.block_ids[: r.num_hashed_blocks]]
    # A table is freed from its tail, so that the queue backwards gives heads first as well.
    order = [*in_use, *blocks.pins.blocks.values(), *reversed(blocks.pool.free_queue())]
    found: dict[bytes, int] = {}
    for block_id in order:
        block_hash = blocks.pool.prefix_cache.hash_of(block_id)
        if block_hash is not None:
            found.setdefault(block_hash, block_id)
    return list(found.items())


def _batch_size(runner: StepRunner) -> int:
    """Blocks that are moved at a time."""
    return max(1, min(_MAX_BATCH_BLOCKS, _BATCH_BYTES // runner.mover.bytes_a_block))


def _array_name(row: int, batch: int, layer: int) -> str:
    return f"row.{row}.blocks.{batch:06}.layer.{layer:03}"


def _ids(ids: Sequence[int], row: int, num_rows: int, size: int) -> np.ndarray:
    """int32[num_rows, size]: blocks of one row of a mesh, filled up with the null block."""
    padded = np.zeros((num_rows, size), np.int32)
    padded[row, : len(ids)] = ids
    return padded


def _spread(blocks: np.ndarray, row: int, num_rows: int, size: int) -> np.ndarray:
    """The blocks of one row, as [num_rows * size, ...], in memory that nothing else writes to."""
    spread = np.zeros((num_rows * size, *blocks.shape[1:]), blocks.dtype)
    spread[row * size : row * size + len(blocks)] = blocks
    return spread


def _samples(params: Any) -> list[jax.Array]:
    """The beginnings of the first and the last row of every parameter."""
    ends = []
    for leaf in jax.tree.leaves(params):
        for place in (0, -1):
            row = leaf[(place,) * (leaf.ndim - 1)] if leaf.ndim else leaf[None]
            ends.append(row[:_NUM_SAMPLED] if place == 0 else row[-_NUM_SAMPLED:])
    return jax.device_get(ends)


def _digest(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
