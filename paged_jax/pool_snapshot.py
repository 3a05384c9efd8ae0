"""The state of every block at one moment, as arrays; report and picture are made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from paged_jax.block_manager import BlockManager
from paged_jax.block_pool import BlockPool
from paged_jax.request import Request


@dataclasses.dataclass(frozen=True, eq=False)
class BlockStates:
    """The blocks of one memory. Entry 0 of each array is the null block's, which nobody holds.

    Attributes:
      ref_counts: int32[num_blocks], as the pool counts them; a pin counts as one.
      is_hashed: bool[num_blocks], whether the prefix cache can find it.
      is_pinned: bool[num_blocks], whether it must stay although no sequence holds it.
      owner: int32[num_blocks], index of the first holder in `PoolSnapshot.owners`, -1 for none.
      num_tokens: int32[num_blocks], how many tokens' keys and values it holds.
    """

    ref_counts: np.ndarray
    is_hashed: np.ndarray
    is_pinned: np.ndarray
    owner: np.ndarray
    num_tokens: np.ndarray

    def __post_init__(self):
        for field in dataclasses.fields(self):
            shape = getattr(self, field.name).shape
            if shape != self.ref_counts.shape or len(shape) != 1:
                raise ValueError(
                    f"{field.name} has shape {shape}, and ref_counts {self.ref_counts.shape}; "
                    "each must be [num_blocks]"
                )

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included: used + cached + free + 1."""
        return len(self.ref_counts)

    @property
    def num_holders(self) -> np.ndarray:
        """int32[num_blocks]: how many sequences hold each block; pins are left out."""
        return self.ref_counts - self.is_pinned

    @property
    def is_used(self) -> np.ndarray:
        """bool[num_blocks]: held by a sequence or by a pin."""
        return self.ref_counts > 0

    @property
    def is_cached(self) -> np.ndarray:
        """bool[num_blocks]: held by nobody, but a hit would find it."""
        return (self.ref_counts == 0) & self.is_hashed

    @property
    def is_shared(self) -> np.ndarray:
        """bool[num_blocks]: held by two sequences or more."""
        return self.num_holders >= 2

    @property
    def num_used_blocks(self) -> int:
        return int(self.is_used.sum())

    @property
    def num_cached_blocks(self) -> int:
        return int(self.is_cached.sum())

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing; the cached ones, which may be taken as well, not counted."""
        return self.num_blocks - 1 - self.num_used_blocks - self.num_cached_blocks

    @property
    def num_shared_blocks(self) -> int:
        return int(self.is_shared.sum())

    @property
    def num_copies_saved(self) -> int:
        """Blocks that would be needed besides, if every sequence had its own copies."""
        return int(np.maximum(self.num_holders - 1, 0).sum())


@dataclasses.dataclass(frozen=True)
class Owner:
    """A sequence that holds blocks.

    Attributes:
      request_id: the sequence's id.
      group: what it was forked from or with ("a" of "a/0"), or its own id.
      status: "running", "waiting", "held", or "swapped" while its blocks are on the host.
      num_tokens: prompt and output together.
      num_blocks, num_host_blocks: length of its table on the device, and on the host.
      num_shared_blocks: how many of the former another sequence holds, too.
    """

    request_id: str
    group: str
    status: str
    num_tokens: int
    num_blocks: int
    num_host_blocks: int
    num_shared_blocks: int


@dataclasses.dataclass(frozen=True, eq=False)
class PoolSnapshot:
    """Every block of the device, and of the host where blocks are swapped, at one moment.

    Attributes:
      block_size: tokens a block.
      device: the blocks of the KV pool.
      host: those of the swap space; None without one.
      owners: the sequences that hold blocks, in the order in which they were given.
    """

    block_size: int
    device: BlockStates
    host: BlockStates | None
    owners: tuple[Owner, ...]


def snapshot(block_manager: BlockManager, requests: Iterable[Request]) -> PoolSnapshot:
    """Reads the state of all blocks off a block manager and the sequences it serves.

    Args:
      block_manager: it is not changed.
      requests: the live ones. Blocks that others hold count as in use, without an owner.
    """
    holders = [r for r in requests if len(r.block_ids) or len(r.host_block_ids)]
    size = block_manager.block_size
    device = _states(
        block_manager.pool,
        [(r.block_ids, r.num_computed_tokens) for r in holders],
        size,
        pinned=block_manager.pins.blocks.values(),
    )
    host = None
    if block_manager.host is not None:
        tables = [(r.host_block_ids, r.num_computed_tokens) for r in holders]
        host = _states(block_manager.host.pool, tables, size, pinned=())
    is_shared = device.is_shared
    owners = tuple(
        Owner(
            request_id=r.request_id,
            group=_group_of(r.request_id),
            status="swapped" if r.is_swapped else r.status.value,
            num_tokens=r.num_tokens,
            num_blocks=len(r.block_ids),
            num_host_blocks=len(r.host_block_ids),
            num_shared_blocks=int(is_shared[np.asarray(r.block_ids, np.int32)].sum()),
        )
        for r in holders
    )
    return PoolSnapshot(size, device, host, owners)


def printable(text: str, max_length: int) -> str:
    """One line of at most `max_length` visible characters: for ids, which may be anything."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _states(
    pool: BlockPool,
    tables: Sequence[tuple[Sequence[int], int]],
    block_size: int,
    *,
    pinned: Iterable[int],
) -> BlockStates:
    """`tables` are (block ids, number of tokens computed), one a holder."""
    num_blocks = pool.num_blocks
    ref_counts = np.asarray(pool.ref_counts, np.int32)
    hash_of = pool.prefix_cache.hash_of
    is_hashed = np.asarray([hash_of(i) is not None for i in range(num_blocks)], bool)
    is_pinned = np.zeros(num_blocks, bool)
    is_pinned[list(pinned)] = True
    owner = np.full(num_blocks, -1, np.int32)
    num_tokens = np.where(is_hashed, block_size, 0).astype(np.int32)  # Only full ones are hashed.
    for index, (block_ids, num_computed_tokens) in enumerate(tables):
        ids = np.asarray(block_ids, np.int32)  # A table holds no block twice.
        owner[ids] = np.where(owner[ids] < 0, index, owner[ids])
        filled = np.clip(num_computed_tokens - block_size * np.arange(len(ids)), 0, block_size)
        num_tokens[ids] = np.maximum(num_tokens[ids], filled)
    return BlockStates(ref_counts, is_hashed, is_pinned, owner, num_tokens)


def _group_of(request_id: str) -> str:
    stem, slash, number = request_id.rpartition("/")
    return stem if slash and stem and number.isdigit() else request_id
