"""Blocks in host memory: sequences that were swapped out, and prefixes that the device evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paged_jax.block_pool import BlockPool


class HostTier:
    """Which block on the host holds what; the bytes are moved by the device half.

    The blocks are kept as the device's are, in a `BlockPool` with a prefix cache of its own: those
    of swapped sequences are held, evicted prefixes are free but hashed, least recently used first
    to go. What is written in a step can be read from the next step on.

    Args:
      num_blocks: usable blocks: the swap space over the bytes of a block.
      on_evict: called with (block id, hash) of each hashed block that leaves the host.
      on_store: called with each hash that can be hit here from now on.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, bytes], None] | None = None,
        on_store: Callable[[bytes], None] | None = None,
    ):
        self.pool = BlockPool(num_blocks + 1, on_evict)
        self._on_store = on_store
        self._outgoing: list[tuple[int, int]] = []
        # Blocks that this step writes, with the hash that they will carry.
        self._landing: dict[int, bytes | None] = {}
        self._landing_by_hash: dict[bytes, int] = {}
        self._offloaded: list[int] = []

    def find(self, block_hash: bytes) -> int | None:
        """The host block that holds a hash's tokens and can be read, or None."""
        return self.pool.prefix_cache.find(block_hash)

    def holds(self, block_hash: bytes) -> bool:
        """Whether the host has a hash's tokens, or will have them after this step."""
        return self._find_any(block_hash) is not None

    def is_landing(self, block_ids: Sequence[int]) -> bool:
        """Whether this very step writes one of these blocks."""
        return bool(self._landing) and any(block_id in self._landing for block_id in block_ids)

    def put(self, sources: Sequence[tuple[int, bytes | None]]) -> list[int] | None:
        """Takes host blocks for device blocks, all or none.

        Args:
          sources: (device block, its hash or None). One whose hash the host holds is not moved.

        Returns:
          One host block for each, held; None, with nothing changed, if there are too few.
        """
        found = [None if h is None else self._find_any(h) for _, h in sources]
        known = [block_id for block_id in found if block_id is not None]
        num_new = len(sources) - len(known)
        if num_new > self.pool.num_free_blocks - self.pool.num_free_among(known):
            return None
        self.pool.touch(known)
        new = iter(self.pool.take(num_new))
        table = []
        for (device_id, block_hash), block_id in zip(sources, found, strict=True):
            if block_id is None:
                block_id = next(new)
                self._send(device_id, block_id, block_hash)
            table.append(block_id)
        return table

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one holder from each block of a table; what nobody wants any more is not moved."""
        self.pool.release(block_ids)
        for block_id in block_ids:
            if block_id in self._landing and self.pool.ref_counts[block_id] == 0:
                block_hash = self._landing.pop(block_id)
                if block_hash is not None:
                    del self._landing_by_hash[block_hash]
                self._outgoing = [pair for pair in self._outgoing if pair[1] != block_id]

    def offload(self, device_id: int, block_hash: bytes) -> bool:
        """Keeps a prefix block that the device evicts, if there is room; True if it is moved."""
        known = self._find_any(block_hash)
        if known is not None:  # Most recently used again.
            self.pool.touch([known])
            self.pool.release([known])
            return False
        if not self.pool.num_free_blocks:
            return False
        [block_id] = self.pool.take(1)
        self._send(device_id, block_id, block_hash)
        self._offloaded.append(block_id)
        return True

    @property
    def is_busy(self) -> bool:
        """Whether this step moves anything to the host."""
        return bool(self._landing)

    def take_outgoing(self) -> tuple[tuple[int, int], ...]:
        """This step's moves, (device block, host block); what they write can be hit from now on."""
        outgoing = tuple(self._outgoing)
        for block_id, block_hash in self._landing.items():
            if block_hash is not None:
                self.pool.prefix_cache.insert(block_hash, block_id)
                if self._on_store is not None:
                    self._on_store(block_hash)
        self.pool.release(self._offloaded)
        self._outgoing.clear()
        self._landing.clear()
        self._landing_by_hash.clear()
        self._offloaded.clear()
        return outgoing

    def _find_any(self, block_hash: bytes) -> int | None:
        landing = self._landing_by_hash.get(block_hash)
        return self.find(block_hash) if landing is None else landing

    def _send(self, device_id: int, block_id: int, block_hash: bytes | None) -> None:
        self._outgoing.append((device_id, block_id))
        self._landing[block_id] = block_hash
        if block_hash is not None:
            self._landing_by_hash[block_hash] = block_id
